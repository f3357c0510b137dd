"""The names under which other projects keep the parameters of each family: one table a family, read in both directions.

A row is a leaf of an entry, and its tensor: the name in files of Hugging Face, the name in GGUF files, and how matrices
are laid out. `{i}` is the number of the block. A leaf with the matrices of all experts is one tensor in GGUF files, and
in files of Hugging Face one for each expert, `{e}`."""

import re
from dataclasses import dataclass, replace

from jaxdt.run.errors import BadInput
from jaxdt.run.model_spec import ModelSpec

NUMBERED = re.compile(r"([a-z]+)_(\d+)")


@dataclass(frozen=True)
class Tensor:
    """The names of one leaf's tensor. `is_matrix`: here it has its inputs first, and in GGUF files its outputs. So it
    has in files of Hugging Face, unless `hf_has_inputs_first`. `is_rotated`: rotary positions turn its outputs.
    `n_experts`: of a leaf with their matrices; 0 for any other."""

    hf: str
    gguf: str
    is_matrix: bool = False
    hf_has_inputs_first: bool = False
    is_rotated: bool = False
    n_experts: int = 0

    @property
    def hf_names(self) -> list[str]:
        """The names in files of Hugging Face, in the order of the experts."""
        return [self.hf.replace("{e}", str(e)) for e in range(self.n_experts)] or [self.hf]

    @property
    def is_transposed(self) -> bool:
        """Whether files of Hugging Face have it the other way round."""
        return self.is_matrix and not self.hf_has_inputs_first


def _linear(hf: str, gguf: str, is_rotated: bool = False) -> dict[str, Tensor]:
    """A linear layer as torch keeps it."""
    return {
        "kernel": Tensor(f"{hf}.weight", f"{gguf}.weight", is_matrix=True, is_rotated=is_rotated),
        "bias": Tensor(f"{hf}.bias", f"{gguf}.bias", is_rotated=is_rotated),
    }


def _conv1d(hf: str, gguf: str) -> dict[str, Tensor]:
    """A linear layer as GPT-2 keeps it, inputs first."""
    kernel = Tensor(f"{hf}.weight", f"{gguf}.weight", is_matrix=True, hf_has_inputs_first=True)
    return {"kernel": kernel, "bias": Tensor(f"{hf}.bias", f"{gguf}.bias")}


def _norm(hf: str, gguf: str) -> dict[str, Tensor]:
    return {"scale": Tensor(f"{hf}.weight", f"{gguf}.weight"), "bias": Tensor(f"{hf}.bias", f"{gguf}.bias")}


def _leaves(**parts: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{part}/{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}


Names = dict[str, dict[str, Tensor]]  # kind of entry -> leaf -> its tensor
_OUT = {"out": Tensor("lm_head.weight", "output.weight", is_matrix=True)}
_H, _BLK, _LAYER = "transformer.h.{i}", "blk.{i}", "model.layers.{i}"
_ATTENTION = {
    "ln1": _norm(f"{_LAYER}.input_layernorm", f"{_BLK}.attn_norm"),
    "q": _linear(f"{_LAYER}.self_attn.q_proj", f"{_BLK}.attn_q", is_rotated=True),
    "k": _linear(f"{_LAYER}.self_attn.k_proj", f"{_BLK}.attn_k", is_rotated=True),
    "v": _linear(f"{_LAYER}.self_attn.v_proj", f"{_BLK}.attn_v"),
    "o": _linear(f"{_LAYER}.self_attn.o_proj", f"{_BLK}.attn_output"),
    "q_norm": _norm(f"{_LAYER}.self_attn.q_norm", f"{_BLK}.attn_q_norm"),
    "k_norm": _norm(f"{_LAYER}.self_attn.k_norm", f"{_BLK}.attn_k_norm"),
    "ln2": _norm(f"{_LAYER}.post_attention_layernorm", f"{_BLK}.ffn_norm"),
}


def _like_llama(block: dict[str, Tensor]) -> Names:
    return {
        "tok": {"": Tensor("model.embed_tokens.weight", "token_embd.weight")},
        "block": block,
        "head": _leaves(ln=_norm("model.norm", "output_norm")) | _OUT,
    }


def _experts(part: str, gate: str, up: str, down: str) -> dict[str, Tensor]:
    """The router and the experts of a block; Mixtral and Qwen3-MoE differ in their names."""
    leaves = {"router": Tensor(f"{_LAYER}.{part}.gate.weight", f"{_BLK}.ffn_gate_inp.weight", is_matrix=True)}
    for leaf, name in (("gate", gate), ("up", up), ("down", down)):
        hf = f"{_LAYER}.{part}.experts.{{e}}.{name}.weight"
        leaves[leaf] = Tensor(hf, f"{_BLK}.ffn_{leaf}_exps.weight", is_matrix=True)
    return leaves


FAMILIES: dict[str, Names] = {
    "gpt": {
        "tok": {"": Tensor("transformer.wte.weight", "token_embd.weight")},
        "pos": {"": Tensor("transformer.wpe.weight", "position_embd.weight")},
        "block": _leaves(
            ln1=_norm(f"{_H}.ln_1", f"{_BLK}.attn_norm"),
            qkv=_conv1d(f"{_H}.attn.c_attn", f"{_BLK}.attn_qkv"),
            proj=_conv1d(f"{_H}.attn.c_proj", f"{_BLK}.attn_output"),
            ln2=_norm(f"{_H}.ln_2", f"{_BLK}.ffn_norm"),
            up=_conv1d(f"{_H}.mlp.c_fc", f"{_BLK}.ffn_up"),
            down=_conv1d(f"{_H}.mlp.c_proj", f"{_BLK}.ffn_down"),
        ),
        "head": _leaves(ln=_norm("transformer.ln_f", "output_norm")) | _OUT,
    },
    "llama": _like_llama(
        _leaves(
            **_ATTENTION,
            gate=_linear(f"{_LAYER}.mlp.gate_proj", f"{_BLK}.ffn_gate"),
            up=_linear(f"{_LAYER}.mlp.up_proj", f"{_BLK}.ffn_up"),
            down=_linear(f"{_LAYER}.mlp.down_proj", f"{_BLK}.ffn_down"),
        )
    ),
    "moe": _like_llama(_leaves(**_ATTENTION) | _experts("block_sparse_moe", "w1", "w3", "w2")),
    "moe with qk_norm": _like_llama(_leaves(**_ATTENTION) | _experts("mlp", "gate_proj", "up_proj", "down_proj")),
}


def names_of(options: ModelSpec) -> Names:
    """The table of a model; empty for a family of which no other project knows."""
    has_norms = options.family == "moe" and getattr(options, "qk_norm", False)
    return FAMILIES.get("moe with qk_norm" if has_norms else options.family, {})


def tensors_of(options: ModelSpec, entry: str) -> dict[str, Tensor]:
    """The tensors of an entry by the paths of its leaves. BadInput for one of which no other project knows."""
    match = NUMBERED.fullmatch(entry)
    kind, number = (match[1], str(int(match[2]))) if match else (entry, "")
    known = names_of(options).get(kind)
    leaves = next(found.leaves for found in options.facts.entries if found.name == entry)
    if known is None or not all(leaf.path in known for leaf in leaves):
        raise BadInput(f"model: its entry {entry} has no counterpart in files of Hugging Face or GGUF")
    found: dict[str, Tensor] = {}
    for leaf in leaves:
        tensor = known[leaf.path]
        hf, gguf = (name.replace("{i}", number) for name in (tensor.hf, tensor.gguf))
        n_experts = leaf.shape[0] if "{e}" in hf else 0
        found[leaf.path] = replace(tensor, hf=hf, gguf=gguf, n_experts=n_experts)
    return found
