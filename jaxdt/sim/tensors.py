"""The tensors that a driver keeps for a peer: the interface, and an implementation without tensors for timing alone."""

from typing import Any, Protocol, runtime_checkable

from jaxdt.protocol import events as ev
from jaxdt.protocol.round_id import RoundId
from jaxdt.run.work import Work


class Tensors(Protocol):
    """The tensors of one peer. Its state has n_words 4-byte words."""

    n_words: int

    def run(self, work: Work, scale: float, rounds: tuple[RoundId, ...] = ()) -> dict[str, float]:
        """Do the Work and return the values of its Ran."""
        ...

    def tensor_to_send(self, body: ev.Message) -> Any:
        """The tensor that a message to be sent names."""

    def put(self, body: ev.Message, src: int, tensor: Any) -> None:
        """Store the tensor that came with a message, which the machine has accepted."""

    def offer(self, round: RoundId, step: int) -> None:
        """The vector that was kept after so many local steps is the contribution to a round."""

    def sum(self, key: ev.SliceKey, members: tuple[int, ...]) -> tuple[int, float]:
        """Add up a slice and return its digest and squared norm."""
        ...

    def forget(self, round: RoundId) -> None:
        """Drop the tensors of a round of averaging that is void, and those of it that still come."""

    def reopen(self, round: RoundId) -> None:
        """Keep the tensors of a round that come from now on, also if it was void."""

    def discard(self, key: ev.Key | ev.StateKey) -> None:
        """Drop a boundary tensor, or the slices of a state that a download has not made whole."""

    def free(self, step: int, rounds: tuple[RoundId, ...]) -> None:
        """Drop the boundary tensors and accumulators of a step and of earlier ones, and all of rounds that are over."""

    def write_checkpoint(self, version: int) -> None:
        """Write this peer's part of a checkpoint."""

    def restore(self, restore: ev.Restore) -> None:
        """Go back to a checkpoint; in place the state stays, and only the results of earlier Work go."""

    def install(self, install: ev.Install) -> ev.Installed | ev.NotInstalled:
        """Replace the state by the one that was fetched, if it is what was sent."""
        ...

    def digest(self) -> tuple[int, float, tuple[float, ...]]:
        """The digest of the state, and the norm and sums of the parameters (StateDigest)."""
        ...


@runtime_checkable
class Perturbed(Protocol):
    """Tensors whose parameters a fault of the simulator may change."""

    def perturb(self, factor: float) -> None:
        """Add `factor` of their norm to the parameters."""


class NoTensors:
    """Timing alone: no arithmetic, losses of zero."""

    def __init__(self, n_samples: int, n_words: int = 0):
        self._n_samples = n_samples
        self.n_words = n_words

    def run(self, work: Work, scale: float, rounds: tuple[RoundId, ...] = ()) -> dict[str, float]:
        return {"n_samples": self._n_samples, "loss_sum": 0.0} if work.kind in "BE" else {}

    def tensor_to_send(self, body: ev.Message) -> None:
        return None

    def put(self, body: ev.Message, src: int, tensor: Any) -> None:
        return None

    def offer(self, round: RoundId, step: int) -> None:
        return None

    def sum(self, key: ev.SliceKey, members: tuple[int, ...]) -> tuple[int, float]:
        return 0, 0.0

    def forget(self, round: RoundId) -> None:
        return None

    def reopen(self, round: RoundId) -> None:
        return None

    def discard(self, key: ev.Key | ev.StateKey) -> None:
        return None

    def free(self, step: int, rounds: tuple[RoundId, ...]) -> None:
        return None

    def write_checkpoint(self, version: int) -> None:
        return None

    def restore(self, restore: ev.Restore) -> None:
        return None

    def install(self, install: ev.Install) -> ev.Installed:
        return ev.Installed(install.version)

    def digest(self) -> tuple[int, float, tuple[float, ...]]:
        return 0, 0.0, ()
