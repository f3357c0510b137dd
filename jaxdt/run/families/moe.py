"""The options of Llama-like models with experts, and presets."""

import math
from dataclasses import dataclass, field
from typing import Any

from jaxdt.run.errors import BadInput
from jaxdt.run.families.llama import PRESETS as OF_LLAMA
from jaxdt.run.families.llama import LlamaConfig
from jaxdt.run.model_facts import require_bools, require_sizes

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

    `d_ff`: width inside one expert. `n_experts_per_token`: how many experts a token is sent to. `norm_topk`: whether
    their weights are scaled to add up to 1. `router_aux_coef`: weight of the auxiliary loss that spreads the tokens
    over the experts. It is the mean over layers of E times the sum over experts of (chosen slots by tokens of the
    sample) x (mean probability in the sample)."""

    n_experts: int = 8
    n_experts_per_token: int = 2
    norm_topk: bool = True
    router_aux_coef: float = 0.001
    family: str = field(default="moe", init=False)

    presets = PRESETS

    def __post_init__(self) -> None:
        super().__post_init__()
        require_sizes(self, "n_experts", "n_experts_per_token")
        require_bools(self, "norm_topk")
        if self.n_experts_per_token > self.n_experts:
            raise BadInput(
                f"model.n_experts_per_token: got {self.n_experts_per_token}, expected at most n_experts "
                f"{self.n_experts}"
            )
        coef: object = self.router_aux_coef
        if type(coef) is not float or not 0 <= coef < math.inf:
            raise BadInput(f"model.router_aux_coef: got {coef!r}, expected a finite number >= 0")


OPTIONS = MoeConfig
