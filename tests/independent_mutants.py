"""Planted mistakes in the protocol of replicas that may differ, each of which the fuzzer must find.

As in mutants.py: a mutant wraps one machine and changes its events or its actions, or replaces a function of one.
"""

from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from unittest import mock

from mutants import Mutant, of_coordinator, of_peers, unchanged

from jaxdt.membership.member import Membership
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import GroupReport
from jaxdt.protocol.round_id import RoundKind
from jaxdt.run.codec import FLOAT32_BYTES
from jaxdt.run.config import GroupsConfig
from jaxdt.run.work import Work, WorkKind
from jaxdt.sync.error_feedback import ErrorFeedback
from jaxdt.sync.exchange import Exchange
from jaxdt.sync.groups import Groups
from jaxdt.sync.held_out import HeldOutLosses
from jaxdt.sync.local_steps import LocalSteps, PipelinePlace
from jaxdt.sync.matching.sync_graph import Sliding
from jaxdt.sync.matching.token import EnforcementToken
from jaxdt.sync.matching.window import MatchWindow
from jaxdt.sync.pending_means import PendingMean
from jaxdt.sync.scheduling import open_groups
from jaxdt.sync.scheduling.open_groups import OpenGroups
from jaxdt.sync.scheduling.replica_states import ReplicaStates
from jaxdt.sync.scheduling.step_budget import StepBudget
from jaxdt.sync.server import ParameterServer, Replica
from jaxdt.sync.server_snapshots import ServerSnapshots
from jaxdt.sync.shared_table import SharedTable
from jaxdt.testing.independent.tensors import ResidueTensors
from jaxdt.testing.promises import (
    ANSWERED,
    BUDGET,
    CONNECTED,
    HELD,
    MEMBERS,
    ONE_CUT,
    ONE_MEAN,
    PROGRESS,
    REPLAYED,
    STALENESS,
    TOKEN,
    WINDOW,
)
from jaxdt.wiring.fixed import FixedWiring

# ---------------------------------------------------------------------------------------------------- the coordinator


class ClosesEarly(Mutant):
    """The first member that holds a result stands for all."""

    def handle(self, now_s, event):
        actions = self.machine.handle(now_s, event)
        if isinstance(event, ev.Received) and isinstance(event.body, ev.ResultHeld):
            sends = [action for action in actions if isinstance(action, ev.Send)]
            header = sends[0].header if sends else replace(event.header, src=ev.COORDINATOR)
            term = self.machine.coordinator_term
            closed = ev.GroupClosed(event.body.round)
            members = self.machine.roster.members
            actions += [ev.Send(peer, closed, header=replace(header, coordinator_term=term)) for peer in members]
        return actions


class TellsOneLess(Mutant):
    """The last member of a group is not told of it."""

    def handle(self, now_s, event):
        actions = self.machine.handle(now_s, event)
        told = [a for a in actions if isinstance(a, ev.Send) and isinstance(a.body, ev.GroupFormed)]
        untold = [a for a in told if len(a.body.members) > 1 and a.dst == a.body.members[-1]]
        return [action for action in actions if action not in untold]


# -------------------------------------------------------------------------------------------------------------- peers


class SkipsANumber(Mutant):
    """The log names each group by the number of the next one."""

    def handle(self, now_s, event):
        actions = self.machine.handle(now_s, event)
        return [replace(action, k=action.k + 1) if isinstance(action, GroupReport) else action for action in actions]


class AdoptsTwice(Mutant):
    """After a reconnect a member adopts its last mean once more."""

    def __init__(self, machine):
        super().__init__(machine)
        self.last = None
        self.again = 0

    def handle(self, now_s, event):
        if isinstance(event, ev.Ran) and self.last and event.work == self.last.work and self.again:
            self.again -= 1
            return []
        actions = self.machine.handle(now_s, event)
        for action in actions:
            if isinstance(action, ev.Run) and action.work.kind == WorkKind.ADOPT:
                self.last = action
        if isinstance(event, ev.LinkChanged) and event.peer == ev.COORDINATOR and event.up and self.last:
            self.again += 1
            actions = [*actions, self.last]
        return actions


class AsksTwice(Mutant):
    """After a reconnect a replica says once more that it wants a group, though it may have had it meanwhile."""

    def __init__(self, machine):
        super().__init__(machine)
        self.last = None

    def handle(self, now_s, event):
        actions = self.machine.handle(now_s, event)
        wants = [action for action in actions if isinstance(action, ev.Send) and isinstance(action.body, ev.WantsGroup)]
        self.last = wants[-1] if wants else self.last
        is_up = isinstance(event, ev.LinkChanged) and event.peer == ev.COORDINATOR and event.up
        return [*actions, self.last] if is_up and self.last and not wants else actions


class ForgetsTheWeight(Mutant):
    """A sum is adopted as if it were the mean."""

    def handle(self, now_s, event):
        actions = self.machine.handle(now_s, event)
        is_mean = lambda action: isinstance(action, ev.Run) and action.work.kind == WorkKind.ADOPT  # noqa: E731
        return [replace(action, scale=1.0) if is_mean(action) else action for action in actions]


class ContributesTwice(Mutant):
    """A part that comes again is added again: here the part of the first member takes the place of the second's."""

    def handle(self, now_s, event):
        actions = self.machine.handle(now_s, event)
        return [
            replace(action, members=(action.members[0],) * 2 + action.members[2:])
            if type(action).__name__ == "Sum" and len(action.members) > 2
            else action
            for action in actions
        ]


class LosesPushes(Mutant):
    """A server that hears a second push of a worker in a row drops it, and says it was added."""

    def handle(self, now_s, event):
        actions = self.machine.handle(now_s, event)
        adopts = [a for a in actions if isinstance(a, ev.Run) and a.work.kind == WorkKind.ADOPT and a.work.step == 2]
        pushes = [a for a in adopts if any(round.kind == RoundKind.PUSH for round in a.rounds)]
        return [replace(a, rounds=()) if a in pushes else a for a in actions]


class ForgetsTheStash(ResidueTensors):
    """A backward computes with the newest parameters."""

    def run(self, work, scale, rounds=()):
        if work.kind == WorkKind.BACKWARD:
            self._stash[work.step] = self.state.params
        return super().run(work, scale, rounds)


class FreesSlicesByStep(ResidueTensors):
    """A local step frees the slices of all rounds with lower numbers."""

    def free(self, step, rounds):
        super().free(step, rounds)
        for round in [round for round in self.rounds if round.number <= step]:
            self.forget(round)


def of_tensors(kind):
    def mutate(peer, machine, tensors):
        if tensors is not None:
            tensors.__class__ = kind
        return machine

    return mutate


# ----------------------------------------------------------------------------------------------------------- patches


def no_token() -> AbstractContextManager:
    return mock.patch.object(EnforcementToken, "take", lambda token, holder: True)


@contextmanager
def adopts_parts():
    """One slice counts as the whole sum."""
    hold = Exchange.hold

    def holds(exchange, sum):
        is_first = not exchange.sums
        return hold(exchange, sum) or is_first

    with mock.patch.object(Exchange, "hold", holds):
        yield


def never_connected() -> AbstractContextManager:
    """Groups are not asked to connect anything."""
    return mock.patch.object(Sliding, "is_due", property(lambda graph: False))


@contextmanager
def serves_too_early():
    """The bound on staleness is one too large at the servers."""
    make = ParameterServer.__init__

    def init(server, stage):
        make(server, replace(stage, staleness=stage.staleness + 1))

    with mock.patch.object(ParameterServer, "__init__", init):
        yield


@contextmanager
def attempts_have_one_name():
    """When members of a group are lost, the others average in a round of the same name."""
    again = lambda round, **changes: round if "attempt" in changes else replace(round, **changes)  # noqa: E731
    with mock.patch.object(open_groups, "replace", again):
        yield


@contextmanager
def results_do_not_count():
    """A group that has lost a member averages again, though somebody holds the result."""
    hear, lose = OpenGroups.hear, OpenGroups.lose

    def hears_latest(groups, src, held):
        group = groups._open.get(held.round.place)
        return ([], None) if group and held.round != group.round else hear(groups, src, held)

    def forgets(groups, lost):
        for group in groups._open.values():
            group.held = group.held if group.waited_for.isdisjoint(lost) else {}
        return lose(groups, lost)

    with mock.patch.object(OpenGroups, "hear", hears_latest), mock.patch.object(OpenGroups, "lose", forgets):
        yield


@contextmanager
def steps_go_on():
    """A pipeline that has heard that there are enough steps does one more."""
    end = LocalSteps._end_of_steps

    def one_more(steps):
        steps._n_begun += 1
        return end(steps)

    with mock.patch.object(LocalSteps, "_end_of_steps", one_more):
        yield


def one_step_counts_twice() -> AbstractContextManager:
    """The coordinator counts a step of the run twice."""
    n_missing = StepBudget.n_missing.fget
    return mock.patch.object(StepBudget, "n_missing", property(lambda budget: n_missing(budget) - 1))


def wants_are_told_again() -> AbstractContextManager:
    """A coordinator that was started again finds another group for a replica whose group was formed before."""
    return mock.patch.object(ReplicaStates, "take_wanted", lambda states, group, fragment: None)


@contextmanager
def one_answer_is_enough():
    """A coordinator that was started again decides when the first member has told it what it knows."""
    hear = ReplicaStates.hear

    def hears(states, src, message):
        hear(states, src, message)
        states._awaited.clear()

    with mock.patch.object(ReplicaStates, "hear", hears):
        yield


def tables_are_not_summed() -> AbstractContextManager[object]:
    """The first stage updates a shared table by its own gradient alone."""
    drained = SharedTable.on_drained

    def alone(table, step):
        norm = ev.Run(Work(table._stage, WorkKind.NORM, None, table._peer, step))
        return [norm] if table.is_first else drained(table, step)

    return mock.patch.object(SharedTable, "on_drained", alone)


def any_table_will_do() -> AbstractContextManager[object]:
    """The last stage begins a step with the table of an earlier one."""
    has_any = property(lambda table: table.is_first or table._table is not None)
    return mock.patch.object(SharedTable, "may_begin", has_any)


def means_have_the_newest_table() -> AbstractContextManager[object]:
    """The table for a held-out loss is that of the first stage's own parameters."""

    def move_table(tensors, work, scale, rounds):
        if tensors._borrows_table or rounds[0].kind != RoundKind.HELD_OUT_TABLE:
            return moved(tensors, work, scale, rounds)
        tensors._own[rounds[0]] = tensors.state.params[:1]
        return {}

    moved = ResidueTensors._move_table
    return mock.patch.object(ResidueTensors, "_move_table", move_table)


@contextmanager
def windows_never_end():
    """The end of a window is not noticed, nor that nobody has come."""
    timer = MatchWindow.timer

    def late(matcher, now_s, tag):
        return timer(matcher, now_s, tag) if tag % 3 else timer(matcher, now_s, -1)

    with mock.patch.object(MatchWindow, "timer", late):
        yield


def norms_of_one_stage() -> AbstractContextManager:
    """A gradient is clipped by the norm of its stage alone."""
    return mock.patch.object(
        LocalSteps, "_pipeline_sq_norm", lambda steps, step: steps._sq_norms[step][steps._place.peer]
    )


def means_come_early() -> AbstractContextManager:
    """With a lag a mean is adopted one local step before it is due."""
    is_due = PendingMean.is_due
    return mock.patch.object(PendingMean, "is_due", lambda mean, version: is_due(mean, version + (mean._lag_steps > 0)))


@contextmanager
def due_fragments(change):
    """The fragment that is due becomes the one that `change` returns for it."""
    due = GroupsConfig.fragment_due

    def changed(settings, n_steps):
        fragment = due(settings, n_steps)
        return fragment if fragment is None else change(fragment)

    with mock.patch.object(GroupsConfig, "fragment_due", changed):
        yield


@contextmanager
def forwards_run_less_ahead():
    """A stage forwards one step less ahead than its stash has places for."""
    make = FixedWiring.__init__

    def init(wiring, *args):
        make(wiring, *args)
        wiring._n_ahead = max(0, wiring._n_ahead - 1)

    with mock.patch.object(FixedWiring, "__init__", init):
        yield


class ForgetsOwnSteps(Mutant):
    """A view makes a wiring forget what has come of the pipeline's own steps, as it does where steps are the run's."""

    def handle(self, now_s, event):
        view = self.machine.membership.view
        actions = self.machine.handle(now_s, event)
        if self.machine.membership.view != view:
            for wiring in self.machine._machines:
                if isinstance(wiring, FixedWiring):
                    wiring._arrived_keys.clear()
        return actions


def members_count_the_same() -> AbstractContextManager:
    """The sum of weighted contributions is divided by their number."""
    return mock.patch.object(Groups, "_factor", lambda groups, exchange: 1.0 / len(exchange.contributors))


def rounded_numbers_take_four_bytes() -> AbstractContextManager:
    return mock.patch.object(Exchange, "n_bytes", lambda exchange, bounds: FLOAT32_BYTES * (bounds[1] - bounds[0]))


def lost_at_once(feedback, round, error):
    """What a codec loses of a contribution to a group is owed, also if the group averages in another attempt."""
    feedback._owed[feedback._slot(round)] = error


def held_out_losses_are_those_of_a_sum() -> AbstractContextManager:
    return mock.patch.object(
        HeldOutLosses, "_evaluate", lambda losses, stage: ev.EvaluateMean(losses._whole[stage][0], 1)
    )


def pulls_do_not_wait_for_the_cut() -> AbstractContextManager:
    """The first stage's server answers pulls before the others know up to which step a snapshot goes."""
    return mock.patch.object(ServerSnapshots, "holds_pulls", property(lambda snapshots: False))


@contextmanager
def snapshots_take_every_push():
    """The parameters that a server keeps aside have the pushes beyond the cut too."""
    push = ServerSnapshots.push

    def pushes(snapshots, worker, step):
        for one in snapshots._open.values():
            one.cut = {worker: max(n, step) for worker, n in one.cut.items()}
        return push(snapshots, worker, step)

    with mock.patch.object(ServerSnapshots, "push", pushes):
        yield


def snapshots_wait_for_lost_workers() -> AbstractContextManager:
    """The copy that a server keeps aside is whole only with the pushes of all workers, also of those that are lost."""
    settle = ServerSnapshots.settle
    return mock.patch.object(
        ServerSnapshots,
        "settle",
        lambda snapshots, n_added, finished: settle(snapshots, snapshots._steps | n_added, finished),
    )


def snapshots_do_not_wait_for_groups() -> AbstractContextManager:
    """A replica takes part in the mean for a checkpoint though it waits for a group, whose mean comes first."""
    return mock.patch.object(Groups, "_is_between_steps", property(lambda groups: not groups._steps.is_stepping))


def norms_are_waited_for() -> AbstractContextManager:
    """A stage that is clipped by its own norm is clipped by that of its pipeline."""
    return mock.patch.object(PipelinePlace, "waits_for_norms", property(lambda place: place.clip_norm > 0))


def means_take_the_place_of_others() -> AbstractContextManager[object]:
    """A mean for a checkpoint is kept aside while the one before is, and not written."""

    def adopts_all(groups):
        waiting, groups._states = groups._states, {}
        return [
            ev.Run(Work(groups._stage, WorkKind.ADOPT, None, groups._peer, r.number), s, (r,))
            for r, s in waiting.items()
        ]

    return mock.patch.object(Groups, "_adopt_state", adopts_all)


def snapshots_take_the_place_of_others() -> AbstractContextManager[object]:
    """The same of a server's snapshot at a worker."""
    return mock.patch.object(Replica, "_is_keeping", property(lambda _: False, lambda _, is_keeping: None), create=True)


def donors_do_not_wait() -> AbstractContextManager[object]:
    """The first stage of a donor says that it waits, and goes on."""
    right = Groups._wait_as_donor

    def goes_on(groups):
        actions = right(groups)
        groups._steps.is_held = False
        return actions

    return mock.patch.object(Groups, "_wait_as_donor", goes_on)


def old_messages_count() -> AbstractContextManager[object]:
    """Messages that were sent to a peer, or by it, before it came back count."""
    outlives = lambda membership, header, body: type(body) in membership.identity.outlives_views  # noqa: E731
    return mock.patch.object(Membership, "_outlives", outlives)


def returns_do_not_count() -> AbstractContextManager[object]:
    """A pipeline that comes back is expected to go on with its own steps."""
    return mock.patch.object(StepBudget, "on_joined", lambda budget, join: [])


# name: (mutation, patch, invariants that may reveal it, or exceptions of a machine, seeds among which they must)
MUTANTS = {
    "a donor does not wait": (unchanged, donors_do_not_wait, {HELD}, (294,)),
    "a return does not change the count of steps": (unchanged, returns_do_not_count, {PROGRESS}, (97, 22)),
    "no token": (unchanged, no_token, {TOKEN}, (25, *range(16, 40))),
    "a result is adopted before it is whole": (unchanged, adopts_parts, {HELD}, range(60)),
    "a group is closed before all hold its result": (
        of_coordinator(ClosesEarly),
        nullcontext,
        {HELD, PROGRESS},
        (30, *range(60)),
    ),
    "the log skips the number of a group": (of_coordinator(SkipsANumber), nullcontext, {MEMBERS}, range(60)),
    "a mean is adopted again after a reconnect": (
        of_peers(AdoptsTwice),
        nullcontext,
        {ONE_MEAN, HELD, REPLAYED},
        range(10, 60),
    ),
    "slices are freed by step": (of_tensors(FreesSlicesByStep), nullcontext, {HELD}, range(60)),
    "the weight is forgotten": (of_peers(ForgetsTheWeight), nullcontext, {REPLAYED}, range(60)),
    "one who asks again gets another group": (of_peers(AsksTwice), nullcontext, {ANSWERED, "ValueError"}, (137, 206)),
    "another attempt has the same name": (unchanged, attempts_have_one_name, {HELD, PROGRESS}, (65, 133, 200)),
    "a group averages again though somebody holds its result": (
        unchanged,
        results_do_not_count,
        {REPLAYED, PROGRESS},
        (206,),
    ),
    "the bound on staleness is one too large": (unchanged, serves_too_early, {STALENESS}, (35, *range(40))),
    "a member is not told of its group": (of_coordinator(TellsOneLess), nullcontext, {ANSWERED}, (10, *range(60))),
    "a part is added in place of another": (of_peers(ContributesTwice), nullcontext, {HELD, REPLAYED}, range(60)),
    "groups need not connect": (unchanged, never_connected, {CONNECTED}, (25, *range(12, 40))),
    "windows do not end": (unchanged, windows_never_end, {WINDOW}, range(12, 40)),
    "a push is not added": (of_peers(LosesPushes), nullcontext, {STALENESS, REPLAYED}, (3, *range(60))),
    "a pipeline goes on after the end": (unchanged, steps_go_on, {BUDGET, PROGRESS, REPLAYED}, range(60)),
    "a step counts twice": (unchanged, one_step_counts_twice, {BUDGET}, range(60)),
    "after a restart the first answer decides": (
        unchanged,
        one_answer_is_enough,
        {PROGRESS, REPLAYED},
        (62, *range(2, 40)),
    ),
    "a gradient is clipped by its stage alone": (unchanged, norms_of_one_stage, {HELD}, range(60)),
    "a gradient is clipped by its pipeline": (unchanged, norms_are_waited_for, {HELD, PROGRESS}, (5, *range(60))),
    "a mean is adopted a step early": (unchanged, means_come_early, {REPLAYED}, (84, 41, *range(60))),
    "a fragment is averaged in place of another": (
        unchanged,
        lambda: due_fragments(lambda f: 0),
        {ANSWERED},
        (30, 20, 34),
    ),
    "a fragment is left out": (unchanged, lambda: due_fragments(lambda f: f or None), {ANSWERED}, range(60)),
    "a backward computes with the newest parameters": (
        of_tensors(ForgetsTheStash),
        nullcontext,
        {REPLAYED},
        (9, *range(60)),
    ),
    "a view voids own steps": (of_peers(ForgetsOwnSteps), nullcontext, {HELD, PROGRESS}, range(9, 60)),
    "forwards run less far ahead": (unchanged, forwards_run_less_ahead, {HELD}, (9, *range(60))),
    "weights are forgotten": (unchanged, members_count_the_same, {REPLAYED}, (60, 70, 34)),
    "a codec saves nothing": (unchanged, rounded_numbers_take_four_bytes, {HELD}, range(60)),
    "what a mean has lost is forgotten": (
        unchanged,
        lambda: mock.patch.object(ErrorFeedback, "commit", lambda *arguments: None),
        {REPLAYED},
        (0, 9, 60),
    ),
    "an attempt that is made again counts": (
        unchanged,
        lambda: mock.patch.object(ErrorFeedback, "lose", lost_at_once),
        {REPLAYED},
        (133, 318),
    ),
    "a held-out loss is that of a sum": (unchanged, held_out_losses_are_those_of_a_sum, {REPLAYED}, range(60)),
    "servers keep aside what others do not": (
        unchanged,
        pulls_do_not_wait_for_the_cut,
        {ONE_CUT},
        (191, *range(119, 400, 4)),
    ),
    "a snapshot has pushes beyond its cut": (unchanged, snapshots_take_every_push, {REPLAYED}, (35, *range(3, 60, 4))),
    "a snapshot waits for lost workers": (unchanged, snapshots_wait_for_lost_workers, {PROGRESS}, range(139, 400, 4)),
    "a mean takes the place of one that is not written": (
        unchanged,
        means_take_the_place_of_others,
        {HELD},
        (52, 33, 53),
    ),
    "a snapshot takes the place of another": (unchanged, snapshots_take_the_place_of_others, {HELD}, (211,)),
    "a table is not summed": (unchanged, tables_are_not_summed, {REPLAYED}, (11, 9, 16)),
    "a step begins with an earlier table": (unchanged, any_table_will_do, {REPLAYED}, (9, 31, 16)),
    "a mean has the newest table": (unchanged, means_have_the_newest_table, {REPLAYED}, (66, 16, 33)),
    "a checkpoint does not wait for a group": (unchanged, snapshots_do_not_wait_for_groups, {REPLAYED}, range(60)),
}
