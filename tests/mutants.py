"""Planted mistakes in the step protocol (step protocol, Sec. 11), each of which the fuzzer must find.

A mutant stands between the driver and one machine and changes what goes in or comes out, so it needs to know messages,
not the machines' insides; some replace a function or a number of theirs instead. `MUTANTS` says by which invariants
each may show itself, and among which of the fuzzer's seeds.

To be planted once grants have lease numbers: cancel without order.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from unittest import mock

from jaxdt.membership import coordinator
from jaxdt.membership.commit import TwoPhaseCommit
from jaxdt.membership.coordinator import Coordinator
from jaxdt.protocol.events import (
    COORDINATOR,
    Boundary,
    Committed,
    Fetch,
    FetchResult,
    Forget,
    Free,
    Grant,
    Install,
    Installed,
    Key,
    Persist,
    Persisted,
    Prepared,
    Received,
    Record,
    Resend,
    Round,
    Send,
    State,
    View,
)
from jaxdt.protocol.message import tensor_key
from jaxdt.sim.fuzz.invariants import APPLICABLE, COVER, DISJOINT, GROWS, PREFIX, PROGRESS, SPARED
from jaxdt.sim.fuzz.symbolic_tensors import SymbolicTensors
from jaxdt.sync import exchange, rounds


class Mutant:
    """A machine that is not changed yet."""

    def __init__(self, machine):
        self.machine = machine

    def handle(self, now_s, event):
        return self.machine.handle(now_s, event)


# ---------------------------------------------------------------------------------------------------- the coordinator


class CommitsEarly(Mutant):
    """One prepared member of a stage stands for all of them."""

    def handle(self, now_s, event):
        actions = self.machine.handle(now_s, event)
        if isinstance(event, Received) and isinstance(event.body, Prepared) and self.machine.view:
            here = {member.peer: member for member in self.machine.view.members}
            for member in here.values():
                if event.header.src in here and member.stage == here[event.header.src].stage:
                    forged = Received(replace(event.header, src=member.peer), event.body)
                    actions += self.machine.handle(now_s, forged)
        return actions


class PublishesEarly(Mutant):
    """A record is announced while it is still being made durable."""

    def handle(self, now_s, event):
        if event == Persisted("records"):
            return []
        actions = list(self.machine.handle(now_s, event))
        for action in actions:  # which grows
            if isinstance(action, Persist) and action.name == "records":
                actions += self.machine.handle(now_s, Persisted("records"))
        return actions


class CountsOldPrepared(Mutant):
    """A `prepared` of an earlier view counts."""

    def handle(self, now_s, event):
        if isinstance(event, Received) and isinstance(event.body, Prepared) and self.machine.view:
            event = Received(replace(event.header, view=self.machine.view.number), event.body)
        return self.machine.handle(now_s, event)


# -------------------------------------------------------------------------------------------------------------- peers


class AppliesAlone(Mutant):
    """Being prepared is enough to apply."""

    def handle(self, now_s, event):
        actions = list(self.machine.handle(now_s, event))
        for action in actions:  # which grows
            if isinstance(action, Send) and isinstance(action.body, Prepared):
                results = action.body.results
                norm = sum(result.sq_norm for result in results)
                rounds = tuple(result.round for result in results)
                record = Record(action.body.step, rounds, norm, results[0].n_samples, "apply")
                actions += self.machine.handle(
                    now_s, Received(replace(action.header, src=COORDINATOR), Committed(record))
                )
        return actions


class DiscardsResults(Mutant):
    """A view makes a peer give up what it is prepared for, before it looks at the records."""

    def __init__(self, machine):
        super().__init__(machine)
        self.rounds = {}

    def handle(self, now_s, event):
        lost = []
        if isinstance(event, Received) and isinstance(event.body, View):
            good = {round for round, _ in event.body.results}
            lost = [Forget(round) for rounds in self.rounds.values() for round in rounds if round not in good]
        actions = self.machine.handle(now_s, event)
        for action in actions:
            if isinstance(action, Send) and isinstance(action.body, Prepared):
                self.rounds[action.body.step] = [result.round for result in action.body.results]
            if isinstance(action, Free):
                self.rounds.pop(action.step, None)
        return lost + actions


class TakesOldMessages(Mutant):
    """Work granted in an earlier view is done: what a lost peer began goes on beside what replaces it."""

    def handle(self, now_s, event):
        if isinstance(event, Received) and isinstance(event.body, Grant | Boundary | Resend):
            mine = self.machine.membership.header
            event = Received(replace(event.header, view=max(event.header.view, mine.view)), event.body)
        return self.machine.handle(now_s, event)


class ServesNobody(Mutant):
    """Who holds a result keeps it for itself."""

    def handle(self, now_s, event):
        takes = isinstance(event, Received) and isinstance(event.body, FetchResult)
        return [] if takes else self.machine.handle(now_s, event)


class CountsAgain(Mutant):
    """A lost tensor is made again by a backward that counts."""

    def handle(self, now_s, event):
        if isinstance(event, Received) and isinstance(event.body, Grant | Boundary | Resend):
            event = Received(event.header, replace(event.body, regenerate=()))
        return self.machine.handle(now_s, event)


class JoinsWithoutState(Mutant):
    """A newcomer takes part before it has the state of its stage."""

    def handle(self, now_s, event):
        actions = list(self.machine.handle(now_s, event))
        for action in actions:  # which grows
            if isinstance(action, Send) and isinstance(action.body, Fetch):
                actions += self.machine.handle(now_s, Received(action.header, State(action.body.key)))
            if isinstance(action, Install):
                actions += self.machine.handle(now_s, Installed(action.version))
        fetches = lambda action: isinstance(action, Send) and isinstance(action.body, Fetch)  # noqa: E731
        return [action for action in actions if not fetches(action) and not isinstance(action, Install)]


class Forgetful(SymbolicTensors):
    """A boundary tensor is gone when it has been sent."""

    def take(self, body):
        tensor = super().take(body)
        if isinstance(tensor_key(body), Key):
            del self._boundaries[body.key]
        return tensor


class Latest(SymbolicTensors):
    """Computes with the newest version there is."""

    def version_for(self, step):
        return self.version


class RedoesWithLatest(Mutant):
    """From the first view that changes in mid-step on, all is computed with the newest version."""

    def __init__(self, machine, contents):
        super().__init__(machine)
        self.contents = contents

    def handle(self, now_s, event):
        if isinstance(event, Received) and isinstance(event.body, View) and event.body.number > 1:
            self.contents.__class__ = Latest
        return super().handle(now_s, event)


# ------------------------------------------------------------------------------------------------------------ the list


def of_coordinator(kind: type) -> Callable:
    return lambda who, machine, contents: kind(machine) if who == COORDINATOR else machine


def of_peers(kind: type) -> Callable:
    return lambda who, machine, contents: machine if who == COORDINATOR else kind(machine)


def without_retention(who, machine, contents):
    if contents is not None:
        contents.__class__ = Forgetful
    return machine


def redoes_with_the_latest(who, machine, contents):
    return machine if who == COORDINATOR else RedoesWithLatest(machine, contents)


def forgets_its_views(who, machine, contents):
    """A coordinator that is started again knows nothing."""
    return (
        Coordinator(machine.config, TwoPhaseCommit(machine.config)) if who == COORDINATOR and machine.view else machine
    )


def unchanged(who, machine, contents):
    return machine


def one_record() -> AbstractContextManager:
    return mock.patch.object(coordinator, "KEPT_RECORDS", 1)


def no_cover_check() -> AbstractContextManager:
    return mock.patch.object(exchange, "cover_problem", lambda *sets: "")


@contextmanager
def rounds_without_view():
    """All rounds of a step and group have one name, whoever is in them."""
    same = lambda group, view, step: Round(step, group.name, 1)  # noqa: E731
    with mock.patch.object(exchange, "round_of", same), mock.patch.object(rounds, "round_of", same):
        yield


# name: (mutation, patch, invariants by which it may show itself, seeds among which it must)
MUTANTS = {
    "commit before all are prepared": (of_coordinator(CommitsEarly), nullcontext, {APPLICABLE}, range(20)),
    "publish before it is durable": (of_coordinator(PublishesEarly), nullcontext, {PREFIX}, range(20)),
    "prepared of an old view counts": (of_coordinator(CountsOldPrepared), nullcontext, {APPLICABLE}, range(360, 366)),
    "apply on own prepared": (of_peers(AppliesAlone), nullcontext, {PREFIX}, range(20)),
    "view discards a committed result": (of_peers(DiscardsResults), nullcontext, {APPLICABLE}, range(50)),
    "no fencing": (of_peers(TakesOldMessages), nullcontext, {DISJOINT}, range(50)),
    "no fencing and no cover check": (of_peers(TakesOldMessages), no_cover_check, {COVER, DISJOINT}, range(50)),
    "nobody serves a take": (of_peers(ServesNobody), nullcontext, {PROGRESS}, (*range(290, 300), *range(438, 444))),
    "regenerating counts": (of_peers(CountsAgain), nullcontext, {DISJOINT}, range(120, 140)),
    "admission without the state": (of_peers(JoinsWithoutState), nullcontext, {APPLICABLE}, range(40)),
    "volatile views": (forgets_its_views, nullcontext, {PROGRESS, SPARED, GROWS, PREFIX}, range(100)),
    "redo with the latest version": (redoes_with_the_latest, nullcontext, {COVER}, range(20)),
    "only the last record kept": (unchanged, one_record, {PROGRESS}, range(70, 90)),
    "no retention": (without_retention, nullcontext, {COVER}, range(20)),
    "rounds without the view's name": (unchanged, rounds_without_view, {COVER, PROGRESS}, range(30)),
}
