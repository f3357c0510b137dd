"""The half of a model that needs no arrays: its fields, presets, and the integer arithmetic of parameters, boundaries,
memory and FLOP.

ModelConfig lists what stage code and the memory estimate ask of any model; GPTConfig is the only one so far. The
functions of a model are in the module that jaxdt.model.base has under the model's `kind`.
"""

import re
from dataclasses import dataclass, fields
from typing import Any, Protocol

from jaxdt.run.errors import BadInput, nearest, require_one_of
from jaxdt.run.serialize import is_list

POSITIONS = ("learned", "rotary")
ACTIVATIONS = ("gelu", "geglu")
COMPRESSION = re.compile("(?:bottleneck|maxout)([2-9]|[1-9][0-9]+)")
# Values that one layer's backward computes at once, per token: so many per D, per up-projection and per H T.
WORKING_WIDTHS, WORKING_UPS, WORKING_SCORES = 10, 2, 4 / 3


class ModelConfig(Protocol):
    """The questions that stage code and the memory estimate ask of a model's config; GPTConfig says what each means."""

    @property
    def kind(self) -> str: ...
    @property
    def n_layers(self) -> int: ...
    @property
    def d_model(self) -> int: ...
    @property
    def seq_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def tied_head(self) -> bool: ...
    @property
    def token_table_params(self) -> int: ...
    @property
    def saved_width(self) -> int: ...
    @property
    def working_width(self) -> float: ...
    def check_range(self, lo: int, hi: int) -> None: ...
    def boundary_width(self, layer: int) -> int: ...
    def boundary_numbers(self, microbatch_size: int, layer: int = 0) -> int: ...
    def stage_params(self, lo: int, hi: int) -> int: ...
    def n_blocks(self, lo: int, hi: int) -> int: ...
    def fragment_of(self, lo: int, layer: int, n_fragments: int) -> int: ...
    def fragment_params(self, lo: int, hi: int, fragment: int, n_fragments: int) -> int: ...


@dataclass(frozen=True)
class GPTConfig:
    """A decoder-only transformer. `n_shared_blocks` > 0 shares blocks as ALBERT does: the layers fall into that many
    equal runs, and every layer of a run applies the run's one block (SWARM Sec. 4.3 shares inside each stage).

    `compression` ("none", "bottleneckR" or "maxoutR") puts a pair of layers that narrows the width by R, and widens it
    again, behind the first l layers, for each l in `compression_after` (SWARM App. J). A pair is part of the model,
    whatever the stages are. Where a stage ends at l, the narrow tensor crosses the boundary."""

    n_layers: int
    d_model: int
    n_heads: int
    d_ff: int
    seq_len: int
    vocab_size: int
    positions: str = "learned"
    activation: str = "gelu"
    tied_head: bool = False
    n_shared_blocks: int = 0
    compression: str = "none"
    compression_after: tuple[int, ...] = ()

    kind = "gpt"  # not a field: a config file names a preset

    def __post_init__(self) -> None:
        for name in ("n_layers", "d_model", "n_heads", "d_ff", "seq_len", "vocab_size"):
            value: object = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise BadInput(f"model.{name}: got {value!r}, expected an integer >= 1")
        if self.d_model % self.n_heads:
            raise BadInput(f"model.n_heads: got {self.n_heads}, expected a divisor of d_model {self.d_model}")
        require_one_of("model.positions", self.positions, POSITIONS)
        if self.positions == "rotary" and (self.d_model // self.n_heads) % 2:
            raise BadInput(f"model.n_heads: head width {self.d_model // self.n_heads} is odd, rotary needs an even one")
        require_one_of("model.activation", self.activation, ACTIVATIONS)
        if type(self.tied_head) is not bool:
            raise BadInput(f"model.tied_head: got {self.tied_head!r}, expected true or false")
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

    def check_range(self, lo: int, hi: int) -> None:
        """BadInput unless 0 <= lo < hi <= n_layers and both cuts fall between runs of shared blocks. A run cut in two
        would be two copies of one block that drift apart."""
        if not 0 <= lo < hi <= self.n_layers:
            raise BadInput(f"stage layers: got {lo}..{hi}, expected 0 <= lo < hi <= n_layers {self.n_layers}")
        for layer in (lo, hi):
            if 0 < layer < self.n_layers and self.block_of(layer) != layer:
                raise BadInput(
                    f"stage layers: got a cut at {layer}, which splits a shared block; expected a multiple of "
                    f"{self.layers_per_block}"
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

    def boundary_width(self, layer: int) -> int:
        """Width of the tensor that crosses from layer - 1 to `layer`, where a stage ends there."""
        return self.d_model // self.compression_ratio if layer in self.compression_after else self.d_model

    def senders_in(self, lo: int, hi: int) -> list[int]:
        """The l whose narrowing half belongs to the layers lo..hi-1: the stage that ends at l has it."""
        return [layer for layer in self.compression_after if lo < layer <= hi]

    def receivers_in(self, lo: int, hi: int) -> list[int]:
        """The l whose widening half belongs to the layers lo..hi-1: the stage that begins at l has it."""
        return [layer for layer in self.compression_after if lo <= layer < hi]

    @property
    def layers_per_block(self) -> int:
        """How many consecutive layers apply one block; a stage holds whole runs of them."""
        return self.n_layers // self.n_shared_blocks if self.n_shared_blocks else 1

    def block_of(self, layer: int) -> int:
        """Index of the block whose parameters `layer` applies: itself, or the first layer of its shared run."""
        return layer - layer % self.layers_per_block

    def blocks_in(self, lo: int, hi: int) -> list[int]:
        """Distinct block indices applied by the layers lo..hi-1."""
        return sorted({self.block_of(layer) for layer in range(lo, hi)})

    @property
    def up_width(self) -> int:
        """Columns of a layer's up-projection."""
        return self.d_ff * (2 if self.activation == "geglu" else 1)

    @property
    def saved_width(self) -> int:
        """Results of a layer's weight products, per token; remat "dots" keeps them."""
        return 4 * self.d_model + self.up_width

    @property
    def working_width(self) -> float:
        """Values that one layer's backward computes at once, per token."""
        return (
            WORKING_WIDTHS * self.d_model + WORKING_UPS * self.up_width + WORKING_SCORES * self.n_heads * self.seq_len
        )

    @property
    def block_params(self) -> int:
        """Numbers of one layer: two LayerNorms, the projections of attention, and the two of the feed-forward part."""
        d, ff = self.d_model, self.d_ff
        up = d * self.up_width + self.up_width
        return 4 * d + (d * 3 * d + 3 * d) + (d * d + d) + up + (ff * d + d)

    @property
    def token_table_params(self) -> int:
        return self.vocab_size * self.d_model

    @property
    def position_params(self) -> int:
        return self.seq_len * self.d_model if self.positions == "learned" else 0

    @property
    def head_params(self) -> int:
        """Final LayerNorm and, when not tied, the output matrix."""
        return 2 * self.d_model + (0 if self.tied_head else self.token_table_params)

    @property
    def sender_params(self) -> int:
        """LayerNorm over the width, with a bottleneck the linear layer, LayerNorm over the narrow width."""
        d, narrow = self.d_model, self.d_model // self.compression_ratio
        linear = d * narrow + narrow if self.compression_kind == "bottleneck" else 0
        return 2 * d + linear + 2 * narrow

    @property
    def receiver_params(self) -> int:
        """The linear layer back to the full width."""
        return (self.d_model // self.compression_ratio) * self.d_model + self.d_model

    def stage_params(self, lo: int, hi: int) -> int:
        """Numbers held by a stage of layers lo..hi-1; a tied head on a last stage of several counts its own table."""
        n = len(self.blocks_in(lo, hi)) * self.block_params
        n += len(self.senders_in(lo, hi)) * self.sender_params
        n += len(self.receivers_in(lo, hi)) * self.receiver_params
        if lo == 0:
            n += self.token_table_params + self.position_params
        if hi == self.n_layers:
            n += self.head_params + (self.token_table_params if self.tied_head and lo > 0 else 0)
        return n

    def n_blocks(self, lo: int, hi: int) -> int:
        """Blocks that the layers lo..hi-1 apply."""
        return len(self.blocks_in(lo, hi))

    def fragment_of(self, lo: int, layer: int, n_fragments: int) -> int:
        """The fragment of a layer of the stage that begins at lo: its blocks go to the fragments in turn."""
        return (layer - lo) // self.layers_per_block % n_fragments

    def fragment_params(self, lo: int, hi: int, fragment: int, n_fragments: int) -> int:
        """Numbers of a fragment of the layers lo..hi-1: its blocks, and what stands before or behind them."""
        blocks = self.blocks_in(lo, hi)[fragment::n_fragments]
        of_tables = self.token_table_params + self.position_params if 0 in blocks else 0
        of_head = self.head_params if self.block_of(self.n_layers - 1) in blocks else 0
        n_senders = sum(self.block_of(layer - 1) in blocks for layer in self.senders_in(lo, hi))
        n_receivers = sum(self.block_of(layer) in blocks for layer in self.receivers_in(lo, hi))
        of_pairs = n_senders * self.sender_params + n_receivers * self.receiver_params
        return len(blocks) * self.block_params + of_tables + of_head + of_pairs

    @property
    def n_params(self) -> int:
        return self.stage_params(0, self.n_layers)

    def boundary_numbers(self, microbatch_size: int, layer: int = 0) -> int:
        """Numbers that one microbatch sends over the stage boundary at `layer`, each way (before a codec); layer 0
        stands for any boundary without a compression pair."""
        return microbatch_size * self.seq_len * self.boundary_width(layer)

    def train_flops(self, n_tokens: int) -> float:
        """FLOP of forward and backward over n_tokens: 6 per parameter use (square-cube law, SWARM Sec. 3.1);
        recomputation, embedding look-ups and attention scores are not counted."""
        used = self.n_layers * self.block_params + self.token_table_params
        used += len(self.compression_after) * (self.sender_params + self.receiver_params)
        return 6.0 * used * n_tokens


def _shape(
    n_layers: int, d_model: int, n_heads: int, seq_len: int, vocab_size: int, tied_head: bool = False
) -> dict[str, Any]:
    return {
        "n_layers": n_layers,
        "d_model": d_model,
        "n_heads": n_heads,
        "seq_len": seq_len,
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

FIELDS = tuple(field.name for field in fields(GPTConfig))


def gpt_config(preset: Any, **overrides: Any) -> GPTConfig:
    """The preset with the given fields replaced; a changed d_model moves an unset d_ff to 4 d_model. Values are checked
    here, since they may come straight from a file."""
    if not isinstance(preset, str) or preset not in PRESETS:
        raise BadInput(
            f"model.preset: got {preset!r}, expected one of {', '.join(PRESETS)}{nearest(str(preset), PRESETS)}"
        )
    for name in overrides:
        if name not in FIELDS:
            raise BadInput(f"model.{name}: unknown field{nearest(name, FIELDS)}; known: {', '.join(FIELDS)}")
    values = PRESETS[preset] | overrides
    if "d_model" in overrides and "d_ff" not in overrides and isinstance(values["d_model"], int):
        values["d_ff"] = 4 * values["d_model"]
    after = values.get("compression_after")
    if is_list(after):
        values["compression_after"] = tuple(after)
    return GPTConfig(**values)
