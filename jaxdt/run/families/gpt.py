"""The options of GPTs, and presets."""

from dataclasses import dataclass, field, replace
from typing import Any

from jaxdt.run.codec import COMPRESSION
from jaxdt.run.errors import BadInput
from jaxdt.run.model_spec import ADAPTER, D_FF, D_MODEL, MAX_LEN, N_HEADS, N_LAYERS, TIED_HEAD, VOCAB_SIZE, ModelSpec
from jaxdt.run.options import in_context, one_of, option, require_accepted
from jaxdt.run.serialize import is_list

POSITIONS = ("learned", "rotary")
ACTIVATIONS = ("gelu", "geglu")


def _shape(
    n_layers: int, d_model: int, n_heads: int, max_len: int, vocab_size: int, tied_head: bool = False
) -> dict[str, Any]:
    return {
        "n_layers": n_layers,
        "d_model": d_model,
        "n_heads": n_heads,
        "max_len": max_len,
        "vocab_size": vocab_size,
        "d_ff": 4 * d_model,
        "tied_head": tied_head,
    }


# base, xxlarge and gpt3 are the layer shapes of SWARM's Table 6 (width, feed-forward width, heads; length 512).
PRESETS: dict[str, dict[str, Any]] = {
    "debug": _shape(2, 64, 4, 32, 256),
    "small": _shape(8, 256, 8, 128, 1024),
    "gpt2_124m": _shape(12, 768, 12, 1024, 50257, tied_head=True),
    "gpt3_1p3b": _shape(24, 2048, 16, 2048, 50257, tied_head=True),
    "base": _shape(12, 768, 12, 512, 50257, tied_head=True),
    "xxlarge": _shape(12, 4096, 32, 512, 50257, tied_head=True),
    "gpt3": _shape(96, 12288, 96, 512, 50257, tied_head=True),
}


@dataclass(frozen=True)
class GPTConfig(ModelSpec):
    """A decoder-only transformer. `n_shared_blocks` > 0 shares blocks as ALBERT does: the layers fall into that many
    equal runs, and every layer of a run applies the run's one block (SWARM Sec. 4.3 shares inside each stage).

    `compression` ("none", "bottleneckR" or "maxoutR") puts a pair of layers that narrows the width by R, and widens it
    again, behind the first l layers, for each l in `compression_after` (SWARM App. J). A pair is part of the model,
    whatever the stages are. Where a stage ends at l, the narrow tensor crosses the boundary."""

    n_layers: int = field(metadata=N_LAYERS)
    d_model: int = field(metadata=D_MODEL)
    n_heads: int = field(metadata=N_HEADS)
    d_ff: int = field(metadata=D_FF)
    max_len: int = field(metadata=MAX_LEN)
    vocab_size: int = field(metadata=VOCAB_SIZE)
    positions: str = option("learned", "how positions enter", one_of(POSITIONS))
    activation: str = option("gelu", "nonlinearity of the feed-forward part", one_of(ACTIVATIONS))
    tied_head: bool = field(default=False, metadata=TIED_HEAD)
    n_shared_blocks: int = option(
        0,
        "blocks that the layers share, as in ALBERT; 0: each layer has its own",
        in_context("0 or a divisor of n_layers"),
    )
    compression: str = option(
        "none",
        "a pair of layers that narrows a boundary",
        in_context("none, or bottleneckR or maxoutR with R from 2 on a proper divisor of d_model"),
    )
    compression_after: tuple[int, ...] = option((), "layers behind which such a pair stands")
    adapter: str = field(default="", metadata=ADAPTER)

    family = "gpt"  # not a field: files without a family are of this one
    presets = PRESETS
    own_head = ("head", "out", "tok")

    def __post_init__(self) -> None:
        require_accepted(self, "model.")
        if self.d_model % self.n_heads:
            raise BadInput(f"model.n_heads: got {self.n_heads}, expected a divisor of d_model {self.d_model}")
        if self.positions == "rotary" and (self.d_model // self.n_heads) % 2:
            raise BadInput(f"model.n_heads: head width {self.d_model // self.n_heads} is odd, rotary needs an even one")
        shared = self.n_shared_blocks
        if type(shared) is not int or shared < 0 or (shared and self.n_layers % shared):
            raise BadInput(
                f"model.n_shared_blocks: got {shared!r}, expected 0 or a divisor of n_layers {self.n_layers}"
            )
        self._check_compression()

    def _check_compression(self) -> None:
        after, ratio, n_layers = self.compression_after, self.compression_ratio, self.n_layers
        if not ratio or self.d_model % ratio or ratio == self.d_model:
            raise BadInput(
                f"model.compression: got {self.compression!r}, expected none, or bottleneckR or maxoutR "
                f"with R from 2 on a proper divisor of d_model {self.d_model}"
            )
        if type(after) is not tuple or not all(type(layer) is int and 0 < layer < n_layers for layer in after):
            raise BadInput(f"model.compression_after: got {after!r}, expected layer indices from 1 to {n_layers - 1}")
        if list(after) != sorted(set(after)):
            raise BadInput(f"model.compression_after: got {after!r}, expected each layer index larger than the last")
        if bool(after) != (ratio > 1):
            wanted = "at least one layer index" if ratio > 1 else "none"
            raise BadInput(
                f"model.compression_after: got {after!r}, expected {wanted} with compression {self.compression!r}"
            )

    @property
    def compression_kind(self) -> str:
        """Name of the pairs without their ratio: bottleneck, maxout or none."""
        return self.compression.rstrip("0123456789")

    @property
    def compression_ratio(self) -> int:
        """By how much a pair narrows the width; 1 without compression, 0 for a name that says neither."""
        if self.compression == "none":
            return 1
        match = COMPRESSION.fullmatch(str(self.compression))
        return int(match[1]) if match else 0

    @property
    def layers_per_block(self) -> int:
        """How many consecutive layers apply one block; a stage holds whole runs of them."""
        return self.n_layers // self.n_shared_blocks if self.n_shared_blocks else 1

    def block_of(self, layer: int) -> int:
        """Index of the block whose parameters `layer` applies: itself, or the first layer of its shared run."""
        return layer - layer % self.layers_per_block

    def with_compression(self, compression: str, after: Any) -> "GPTConfig":
        return replace(self, compression=compression, compression_after=tuple(after) if is_list(after) else after)

    def untied(self) -> ModelSpec:
        return replace(self, tied_head=False) if self.tied_head else super().untied()

    def with_equal_layers(self, n_layers: int) -> "GPTConfig":
        return replace(self, n_layers=n_layers, n_shared_blocks=0, compression="none", compression_after=())

    @property
    def depth_field(self) -> str:
        """The field that says how many stages the model can have at most."""
        return "n_shared_blocks" if self.n_shared_blocks else "n_layers"


OPTIONS = GPTConfig
