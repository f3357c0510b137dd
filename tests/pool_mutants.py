"""Planted mistakes in the machines of a pool, servers' and workers', each of which the pool's fuzzer must find.

`POOL_MUTANTS`: how a machine is changed, what is patched, the invariants that may reveal it, and the seeds among which
they must.
"""

import itertools
import math
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from unittest import mock

from mutants import Mutant, one_buffer, unchanged

from jaxdt.membership.roster import Roster
from jaxdt.protocol import events as ev
from jaxdt.protocol.round_id import RoundKind
from jaxdt.protocol.wake_up import WakeUp
from jaxdt.sync.error_feedback import ErrorFeedback
from jaxdt.testing.pool.reissue_only import ReissueOnly
from jaxdt.testing.promises import BOUNDED, COVER, GIVEN_BACK, LEASED_TWICE, PROGRESS, WHOLE_SUMS
from jaxdt.wiring.pool.contributions import Contributions
from jaxdt.wiring.pool.server import PoolServer
from jaxdt.wiring.pool.task_table import TaskTable
from jaxdt.wiring.pool.task_times import LeaseTimes
from jaxdt.wiring.pool.work_stealing import StepSteals


class KeepsWorkBesideAnyVersion(Mutant):
    """A worker takes each version for the next one of those that it holds."""

    def handle(self, now_s, event):
        actions = self.machine.handle(now_s, event)
        return [replace(a, beside_work=True) if isinstance(a, ev.Install) else a for a in actions]


class FreesNothing(Mutant):
    """What a worker holds of steps that are over stays."""

    def handle(self, now_s, event):
        return [action for action in self.machine.handle(now_s, event) if not isinstance(action, ev.Free)]


class KeepsContributions(Mutant):
    """A server keeps the vectors of contributions once they are added."""

    def handle(self, now_s, event):
        is_kept = lambda action: isinstance(action, ev.Forget) and action.round.kind == RoundKind.CONTRIBUTION  # noqa: E731
        return [action for action in self.machine.handle(now_s, event) if not is_kept(action)]


def keeps_accumulators(peer, machine, tensors):
    """A worker that is let in anew goes on with what it has accumulated."""
    if tensors is not None and tensors.is_worker:
        tensors.restore = lambda restore: None
    return machine


def of_workers(mutant):
    def mutate(peer, machine, tensors):
        return mutant(machine) if tensors is not None and tensors.is_worker else machine

    return mutate


def of_servers(mutant):
    def mutate(peer, machine, tensors):
        is_server = peer != ev.COORDINATOR and not tensors.is_worker
        return _seen(mutant, machine) if is_server else machine

    return mutate


def _seen(mutant, machine):
    """The invariants of the step protocol read the view of a server's own machine."""
    made = mutant(machine)
    made.membership = machine.membership
    return made


def patched(owner, name, value):
    @contextmanager
    def patch():
        with mock.patch.object(owner, name, value):
            yield

    return patch


ARRIVED, EXPIRE, INIT, LOOK_AT, LOSE, NEXT_VIEW, TIMEOUT_S = (
    StepSteals.on_arrived,
    TaskTable.expire,
    TaskTable.__init__,
    Contributions.look_at,
    PoolServer._lose,
    Roster.next_view,
    LeaseTimes.timeout_s,
)


def looks_at_nothing(self, step, received):
    """The server does not compare what a contribution holds with what the worker has done."""
    return LOOK_AT(self, step, replace(received, items=step.table.contribution(received.worker) or received.items))


def forgives(self, peer, reason, readmit):
    """A worker whose backward came after its lease goes on."""
    return [] if reason == "a backward came too late" else LOSE(self, peer, reason, readmit)


@contextmanager
def late_and_not_compared():
    with (
        mock.patch.object(Contributions, "look_at", looks_at_nothing),
        mock.patch.object(PoolServer, "_lose", forgives),
    ):
        yield


def from_one(self, numbers, server, is_last_stage, lease_numbers):
    INIT(self, numbers, server, is_last_stage, itertools.count(1))


def forgets_who_is_late(self, now_s):
    expired = EXPIRE(self, now_s)
    for lease in expired:
        self._task(self._units[lease.microbatch], lease.kind).late.clear()
    return expired


@contextmanager
def late_workers_and_no_steals():
    """Servers keep their tasks, so that more of a late worker's tasks are left for it, and more workers are late."""
    with (
        mock.patch.object(LeaseTimes, "timeout_s", lambda *args: TIMEOUT_S(*args) / 4),
        mock.patch.object(TaskTable, "expire", forgets_who_is_late),
        mock.patch.object(PoolServer, "_n_may_take", lambda self, step: 0),
    ):
        yield


def any_version(self, worker, wants):
    worker.versions, worker.n_tasks = frozenset(range(wants.version + 2)), wants.n_tasks


def gives_and_keeps(self, kind, m):
    """Another server gets the task, and this one's clients do it too."""
    return self._units[m].is_redo


def keeps_gradients(self, key):
    """The gradient of a stolen microbatch stays with the owner."""
    return [] if key.microbatch in self.taken_by else ARRIVED(self, key)


def takes_all(self, step):
    return 1000


def for_each_wish(self, at_s):
    """A machine is woken for each time that it wants, also for one that it waits for already."""
    return [] if at_s == math.inf else [ev.WakeAt(at_s, self._tag), ev.WakeAt(at_s, self._tag)]


def as_without_workers(self, between_steps, *others):
    with mock.patch.object(self, "_is_pool", False):
        return NEXT_VIEW(self, between_steps, *others)


def as_without_workers_between_steps(self, between_steps, *others):
    with mock.patch.object(self, "_is_pool", not between_steps):
        return NEXT_VIEW(self, between_steps, *others)


def one_debt(self, round):
    """What a worker owes does not end with its admission."""
    return round.stage, 0


POOL_MUTANTS = {
    "a worker makes up for a void contribution": (
        unchanged,
        patched(ErrorFeedback, "_slot", one_debt),
        {GIVEN_BACK},
        (3, 5, 7),
    ),
    "a worker keeps its accumulator": (keeps_accumulators, nullcontext, {COVER}, (112, *range(22, 26))),
    "any version is the next one": (of_workers(KeepsWorkBesideAnyVersion), nullcontext, {COVER}, (62, *range(56, 72))),
    "a worker frees nothing": (of_workers(FreesNothing), nullcontext, {BOUNDED}, (14, *range(20))),
    "contributions stay": (of_servers(KeepsContributions), nullcontext, {BOUNDED}, range(20)),
    "lost work is not redone": (
        unchanged,
        patched(TaskTable, "void", ReissueOnly.void),
        {COVER, PROGRESS, WHOLE_SUMS},
        (11, *range(40)),
    ),
    "a worker's versions share one buffer": (unchanged, one_buffer, {COVER}, range(3, 6)),
    "late backwards count": (unchanged, late_and_not_compared, {COVER}, (66, *range(60, 67))),
    "a late worker gets the same task again": (unchanged, late_workers_and_no_steals, {COVER}, (254,)),
    "lease numbers begin anew": (unchanged, patched(TaskTable, "__init__", from_one), {LEASED_TWICE}, range(20)),
    "workers compute with any version": (unchanged, patched(PoolServer, "_holds", any_version), {COVER}, range(40)),
    "a stolen task is also done by its owner": (
        unchanged,
        patched(TaskTable, "give", gives_and_keeps),
        {COVER, PROGRESS},
        (27, *range(10)),
    ),
    "gradients of stolen microbatches stay": (
        unchanged,
        patched(StepSteals, "on_arrived", keeps_gradients),
        {PROGRESS},
        (15, 11),
    ),
    "a lost server gives other stages no other round": (
        unchanged,
        patched(Roster, "next_view", as_without_workers),
        {WHOLE_SUMS},
        (46, *range(40, 50)),
    ),
    "a view between steps gives other stages no other round": (
        unchanged,
        patched(Roster, "next_view", as_without_workers_between_steps),
        {WHOLE_SUMS},
        (23, *range(20, 30)),
    ),
    "each waking asks for two more": (unchanged, patched(WakeUp, "at", for_each_wish), {BOUNDED}, range(10)),
    "a thief takes any number": (unchanged, patched(PoolServer, "_n_may_take", takes_all), {BOUNDED}, (3, *range(10))),
}
