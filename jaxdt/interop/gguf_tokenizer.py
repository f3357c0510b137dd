"""The tokenizer in a GGUF file, as the tokenizer.json that other programs read.

Two kinds are read. One merges pairs of bytes: the file names the rule by which a text is split before that. Each rule
is a part of the definition of the tokenizers that were released with it: under another one the same text has other
tokens. The other is SentencePiece's, which merges pairs of characters in a text that is not split, first those whose
result has the highest score; characters that no piece has become bytes.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from jaxdt.interop.hf_files import extra
from jaxdt.model.byte_pairs import LLAMA3_SPLIT, QWEN2_SPLIT
from jaxdt.run.errors import BadInput, nearest

# The types of pieces, of special tokens, and of texts that are tokens before anything is split.
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
BLANK = "\u2581"  # stands for a blank in SentencePiece's pieces


def _gpt2(splits: Any) -> Any:
    return splits.ByteLevel(add_prefix_space=False)


def _single_digits(splits: Any) -> Any:
    return splits.Sequence([splits.Digits(individual_digits=True), _gpt2(splits)])


def _by_expression(expression: str) -> Callable[[Any], Any]:
    def made(splits: Any) -> Any:
        split = splits.Split(extra("tokenizers").Regex(expression), "isolated")
        return splits.Sequence([split, splits.ByteLevel(add_prefix_space=False, use_regex=False)])

    return made


SPLITS: dict[str, Callable[[Any], Any]] = {
    "gpt-2": _gpt2,
    "mpt": _gpt2,
    "starcoder": _single_digits,
    "refact": _single_digits,
    "smollm": _single_digits,
    "llama-bpe": _by_expression(LLAMA3_SPLIT),
    "qwen2": _by_expression(QWEN2_SPLIT),
}
WHOLE_WORDS = ("llama-bpe",)  # a word that is a token is that token, whatever the merges make of it


def tokenizer_files(fields: Mapping[str, Any], where: str) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json for the metadata of a GGUF file, {} where it has no tokenizer of these
    kinds. BadInput for a split rule that is unknown here."""
    kind = fields.get("tokenizer.ggml.model")
    if kind not in KINDS or "tokenizer.ggml.tokens" not in fields:
        return {}
    texts, kinds = fields["tokenizer.ggml.tokens"], fields.get("tokenizer.ggml.token_type", [])
    numbers = {text: number for number, text in enumerate(texts)}
    tokenizers, tokenizer = extra("tokenizers"), KINDS[kind](fields, numbers, where)
    for wanted, add in ((CONTROL, tokenizer.add_special_tokens), (USER_DEFINED, tokenizer.add_tokens)):
        found = [text for text, kind in zip(texts, kinds, strict=False) if kind == wanted]
        add([tokenizers.AddedToken(text, special=wanted == CONTROL, normalized=False) for text in found])
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name in ("bos", "eos"):
        number = fields.get(f"tokenizer.ggml.{name}_token_id")
        if number is not None:
            config[f"{name}_token"] = texts[number]
    if fields.get("tokenizer.ggml.add_bos_token", kind == "llama") and "bos_token" in config:
        first = config["bos_token"]
        template = extra("tokenizers.processors").TemplateProcessing
        parts = {"single": f"{first} $A", "pair": f"{first} $A {first}:1 $B:1"}
        tokenizer.post_processor = template(**parts, special_tokens=[(first, numbers[first])])
    if chat := fields.get("tokenizer.chat_template"):
        config["chat_template"] = chat
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(config, indent=1).encode(),
    }


def _of_bytes(fields: Mapping[str, Any], numbers: dict[str, int], where: str) -> Any:
    """Byte-pair encoding, as of GPT-2."""
    rule = fields.get("tokenizer.ggml.pre", "gpt-2")
    if rule not in SPLITS:
        known = f"expected one of {', '.join(SPLITS)}{nearest(str(rule), SPLITS)}"
        raise BadInput(f"{where}: tokenizer.ggml.pre: got {rule!r}, {known}: with another rule texts get other tokens")
    pairs = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    model = extra("tokenizers.models").BPE(vocab=numbers, merges=pairs, ignore_merges=rule in WHOLE_WORDS)
    tokenizer = extra("tokenizers").Tokenizer(model)
    tokenizer.pre_tokenizer = SPLITS[rule](extra("tokenizers.pre_tokenizers"))
    tokenizer.decoder = extra("tokenizers.decoders").ByteLevel()
    return tokenizer


def _of_pieces(fields: Mapping[str, Any], numbers: dict[str, int], where: str) -> Any:
    """SentencePiece's byte-pair encoding, as of Llama 2 and Mistral. A file has the pieces and their scores, from which
    the pairs follow."""
    texts, lists = fields["tokenizer.ggml.tokens"], []
    for name in ("scores", "token_type"):
        lists.append(fields.get(f"tokenizer.ggml.{name}", []))
        if len(lists[-1]) != len(texts):
            raise BadInput(f"{where}: tokenizer.ggml.{name}: got {len(lists[-1])} entries, expected one a token")
    scores, kinds = lists
    merged = {texts[n] for n in range(len(texts)) if kinds[n] in (NORMAL, USER_DEFINED)}
    by_score = sorted(
        (text for text in merged if len(text) > 1), key=lambda text: (-scores[numbers[text]], numbers[text])
    )
    pairs = [
        (text[:end], text[end:])
        for text in by_score
        for end in range(1, len(text))
        if text[:end] in merged and text[end:] in merged
    ]
    number = fields.get("tokenizer.ggml.unknown_token_id", 0)
    if not 0 <= number < len(texts):
        raise BadInput(f"{where}: tokenizer.ggml.unknown_token_id: got {number}, expected less than {len(texts)}")
    models, normalizers, decoders = (extra(f"tokenizers.{name}") for name in ("models", "normalizers", "decoders"))
    model = models.BPE(vocab=numbers, merges=pairs, unk_token=texts[number], fuse_unk=True, byte_fallback=True)
    tokenizer = extra("tokenizers").Tokenizer(model)
    begins_with_blank = fields.get("tokenizer.ggml.add_space_prefix", True)
    blanks = normalizers.Replace(" ", BLANK)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(BLANK), blanks]) if begins_with_blank else blanks
    parts = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if begins_with_blank else [])])
    return tokenizer


KINDS: dict[str, Callable[[Mapping[str, Any], dict[str, int], str], Any]] = {"gpt2": _of_bytes, "llama": _of_pieces}
