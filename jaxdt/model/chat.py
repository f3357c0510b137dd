"""Chats: what a chat model reads is its own template, filled with messages.

The template is a program in Jinja's language that came with the model, so it runs in Jinja's sandbox. Of a conversation
the tokens of its answers count as targets: what the model has to write, up to the token that ends a turn.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from jaxdt.model.documents import ANSWERS
from jaxdt.model.tokenizer import TOKENIZER_CONFIG, Tokenizer, tokenizer_config
from jaxdt.run.errors import BadInput, why
from jaxdt.run.serialize import parse_json

TEMPLATE = "chat_template.jinja"
DEFAULT = "default"  # of several templates with names
SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
# A template that asks for the date gets this one when text is prepared, so that equal text gives equal tokens on any
# day. Llama's own templates write it where they cannot ask.
PREPARING = datetime(2024, 7, 26)
PRIVATE_USE = range(0xE000, 0xF900)
GENERATION = re.compile(r"\{%[-+]?\s*generation\b")
STRING = re.compile(r'"(?:[^"\\]|\\.)*"')  # in JSON


class ChatTemplate:
    """A model's template. `origin`: the files that came with the model. BadInput for a model without one, and for one
    that is no template."""

    def __init__(self, origin: Path, now: Callable[[], datetime] = datetime.now):
        if find_spec("jinja2") is None:
            raise BadInput("--chat: needs the module jinja2, expected the extra hf or data: pip install jinja2")
        from jinja2.sandbox import ImmutableSandboxedEnvironment  # pyright: ignore[reportMissingImports]  an extra

        path = origin / TOKENIZER_CONFIG
        config = tokenizer_config(path) if path.exists() else {}
        self._origin = origin
        self.source = _source(origin, config)
        self.names = {name: _text(config[name]) for name in SPECIAL if config.get(name)}
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation_blocks()]
        )
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: now().strftime(form)  # Llama 3 is told today's date
        environment.filters["tojson"] = _tojson
        try:
            self._template = environment.from_string(self.source)
        except Exception as error:  # also what Jinja's own parser does not expect
            raise BadInput(
                f"{origin}: its chat template cannot be read ({_reason(error)}), expected one for Jinja"
            ) from None

    @property
    def marks_answers(self) -> bool:
        return bool(GENERATION.search(self.source))

    def render(self, messages: list[Any], for_answer: bool, begins: str = "", ends: str = "") -> str:
        """The text of messages, with `for_answer` up to where an answer begins. `begins` and `ends` stand where the
        template says that an answer does. ValueError for messages that this template does not take."""
        variables = {"tools": None, "documents": None, "answer_begins": begins, "answer_ends": ends, **self.names}
        try:
            return self._template.render(messages=messages, add_generation_prompt=for_answer, **variables)
        except Exception as error:  # a template is a program, which may raise anything
            raise ValueError(_reason(error)) from None


def chat_prompt(origin: Path, message: str) -> str:
    """The text that the model answers: `message` as that of a user, up to where the answer begins. `origin`: the files
    that came with the model. BadInput for a model without a template, and one that this template cannot fill."""
    template = ChatTemplate(origin)
    try:
        return template.render([{"role": "user", "content": message}], True)
    except ValueError as error:
        raise BadInput(f"{origin}: its chat template cannot be filled ({error}), use --prompt without --chat") from None


def _source(origin: Path, config: Mapping[str, Any]) -> str:
    if (origin / TEMPLATE).exists():
        try:
            return (origin / TEMPLATE).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"{origin / TEMPLATE}: cannot be read ({why(error)}), expected a chat template") from None
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get(DEFAULT)
    if not isinstance(found, str):
        raise BadInput(f"--chat: {origin} has no chat template, expected a model that was made to chat")
    return found


def _text(token: Any) -> str:
    """The text of a special token; older files say more of it."""
    return token["content"] if isinstance(token, dict) else token


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _refuse(reason: str) -> NoReturn:
    """What templates call for messages that they do not take."""
    from jinja2 import TemplateError  # pyright: ignore[reportMissingImports]

    raise TemplateError(reason)


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
            sort_keys: bool = False) -> str:  # fmt: skip
    """As transformers has it; Jinja's own filter writes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _generation_blocks() -> type:
    """What reads {% generation %}, between which and {% endgeneration %} an answer stands."""
    from jinja2 import nodes  # pyright: ignore[reportMissingImports]
    from jinja2.ext import Extension  # pyright: ignore[reportMissingImports]

    class GenerationBlocks(Extension):
        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            begins, ends = (nodes.Output([nodes.Name(name, "load")]) for name in ("answer_begins", "answer_ends"))
            return nodes.Scope([begins, *body, ends]).set_lineno(line)

    return GenerationBlocks


# ------------------------------------------------------------------------------------------------ token by token


class Conversation(NamedTuple):
    """The tokens of a conversation [n], and which of them count as targets, bool [n]."""

    numbers: np.ndarray
    counted: np.ndarray


class Rendered(NamedTuple):
    """The text of a conversation. `answers`: from which character to which they go. `written`: the special tokens that
    messages write out, by the character that stands for each of them here."""

    text: str
    answers: list[tuple[int, int]]
    written: dict[str, str]


class Chats:
    """Encodes conversations as a model's template and tokenizer do, with the end of text behind each that does not end
    so by itself. A special token that the template writes is one; in messages it is text. `about`: a digest of what
    else than messages the tokens depend on."""

    def __init__(self, tokenizer: Tokenizer):
        if tokenizer.origin is None or tokenizer.encodings is None:
            expected = "expected a model's folder, or a tokenizer.json with a chat template beside it"
            raise BadInput(f"--chat: the tokenizer {tokenizer.name} has no chat template, {expected}")
        self._template = ChatTemplate(tokenizer.origin, lambda: PREPARING)
        self._encodings = tokenizer.encodings
        self._end_of_text = tokenizer.end_of_text
        named = {text for text in self._template.names.values() if tokenizer.number(text) is not None}
        special_tokens = sorted(named | set(tokenizer.special), key=len, reverse=True)  # one may begin another
        special = "|".join(map(re.escape, special_tokens)) or "(?!)"
        self._at_end = re.compile(rf"(?:{special})+(?=(?:\s|{special})*\Z)")
        in_json = (json.dumps(token, ensure_ascii=False)[1:-1] for token in special_tokens)
        self._in_json = re.compile("|".join(map(re.escape, in_json)) or "(?!)")
        about = [self._template.source, self._template.names, tokenizer.end_of_text]
        self.about = hashlib.sha256(json.dumps(about).encode()).hexdigest()

    def encode(self, conversations: Sequence[bytes]) -> Iterator[Conversation]:
        """The tokens of conversations, each the JSON of its messages, in which only what must be is escaped. ValueError
        for the first one that the template does not take, or in which it leaves no answer, when that is reached."""
        for content in conversations:
            rendered = self._rendered(content.decode())
            numbers, offsets = self._encoded(rendered)
            counted = np.zeros(len(numbers), bool)
            for lo, hi in rendered.answers:  # as transformers has it: a token that is partly in an answer counts
                counted |= (offsets[:, 0] < hi) & (offsets[:, 1] > lo)
            if not counted.any():
                raise ValueError("the chat template writes no answer, expected one at least")
            if self._end_of_text is not None and not self._ends(rendered.text, numbers, offsets):
                numbers, counted = np.append(numbers, np.uint32(self._end_of_text)), np.append(counted, False)
            yield Conversation(numbers, counted)

    def _ends(self, text: str, numbers: np.ndarray, offsets: np.ndarray) -> bool:
        """Whether the end of text is the last token, or only white space follows it."""
        found = np.flatnonzero(numbers == self._end_of_text)
        return len(found) > 0 and not text[offsets[found[-1], 1] :].strip()

    def _rendered(self, content: str) -> Rendered:
        unused = _unused(content, self._template.source)
        begins, ends = next(unused), next(unused)
        written: dict[str, str] = {}
        if self._in_json.search(content):
            characters: dict[str, str] = {}

            def as_one(match: re.Match[str]) -> str:
                if match[0] not in characters:
                    characters[match[0]] = next(unused)
                return characters[match[0]]

            content = STRING.sub(lambda string: self._in_json.sub(as_one, string[0]), content)
            written = {character: json.loads(f'"{token}"') for token, character in characters.items()}
        messages = parse_json(content)
        if self._template.marks_answers:
            text, answers = _between(self._render(messages, False, begins, ends), begins, ends)
        else:
            text = self._render(messages, False)
            answers = [self._answer(messages, n, text) for n, one in enumerate(messages) if one["role"] == ANSWERS]
        if "\0" in text:
            raise ValueError("it has a character of number zero, expected text")
        return Rendered(text, answers, written)

    def _render(self, messages: list[Any], for_answer: bool, begins: str = "", ends: str = "") -> str:
        try:
            return self._template.render(messages, for_answer, begins, ends)
        except ValueError as error:
            raise ValueError(f"the chat template refuses it ({error}), expected messages that it takes") from None

    def _answer(self, messages: list[Any], n: int, text: str) -> tuple[int, int]:
        """Where the answer is that message number n gives: behind what the template writes to ask for it, up to the
        special tokens that end the message. What the template writes behind them is no part of it: a line's end, or
        what ends the whole conversation."""
        asks, answered = self._render(messages[:n], True), self._render(messages[: n + 1], False)
        expected = "expected a template that does not, or one with {% generation %} blocks"
        if not answered.startswith(asks):
            raise ValueError(
                f"the chat template asks for message {n + 1} otherwise than it writes what is before it, {expected}"
            )
        last = self._at_end.search(answered, len(asks))
        end = last.end() if last else len(answered)
        if not text.startswith(answered[:end]):
            raise ValueError(f"the chat template writes message {n + 1} otherwise if more follow, {expected}")
        return len(asks), end

    def _encoded(self, rendered: Rendered) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of a text [n], and from which character to which each goes [n, 2]."""
        if not rendered.written:
            (found,) = self._encodings([rendered.text], True)
            return np.array(found.ids, np.uint32), np.array(found.offsets, np.int64).reshape(-1, 2)
        numbers, offsets, start = [], [], 0
        for piece in re.split(f"([{''.join(rendered.written)}])", rendered.text):
            token = rendered.written.get(piece)
            found = self._apart(token or piece, not token, start > 0)
            for number, (lo, hi) in found:
                numbers.append(number)
                offsets.append((start, start + 1) if token else (start + lo, start + hi))
            start += len(piece)
        return np.array(numbers, np.uint32), np.array(offsets, np.int64).reshape(-1, 2)

    def _apart(self, text: str, has_special: bool, follows: bool) -> list[tuple[int, tuple[int, int]]]:
        """The tokens of a part of a text, and where each is in it. A tokenizer may add a space to what begins a text,
        so a part that follows others is encoded behind a line's end, as transformers does."""
        if not text:
            return []
        line_end, behind, alone = self._encodings(["\n", f"\n{text}", text], has_special)
        if not has_special and any(number in alone.ids for number in self._numbers_of(text)):
            raise ValueError(f"it writes the special token {text!r}, which this tokenizer cannot take for text")
        n = len(line_end.ids)
        if not follows or behind.ids[:n] != line_end.ids:
            return list(zip(alone.ids, alone.offsets, strict=True))
        moved = ((lo - 1, hi - 1) for lo, hi in behind.offsets[n:])
        return list(zip(behind.ids[n:], moved, strict=True))

    def _numbers_of(self, token: str) -> list[int]:
        (found,) = self._encodings([token], True)
        return found.ids[:1] if len(found.ids) == 1 else []


def _unused(*texts: str) -> Iterator[str]:
    """Characters that are in none of these texts, and mean nothing by themselves. ValueError behind the last one."""
    for character in map(chr, PRIVATE_USE):
        if not any(character in text for text in texts):
            yield character
    raise ValueError("it has each character for private use, expected one that it has not")


def _between(text: str, begins: str, ends: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without these two characters, and from where to where it goes between one and the other."""
    parts, answers, n, start = [], [], 0, None
    for part in re.split(f"([{begins}{ends}])", text):
        if part == begins:
            start = n
        elif part == ends and start is not None:
            answers.append((start, n))
            start = None
        elif part != ends:
            parts.append(part)
            n += len(part)
    return "".join(parts), answers
