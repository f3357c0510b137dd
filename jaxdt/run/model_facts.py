"""What everything without jax knows of a model: numbers that are read off the model's own functions once.

A model is a row of layers, an embedding before them and a head behind. Its parameters are entries: trees with a name.
Every question of plans, memory, sync groups, checkpoints and predictions is a sum over layers and entries, so none of
them needs a formula of a family.

The facts of a model follow from its options (a ModelSpec). jaxdt.model.derive reads them off the family's functions. A
process that has imported jax calls it; for any other, jaxdt.model.facts_process asks a child process.
"""

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from math import prod
from typing import Any, NamedTuple

from jaxdt.run import serialize
from jaxdt.run.errors import BadInput

HEAD = "head"  # the entry of the head, in every family
MATRIX, TABLE, VECTOR = ROLES = ("matrix", "table", "vector")


class Moments(NamedTuple):
    """Moments that an optimizer holds for each number of a trained matrix, and of any other trained leaf. The head
    counts among the others."""

    matrices: int
    others: int


NO_MOMENTS, TWO_MOMENTS = Moments(0, 0), Moments(2, 2)


@dataclass(frozen=True)
class Leaf:
    """One array of an entry. `role`: "matrix" of a product, "table" of look-ups, or "vector" (biases and scales, which
    do not decay). `trained`: whether it has a gradient, moments and a place in exchanges."""

    path: str
    shape: tuple[int, ...]
    role: str
    trained: bool = True

    @property
    def n_params(self) -> int:
        return prod(self.shape)

    @property
    def is_narrow(self) -> bool:
        """Whether a peer that computes in bf16 holds it in bf16 (jaxdt.model.adapter)."""
        return not self.trained and self.role != VECTOR


@dataclass(frozen=True)
class Entry:
    """Parameters with one name. `layers`: those that read it, in order; the first of them owns it. The embedding counts
    as a part of the first layer, the head as a part of the last. An entry that layers of several stages read is a sync
    group of its own among these stages."""

    name: str
    layers: tuple[int, ...]
    leaves: tuple[Leaf, ...]

    @cached_property
    def n_params(self) -> int:
        return sum(leaf.n_params for leaf in self.leaves)

    @cached_property
    def n_trained(self) -> int:
        return sum(leaf.n_params for leaf in self.leaves if leaf.trained)

    @cached_property
    def n_narrow(self) -> int:
        return sum(leaf.n_params for leaf in self.leaves if leaf.is_narrow)

    @property
    def has_matrices(self) -> bool:
        """Whether an optimizer takes its matrices for such: the head's has a column for each token, like a table."""
        return self.name != HEAD

    @property
    def matrices(self) -> list[Leaf]:
        """Those of them that are trained."""
        return [leaf for leaf in self.leaves if self.has_matrices and leaf.trained and leaf.role == MATRIX]

    @cached_property
    def n_matrix_trained(self) -> int:
        return sum(leaf.n_params for leaf in self.matrices)

    def moment_numbers(self, moments: Moments) -> int:
        """Numbers of its moments."""
        return moments.others * self.n_trained + (moments.matrices - moments.others) * self.n_matrix_trained

    def is_read_in(self, lo: int, hi: int) -> bool:
        """Whether one of the layers lo..hi-1 reads it."""
        first = bisect_left(self.layers, lo)
        return first < len(self.layers) and self.layers[first] < hi

    def is_read_outside(self, lo: int, hi: int) -> bool:
        """Whether a layer before lo or from hi on reads it."""
        return self.layers[0] < lo or self.layers[-1] >= hi


@dataclass(frozen=True)
class LayerFacts:
    """One layer, without embedding and head; numbers and FLOP are those of one token.

    `out_width`: of the tensor behind the layer. `flops`: of the forward's products with weights. `saved`: results of
    these products, which remat "dots" keeps. `working`: numbers that the layer's backward computes at once. Attention
    adds `flops_per_token` and `working_per_token` for each token of the sample. `n_params`: of the entries that the
    layer reads, shared ones too; `n_used`: those of them that one token meets, of experts the ones to which it is sent.
    `cut`: whether a stage may begin here. `like`: the first layer that takes the same time. `n_experts`: those whose
    load the layer counts; 0 for a layer without experts."""

    out_width: int
    flops: int
    flops_per_token: int
    saved: int
    working: float
    working_per_token: float
    n_params: int
    n_used: int
    cut: bool
    like: int
    n_experts: int = 0


@dataclass(frozen=True)
class ModelFacts:
    """`max_len`: the most tokens that a sample may have. `in_width`: numbers of a token behind the embedding.
    `first_flops`, `last_flops`: of embedding and head, for one token."""

    vocab_size: int
    max_len: int
    in_width: int
    layers: tuple[LayerFacts, ...]
    entries: tuple[Entry, ...]
    first_flops: int = 0
    last_flops: int = 0

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def n_params(self) -> int:
        return self.stage_params(0, self.n_layers)

    @property
    def structure(self) -> dict[str, Any]:
        """What replicas have to agree in: all but the estimates of time and memory, which may change from one version
        of this package to the next."""
        layers = [[layer.out_width, layer.n_params, layer.cut] for layer in self.layers]
        sizes = [self.vocab_size, self.max_len, self.in_width]
        return {"sizes": sizes, "layers": layers, "entries": [serialize.write(entry) for entry in self.entries]}

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """The layers before which a stage may begin, and the number of layers."""
        return (*(i for i, layer in enumerate(self.layers) if layer.cut), self.n_layers)

    def check_range(self, lo: int, hi: int) -> None:
        """BadInput unless 0 <= lo < hi <= n_layers and a stage may begin and end there."""
        if not 0 <= lo < hi <= self.n_layers:
            raise BadInput(f"stage layers: got {lo}..{hi}, expected 0 <= lo < hi <= n_layers {self.n_layers}")
        for layer in (lo, hi):
            if layer not in self.cuts:
                raise BadInput(
                    f"stage layers: got a cut at {layer}, which splits a shared block; expected one of "
                    f"{', '.join(map(str, self.cuts))}"
                )

    @cached_property
    def frozen(self) -> frozenset[tuple[str, str]]:
        """(entry, path) of the leaves that are not trained."""
        return frozenset((e.name, leaf.path) for e in self.entries for leaf in e.leaves if not leaf.trained)

    def entries_in(self, lo: int, hi: int) -> list[Entry]:
        """The entries that the layers lo..hi-1 read, by name."""
        return self._of_range(lo, hi).entries

    def shared(self, lo: int, hi: int) -> list[Entry]:
        """Those of them that are trained and that other layers read too: parameters that several stages hold, and on
        which they have to agree."""
        return self._of_range(lo, hi).shared

    def owned(self, lo: int, hi: int) -> list[Entry]:
        """Those of them that no layer before lo reads, or that are not trained: each trained entry of the model is
        owned by one stage, and of the others each stage has its own copy."""
        return [entry for entry in self.entries_in(lo, hi) if entry.layers[0] >= lo or not entry.n_trained]

    def stage_params(self, lo: int, hi: int) -> int:
        """Numbers that a stage of the layers lo..hi-1 holds."""
        return self._of_range(lo, hi).n_params

    def stage_trained(self, lo: int, hi: int) -> int:
        """Those of them that are trained."""
        return self._of_range(lo, hi).n_trained

    def stage_narrow(self, lo: int, hi: int) -> int:
        """Those that a stage which computes in bf16 holds in bf16."""
        return self._of_range(lo, hi).n_narrow

    def moment_numbers(self, lo: int, hi: int, moments: Moments, *, owned: bool = False) -> int:
        """Numbers of the optimizer's moments of a stage, or of the entries that it owns."""
        if owned:
            return sum(entry.moment_numbers(moments) for entry in self.owned(lo, hi))
        found = self._of_range(lo, hi)
        return moments.others * found.n_trained + (moments.matrices - moments.others) * found.n_matrix_trained

    def state_numbers(self, lo: int, hi: int, moments: Moments) -> int:
        """Numbers of a stage's trained parameters and of the optimizer's moments."""
        return self.stage_trained(lo, hi) + self.moment_numbers(lo, hi, moments)

    def shared_trained(self, lo: int, hi: int) -> int:
        return sum(entry.n_trained for entry in self.shared(lo, hi))

    def owned_trained(self, lo: int, hi: int) -> int:
        return sum(entry.n_trained for entry in self.owned(lo, hi))

    def _of_range(self, lo: int, hi: int) -> "_Range":
        """Kept for each range: planners ask for the same few a million times."""
        if (lo, hi) not in self._ranges:
            found = [entry for entry in self.entries if entry.is_read_in(lo, hi)]
            shared = [entry for entry in found if entry.n_trained and entry.is_read_outside(lo, hi)]
            totals = (sum(getattr(entry, name) for entry in found) for name in _Range._fields[2:])
            self._ranges[lo, hi] = _Range(found, shared, *totals)
        return self._ranges[lo, hi]

    @cached_property
    def _ranges(self) -> dict[tuple[int, int], "_Range"]:
        return {}

    @property
    def n_trained(self) -> int:
        return self.stage_trained(0, self.n_layers)

    @property
    def n_split_trained(self) -> int:
        """Trained numbers of all entries that some cut splits, so that several stages hold them."""
        return sum(e.n_trained for e in self.entries if any(e.layers[0] < cut <= e.layers[-1] for cut in self.cuts))

    @property
    def n_logit_params(self) -> int:
        """Weights of the product that makes logits."""
        return self.vocab_size * self.layers[-1].out_width

    def n_used_params(self, lo: int, hi: int) -> int:
        """Parameters that a token meets in layers lo..hi-1, as often as it does: those of each layer, and of the
        logits. A look-up costs next to nothing."""
        of_logits = self.n_logit_params if hi == self.n_layers else 0
        return sum(layer.n_used for layer in self.layers[lo:hi]) + of_logits

    def train_flops(self, n_tokens: int) -> float:
        """FLOP of forward and backward over n_tokens by the rule of 6 per parameter use (square-cube law, SWARM Sec.
        3.1), which counts neither recomputation nor attention scores."""
        return 6.0 * self.n_used_params(0, self.n_layers) * n_tokens

    def boundary_width(self, layer: int) -> int:
        """Numbers of a token that crosses from layer - 1 to `layer`, where a stage ends there."""
        return self.layers[layer - 1].out_width if layer else self.in_width

    def boundary_numbers(self, n_tokens: int, layer: int = 0) -> int:
        """Numbers that a microbatch of so many tokens sends over the stage boundary at `layer`, each way (before a
        codec)."""
        return n_tokens * self.boundary_width(layer)

    def alike(self, lo: int = 0, hi: int | None = None) -> dict[int, tuple[int, int]]:
        """(layers, runs between cuts) of the layers lo..hi-1 that take the same time, by the first of the model."""
        counted: dict[int, tuple[int, int]] = {}
        for layer in self.layers[lo:hi]:
            n_layers, n_runs = counted.get(layer.like, (0, 0))
            counted[layer.like] = n_layers + 1, n_runs + layer.cut
        return counted

    def flops(self, lo: int, hi: int, n_tokens: int) -> int:
        """FLOP of the forward of a sample of so many tokens, attention included."""
        a_token = sum(layer.flops + layer.flops_per_token * n_tokens for layer in self.layers[lo:hi])
        a_token += self.first_flops * (lo == 0) + self.last_flops * (hi == self.n_layers)
        return a_token * n_tokens

    def saved(self, lo: int, hi: int) -> int:
        """Numbers of a token that remat "dots" keeps beside the input of a stage that is not the last. Nothing reads
        the results of its last product again, unless experts made them: their weights' gradient does."""
        last = self.layers[hi - 1]
        n_unread = 0 if last.n_experts else min(last.saved, last.out_width)
        return sum(layer.saved for layer in self.layers[lo:hi]) - n_unread

    @cached_property
    def _trained_spans(self) -> list[tuple[int, int]]:
        """First and last layer of each entry that has a trained leaf."""
        return sorted((entry.layers[0], entry.layers[-1]) for entry in self.entries if entry.n_trained)

    def may_be_stage(self, lo: int, hi: int) -> bool:
        """Whether layers lo..hi-1 have a trained leaf that no other stage reads."""
        first = bisect_left(self._trained_spans, (lo, lo))
        return any(last < hi for _, last in islice(self._trained_spans, first, None))

    def working(self, lo: int, hi: int, n_tokens: int) -> float:
        """Numbers of a token that the backward of layers lo..hi-1 computes at once, for samples of so many tokens."""
        total = 0.0
        for like, (n_layers, _) in self.alike(lo, hi).items():
            total += n_layers * (self.layers[like].working + self.layers[like].working_per_token * n_tokens)
        return total

    def n_runs(self, lo: int, hi: int) -> int:
        """Runs of layers between two neighbouring cuts."""
        return sum(lo <= cut < hi for cut in self.cuts)

    def fragments(self, lo: int, hi: int, n_fragments: int) -> list[list[Entry]]:
        """The entries of each fragment of a stage: its runs of layers go to the fragments in turn, with the entries
        that the stage owns there."""
        starts = [cut for cut in self.cuts if lo <= cut < hi]
        found: list[list[Entry]] = [[] for _ in range(n_fragments)]
        for entry in self.owned(lo, hi):
            found[sum(start <= entry.layers[0] for start in starts[1:]) % n_fragments].append(entry)
        return found


class _Range(NamedTuple):
    """What is known of the entries that a range of layers reads."""

    entries: list[Entry]
    shared: list[Entry]
    n_params: int
    n_trained: int
    n_matrix_trained: int
    n_narrow: int


UNKNOWN = ModelFacts(0, 0, 0, (), ())


class MicrobatchShape(NamedTuple):
    """The shape of a microbatch's tokens: `size` samples of `seq_len` tokens."""

    size: int
    seq_len: int

    @property
    def n_tokens(self) -> int:
        return self.size * self.seq_len
