"""Adapters: small trained matrices beside frozen ones (LoRA, Hu et al. 2021, Sec. 4.1).

    model.adapter = "lora:RANK" or "lora:RANK:q,v"

A matrix [D,F] of a layer computes as `matrix + SCALE * a b`, with a [D,RANK] drawn and b [RANK,F] zero at first. All
other parameters of the model are frozen: no gradient, moments or exchange. Of the names behind the rank one must stand
in the path of a matrix, such as "q" in "q/kernel"; without names every matrix of the layers has an adapter. Embedding
and head have none, nor have the matrices of experts, which stand in one leaf. The leaves of an adapter are those of an
entry below "lora": "lora/q/kernel/a" and ".../b"."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from jaxdt.run.errors import BadInput, nearest
from jaxdt.run.model_facts import HEAD, MATRIX, Entry, Leaf, ModelFacts

SYNTAX = re.compile(r"lora:([1-9]\d{0,4})(?::([\w.-]+(?:,[\w.-]+)*))?")  # rank, targets
LORA, A, B = "lora", "a", "b"
SCALE = 2.0  # the usual alpha of twice the rank, by the rank


@dataclass(frozen=True)
class Adapter:
    """`targets`: names in the paths of matrices; empty for all matrices."""

    rank: int
    targets: tuple[str, ...]

    def fits(self, leaf: Leaf) -> bool:
        """Whether a leaf of a layer gets an adapter."""
        is_matrix = leaf.role == MATRIX and len(leaf.shape) == 2
        return is_matrix and (not self.targets or bool(set(self.targets) & set(leaf.path.split("/"))))


def parse(text: str) -> Adapter:
    """The adapter that the option model.adapter names."""
    match = SYNTAX.fullmatch(text)
    assert match, "options were checked"
    return Adapter(int(match[1]), tuple(match[2].split(",")) if match[2] else ())


def adapted(facts: ModelFacts, adapter: Adapter) -> ModelFacts:
    """The facts of a model with an adapter. FLOP stay those of the model: what the adapter adds is small beside them.
    BadInput for a target that no matrix has."""
    known = _names(facts)
    for target in adapter.targets:
        if target not in known:
            expected = f"expected some of {', '.join(sorted(known))}"
            raise BadInput(f"model.adapter: got the target {target!r}{nearest(target, known)}, {expected}")
    entries = tuple(_adapted_entry(entry, adapter) for entry in facts.entries)
    n_new = {entry.name: entry.n_trained for entry in entries}
    n_of_layer = [0] * facts.n_layers
    for entry in entries:
        for layer in entry.layers:
            n_of_layer[layer] += n_new[entry.name]
    layers = tuple(
        replace(layer, n_params=layer.n_params + n_more, n_used=layer.n_used + n_more)
        for layer, n_more in zip(facts.layers, n_of_layer, strict=True)
    )
    return replace(facts, layers=layers, entries=entries)


def _names(facts: ModelFacts) -> set[str]:
    """What can be a target."""
    matrices = Adapter(1, ())
    paths = (leaf.path for entry in facts.entries if entry.name != HEAD for leaf in entry.leaves if matrices.fits(leaf))
    return {name for path in paths for name in path.split("/")}


def _adapted_entry(entry: Entry, adapter: Adapter) -> Entry:
    frozen = [replace(leaf, trained=False) for leaf in entry.leaves]
    new = [leaf for of in entry.leaves if entry.name != HEAD and adapter.fits(of) for leaf in _leaves(of, adapter.rank)]
    return replace(entry, leaves=tuple(_in_order_of_trees([*frozen, *new])))


def _leaves(of: Leaf, rank: int) -> list[Leaf]:
    n_in, n_out = of.shape
    path = f"{LORA}/{of.path}"
    return [Leaf(f"{path}/{A}", (n_in, rank), MATRIX), Leaf(f"{path}/{B}", (rank, n_out), MATRIX)]


def _in_order_of_trees(leaves: Iterable[Leaf]) -> list[Leaf]:
    return sorted(leaves, key=lambda leaf: leaf.path.split("/"))
