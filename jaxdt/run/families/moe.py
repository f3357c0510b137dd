"""The options of Llama-like models with experts, and presets."""

from dataclasses import dataclass, field
from typing import Any

from jaxdt.run.errors import BadInput
from jaxdt.run.families.llama import PRESETS as OF_LLAMA
from jaxdt.run.families.llama import LlamaConfig
from jaxdt.run.options import NOT_NEGATIVE, at_least, option

# The published shapes, with samples of at most 2,048 tokens.
PRESETS: dict[str, dict[str, Any]] = {
    "debug": OF_LLAMA["debug"] | dict(d_ff=64, n_experts=4, n_experts_per_token=2),
    "mixtral_8x7b": OF_LLAMA["mistral_7b"] | dict(n_experts=8, n_experts_per_token=2, rope_theta=1e6, window=0),
    "qwen3_30b_a3b": OF_LLAMA["qwen3_0p6b"]
    | dict(n_layers=48, d_model=2048, n_heads=32, n_kv_heads=4, d_ff=768, n_experts=128, n_experts_per_token=8)
    | dict(tied_head=False),
}


@dataclass(frozen=True)
class MoeConfig(LlamaConfig):
    """A Llama-like decoder whose feed-forward parts are experts, of which a router chooses some for each token, as in
    Mixtral and Qwen3-MoE. No token is dropped.

    `d_ff`: width inside one expert. The loss that `router_aux_coef` weighs is the mean over layers of E times the sum
    over experts of (chosen slots by tokens of the sample) x (mean probability in the sample)."""

    n_experts: int = option(8, "experts of a layer", at_least(1))
    n_experts_per_token: int = option(2, "experts that compute a token", at_least(1))
    norm_topk: bool = option(True, "the weights of a token's experts add up to 1")
    router_aux_coef: float = option(0.001, "weight of the loss that spreads tokens over the experts", NOT_NEGATIVE)
    family: str = field(default="moe", init=False)

    presets = PRESETS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_experts_per_token > self.n_experts:
            raise BadInput(
                f"model.n_experts_per_token: got {self.n_experts_per_token}, expected at most n_experts "
                f"{self.n_experts}"
            )


OPTIONS = MoeConfig
