"""The tensors of one peer of a simulated run: something small in place of arrays, that comes and goes as in the
runtime's store.

It is an error to use a tensor that is not there, as it is in that store. A subclass says what stands for arrays: counts
of microbatches where replicas stay equal (symbolic_tensors.py), residues where they may differ
(independent/tensors.py).
"""

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from jaxdt.protocol import events as ev
from jaxdt.protocol.message import tensor_key
from jaxdt.protocol.round_id import RoundId
from jaxdt.run.work import Work
from jaxdt.sync.transfer import FetchedStates

ACTIVATION, GRADIENT, HELD_OUT = "act", "grad", "eval"  # the kinds of the keys of boundary tensors
Compute = Callable[[Work, float, tuple[RoundId, ...]], dict[str, float]]  # returns the values of a Ran


class HeldTensors:
    """The base of both kinds. `n_words`: of a state. `broken(peer, problem)` raises."""

    def __init__(self, peer: int, place: tuple[int, int], n_words: int, broken: Callable[[int, str], NoReturn]):
        """`place`: the peer's stage, and the number of stages."""
        self.peer = peer
        self.stage, n_stages = place
        self.n_words = n_words
        self.accumulators: dict[int, Any] = {}  # by step
        self._is_last = self.stage == n_stages - 1
        self._broken = broken
        self._work: Mapping[str, Compute] = {}
        self._boundaries: dict[ev.Key, Any] = {}
        self._residuals: dict[ev.Key, Any] = {}  # by the keys of the inputs of their forwards
        self._own: dict[RoundId, Any] = {}  # what this peer contributes to rounds
        self._slices: dict[ev.SliceKey, Any] = {}
        self._forgotten: set[RoundId] = set()
        self._fetched = FetchedStates(n_words)

    @property
    def boundary_keys(self) -> tuple[ev.Key, ...]:
        """The boundary tensors that are here."""
        return tuple(self._boundaries)

    @property
    def residual_keys(self) -> tuple[ev.Key, ...]:
        """The forwards whose residuals are here, by the keys of their inputs."""
        return tuple(self._residuals)

    @property
    def rounds(self) -> set[RoundId]:
        """The rounds of which an own vector, or a slice, is here."""
        return self._own.keys() | {key.round for key in self._slices}

    def broken(self, problem: str) -> NoReturn:
        self._broken(self.peer, problem)

    def _missing(self, what: object) -> NoReturn:
        self.broken(f"wants a tensor that it does not hold: {what}")

    # ------------------------------------------------------------------------------------------------------- compute

    def run(self, work: Work, scale: float, rounds: tuple[RoundId, ...] = ()) -> dict[str, float]:
        """Do the Work and return the values of its Ran: one sample of loss 1 for each microbatch."""
        if work.kind not in self._work:
            self.broken(f"{work} is not Work of these replicas")
        return self._work[work.kind](work, scale, rounds)

    def _forward(self, work: Work, scale: float, rounds: tuple[RoundId, ...]) -> dict[str, float]:
        if not self._is_last:
            y = self._forwarded(work, self._input(ACTIVATION, work))
            self._residuals[key_of(ACTIVATION, work)] = self._boundaries[key_of(ACTIVATION, work, 1)] = y
        return {}

    def _backward(self, work: Work, scale: float, rounds: tuple[RoundId, ...]) -> dict[str, float]:
        if self._is_last:
            x, gy = self._input(ACTIVATION, work), None
        else:
            gy = self._take(self._boundaries, key_of(GRADIENT, work, 1), work)
            x = self._take(self._residuals, key_of(ACTIVATION, work), work)
        self._boundaries[key_of(GRADIENT, work)] = self._backwarded(work, x, gy)
        return {"n_samples": 1, "loss_sum": 1.0} if self._is_last else {"n_samples": 1}

    def _input(self, kind: str, work: Work) -> Any:
        is_here = self.stage > 0
        return self._take(self._boundaries, key_of(kind, work), work) if is_here else self._tokens(kind, work)

    def _take(self, held: dict[ev.Key, Any], key: ev.Key, work: Work) -> Any:
        if key not in held:
            self._missing(f"{key} for {work}")
        return held.pop(key)

    def _tokens(self, kind: str, work: Work) -> Any:
        """The input of the first stage."""
        raise NotImplementedError

    def _forwarded(self, work: Work, x: Any) -> Any:
        """The activation for the next stage, which is kept for the backward too."""
        raise NotImplementedError

    def _backwarded(self, work: Work, x: Any, gy: Any) -> Any:
        """The gradient for the stage before. Its own part of the gradient goes into the accumulator."""
        raise NotImplementedError

    # -------------------------------------------------------------------------------------------------------- rounds

    def sum(self, key: ev.SliceKey, members: tuple[int, ...]) -> tuple[int, float]:
        """Add a slice of all members up; its check sum and norm."""
        parts = [self._own_part(key) if member == self.peer else self._part(key, member) for member in members]
        self._slices[key], checksum, norm = self._added(key, parts)
        return checksum & 0xFFFFFFFF, norm

    def _added(self, key: ev.SliceKey, parts: list[Any]) -> tuple[Any, int, float]:
        """(the sum, a check sum, its norm)."""
        raise NotImplementedError

    def _own_part(self, key: ev.SliceKey) -> Any:
        if key.round not in self._own:
            self._missing(f"its own part of {key}")
        return self._own[key.round]

    def _part(self, key: ev.SliceKey, member: int) -> Any:
        part = ev.SliceKey(key.round, key.lo, key.hi, member)
        if part not in self._slices:
            self._missing(f"{part} to add it up")
        return self._slices.pop(part)

    def _n_held(self, round: RoundId) -> int:
        """The number of numbers of a round's result that are here."""
        return sum(key.hi - key.lo for key in self._slices if key.src is None and key.round == round)

    def forget(self, round: RoundId) -> None:
        self._forgotten.add(round)
        self._own.pop(round, None)
        for key in [key for key in self._slices if key.round == round]:
            del self._slices[key]

    def reopen(self, round: RoundId) -> None:
        self._forgotten.discard(round)

    # ------------------------------------------------------------------------------------------------------- tensors

    def tensor_to_send(self, body: ev.Message) -> Any:
        """What `put` gets at the receiver."""
        key = tensor_key(body)
        assert key is not None  # only messages with a tensor come here
        if isinstance(key, ev.StateKey):
            return None if key.part else self._given(key)  # the disk has been asked for a checkpoint's part
        if isinstance(key, ev.SliceKey) and key.src is not None:
            return self._own_part(key)
        tensor = self._boundaries.get(key) if isinstance(key, ev.Key) else self._slices.get(key)
        if tensor is None:
            self._missing(f"{key} to send it")
        return tensor

    def _given(self, key: ev.StateKey) -> Any:
        """A slice of the own state."""
        raise NotImplementedError

    def put(self, body: ev.Message, src: int, tensor: Any) -> None:
        key = tensor_key(body)
        if isinstance(key, ev.StateKey):
            self._fetched.put(key, tensor)
        elif isinstance(key, ev.Key):
            self._boundaries[key] = tensor
        elif key is not None and key.round not in self._forgotten:
            self._slices[key] = tensor

    def discard(self, key: ev.Key | ev.StateKey) -> None:
        if isinstance(key, ev.StateKey):
            self._fetched.begin()
        else:
            self._boundaries.pop(key, None)

    def free(self, step: int, rounds: tuple[RoundId, ...]) -> None:
        for freed in [other for other in self.accumulators if other <= step]:
            del self.accumulators[freed]

    def _fetched_state(self, install: ev.Install) -> set[Any]:
        """The states of which all words have been fetched: one, unless slices are of several."""
        slices = self._fetched.take(install.version)
        if (n_words := sum(key.hi - key.lo for key, _ in slices)) != self.n_words:
            self._missing(f"a whole state for {install}, has {n_words} of {self.n_words} words")
        return {state for _, state in slices}


def key_of(kind: str, work: Work, offset: int = 0) -> ev.Key:
    """The key of a boundary tensor before the stage of a Work, or `offset` stages behind it."""
    step, m = work.place
    return ev.Key(kind, step, work.stage + offset, m)
