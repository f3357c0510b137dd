"""The gradients that a server's workers have accumulated for a step: asked for, checked, and added to the server's own.

    nothing is left of a step   -> ContributionWanted to every worker that has done something, once it has nothing to do
    a contribution is here      -> it is added if it holds exactly what the worker has done, and is finite
    it may be added             -> one after another, in the order in which they were checked (C)

The server decides what becomes of a worker whose contribution may not be added.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxdt.protocol import events as ev
from jaxdt.protocol.round_id import RoundId, RoundKind
from jaxdt.run.work import Work, WorkKind
from jaxdt.wiring.pool.step_under_way import AskedContribution, StepUnderWay
from jaxdt.wiring.pool.task_times import LeaseTimes

NEVER = float("inf")
CONTRIBUTION = "contribution"  # in LeaseTimes
NOT_ITS_WORK = "its contribution is not what it has done"
NOT_FINITE = "its gradient is not finite"


@dataclass(frozen=True)
class Contribution:
    """The gradients of a step that a worker has contributed, as (microbatch, lease), until they are added."""

    worker: int
    step: StepUnderWay
    rounds: tuple[RoundId, ...]
    items: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Rejection:
    """Why a contribution is not added. `is_suspicious`: it cannot be right, by the fault of the worker or of the
    run."""

    reason: str
    is_suspicious: bool = False


class Contributions:
    """The contributions to one server. `sync_stages`: the `stage` of each of its sync groups (jaxdt.run.sizes)."""

    def __init__(self, peer: int, stage: int, sync_stages: Sequence[int], times: LeaseTimes):
        self._peer = peer
        self._stage = stage
        self._sync_stages = sync_stages
        self._times = times
        self._n_rounds = 0
        self._adding: deque[Contribution] = deque()  # in order
        self._is_adding = False  # the first of them, now
        self._is_void = False  # the one that is being added was dropped, and is not among them any more

    def ask(self, now_s: float, step: StepUnderWay, worker: int, admission: int) -> ev.Actions:
        """Ask a worker for what it has accumulated."""
        self._n_rounds += 1
        made = [
            RoundId(RoundKind.CONTRIBUTION, stage, step.number, peer=worker, view=admission, attempt=self._n_rounds)
            for stage in self._sync_stages
        ]
        rounds = tuple(made)
        until_s = now_s + self._times.timeout_s(worker, CONTRIBUTION)
        step.asked[worker] = AskedContribution(rounds, now_s, until_s)
        return [ev.ContributionBegins(worker, rounds), ev.Send(worker, ev.ContributionWanted(admission, rounds))]

    def arrived(self, now_s: float, step: StepUnderWay, received: ev.ContributionReceived) -> bool:
        """All of a contribution is here. Whether it was asked for."""
        worker, rounds = received.worker, received.rounds
        asked = step.asked.get(worker)
        if not asked or asked.rounds != rounds:
            return False
        self._times.took(worker, CONTRIBUTION, now_s - asked.asked_s)
        step.asked[worker] = replace(asked, until_s=NEVER)
        return True

    def look_at(self, step: StepUnderWay, received: ev.ContributionReceived) -> Rejection | None:
        """A contribution is to be added if it holds exactly what the worker has done, and is finite. Else why not."""
        worker, rounds, items = received.worker, received.rounds, received.items
        if items != step.table.contribution(worker) or not items:
            return Rejection(NOT_ITS_WORK)
        if not math.isfinite(received.sq_norm):
            return Rejection(NOT_FINITE, is_suspicious=True)
        step.table.commit(worker, items)
        del step.asked[worker]
        self._adding.append(Contribution(worker, step, rounds, items))
        return None

    def next_work(self) -> tuple[Work, tuple[RoundId, ...]] | None:
        """The Work that contributions wait for, and the rounds whose vectors it reads. It is begun at once."""
        if not self._adding or self._is_adding:
            return None
        first = self._adding[0]
        self._is_adding = True
        return Work(self._stage, WorkKind.CONTRIBUTE, None, self._peer, first.step.number), first.rounds

    def added(self) -> Contribution | None:
        """The first contribution that waited is in this server's accumulator; None if it was dropped meanwhile."""
        was_dropped, self._is_adding, self._is_void = self._is_void, False, False
        return None if was_dropped else self._adding.popleft()

    def are_waiting(self, step: StepUnderWay) -> bool:
        """Whether contributions to the step are still to be added."""
        return any(contribution.step is step for contribution in self._adding)

    def drop(self, keeps_what_is_being_added: bool) -> ev.Actions:
        """Contributions that wait to be added are void. The Work that adds one of them gives up, or its result goes
        with the accumulator, so its end says nothing of those that come after."""
        self._is_void |= self._is_adding and not keeps_what_is_being_added
        n_kept = 1 if self._is_adding and not self._is_void else 0
        actions: ev.Actions = []
        while len(self._adding) > n_kept:
            actions += forget(self._adding.pop().rounds)
        return actions


def forget(rounds: tuple[RoundId, ...]) -> ev.Actions:
    """Nothing of these rounds is needed any more."""
    return [ev.Forget(round) for round in rounds]
