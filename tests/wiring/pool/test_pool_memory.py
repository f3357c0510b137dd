"""What servers and workers hold stays the same over 200 batches in which workers come and go."""

import gc
import random
import types
from dataclasses import replace

import pytest
from pool_mutants import KeepsContributions, of_servers

from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import WorkerLostReport
from jaxdt.run.config import default_plan
from jaxdt.run.network import Link
from jaxdt.run.work import WorkKind
from jaxdt.sim.faults import CRASH, PAUSE, RESTART, Fault
from jaxdt.testing.case import Busy, play, work_seconds
from jaxdt.testing.cases import draw_case
from jaxdt.testing.invariants import InvariantBroken

SERVERS, WORKERS = (0, 1), (2, 3, 4, 5)
SHARED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)


def churn(n_steps, delay):
    """Two stages with a server and two workers each; every worker is lost every few steps."""
    case = draw_case(0, "pool")
    config = case.config
    config = replace(
        config,
        plan=replace(config.plan, stages=2, pipelines=1, microbatches=4, workers=2),
        train=replace(config.train, steps=n_steps, eval_every_steps=0, checkpoint_every_steps=0, on_nonfinite="stop"),
        sync=replace(config.sync, delay=delay, delay_after_steps=0, check_every_steps=0),
    )
    rng = random.Random("churn")
    faults = []
    for worker in WORKERS:
        at_s = 0.0
        while (at_s := at_s + rng.uniform(2.0, 20.0)) < 4.0 * n_steps:
            seconds = rng.uniform(0.5, 3.0)
            crashes = [Fault(at_s, CRASH, worker), Fault(at_s + seconds, RESTART, worker)]
            faults += rng.choice((crashes, crashes, [Fault(at_s, PAUSE, worker, 3 * seconds)]))
            at_s += seconds
    ends = (ev.COORDINATOR, *SERVERS, *WORKERS)
    return replace(
        case,
        config=config,
        plan=default_plan(config),
        seconds={peer: work_seconds(0.05 if peer in WORKERS else 0.2) for peer in (*SERVERS, *WORKERS)},
        links={(src, dst): Link(0.01, 1.0) for src in ends for dst in ends if src != dst},
        persist_s=0.0,
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
        nonfinite=None,
        random_moves_s=0.0,
        busy=Busy(),  # else the batches take longer than the faults last, and fuller windows follow
    )


def n_objects(root):
    """Objects that belong to a machine, however deep."""
    seen, left = set(), [vars(root)]
    while left:
        for one in gc.get_referents(left.pop()):
            if id(one) not in seen and not isinstance(one, SHARED):
                seen.add(id(one))
                left.append(one)
    return len(seen)


def held_by(tensors):
    vectors = len(tensors.rounds) + len(tensors.accumulators)
    return len(tensors.boundary_keys) + len(tensors.residual_keys) + vectors


def grown(case, every_steps, mutate=lambda peer, machine, tensors: machine):
    """For each server the objects of its machine, and the tensors that it holds, sampled when an update is done; and
    how often a worker was lost."""
    machines, sampled, n_lost = {}, {peer: [] for peer in SERVERS}, [0]

    def noting(peer, machine, tensors):
        machines[peer] = machine, tensors
        return mutate(peer, machine, tensors)

    def sample(now_s, peer, event, actions):
        n_lost[0] += sum(isinstance(action, WorkerLostReport) for action in actions)
        is_update = peer in SERVERS and isinstance(event, ev.Ran) and event.work.kind == WorkKind.UPDATE
        if is_update and event.work.step % every_steps == 0:
            machine, tensors = machines[peer]
            sampled[peer].append((n_objects(machine), held_by(tensors)))

    play(case, noting, sample)
    return sampled, n_lost[0]


@pytest.mark.parametrize("delay", [0, 1])
def test_a_server_holds_as_much_after_200_batches_as_after_100(delay):
    """By then the windows of measured times have been full. They are emptied when a worker is lost, so the number of
    objects goes up and down. So do tensors by a few, which (13) bounds."""
    sampled, n_lost = grown(churn(200, delay), every_steps=10)
    assert n_lost > 40
    for samples in sampled.values():
        n_of_machine, n_tensors = zip(*samples, strict=True)
        assert max(n_of_machine[10:]) < 1.1 * max(n_of_machine[:10])
        assert max(n_tensors[10:]) < 1.5 * max(n_tensors[:10])


def test_vectors_that_are_not_freed_are_found():
    with pytest.raises(InvariantBroken, match=r"\(13\)"):
        grown(churn(10, 0), 10, of_servers(KeepsContributions))
