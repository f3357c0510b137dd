"""A model in a GGUF file, as a source of a model folder: its numbers become fp32, whatever they were quantised to.

Its metadata are read as the config.json of a model of Hugging Face that computes the same, so that one table says what
can be computed here."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxdt.interop.gguf_tokenizer import tokenizer_files
from jaxdt.interop.hf_config import LLAMA3_ROPE, options_of_config
from jaxdt.interop.hf_files import extra
from jaxdt.interop.tensor_names import Tensor
from jaxdt.run.errors import BadInput, why

# general.architecture -> model_type, and key behind the architecture -> key of config.json.
ARCHITECTURES = {"gpt2": "gpt2", "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
KEYS = {
    "gpt2": {
        "block_count": "n_layer",
        "embedding_length": "n_embd",
        "attention.head_count": "n_head",
        "feed_forward_length": "n_inner",
        "context_length": "n_positions",
    },
    "llama": {
        "block_count": "num_hidden_layers",
        "embedding_length": "hidden_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim",
        "feed_forward_length": "intermediate_size",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
        "context_length": "max_position_embeddings",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "rope.freq_base": "rope_theta",
    },
}
TABLE, HEAD, FREQUENCIES = "token_embd.weight", "output.weight", "rope_freqs.weight"
# What Llama 3.1 and 3.2 have in common; files hold the frequencies' divisors in place of the rule.
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_LENGTH = 1.0, 4.0, 8192
RELATIVE_ERROR = 1e-6  # of a float that was stored in 32 bits


class GGUFFile:
    """A GGUF file with a model; its tensors are read one at a time."""

    def __init__(self, path: Path):
        self.where = str(path)
        gguf = extra("gguf")
        try:
            reader = gguf.GGUFReader(path)
        except OSError as error:
            raise BadInput(f"{path}: cannot be read ({why(error)}), expected a GGUF file") from None
        except (ValueError, IndexError, KeyError) as error:
            raise BadInput(f"{path}: is no GGUF file, or truncated ({error})") from None
        self._dequantize = gguf.dequantize
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._fields = {name: field.contents() for name, field in reader.fields.items()}
        self._is_rotated = self._fields.get("general.architecture") == "llama"
        self.config = self._config()
        self.options: Any = options_of_config(self.config, str(path))

    def _config(self) -> dict[str, Any]:
        """The config.json of the model."""
        fields, architecture = self._fields, self._fields.get("general.architecture")
        if architecture not in ARCHITECTURES:
            expected = ", ".join(ARCHITECTURES)
            raise BadInput(f"{self.where}: general.architecture: got {architecture!r}, expected one of {expected}")
        if TABLE not in self._tensors:
            raise BadInput(f"{self.where}: lacks {TABLE}, expected the tensors of a model")
        keys = KEYS["gpt2" if architecture == "gpt2" else "llama"]
        found: dict[str, Any] = {key: fields.get(f"{architecture}.{name}") for name, key in keys.items()}
        found = {key: value for key, value in found.items() if value is not None}
        for name in ("rms_norm_eps", "rope_theta"):  # 32 bits, of which people write the shortest decimal
            if name in found:
                found[name] = float(str(np.float32(found[name])))
        found |= {
            "model_type": ARCHITECTURES[architecture],
            "vocab_size": int(self._tensors[TABLE].shape[1]),
            "tie_word_embeddings": HEAD not in self._tensors,
            "attention_bias": architecture == "llama" and "blk.0.attn_q.bias" in self._tensors,
        }
        if architecture == "llama" and found.get("num_local_experts"):
            found["model_type"] = "mixtral"
        if architecture == "qwen3moe":  # files do not say it; those who run them scale the weights
            found["norm_topk_prob"] = True
        if window := fields.get(f"{architecture}.attention.sliding_window"):
            if found["model_type"] == "llama":
                found["model_type"] = "mistral"
            found |= {"sliding_window": window} | ({} if architecture == "llama" else {"use_sliding_window": True})
        if epsilon := fields.get(f"{architecture}.attention.layer_norm_epsilon"):
            found["layer_norm_epsilon"] = float(str(np.float32(epsilon)))
        for name in ("bos", "eos"):
            if (number := fields.get(f"tokenizer.ggml.{name}_token_id")) is not None:
                found[f"{name}_token_id"] = number
        return found | self._rope(architecture, found)

    def _rope(self, architecture: str, config: dict[str, Any]) -> dict[str, Any]:
        """Llama 3's rule for longer texts, from the divisors that follow from it."""
        scaling = self._fields.get(f"{architecture}.rope.scaling.type", "none")
        if scaling != "none":
            raise BadInput(f"{self.where}: {architecture}.rope.scaling.type: got {scaling!r}, expected none")
        if FREQUENCIES not in self._tensors:
            return {}
        divisors = self._tensors[FREQUENCIES].data.astype(np.float64)
        n = len(divisors)
        turns = LLAMA3_LENGTH * config["rope_theta"] ** (-np.arange(n) / n) / (2 * np.pi)
        share = np.clip((turns - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW), 0.0, 1.0)
        factor = float(divisors.max())
        if not np.allclose(divisors, 1 / (share + (1 - share) / factor), rtol=RELATIVE_ERROR * 10):
            expected = f"expected those of Llama 3 with the factor {factor:g}"
            raise BadInput(f"{self.where}: {FREQUENCIES}: got other divisors of the rotary frequencies, {expected}")
        rule = dict(zip(LLAMA3_ROPE, (factor, LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_LENGTH), strict=True))
        return {"rope_scaling": {"rope_type": "llama3", **rule}}

    @property
    def origin(self) -> Iterator[tuple[str, bytes]]:
        """A config.json and a tokenizer like those with which the model was released."""
        yield "config.json", json.dumps(self.config, indent=1).encode()
        yield from tokenizer_files(self._fields, self.where).items()

    @property
    def names(self) -> set[str]:
        """The tensors that are parameters."""
        return set(self._tensors) - {FREQUENCIES}

    def names_of(self, tensor: Tensor) -> list[str]:
        """The name of a tensor here."""
        return [tensor.gguf]

    def shape(self, tensor: Tensor, name: str) -> tuple[int, ...]:
        """The shape of a tensor in the layout of this project."""
        shape = tuple(int(n) for n in reversed(self._tensors[name].shape))
        return (*shape[:-2], shape[-1], shape[-2]) if tensor.is_matrix and len(shape) > 1 else shape

    def read(self, tensor: Tensor) -> np.ndarray:
        """A tensor in fp32 and in the layout of this project."""
        found = self._tensors[tensor.gguf]
        try:
            array = self._dequantize(found.data, found.tensor_type).astype(np.float32)
        except NotImplementedError:
            raise BadInput(
                f"{self.where}: {tensor.gguf}: its quantisation {found.tensor_type.name} is not read"
            ) from None
        if tensor.is_rotated and self._is_rotated:
            array = without_pairs(array, self.options.head_width)
        return np.ascontiguousarray(array.swapaxes(-1, -2)) if tensor.is_matrix else np.array(array)


def without_pairs(array: np.ndarray, head_width: int) -> np.ndarray:
    """Rows of all heads in the order of this project, from that of Llama's GGUF files: there the two numbers that
    rotary positions turn together stand side by side, here half a head apart."""
    heads = array.reshape(-1, head_width // 2, 2, *array.shape[1:])
    return heads.swapaxes(1, 2).reshape(array.shape)
