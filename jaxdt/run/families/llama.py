"""The options of Llama-like models, and presets."""

import math
from dataclasses import dataclass, field, replace
from typing import Any, Self

from jaxdt.run.errors import BadInput
from jaxdt.run.model_spec import ADAPTER, D_FF, D_MODEL, MAX_LEN, N_HEADS, N_LAYERS, TIED_HEAD, VOCAB_SIZE, ModelSpec
from jaxdt.run.options import POSITIVE, about, at_least, option, require_accepted


def _shape(
    n_layers: int, d_model: int, n_heads: int, n_kv_heads: int, d_ff: int, max_len: int, vocab_size: int, **more: Any
) -> dict[str, Any]:
    return {
        "n_layers": n_layers,
        "d_model": d_model,
        "n_heads": n_heads,
        "n_kv_heads": n_kv_heads,
        "d_ff": d_ff,
        "max_len": max_len,
        "vocab_size": vocab_size,
    } | more


# The published shapes, with samples of at most 2,048 tokens.
PRESETS: dict[str, dict[str, Any]] = {
    "debug": _shape(2, 64, 4, 2, 192, 32, 256),
    "smollm2_135m": _shape(30, 576, 9, 3, 1536, 2048, 49152, rope_theta=1e5, tied_head=True),
    "llama2_7b": _shape(32, 4096, 32, 32, 11008, 2048, 32000),
    "llama3_8b": _shape(32, 4096, 32, 8, 14336, 2048, 128256, rope_theta=5e5),
    "qwen2_0p5b": _shape(
        24, 896, 14, 2, 4864, 2048, 151936, rope_theta=1e6, norm_eps=1e-6, qkv_bias=True, tied_head=True
    ),
    "qwen3_0p6b": _shape(
        28, 1024, 16, 8, 3072, 2048, 151936, d_head=128, rope_theta=1e6, norm_eps=1e-6, qk_norm=True, tied_head=True
    ),
    "mistral_7b": _shape(32, 4096, 32, 8, 14336, 2048, 32000, window=4096),
}


@dataclass(frozen=True)
class LlamaConfig(ModelSpec):
    """A decoder with RMSNorm, SwiGLU, rotary positions and grouped heads: Llama, Qwen 2 and 3, Mistral, SmolLM."""

    n_layers: int = field(metadata=N_LAYERS)
    d_model: int = field(metadata=D_MODEL)
    n_heads: int = field(metadata=N_HEADS)
    n_kv_heads: int = field(metadata=about("heads of keys and values, each for as many heads of queries", at_least(1)))
    d_ff: int = field(metadata=D_FF)
    max_len: int = field(metadata=MAX_LEN)
    vocab_size: int = field(metadata=VOCAB_SIZE)
    d_head: int = option(0, "width of an attention head; 0: d_model / n_heads", at_least(0))
    rope_theta: float = option(10000.0, "base of the frequencies of rotary positions", POSITIVE)
    rope_scaling: tuple[float, ...] = option(
        (), "Llama 3's (factor, low_freq_factor, high_freq_factor, original_len); empty: none"
    )
    norm_eps: float = option(1e-5, "added to the mean square in an RMSNorm", POSITIVE)
    qkv_bias: bool = option(False, "biases in the projections to queries, keys and values")
    o_bias: bool = option(False, "a bias in the projection behind the attention")
    qk_norm: bool = option(False, "each head of queries and keys is normalised")
    window: int = option(0, "tokens that a token sees, itself included; 0: all before it", at_least(0))
    tied_head: bool = field(default=False, metadata=TIED_HEAD)
    adapter: str = field(default="", metadata=ADAPTER)
    family: str = field(default="llama", init=False)

    presets = PRESETS
    own_head = ("head", "out", "tok")

    def __post_init__(self) -> None:
        require_accepted(self, "model.")
        if self.n_heads % self.n_kv_heads:
            raise BadInput(f"model.n_kv_heads: got {self.n_kv_heads}, expected a divisor of n_heads {self.n_heads}")
        if not self.d_head and self.d_model % self.n_heads:
            raise BadInput(
                f"model.n_heads: got {self.n_heads}, expected a divisor of d_model {self.d_model}, or model.d_head > 0"
            )
        if self.head_width % 2:
            raise BadInput(f"model.d_head: head width {self.head_width} is odd, rotary positions need an even one")
        self._check_scaling()

    def _check_scaling(self) -> None:
        given: Any = self.rope_scaling
        numbers: list[Any] = [*given] if isinstance(given, tuple) else [None]
        are_finite = all(type(number) in (int, float) and 0 < number < math.inf for number in numbers)
        if not are_finite or len(numbers) not in (0, 4) or (numbers and not (given[0] >= 1 and given[1] < given[2])):
            raise BadInput(
                f"model.rope_scaling: got {given!r}, expected nothing, or factor >= 1, low_freq_factor, a larger "
                "high_freq_factor, and original_len"
            )

    @property
    def head_width(self) -> int:
        return self.d_head or self.d_model // self.n_heads

    def untied(self) -> ModelSpec:
        return replace(self, tied_head=False) if self.tied_head else super().untied()

    def with_equal_layers(self, n_layers: int) -> Self:
        return replace(self, n_layers=n_layers)


OPTIONS = LlamaConfig
