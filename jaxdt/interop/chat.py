"""What a chat model expects to read: its own template, filled with the message of a user.

The template is a program in Jinja's language that came with the model, so it runs in Jinja's sandbox.
"""

from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from jaxdt.interop.hf_config import read_config
from jaxdt.model.tokenizer import TOKENIZER_CONFIG
from jaxdt.run.errors import BadInput

TEMPLATE = "chat_template.jinja"
DEFAULT = "default"  # of several templates with names
SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


def chat_prompt(origin: Path, message: str) -> str:
    """The text that the model answers: `message` as that of a user, up to where the answer begins. `origin`: the files
    that came with the model. BadInput for a model without a template, and one that this template cannot fill."""
    if find_spec("jinja2") is None:
        raise BadInput("--chat: needs the module jinja2, expected the extra hf: pip install jinja2")
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # pyright: ignore[reportMissingImports]  an extra

    config = read_config(origin / TOKENIZER_CONFIG) if (origin / TOKENIZER_CONFIG).exists() else {}
    template = _template(origin, config)
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)  # Llama 3 is told today's date
    names = {name: _text(config[name]) for name in SPECIAL if config.get(name)}
    messages = [{"role": "user", "content": message}]
    try:
        return environment.from_string(template).render(messages=messages, add_generation_prompt=True, **names)
    except Exception as error:  # a template is a program, which may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise BadInput(
            f"{origin}: its chat template cannot be filled ({reason}), use --prompt without --chat"
        ) from None


def _template(origin: Path, config: dict[str, Any]) -> str:
    if (origin / TEMPLATE).exists():
        return (origin / TEMPLATE).read_text(encoding="utf-8")
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


def _refuse(reason: str) -> NoReturn:
    """What templates call for messages that they do not take."""
    from jinja2 import TemplateError  # pyright: ignore[reportMissingImports]

    raise TemplateError(reason)
