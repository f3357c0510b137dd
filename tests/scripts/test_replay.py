"""scripts/tools/replay.py: when two states are the same, and how far a stopped run is done again."""

import numpy as np
import pytest
from tools import replayed_log

from jaxdt.run.errors import BadInput
from jaxdt.run.plan import Plan
from jaxdt.runtime.compute_environment import ONE_THREAD

NAN = np.float32("nan")


@pytest.mark.parametrize(
    ("made", "kept", "n_unequal"),
    [
        ([1.0, NAN, np.inf], [1.0, NAN, np.inf], 0),  # after train.on_nonfinite=skip a state may hold such
        ([1.0, NAN], [1.0, 2.0], 1),
        ([0.0, 1.0], [-0.0, 1.0], 1),
    ],
)
def test_numbers_are_compared_by_their_bits(made, kept, n_unequal):
    states = [{"head": {"w": np.array(values, np.float32), "count": np.int32(3)}} for values in (made, kept)]
    assert replayed_log.compared(*states) == (n_unequal, len(made) + 1)


PLAN = Plan(2, ((0, 1), (1, 2)), ((0, 2, 4), (1, 3, 5)), (2, 2, 2))


def report(kind, **fields):
    return {"what": "report", "kind": kind, "fields": fields}


def mean(version, members, steps, view=1):
    return report("state_mean", stage=members[0] % 2, version=version, members=members, steps=steps, view=view)


def test_a_pipeline_that_was_stopped_does_the_steps_of_its_last_checkpoint():
    log = [
        mean(6, [0, 2, 4], [6, 7, 6]),
        mean(6, [1, 3, 5], [6, 8, 6]),
        report("pipeline_end", pipeline=2, n_steps=9),
        mean(12, [0, 2], [12, 14], view=2),
        mean(12, [1, 3], [13, 14], view=2),
    ]
    found = [replayed_log.incarnations_of(PLAN, log, versions).n_steps for versions in ({6}, {6, 12}, {})]
    assert found == [{0: 6, 1: 8, 2: 9}, {0: 13, 1: 14, 2: 9}, {0: 0, 1: 0, 2: 9}]


def test_a_donor_does_the_steps_after_which_another_pipeline_took_over_from_it():
    log = [
        mean(6, [0, 2, 4], [6, 7, 6]),
        report("pipeline_end", pipeline=2, n_steps=7),
        report("pipeline_join", pipeline=2, admission=3, donor=0, n_steps=11),
    ]
    assert replayed_log.incarnations_of(PLAN, log, {6}).n_steps == {0: 11, 1: 7, 2: 7, 3: 11}


def test_the_last_one_counts_where_a_mean_was_made_again():
    log = [mean(6, [0, 2, 4], [6, 7, 6]), mean(6, [0, 2], [6, 7], view=2), mean(9, [0, 2], [9, 9], view=2)]
    assert [found.members for found in replayed_log.checkpoint_means(log, {6})] == [[0, 2]]


def ready(peer, device):
    return {"what": "report", "peer": peer, "kind": "ready", "fields": {"device": device}}


@pytest.mark.parametrize(("log", "found"), [
    ([], {}),
    ([ready(0, "cpu: 1 x cpu"), ready(1, "gpu: 1 x NVIDIA H100")], {}),
    ([ready(0, "cpu: 1 x cpu, 1 thread"), ready(1, "cpu: 1 x cpu, 1 thread")], {1: ["peer 0", "peer 1"]}),
    ([ready(0, "cpu: 1 x cpu, 1 thread"),
      {**ready(-1, ""), "kind": "candidate", "fields": {"peer": 3, "device": "cpu: 1 x cpu, 8 threads"}}],
     {1: ["peer 0"], 8: ["peer 3"]}),
])  # fmt: skip
def test_the_log_says_on_how_many_threads_peers_computed(log, found):
    assert replayed_log.peers_by_threads(log) == found


def test_a_replay_takes_as_many_threads_as_the_peers_or_says_why_it_cannot(monkeypatch):
    taken = []
    monkeypatch.setattr(replayed_log.os, "environ", environment := {})
    monkeypatch.setattr(replayed_log.os, "sched_getaffinity", lambda pid: {2, 3, 5, 7})
    monkeypatch.setattr(replayed_log.os, "sched_setaffinity", lambda pid, cpus: taken.append(list(cpus)))
    replayed_log.take_threads({3: ["peer 0"]})
    assert taken == [[2, 3, 5]] and not environment
    with pytest.raises(BadInput, match="its peers computed on 5 threads each, this process may use 4 CPUs"):
        replayed_log.take_threads({5: ["peer 0"]})
    with pytest.raises(BadInput, match=r"numbers of threads \(1 at peer 0, peer 1; 8 at peer 3\), which"):
        replayed_log.take_threads({8: ["peer 3"], 1: ["peer 0", "peer 1"]})
    for peers in ({}, {1: ["peer 0"]}):
        environment.clear()
        replayed_log.take_threads(peers)
        assert environment == {"XLA_FLAGS": ONE_THREAD}
    assert len(taken) == 1
