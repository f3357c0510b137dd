"""Planted mistakes in the step protocol (step protocol, Sec. 11), each of which the fuzzer must find.

A mutant wraps one machine and changes its events or its actions. So it needs to know the messages, but not the inside
of the machines. Some mutants replace a function or a constant of a machine instead. `MUTANTS` says which promises may
reveal each mutant, and among which of the fuzzer's seeds they must.

To be planted once grants have lease numbers: cancel without order.
"""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from unittest import mock

import pytest

from jaxdt.membership import commit, coordinator_config
from jaxdt.membership.admission import Admission
from jaxdt.membership.checkpoint_progress import CheckpointProgress
from jaxdt.membership.commit import TwoPhaseCommit
from jaxdt.membership.coordinator import Coordinator
from jaxdt.membership.coordinator_config import OperatorState
from jaxdt.membership.held_out_rows import HeldOutRows
from jaxdt.membership.member import Membership
from jaxdt.membership.operations import Operations
from jaxdt.membership.roster import Roster
from jaxdt.protocol import events as ev
from jaxdt.protocol import participants
from jaxdt.protocol.message import tensor_key
from jaxdt.protocol.reports import LateResultReport
from jaxdt.protocol.round_id import RoundId, RoundKind
from jaxdt.sync import allreduce
from jaxdt.sync.allreduce import AllReduce
from jaxdt.sync.error_feedback import ErrorFeedback
from jaxdt.sync.transfer import FetchedStates, TransferEngine
from jaxdt.testing.case import finding
from jaxdt.testing.cases import draw_case
from jaxdt.testing.promises import (
    APPLICABLE,
    COPIES,
    COVER,
    DISJOINT,
    EQUAL,
    GIVEN_BACK,
    GROWS,
    LIVING,
    PAUSED,
    PREFIX,
    PROGRESS,
    SPARED,
)
from jaxdt.testing.symbolic_tensors import SymbolicTensors


class Mutant:
    """A wrapper that changes nothing."""

    def __init__(self, machine):
        self.machine = machine

    def handle(self, now_s, event):
        return self.machine.handle(now_s, event)


# ---------------------------------------------------------------------------------------------------- the coordinator


class CommitsEarly(Mutant):
    """One prepared member of a stage stands for all of them."""

    def handle(self, now_s, event):
        actions = self.machine.handle(now_s, event)
        if isinstance(event, ev.Received) and isinstance(event.body, ev.Prepared) and self.machine.view:
            members = {member.peer: member for member in self.machine.view.members}
            for member in members.values():
                if event.header.src in members and member.stage == members[event.header.src].stage:
                    forged = ev.Received(replace(event.header, src=member.peer), event.body)
                    actions += self.machine.handle(now_s, forged)
        return actions


class PublishesEarly(Mutant):
    """A record is announced while it is still being made durable."""

    def handle(self, now_s, event):
        if event == ev.Persisted("steps"):
            return []
        actions = list(self.machine.handle(now_s, event))
        for action in actions:  # the loop appends to the list
            if isinstance(action, ev.Persist) and action.name == "steps":
                actions += self.machine.handle(now_s, ev.Persisted("steps"))
        return actions


class CountsOldPrepared(Mutant):
    """A `prepared` of an earlier view counts."""

    def handle(self, now_s, event):
        if isinstance(event, ev.Received) and isinstance(event.body, ev.Prepared) and self.machine.view:
            event = ev.Received(replace(event.header, view=self.machine.view.number), event.body)
        return self.machine.handle(now_s, event)


class EndsWithANewcomer(Mutant):
    """The failure of a peer that is no member ends the run for all."""

    def handle(self, now_s, event):
        failed = isinstance(event, ev.Received) and isinstance(event.body, ev.Failed)
        if failed and self.machine.view and event.header.src not in self.machine.roster.members:
            ended = ev.Ended(2, event.body.reason)
            sends = [ev.Send(peer, ended, header=event.header) for peer in self.machine.roster.members]
            return [*sends, ev.Stop(2, event.body.reason)]
        return self.machine.handle(now_s, event)


# -------------------------------------------------------------------------------------------------------------- peers


class AppliesAlone(Mutant):
    """Being prepared is enough to apply."""

    def handle(self, now_s, event):
        actions = list(self.machine.handle(now_s, event))
        for action in actions:  # the loop appends to the list
            if isinstance(action, ev.Send) and isinstance(action.body, ev.Prepared):
                results = action.body.results
                norm = sum(result.sq_norm for result in results)
                rounds = tuple(result.round for result in results)
                record = ev.Record(action.body.step, rounds, norm, results[0].n_samples, "apply")
                actions += self.machine.handle(
                    now_s, ev.Received(replace(action.header, src=ev.COORDINATOR), ev.Committed(record))
                )
        return actions


class DiscardsResults(Mutant):
    """A view makes a peer drop the results that it is prepared for, before it reads the records."""

    def __init__(self, machine):
        super().__init__(machine)
        self.rounds = {}

    def handle(self, now_s, event):
        forgotten = []
        if isinstance(event, ev.Received) and isinstance(event.body, ev.View):
            named = {round for round, _ in event.body.results}
            forgotten = [ev.Forget(round) for rounds in self.rounds.values() for round in rounds if round not in named]
        actions = self.machine.handle(now_s, event)
        for action in actions:
            if isinstance(action, ev.Send) and isinstance(action.body, ev.Prepared):
                self.rounds[action.body.step] = [result.round for result in action.body.results]
            if isinstance(action, ev.Free):
                self.rounds.pop(action.step, None)
        return forgotten + actions


class TakesOldMessages(Mutant):
    """Work granted in an earlier view is done: Work that a lost peer began goes on beside the Work that replaces it."""

    def handle(self, now_s, event):
        if isinstance(event, ev.Received) and isinstance(event.body, ev.Grant | ev.Boundary | ev.Resend):
            own_view = self.machine.membership.header.view
            event = replace(event, header=replace(event.header, view=max(event.header.view, own_view)))
        return self.machine.handle(now_s, event)


class ServesNobody(Mutant):
    """A peer that holds a result never sends it to others."""

    def handle(self, now_s, event):
        fetches = isinstance(event, ev.Received) and isinstance(event.body, ev.FetchResult)
        return [] if fetches else self.machine.handle(now_s, event)


class CountsAgain(Mutant):
    """A lost tensor is computed again by a backward that counts."""

    def handle(self, now_s, event):
        if isinstance(event, ev.Received) and isinstance(event.body, ev.Grant | ev.Boundary | ev.Resend):
            event = replace(event, body=replace(event.body, regenerate=()))
        return self.machine.handle(now_s, event)


class UsesBothResults(Mutant):
    """A forward that two replicas have done gets its gradient back at both."""

    def __init__(self, machine):
        super().__init__(machine)
        self.gradients = {}
        self.late = {}

    def handle(self, now_s, event):
        actions = self.machine.handle(now_s, event)
        again = []
        for action in actions:
            if isinstance(action, LateResultReport):
                self.late[action.step, action.microbatch] = action.peer, action.stage
            if isinstance(action, ev.Send) and isinstance(action.body, ev.Boundary) and action.body.key.kind == "grad":
                self.gradients[action.body.key.step, action.body.key.microbatch] = action
        for name in self.late.keys() & self.gradients.keys():
            peer, stage = self.late.pop(name)
            gradient = self.gradients[name]
            route = list(gradient.body.route)
            route[stage] = peer
            again.append(replace(gradient, dst=peer, body=replace(gradient.body, route=tuple(route))))
        return actions + again


class JoinsWithoutState(Mutant):
    """A newcomer takes part before it has the state of its stage."""

    def handle(self, now_s, event):
        actions = list(self.machine.handle(now_s, event))
        for action in actions:  # the loop appends to the list
            if isinstance(action, ev.Send) and isinstance(action.body, ev.Fetch):
                given = ev.Received(replace(action.header, src=action.dst), ev.State(action.body.key))
                actions += self.machine.handle(now_s, given)
            if isinstance(action, ev.Install):
                actions += self.machine.handle(now_s, ev.Installed(action.version))
        fetches = lambda action: isinstance(action, ev.Send) and isinstance(action.body, ev.Fetch)  # noqa: E731
        return [action for action in actions if not fetches(action) and not isinstance(action, ev.Install)]


class WithoutRetention(SymbolicTensors):
    """A boundary tensor is dropped when it has been sent."""

    def tensor_to_send(self, body):
        tensor = super().tensor_to_send(body)
        if isinstance(tensor_key(body), ev.Key):
            del self._boundaries[body.key]
        return tensor


@contextmanager
def one_buffer():
    """The slices of all downloads of a peer lie in one buffer, from which its compute thread takes what is there."""

    def put(self, key, words):
        self._slices[key.lo] = (key, words)

    def take(self, version):
        return [self._slices[lo] for lo in sorted(self._slices)]

    with mock.patch.multiple(FetchedStates, begin=lambda self: None, put=put, take=take):
        yield


def forgets_requests() -> AbstractContextManager:
    """What a newcomer has asked for before it was here is never given."""
    return mock.patch.object(TransferEngine, "give_waiting", lambda engine: [])


class LatestVersion(SymbolicTensors):
    """Computes with the newest version that the peer has."""

    def version_for(self, step):
        return self.version


class RedoesWithLatest(Mutant):
    """From the first change of view in mid-step on, everything is computed with the newest version."""

    def __init__(self, machine, tensors):
        super().__init__(machine)
        self.tensors = tensors

    def handle(self, now_s, event):
        if isinstance(event, ev.Received) and isinstance(event.body, ev.View) and event.body.number > 1:
            self.tensors.__class__ = LatestVersion
        return super().handle(now_s, event)


class StoresBeforeItReads(Mutant):
    """The tensor of every message is stored, also of one that is dropped."""

    def __init__(self, machine, tensors):
        super().__init__(machine)
        self.tensors = tensors

    def handle(self, now_s, event):
        if isinstance(event, ev.Received) and event.tensor is not None:
            self.tensors.put(event.body, event.header.src, event.tensor)
        return super().handle(now_s, event)


# ------------------------------------------------------------------------------------------------------------ the list


def of_coordinator(kind: type) -> Callable:
    return lambda peer, machine, tensors: kind(machine) if peer == ev.COORDINATOR else machine


def of_peers(kind: type) -> Callable:
    return lambda peer, machine, tensors: machine if peer == ev.COORDINATOR else kind(machine)


def without_retention(peer, machine, tensors):
    if tensors is not None:
        tensors.__class__ = WithoutRetention
    return machine


def redoes_with_the_latest(peer, machine, tensors):
    return machine if peer == ev.COORDINATOR else RedoesWithLatest(machine, tensors)


def stores_before_it_reads(peer, machine, tensors):
    return machine if peer == ev.COORDINATOR else StoresBeforeItReads(machine, tensors)


def forgets_its_views(peer, machine, tensors):
    """A coordinator that is started again begins with nothing."""
    if peer != ev.COORDINATOR or not machine.view:
        return machine
    rows = machine._agreement._rows
    again = HeldOutRows(rows._train, rows._delay)
    return Coordinator(machine.config, TwoPhaseCommit(machine.config, again))


def unchanged(peer, machine, tensors):
    return machine


def one_record() -> AbstractContextManager:
    return mock.patch.object(commit, "KEPT_STEPS", 1)


def nobody_else_saves() -> AbstractContextManager:
    """A checkpoint whose writer goes is left out, also if the end of the run waits for it."""
    return mock.patch.object(Membership, "_is_awaited", lambda member, version: version == member.identity.n_steps)


def silence_is_death() -> AbstractContextManager:
    """Nobody who is silent is waited for."""
    return mock.patch.object(Roster, "awaited", lambda roster, stage: [])


def no_replacements() -> AbstractContextManager:
    """A peer outside of the view that holds the committed version of a vacant stage does not take its place."""
    return mock.patch.object(Roster, "_replacements", lambda *arguments: set())


def nobody_replaces_the_last_replica() -> AbstractContextManager:
    """A last replica that blocks the run stays, although another peer has its state."""
    return mock.patch.object(Roster, "replaceable", lambda *arguments: set())


def newcomers_wait_for_the_end_of_the_step() -> AbstractContextManager:
    """Also of a step that cannot end because of the last replica of a stage."""
    return mock.patch.object(Roster, "admit_in_mid_step", lambda roster: None)


def failures_count_whoever_waits() -> AbstractContextManager:
    """Three failures at a vacant stage end the run, although somebody else may fill it."""
    return mock.patch.object(Roster, "deserted", property(lambda roster: roster.vacant))


def one_copy_is_enough() -> AbstractContextManager:
    """A checkpoint is complete before it is on as many disks as were asked for."""
    return mock.patch.object(CheckpointProgress, "_n_missing", lambda progress, part, live: 0)


def states_on_trust() -> AbstractContextManager:
    """Nobody compares the states that replicas vote with."""
    return mock.patch.object(commit, "deviations", lambda votes: [])


@contextmanager
def owes_at_once():
    """What a contribution has lost is owed before its round counts, and also if it never does."""
    right = ErrorFeedback.lose

    def lose(self, round, error):
        right(self, round, error)
        self.commit([round])

    with mock.patch.object(ErrorFeedback, "lose", lose):
        yield


@contextmanager
def owes_it_still():
    """A round that counts leaves what was owed before."""
    right = ErrorFeedback.commit

    def commit(self, rounds):
        right(self, [round for round in rounds if self.owed(round) is None])

    with mock.patch.object(ErrorFeedback, "commit", commit):
        yield


def owes_what_is_rolled_back() -> AbstractContextManager:
    """A peer goes back to a checkpoint, and owes what it owed before."""
    return mock.patch.object(ErrorFeedback, "reset", lambda feedback, owed=None: None)


def no_cover_check() -> AbstractContextManager:
    return mock.patch.object(participants, "cover_problem", lambda *sets: "")


@contextmanager
def rounds_without_view():
    """All rounds of a step and group have the same name, whichever members they have."""
    original = allreduce.round_in_view

    def same(group, view, step, n_microbatches):
        return replace(
            original(group, view, step, n_microbatches), id=RoundId(RoundKind.GRADIENT, group.stage, step, view=1)
        )

    with mock.patch.object(allreduce, "round_in_view", same):
        yield


def obeys_every_term() -> AbstractContextManager:
    return mock.patch.object(Membership, "_obeys", lambda self, coordinator_term: True)


def adopts_every_later_view() -> AbstractContextManager:
    """A peer goes on from its own view to any later one, whether its coordinator knew of the own one or not."""
    return mock.patch.object(ev.View, "continues", lambda view, number: True)


def commits_in_a_pause() -> AbstractContextManager:
    """An operator's pause holds back nothing."""
    return mock.patch.object(Operations, "holds_steps", False)


def forgets_pauses() -> AbstractContextManager:
    """A coordinator that is started again does not know that an operator has paused the run."""
    return mock.patch.object(coordinator_config, "load_operator_state", lambda disk: OperatorState())


@contextmanager
def updates_at_once():
    """An update begins before a checkpoint of the version that the one before has made."""
    right = AllReduce._advance

    def advance(self, step):
        actions = right(self, step)
        return [*actions, *self._update_again()]

    with mock.patch.object(AllReduce, "_advance", advance):
        yield


@contextmanager
def waits_for_an_update_of_before():
    """A member begins a generation once its update is done: what others send of that generation meanwhile is lost."""
    roll_back, advance = AllReduce._roll_back, AllReduce._advance
    waiting = {}

    def later(self, view):
        if self._updating:
            waiting[self] = view
            return []
        return roll_back(self, view)

    def then(self, step):
        if self not in waiting:
            return advance(self, step)
        self._updating = None
        return roll_back(self, waiting.pop(self))

    with mock.patch.object(AllReduce, "_roll_back", later), mock.patch.object(AllReduce, "_advance", then):
        yield


def writes_what_is_replaced() -> AbstractContextManager:
    """A member that takes a checkpoint over writes its state during an update."""
    return mock.patch.object(Membership, "_is_replaced_now", False)


def judges_after_a_pause() -> AbstractContextManager:
    return mock.patch.object(Coordinator, "_on_pause", lambda self, now_s, paused_s: [])


def starts_in_silence() -> AbstractContextManager:
    """A step that was durable when the coordinator ended is never reported."""
    return mock.patch.object(TwoPhaseCommit, "start", lambda commit, now_s: [])


@contextmanager
def second_process_replaces_the_first():
    """Every process that asks whether it may be a peer may be it."""

    def grants_all(self, now_s):
        claims = list(self._claims.values())
        self._claims.clear()
        return [(claim, True) for claim in claims]

    with mock.patch.object(Admission, "_answered", grants_all):
        yield


# name: (mutation, patch, promises that reveal it when they are broken, or exceptions, seeds among which they must)
MUTANTS = {
    "commit before all are prepared": (of_coordinator(CommitsEarly), nullcontext, {APPLICABLE}, (2, *range(20))),
    "publish before it is durable": (of_coordinator(PublishesEarly), nullcontext, {PREFIX}, range(20)),
    "prepared of an old view counts": (
        of_coordinator(CountsOldPrepared),
        nullcontext,
        {APPLICABLE},
        (363, *range(360, 366)),
    ),
    "a newcomer's failure ends the run": (of_coordinator(EndsWithANewcomer), nullcontext, {SPARED}, (2, *range(30))),
    "apply on own prepared": (of_peers(AppliesAlone), nullcontext, {PREFIX}, range(20)),
    "view discards a committed result": (of_peers(DiscardsResults), nullcontext, {APPLICABLE}, (3, *range(50))),
    "a redo makes up for what an attempt has lost": (unchanged, owes_at_once, {GIVEN_BACK}, (7, *range(10))),
    "what was lost is made up for twice": (unchanged, owes_it_still, {GIVEN_BACK}, (2, *range(8))),
    "what was lost before a rollback is made up for": (unchanged, owes_what_is_rolled_back, {GIVEN_BACK}, (60, 63, 71)),
    "no fencing": (of_peers(TakesOldMessages), nullcontext, {DISJOINT}, (30, 61)),
    "no fencing and no cover check": (of_peers(TakesOldMessages), no_cover_check, {COVER, DISJOINT}, (17, *range(50))),
    "nobody serves a take": (of_peers(ServesNobody), nullcontext, {PROGRESS}, (15, 9)),
    "regenerating counts": (of_peers(CountsAgain), nullcontext, {DISJOINT}, (123, *range(120, 140))),
    "admission without the state": (of_peers(JoinsWithoutState), nullcontext, {APPLICABLE}, (3, *range(40))),
    "volatile views": (forgets_its_views, nullcontext, {PROGRESS, SPARED, GROWS, PREFIX}, (3, *range(100))),
    "redo with the latest version": (redoes_with_the_latest, nullcontext, {COVER}, (3, *range(20))),
    "only the last record kept": (unchanged, one_record, {PROGRESS}, (227, 321)),
    "no retention": (without_retention, nullcontext, {COVER}, (3, *range(20))),
    "silence is death": (unchanged, silence_is_death, {SPARED}, (9, 14, 22)),
    "no return to a vacant stage": (unchanged, no_replacements, {SPARED}, (7, 8, 34)),
    "a last replica that blocks the run is not replaced": (
        unchanged,
        nobody_replaces_the_last_replica,
        {PROGRESS},
        (4728, 1500),
    ),
    "newcomers wait for a step that cannot end": (
        unchanged,
        newcomers_wait_for_the_end_of_the_step,
        {PROGRESS},
        (6495, 4947),
    ),
    "three failures end a run that somebody could go on with": (
        unchanged,
        failures_count_whoever_waits,
        {SPARED},
        (1805, 5185, 7304),
    ),
    "tensors of dropped messages are stored": (stores_before_it_reads, nullcontext, {COVER}, (12, 62, 78)),
    "a checkpoint counts before its copies": (unchanged, one_copy_is_enough, {COPIES}, (7, *range(20))),
    "a state that is asked for too early is never given": (unchanged, forgets_requests, {LIVING}, (67, 9, 42)),
    "replicas are equal on trust": (unchanged, states_on_trust, {EQUAL}, range(2, 62, 5)),
    "rounds without the view's name": (unchanged, rounds_without_view, {COVER, PROGRESS}, (80, *range(30))),
    "peers obey every term": (unchanged, obeys_every_term, {LIVING, SPARED}, range(21, 25)),
    "a second process replaces a living one": (
        unchanged,
        second_process_replaces_the_first,
        {LIVING, SPARED},
        (37, 60, 72),
    ),
    "a restarted coordinator says nothing of the last step": (
        unchanged,
        starts_in_silence,
        {PROGRESS},
        (421, 437, 468),
    ),
    "unknown views are continued": (
        unchanged,
        adopts_every_later_view,
        {DISJOINT, PROGRESS, SPARED, COVER, APPLICABLE},
        (15, 8, 65, 133),
    ),
    "steps are committed while the run is paused": (unchanged, commits_in_a_pause, {PAUSED}, (30, 47, 48)),
    "a restarted coordinator forgets a pause": (unchanged, forgets_pauses, {PAUSED}, (47, 134, 292)),
    "a stop waits for a checkpoint that nobody writes": (unchanged, nobody_else_saves, {PROGRESS}, (86, 247, 309)),
    "an update does not wait for a checkpoint": (unchanged, updates_at_once, {COVER}, (63, 95)),
    "a generation waits for an update of the one before": (
        unchanged,
        waits_for_an_update_of_before,
        {COVER, PROGRESS},
        (413,),
    ),
    "a checkpoint is taken over during an update": (unchanged, writes_what_is_replaced, {COVER}, (306,)),
    "a coordinator judges right after its pause": (unchanged, judges_after_a_pause, {LIVING, SPARED}, (89, 78, 113)),
}


def check_found(mutant, kind: str) -> None:
    """Fail unless one of the mutant's seeds, drawn with this kind, reveals it by a promise that it should break or an
    exception of a machine, and passes without it."""
    mutate, patched, revealed_by, seeds = mutant
    others = []
    for seed in seeds:
        with patched():
            line = finding(draw_case(seed, kind), mutate)
        broken = re.search(r" s: \((\d+)\) ", line)
        if (int(broken[1]) if broken else line.partition(":")[0]) in revealed_by:
            assert not finding(draw_case(seed, kind))
            return
        others += [line] if line else []
    pytest.fail(f"not caught among {seeds}: {others}")
