"""READS decides what Peer hands to a machine, so it must be what the machine's methods look at: for every machine."""

import ast
import importlib
import inspect
import pkgutil
import textwrap

import pytest

from jaxdt import membership, sync, wiring
from jaxdt.protocol import events as ev
from jaxdt.run.delay import Delay
from jaxdt.run.plan import Plan
from jaxdt.wiring.base import StepShape
from jaxdt.wiring.delayed_update import DelayedUpdate
from jaxdt.wiring.fixed import FixedWiring
from jaxdt.wiring.load_report import LoadReporter

PLAN = Plan(2, ((0, 1), (1, 2)), ((0,), (1,)), (2,))

READABLE = (ev.Event.kinds.keys() | ev.Message.kinds.keys()) - {"Received"}


def machines():
    """All classes with READS in the packages of machines."""
    for package in (membership, wiring, sync):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            for _, kind in inspect.getmembers(importlib.import_module(found.name), inspect.isclass):
                is_own = kind.__module__ == found.name
                if is_own and hasattr(kind, "handle") and isinstance(getattr(kind, "READS", None), frozenset):
                    yield kind


def matched(machine):
    """Names of events and messages that the methods of a class match, or compare a type with."""
    names = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(machine)))):
        kinds = [node.cls] if isinstance(node, ast.MatchClass) else []
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is):
            kinds = node.comparators
        names |= {kind.attr for kind in kinds if isinstance(kind, ast.Attribute)}  # such as ev.Updated
    return names & READABLE


MACHINES = {machine.__name__: machine for machine in machines()}


def test_all_machines_are_found():
    assert {"Membership", "FixedWiring", "RoutedWiring", "AllReduce", "StateTransfer"} <= set(MACHINES)


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_reads_every_event_that_it_matches(name):
    assert matched(MACHINES[name]) <= {kind.__name__ for kind in MACHINES[name].READS}


# These machines pass some events on without a match: to a routed wiring, to their local steps, rounds or transfers.
HAND_ON = {
    *("AllReduce", "FixedWiring", "Groups", "IndependentReplica", "PoolServer", "Replica", "RoundEngine"),
    *("LocalSteps", "SharedTable", "StateTransfer", "DonorTransfer", "PartTransfer", "ParameterDownload"),
}


@pytest.mark.parametrize("name", sorted(set(MACHINES) - HAND_ON))
def test_a_machine_is_spared_what_it_does_not_match(name):
    assert {kind.__name__ for kind in MACHINES[name].READS} <= matched(MACHINES[name])


def test_a_wiring_around_others_reads_all_that_they_read():
    """With a delay a wiring has to hear of each commit, also when its queue is measured."""
    wirings = [FixedWiring(PLAN, StepShape(0, 0, 2, 2, 1, ((1, 0),))) for _ in range(2)]
    delayed = DelayedUpdate(0, 0, wirings, Delay(1))
    assert FixedWiring.READS <= delayed.READS == LoadReporter(delayed, 1.0).READS
    assert ev.Committed in delayed.READS
