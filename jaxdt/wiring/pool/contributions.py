"""The gradients that a server's workers have accumulated for a step: asked for, checked, and added to the server's own.

    nothing is left of a step   -> ContributionWanted to every worker that has done something, once it has nothing to do
    a contribution is here      -> once the own gradient is measured (N): it is added if it holds exactly what the
                                   worker has done, and if its norm may be right (norm_check.py)
    it may be added             -> one after another, in the order in which they were checked (C)

The server decides what becomes of a worker whose contribution may not be added.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxdt.protocol.events import (
    Action,
    ContributionBegins,
    ContributionReceived,
    ContributionWanted,
    Event,
    Forget,
    Round,
    Send,
)
from jaxdt.spec.sizes import contribution_name
from jaxdt.spec.work import CONTRIBUTE, NORM, Work
from jaxdt.wiring.pool.lease_times import LeaseTimes
from jaxdt.wiring.pool.norm_check import NormCheck
from jaxdt.wiring.pool.step_under_way import AskedContribution, StepUnderWay

NEVER = float("inf")
CONTRIBUTION = "contribution"  # in LeaseTimes
NOT_ITS_WORK = "its contribution is not what it has done"
NOT_CHECKED = (
    "its contribution is not counted: the check of norms needs a gradient of this server's own first, so this server "
    "computes these microbatches itself; nothing has to be done"
)


@dataclass(frozen=True)
class Contribution:
    """The gradients of a step that a worker has contributed, as (microbatch, lease), until they are added."""

    worker: int
    step: StepUnderWay
    rounds: tuple[Round, ...]
    items: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Rejection:
    """Why a contribution is not added. `is_suspicious`: it cannot be right, by the fault of the worker or of the
    run."""

    reason: str
    is_suspicious: bool = False


class Contributions:
    """The contributions to one server. `groups`: the names of the stage's sync groups."""

    def __init__(self, peer: int, stage: int, groups: Sequence[str], times: LeaseTimes):
        self._peer = peer
        self._stage = stage
        self._groups = groups
        self._times = times
        self._n_rounds = 0
        self._adding: deque[Contribution] = deque()  # in order
        self._is_adding = False  # the first of them, now
        self._norms = NormCheck()
        self._n_measured = 0  # microbatches of the own gradient whose norm is being measured

    def ask(self, now_s: float, step: StepUnderWay, worker: int, admission: int) -> list[Action | Event]:
        """Ask a worker for what it has accumulated."""
        self._n_rounds += 1
        names = [contribution_name(group, worker) for group in self._groups]
        rounds = tuple(Round(step.number, name, admission, self._n_rounds) for name in names)
        until_s = now_s + self._times.timeout_s(worker, CONTRIBUTION)
        step.asked[worker] = AskedContribution(rounds, now_s, until_s)
        return [ContributionBegins(worker, rounds), Send(worker, ContributionWanted(admission, rounds))]

    def arrived(self, now_s: float, step: StepUnderWay, received: ContributionReceived) -> bool:
        """All of a contribution is here. Whether it was asked for."""
        worker, rounds = received.worker, received.rounds
        asked = step.asked.get(worker)
        if not asked or asked.rounds != rounds:
            return False
        self._times.took(worker, CONTRIBUTION, now_s - asked.asked_s)
        step.asked[worker] = replace(asked, until_s=NEVER)
        step.is_measured |= not step.table.n_committed  # nothing of its own to measure
        if not step.is_measured:
            step.unchecked.append(received)
        return True

    def measured(self, step: StepUnderWay | None, sq_norm: float) -> list[ContributionReceived]:
        """The own gradient of a step is measured, which may be over; the contributions that have waited for that."""
        self._norms.measured(self._n_measured, sq_norm)
        if step is None:
            return []
        step.is_measured = True
        waited, step.unchecked = step.unchecked, []
        return [received for received in waited if received.worker in step.asked]

    def look_at(self, step: StepUnderWay, received: ContributionReceived) -> Rejection | None:
        """A contribution is to be added if it holds exactly what the worker has done, and its norm may be right. Else
        why not; None for one of an earlier admission too, which is forgotten."""
        worker, rounds, items = received.worker, received.rounds, received.items
        if rounds != step.asked[worker].rounds:
            return None
        if items != step.table.contribution(worker) or not items:
            return Rejection(NOT_ITS_WORK)
        if not self._norms.is_possible:
            step.is_measured, step.lacks_measure = False, True
            step.table.distrust(worker)
            return Rejection(NOT_CHECKED)
        if problem := self._norms.problem(len(items), received.sq_norm):
            return Rejection(problem, is_suspicious=True)
        step.table.commit(worker, items)
        del step.asked[worker]
        self._adding.append(Contribution(worker, step, rounds, items))
        return None

    def next_work(self, steps: Sequence[StepUnderWay]) -> tuple[Work, tuple[Round, ...]] | None:
        """The Work that contributions wait for, and the rounds whose vectors it reads. It is begun at once."""
        for step in steps:
            if (step.unchecked or step.lacks_measure) and not step.is_measured and step.table.n_committed:
                self._n_measured = step.table.n_committed
                return Work(self._stage, NORM, None, self._peer, step.number), ()
        if not self._adding or self._is_adding:
            return None
        first = self._adding[0]
        self._is_adding = True
        return Work(self._stage, CONTRIBUTE, None, self._peer, first.step.number), first.rounds

    def added(self) -> Contribution | None:
        """The first contribution that waited is in this server's accumulator; None if it was dropped meanwhile."""
        self._is_adding = False
        return self._adding.popleft() if self._adding else None

    def are_waiting(self, step: StepUnderWay) -> bool:
        """Whether contributions to the step are still to be added."""
        return any(contribution.step is step for contribution in self._adding)

    def drop(self, keeps_what_is_being_added: bool) -> list[Action | Event]:
        """Contributions that wait to be added are void."""
        n_kept = 1 if self._is_adding and keeps_what_is_being_added else 0
        actions: list[Action | Event] = []
        while len(self._adding) > n_kept:
            actions += forget(self._adding.pop().rounds)
        return actions


def forget(rounds: tuple[Round, ...]) -> list[Action | Event]:
    """Nothing of these rounds is needed any more."""
    return [Forget(round) for round in rounds]
