"""The tokenizer in a GGUF file, as the tokenizer.json that other programs read.

A file names the rule by which a text is split before pairs are merged. Each rule is a part of the definition of the
tokenizers that were released with it: under another one the same text has other tokens.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from jaxdt.interop.hf_files import extra
from jaxdt.run.errors import BadInput, nearest

# Contractions, words with one sign or blank before them, runs of at most three digits, signs, and white space.
LLAMA3_SPLIT = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
CONTROL, USER_DEFINED = 3, 4  # the types of special tokens, and of texts that are tokens before anything is split


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
    """tokenizer.json and tokenizer_config.json for the metadata of a GGUF file, {} where it has no tokenizer of the
    kind that merges pairs of bytes. BadInput for a split rule that is unknown here."""
    if fields.get("tokenizer.ggml.model") != "gpt2":
        return {}
    rule = fields.get("tokenizer.ggml.pre", "gpt-2")
    if rule not in SPLITS:
        known = f"expected one of {', '.join(SPLITS)}{nearest(str(rule), SPLITS)}"
        raise BadInput(f"{where}: tokenizer.ggml.pre: got {rule!r}, {known}: with another rule texts get other tokens")
    texts, merges = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.merges"]
    kinds = fields.get("tokenizer.ggml.token_type", [])
    tokenizers, splits = extra("tokenizers"), extra("tokenizers.pre_tokenizers")
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    numbers = {text: number for number, text in enumerate(texts)}
    model = extra("tokenizers.models").BPE(vocab=numbers, merges=pairs, ignore_merges=rule in WHOLE_WORDS)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = SPLITS[rule](splits)
    tokenizer.decoder = extra("tokenizers.decoders").ByteLevel()
    for wanted, add in ((CONTROL, tokenizer.add_special_tokens), (USER_DEFINED, tokenizer.add_tokens)):
        found = [text for text, kind in zip(texts, kinds, strict=False) if kind == wanted]
        add([tokenizers.AddedToken(text, special=wanted == CONTROL, normalized=False) for text in found])
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name in ("bos", "eos"):
        number = fields.get(f"tokenizer.ggml.{name}_token_id")
        if number is not None:
            config[f"{name}_token"] = texts[number]
    if fields.get("tokenizer.ggml.add_bos_token") and "bos_token" in config:
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
