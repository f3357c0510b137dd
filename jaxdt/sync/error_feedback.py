"""What a codec has lost of a peer's gradients, pushes or averages, until a later contribution of the peer makes up for
it (error feedback, Seide et al. 2014).

A contribution is the gradient and what is owed. The codec loses a part of it. An owner loses a part of each sum that it
encodes, and owes that too. Both are owed once the round counts:

    the round is committed                        -> the next contribution adds what was lost, once
    it is given up, redone or superseded          -> the next attempt adds what was owed before
    its step is skipped                           -> what was owed before stays
    the run goes back, or the peer gets a state   -> nothing is owed, or what all-reduce wrote beside that checkpoint
    the coordinator is started again              -> nothing changes: rounds outlive it

What an averaging group exchanges counts once its mean is adopted. The mean takes the place of the parameters of which
it is made, so an average leaves the weighted sum of its members' parameters and of what they owe as it was. With an
outer optimizer changes are averaged, as gradients are.

With delayed updates a step may be laid out before the one before it is committed, or after. So a step adds what the
last step lost that is committed in any case, and as many series alternate as steps are under way.

A pool's worker never hears of a commit. Its contribution counts once it is sent; one that turns out to be void ends the
worker's admission, and nothing is owed under the next one. Here too series alternate: what it sends for a step must not
make up for a later step, which may be void when the earlier one is committed. What is pushed to a server counts once it
is sent, too: the server adds it, unless the worker is lost.

No arrays here: an error is whatever stands for an array (the store's vectors, or tokens in a simulation without
arithmetic)."""

from collections.abc import Callable, Iterable, Mapping
from typing import Generic, TypeVar

from jaxdt.protocol.round_id import RoundId, RoundKind

Error = TypeVar("Error")
Slot = tuple[int, int]  # `stage` of the round, and which of its alternating series, or fragments


class ErrorFeedback(Generic[Error]):
    """Of one peer, at which `n_under_way` steps may be under way at once."""

    def __init__(self, n_under_way: int):
        self._n_under_way = n_under_way
        self._owed: dict[Slot, Error] = {}
        self._lost: dict[RoundId, Error] = {}

    def owed(self, round: RoundId) -> Error | None:
        """What a contribution to the round adds to its vector; None for nothing."""
        return self._owed.get(self._slot(round))

    def lost(self, round: RoundId) -> Error | None:
        """What was lost of the contribution to a round; None if there was none, or it does not wait for a commit."""
        return self._lost.get(round)

    def lose(self, round: RoundId, error: Error) -> None:
        """The codec has lost this of the contribution to a round. It must not be written to once the round counts."""
        if round.kind in (RoundKind.GRADIENT, RoundKind.MEAN):
            self._lost[round] = error
            return
        slot, n = self._slot(round), self._n_under_way
        self._owed = {old: owed for old, owed in self._owed.items() if old[0] != slot[0] or old[1] // n == slot[1] // n}
        self._owed[slot] = error

    def commit(self, rounds: Iterable[RoundId]) -> None:
        """These rounds count. A peer that has joined, and contributed to none, owes what it owed."""
        for round in rounds:
            if round in self._lost:
                self._owed[self._slot(round)] = self._lost.pop(round)

    def forget(self, is_over: Callable[[RoundId], bool]) -> None:
        """These rounds never count, or count already. Another thread may lay a round out meanwhile."""
        for round in [round for round in list(self._lost) if is_over(round)]:
            self._lost.pop(round, None)

    def reset(self, owed: Mapping[Slot, Error] | None = None) -> None:
        """The peer has another state, with which so much is owed."""
        self._owed = dict(owed or {})
        self._lost.clear()

    @property
    def of_state(self) -> Mapping[Slot, Error]:
        """What is owed with the peer's present state."""
        return dict(self._owed)

    def _slot(self, round: RoundId) -> Slot:
        series = round.number % self._n_under_way
        if round.kind == RoundKind.MEAN:
            return round.stage, round.fragment
        if round.kind == RoundKind.GRADIENT:
            return round.stage, series
        return round.stage, round.view * self._n_under_way + series  # the view is that of the admission
