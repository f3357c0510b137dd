"""Servers that hold the parameters of replicas that may differ: a run equals the replay of its servers' logs bit for
bit, nobody gets further ahead than the bound, and no run stands still."""

import functools
import random
from collections import defaultdict
from dataclasses import replace

import jax
import numpy as np
import pytest
from test_group_replay import Tokens

from jaxdt.build import RunStart, build_coordinator, build_peers, check
from jaxdt.codec.vectors import VectorCodec
from jaxdt.membership.coordinator_config import load_durable_state
from jaxdt.model.float_vector import FloatVector
from jaxdt.model.stage_arithmetic import StageArithmetic
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import KeptReport, PipelineEndReport, PullReport, PushReport, SnapshotReport, StepReport
from jaxdt.protocol.round_id import RoundId, RoundKind
from jaxdt.run import config as run_config
from jaxdt.run.errors import BadInput
from jaxdt.run.network import Link
from jaxdt.run.plan import PlanRoles
from jaxdt.run.work import WorkKind
from jaxdt.runtime.storage.store import Store, stage_functions
from jaxdt.sim.cluster import Simulation
from jaxdt.sim.faults import CRASH, Fault
from jaxdt.sim.sim_peer import Environment, ProcessFactory, SimPeer
from jaxdt.sim.tensors import NoTensors
from jaxdt.sync.held_out import HeldOutPlace, HeldOutWork
from jaxdt.sync.local_steps import PipelinePlace
from jaxdt.sync.server import ParameterServer, Replica, ServedStage
from jaxdt.testing.replay import Replay

pytestmark = pytest.mark.xdist_group("replicas_that_differ")

SEED, BATCH, N_STEPS = 3, 2, 6
MODEL = dict(preset="debug", n_layers=2, d_model=16, n_heads=2, d_ff=32, max_len=8, vocab_size=64, tied_head=False)
ADAMW = dict(name="adamw", lr=3e-3, eps=1e-6, weight_decay=0.1, clip_norm=0.5, warmup_steps=5)


class Stalling(dict):
    """Seconds per kind of Work; now and then a forward or a backward takes much longer."""

    def __init__(self, seconds, seed):
        super().__init__(seconds)
        self._rng = random.Random(seed)

    def __getitem__(self, kind):
        stalls = kind in "FB" and self._rng.random() < 0.2
        return super().__getitem__(kind) + (15.0 * self._rng.random() if stalls else 0.0)


def make_config(staleness=0, wave=1, pipelines=3, microbatches=7, steps=N_STEPS, kind="server", head="untied"):
    has_servers = kind == "server"
    sync = {"kind": kind, "server": {"staleness": staleness, "wave": wave}} if has_servers else {}
    return run_config.parse(
        dict(
            model=MODEL | {"tied_head": head == "tied"},
            plan=dict(stages=2, pipelines=pipelines, microbatches=microbatches, servers=int(has_servers)),
            train=dict(steps=steps, seed=SEED, microbatch_size=BATCH),
            optim=ADAMW,
            sync=sync | {"slice_bytes": 1000},
            net=dict(heartbeat_s=200.0, deadline_floor_s=4000.0),
        )
    )


@functools.cache
def functions_of(stage, head):
    config = make_config(head=head)
    return stage_functions(config, run_config.default_plan(config), stage)


def functions_for(config, stage):
    return functions_of(stage, "tied" if config.model.tied_head else "untied")


def simulated(config, make_tensors, seed=0, faults=()):
    """The outcome of a run whose peers and links have unequal speeds, and stall."""
    plan, rng = run_config.default_plan(config), random.Random(seed)
    peers = {}
    for peer, machine in build_peers(config, plan, RunStart("r")).items():
        seconds = Stalling(dict.fromkeys("FBEGU", rng.uniform(0.2, 2.0)), rng.random())
        peers[peer] = SimPeer(machine, make_tensors(peer, plan.seat(peer)[0]), f"h{peer}", seconds)
    latency_s = {pair: rng.uniform(0.1, 3.0) for pair in ((a, b) for a in plan.peers for b in plan.peers)}
    link = lambda src, dst: Link(latency_s.get((src, dst), 0.5), 1e-4)  # noqa: E731
    environment = Environment(link, cores={peer.host: 1 for peer in peers.values()})
    again = lambda disk: build_coordinator(config, plan, RunStart("r"), load_durable_state(disk))  # noqa: E731
    processes = ProcessFactory(lambda peer, stage: pytest.fail("no peer is started"), again)
    coordinator = build_coordinator(config, plan, RunStart("r"))
    outcome = Simulation(coordinator, peers, environment, faults, processes=processes).run(until_s=1e5)
    assert ev.COORDINATOR in outcome.stopped, "the run stands still"
    servers = {peer for row in plan.roles.servers for peer in row}
    lost_servers = {fault.peer for fault in faults} & servers
    assert outcome.stopped[ev.COORDINATOR].code == (3 if lost_servers else 0), outcome.stopped[ev.COORDINATOR].reason
    return outcome


def trained(config, seed=0, faults=()):
    """(outcome, {peer: its state at the end})."""
    plan, stores = run_config.default_plan(config), {}

    def make_store(peer, stage):
        stores[peer] = Store(config, plan, peer, Tokens(), functions_for(config, stage))
        return stores[peer]

    outcome = simulated(config, make_store, seed, faults)
    return outcome, {peer: jax.device_get(store.parameter_versions.state) for peer, store in stores.items()}


def replayed(config, outcome):
    plan = run_config.default_plan(config)
    logs = [[] for _ in range(plan.n_stages)]
    for _, _, report in outcome.reports:
        if isinstance(report, PushReport | PullReport | SnapshotReport):
            logs[report.stage].append(report)
    functions = [functions_for(config, stage) for stage in range(plan.n_stages)]
    replay = Replay(
        config, plan, StageArithmetic(config, plan, functions, Tokens(), VectorCodec(config.sync.codec_spec))
    )
    n_steps = {report.pipeline: report.n_steps for report in outcome.of(PipelineEndReport)}
    replay.run(n_steps, logs=logs, keep=outcome.of(KeptReport))
    return replay


def result_of(replay, stage, pipeline=0):
    """The state of a stage that the run writes if this pipeline is the first that is left."""
    return replay.served_state(stage, replay.states[stage, pipeline])


@pytest.mark.parametrize(
    ("staleness", "wave", "codec", "head"),
    [(0, 1, "none", "untied"), (2, 3, "bf16", "tied"), (1, 2, "int8", "untied")],
)
def test_a_run_equals_the_replay_of_its_servers_logs(staleness, wave, codec, head):
    config = make_config(staleness, wave, head=head)
    config = replace(config, sync=replace(config.sync, codec=codec))
    plan = run_config.default_plan(config)
    outcome, states = trained(config)
    replay = replayed(config, outcome)
    assert sum(map(len, replay.losses)) >= plan.n_pipelines * N_STEPS
    for stage, row in enumerate(plan.placement):
        jax.tree.map(np.testing.assert_array_equal, states[min(row)], jax.device_get(result_of(replay, stage)))
        for peer in (*row, *plan.roles.servers[stage]):
            jax.tree.map(np.testing.assert_array_equal, states[peer][0], jax.device_get(replay.servers[stage][0]))
    rows = [report.loss for report in outcome.of(StepReport)]
    assert len(rows) == N_STEPS and rows[-1] < rows[0]


def test_a_lost_worker_holds_nobody_and_its_pushes_stay():
    """Its pipeline leaves at all stages; without the bound's slowest worker the others would stand still."""
    config = make_config(0, 1)
    plan = run_config.default_plan(config)
    lost = plan.placement[0][0]
    outcome, states = trained(config, faults=[Fault(80.0, CRASH, lost)])
    replay = replayed(config, outcome)
    assert any(report.worker == lost for report in outcome.of(PushReport))
    for stage, row in enumerate(plan.placement):
        jax.tree.map(np.testing.assert_array_equal, states[row[1]], jax.device_get(result_of(replay, stage, 1)))
        for peer in (*row[1:], *plan.roles.servers[stage]):
            jax.tree.map(np.testing.assert_array_equal, states[peer][0], jax.device_get(replay.servers[stage][0]))
    assert len(outcome.of(StepReport)) >= N_STEPS - 1


def test_a_run_that_loses_a_server_ends_in_one_line():
    config = make_config()
    (server,) = run_config.default_plan(config).roles.servers[0]
    outcome = simulated(config, lambda peer, stage: NoTensors(1), faults=[Fault(20.0, CRASH, server)])
    reason = outcome.stopped[ev.COORDINATOR].reason
    assert f"peer {server} (stage 0): lost" in reason and "it is the server that holds its stage's parameters" in reason


def test_one_pipeline_without_staleness_is_one_process():
    """But for rounding: the server adds the change to its parameters."""
    outcome, states = trained(make_config(pipelines=1, microbatches=3))
    reference, same_states = trained(make_config(pipelines=1, microbatches=3, kind="allreduce"))
    losses, expected = ([report.loss for report in run.of(StepReport)] for run in (outcome, reference))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for peer, (params, _) in same_states.items():
        got, expected = (FloatVector(tree).of(tree) for tree in (states[peer][0], params))
        assert np.linalg.norm(got - expected) < 1e-6 * np.linalg.norm(expected)


def checked_run(seed):
    """A run without arithmetic; asserts the bound on the clocks after every report. Returns (reports of pulls, how far
    a clock was ahead of the slowest at most)."""
    rng = random.Random(seed)
    staleness, wave = rng.choice((0, 1, 2, 4)), rng.choice((1, 2, 3))
    config = make_config(staleness, wave, rng.randint(2, 5), 7, steps=rng.randint(3, 12))
    plan = run_config.default_plan(config)
    outcome = simulated(config, lambda peer, stage: NoTensors(BATCH, 100), seed)
    n_steps = {report.pipeline: report.n_steps for report in outcome.of(PipelineEndReport)}
    assert sum(n_steps.values()) >= plan.n_pipelines * config.train.steps
    pushed, pulled, lead = defaultdict(int), defaultdict(int), 0
    for _, _, report in outcome.reports:
        if isinstance(report, PushReport):
            assert report.step == pushed[report.worker] + 1, "each push is added once, in order"
            pushed[report.worker] = report.step
        elif isinstance(report, PullReport):
            assert pushed[report.worker] == report.step, "a pull contains the worker's own pushes"
            pulled[report.worker] = report.step // wave
        else:
            continue
        row = plan.placement[report.stage]
        going_on = [peer for peer in row if pushed[peer] < n_steps[row.index(peer)]]
        if going_on:
            slowest = min(pushed[peer] // wave for peer in going_on)
            lead = max(lead, *(pulled[peer] - slowest for peer in row))
            assert all(pulled[peer] - slowest <= staleness for peer in going_on)
    for row in plan.placement:
        assert [pushed[peer] for peer in row] == [n_steps[row.index(peer)] for peer in row], "no push is lost"
    return staleness, lead


def test_no_clock_is_further_ahead_than_the_bound_and_no_run_stands_still():
    results = [checked_run(seed) for seed in range(12)]
    reached = {staleness for staleness, lead in results if lead == staleness}
    assert reached >= {0, 1, 2}, "the bound is reached, so it is the gate that holds"


def test_a_push_is_added_once():
    """Neither when its messages come again nor when they are those of an earlier admission."""
    server = ParameterServer(ServedStage(0, (9,), (4,), 8, n_elements=6, slice_bytes=24, staleness=0, wave=1))
    members = (ev.Member(4, 0, admission=3), ev.Member(9, 0, admission=1))
    server.handle(0.0, ev.ViewChanged(ev.View(3, 1, 0, members, (3,), n_committed=0)))

    def pushed(step, admission=3):
        round = RoundId(RoundKind.PUSH, 0, step, peer=4, view=admission)
        shard = ev.Shard(ev.SliceKey(round, 0, 6, 4), ((4, step),), 1, ev.Tally())
        actions = server.handle(0.0, ev.Received(ev.Header("r", 0, 3, 4), shard))
        sums = [action for action in actions if isinstance(action, ev.Sum)]
        actions += [answer for sum in sums for answer in server.handle(0.0, ev.Summed(sum.key, 1, 1.0))]
        for work in [action.work for action in actions if isinstance(action, ev.Run)]:
            actions += server.handle(0.0, ev.Ran(work, 0.0, 1.0, {}))
        return [action.step for action in actions if isinstance(action, PushReport)]

    assert [pushed(1), pushed(1), pushed(2, admission=2), pushed(2), pushed(1), pushed(2)] == [[1], [], [], [2], [], []]


def test_a_snapshot_that_comes_after_the_result_is_not_kept():
    """Its checkpoint would be the newest one here, and the result could not be written again."""
    stage = ServedStage(0, (9,), (4,), 1, n_elements=6, slice_bytes=24, staleness=0, wave=1)
    place = PipelinePlace(peer=4, stage=0, pipeline=[4], n_steps=1, clip_norm=0.0)
    worker, done = Replica(stage, place, HeldOutWork(HeldOutPlace(4, 0, None, 0, []))), []

    def perform(event):
        done.extend(worker.handle(0.0, event))

    def hear(src, body):
        perform(ev.Received(ev.Header("r", 0, 1, src), body))

    def give(round):
        hear(9, ev.Reduced(ev.SliceKey(round, 0, 6), ((9,), (((9, 0),),)), 1, 1, 1.0))

    def pull():
        [wanted] = [action.body for action in done if isinstance(getattr(action, "body", None), ev.WantsParameters)]
        done.clear()
        give(wanted.round)

    def ran(kind):
        [work] = [action.work for action in done if isinstance(action, ev.Run)]
        assert work.kind == kind
        done.clear()
        perform(ev.Ran(work, 0.0, 1.0))

    members = (ev.Member(4, 0, admission=1), ev.Member(9, 0, admission=1))
    perform(ev.ViewChanged(ev.View(1, 1, 0, members, (1,), n_committed=0)))
    pull()
    ran(WorkKind.ADOPT)
    hear(ev.COORDINATOR, ev.EndOfSteps())
    perform(ev.Accumulated(0, 0, 0, 1, 1.0))
    perform(ev.Drained(0))
    for kind in (WorkKind.NORM, WorkKind.LOCAL_STEP, WorkKind.LAY_OUT):
        ran(kind)
    pull()
    late = RoundId(RoundKind.CHECKPOINT, 0, 0, view=1)
    hear(ev.COORDINATOR, ev.GroupFormed(late, (4,), (9,)))
    assert done[-1] == ev.Send(9, ev.FetchResult(late))
    give(late)
    assert done[-1] == ev.Forget(late)
    ran(WorkKind.ADOPT)
    assert done[-1] == ev.Updated(0, 1)


# ---------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("part", "field", "value", "line"),
    [
        ("sync", "delay", 1, "sync.delay: got 1, expected 0"),
        ("wiring", "kind", "pool", "wiring.kind: got pool, expected fixed with sync.kind server: no microbatch"),
        ("train", "on_nonfinite", "rollback", "train.on_nonfinite: got rollback"),
        ("optim", "second_moment", "corrected", "optim.second_moment: got corrected, expected own"),
        ("plan", "servers", 0, r"plan.roles.servers: got \[\] peers for the stages, expected one for each of 2"),
        ("plan", "servers", 2, r"plan.roles.servers: got \[2, 2\] peers for the stages"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(part, field, value, line):
    config = make_config()
    config = replace(config, **{part: replace(getattr(config, part), **{field: value})})
    with pytest.raises(BadInput, match=line):
        check(config, run_config.default_plan(config))


@pytest.mark.parametrize("servers", [((0,), (7,)), ((6,), (2,))])
def test_a_server_is_no_replica_and_does_not_write_the_checkpoint(servers):
    config = make_config()
    plan = run_config.default_plan(config)
    with pytest.raises(BadInput, match=r"plan.roles.servers: got peer [02], expected a peer that is no replica"):
        check(config, replace(plan, roles=PlanRoles(servers=servers)))
