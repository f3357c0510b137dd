"""The simulator's clock: closed formulas where there are any, and properties where there are not."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_fields import report_fields

from jaxdt.build import RunStart, build_coordinator, build_peer
from jaxdt.protocol import events as ev
from jaxdt.protocol.trace import Trace
from jaxdt.run import config as run_config
from jaxdt.run.config import default_plan
from jaxdt.run.network import Link, uniform
from jaxdt.run.plan import Plan
from jaxdt.run.sizes import sync_groups
from jaxdt.run.work import ON_A_CORE
from jaxdt.sim.cluster import Simulation
from jaxdt.sim.hosts import SimulatedHost
from jaxdt.sim.links import SimulatedLink
from jaxdt.sim.predict import Conditions, device_links, predict_step_s, simulate
from jaxdt.sim.sim_peer import Environment, SimPeer
from jaxdt.sim.tensors import NoTensors

START = RunStart("r")


F_S, B_S = 1.0, 2.0


def make_config(stages, pipelines=1, microbatches=1, **options):
    """Heartbeats are rare, so that a virtual hour costs nothing."""
    plan = dict(stages=stages, pipelines=pipelines, microbatches=microbatches)
    train = {name: options.pop(name) for name in ("steps", "eval_every_steps", "on_nonfinite") if name in options}
    net = dict(heartbeat_s=1000.0, deadline_floor_s=10000.0) | options.pop("net", {})
    sync = dict(slice_bytes=options.pop("slice_bytes", 1 << 20))
    model = dict(preset="debug", n_layers=4, d_model=8, n_heads=2, max_len=4, vocab_size=16)
    data = dict(model=model, plan=plan | options, train=train, net=net, sync=sync)
    return run_config.parse(data)


def conditions(plan, link=None, seconds=None, n_cores=None, persist_s=0.0):
    """Every peer on a host of its own, unless they all share one of n_cores."""
    work = dict(F=F_S, B=B_S, E=F_S, G=0.0, U=0.0)
    return Conditions(
        seconds=seconds or dict.fromkeys(plan.peers, work),
        link=link or (lambda src, dst: Link()),
        host_of={peer: "all" if n_cores else f"h{peer}" for peer in plan.peers},
        cores={"all": n_cores} if n_cores else {f"h{peer}": 1 for peer in plan.peers},
        persist_s=persist_s,
    )


def step_s(config, plan=None, **how):
    plan = plan or default_plan(config)
    return predict_step_s(config, plan, conditions(plan, **how))


# --------------------------------------------------------------------------------------------------- a pipeline's time


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (1, 5), (2, 1), (2, 8), (3, 3), (4, 2), (4, 16)])
def test_without_a_network_a_step_fills_and_drains_the_pipeline(schedule, stages, microbatches):
    """(M + S - 1)(f + b): Huang et al. 2019 (GPipe), Narayanan et al. 2021 (1F1B has the same bubble)."""
    config = make_config(stages, microbatches=microbatches, schedule=schedule)
    assert step_s(config) == (microbatches + stages - 1) * (F_S + B_S)


def test_pipelines_side_by_side_take_no_longer():
    assert step_s(make_config(4, pipelines=3, microbatches=12)) == pytest.approx((4 + 3) * (F_S + B_S))


def test_replicas_wait_for_the_slowest_of_them():
    """Pipeline 0 takes 4 of 5 microbatches, or pipeline 1 is slow."""
    config = make_config(1, pipelines=2, microbatches=5)
    plan = replace(default_plan(config), shares=(4, 1))
    assert step_s(config, plan) == pytest.approx(4 * (F_S + B_S))
    slow = {0: dict(F=1, B=2, E=0, G=0, U=0), 1: dict(F=5, B=10, E=0, G=0, U=0)}
    assert step_s(config, plan, seconds=slow) == pytest.approx(15.0)


def test_gather_and_update_count_once_per_step():
    config = make_config(2, microbatches=3)
    seconds = dict.fromkeys((0, 1), dict(F=F_S, B=B_S, E=0, G=0.25, U=0.5))
    assert step_s(config, seconds=seconds) == pytest.approx(4 * (F_S + B_S) + 0.75)


def test_the_step_after_one_that_is_evaluated_is_longer():
    config = make_config(2, microbatches=2, steps=3, eval_every_steps=2)
    plan = default_plan(config)
    outcome = simulate(config, plan, conditions(plan))
    steps = [fields["step_s"] for fields in report_fields(outcome, "step")]
    assert steps[:2] == pytest.approx([3 * (F_S + B_S)] * 2)
    assert steps[2] > steps[1] + F_S
    assert {stop.code for stop in outcome.stopped.values()} == {0}


# ----------------------------------------------------------------------------------------------------------- commit


def test_a_commit_costs_a_round_trip_to_the_coordinator_and_the_record():
    link = lambda src, dst: Link(0.25) if ev.COORDINATOR in (src, dst) else Link()  # noqa: E731
    config = make_config(1)
    assert step_s(config, link=link, persist_s=0.125) == pytest.approx(F_S + B_S + 2 * 0.25 + 0.125)


def test_the_exchange_of_two_replicas_is_two_halves_each_way():
    """Shards of half the vector go both ways at once, then sums of half the vector."""
    config = make_config(1, pipelines=2, microbatches=2)
    plan = default_plan(config)
    (group,) = sync_groups(config, plan)
    half = Link(0.5, 1e-4).transfer_s(4 * (group.n_elements // 2))
    link = lambda src, dst: Link() if ev.COORDINATOR in (src, dst) else Link(0.5, 1e-4)  # noqa: E731
    assert step_s(config, plan, link=link) == pytest.approx(F_S + B_S + 2 * half, rel=1e-3)


def test_small_slices_let_the_two_halves_overlap():
    """A whole shard arrives, latency included, before its sum can leave. In slices the first sums are ready while a
    peer's own shards still leave, so a link is busy from the start with the whole vector, and one latency remains."""
    link = lambda src, dst: Link() if ev.COORDINATOR in (src, dst) else Link(0.5, 1e-4)  # noqa: E731
    config = make_config(1, pipelines=2, microbatches=2, slice_bytes=64)
    (group,) = sync_groups(config, default_plan(config))
    assert step_s(config, link=link) == pytest.approx(F_S + B_S + Link(0.5, 1e-4).transfer_s(4 * group.n_elements))


# --------------------------------------------------------------------------------------------------------- latency


def test_a_boundary_adds_its_latency_both_ways_to_one_microbatch():
    """S = 2, M = 1: F, latency, F, B, latency, B; the tensors are too small to count."""
    link = lambda src, dst: Link() if ev.COORDINATOR in (src, dst) else Link(0.5)  # noqa: E731
    assert step_s(make_config(2), link=link) == pytest.approx(2 * (F_S + B_S) + 2 * 0.5)


def test_more_in_flight_hides_latency():
    """With the usual depth, stage 0 of 2 waits for a round trip per microbatch; with more in flight it computes."""
    link = lambda src, dst: Link() if ev.COORDINATOR in (src, dst) else Link(3.0)  # noqa: E731
    times = [
        step_s(make_config(2, microbatches=12, in_flight=in_flight), link=link)
        for in_flight in ("1,1", "2,1", "4,1", "6,1")
    ]
    assert times == sorted(times, reverse=True)
    assert times[0] > 1.5 * times[2]
    assert times[1] > 1.2 * times[2]
    assert times[3] >= 13 * (F_S + B_S)


# --------------------------------------------------------------------------------------------------------- links, hosts


class Clock:
    """An event queue that sorts its callbacks by time."""

    def __init__(self):
        self.waiting, self.order = [], itertools.count()

    def at(self, when_s, happen, args=()):
        self.waiting.append((when_s, next(self.order), happen, args))

    def run(self):
        while self.waiting:
            self.waiting.sort(key=lambda entry: entry[:2])
            self.now_s, _, happen, args = self.waiting.pop(0)
            happen(*args)


def arrivals(link, offers):
    """{name: when}; offers are (name, when offered, bytes, priority)."""
    clock, got = Clock(), {}
    line = SimulatedLink(link, clock.at)
    for name, when_s, n_bytes, priority in offers:
        deliver = lambda name=name: got.setdefault(name, clock.now_s)  # noqa: E731
        clock.at(
            when_s,
            lambda n_bytes=n_bytes, priority=priority, deliver=deliver: line.carry(
                clock.now_s, n_bytes, priority, deliver
            ),
        )
    clock.run()
    return got


GBPS = Link(latency_s=0.5, bandwidth_gbps=1e-9 * 8)  # one byte per second


def test_messages_in_a_row_share_one_latency():
    """Occupied 10, 4 and 2 s; the last is offered to an idle link."""
    offers = [("a", 0.0, 10, 1), ("b", 0.0, 4, 1), ("c", 20.0, 2, 1)]
    assert arrivals(GBPS, offers) == pytest.approx({"a": 10.5, "b": 14.5, "c": 22.5})


def test_priority_overtakes_what_waits_but_not_what_is_on_the_wire():
    offers = [("bulk1", 0.0, 10, 1), ("bulk2", 0.0, 10, 1), ("urgent", 3.0, 2, 0)]
    assert arrivals(GBPS, offers) == pytest.approx({"bulk1": 10.5, "urgent": 12.5, "bulk2": 22.5})


def test_equal_priority_is_first_in_first_out():
    offers = [(name, 0.0, 1, 1) for name in "dacb"]
    assert list(arrivals(GBPS, offers)) == list("dacb")


def test_control_messages_take_the_latency_only():
    assert arrivals(GBPS, [("bulk", 0.0, 100, 0), ("control", 1.0, 0, 1)]) == pytest.approx(
        {"control": 1.5, "bulk": 100.5}
    )


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 10), st.integers(0, 1)), min_size=1, max_size=8))
def test_a_link_never_idles_while_something_waits(offers):
    """The last byte leaves when the Lindley recursion says, whatever overtakes what."""
    named = [(i, when_s, n_bytes, priority) for i, (when_s, n_bytes, priority) in enumerate(offers)]
    free_s = 0.0
    for when_s, n_bytes, _ in sorted(offers):
        free_s = max(free_s, when_s) + n_bytes
    assert max(arrivals(GBPS, named).values()) == pytest.approx(free_s + 0.5)


def finished(n_cores, starts):
    """{peer: when done}; starts are (when, peer, seconds)."""
    clock, done = Clock(), {}
    host = SimulatedHost(n_cores, clock.at)
    for when_s, peer, seconds in starts:
        clock.at(
            when_s, lambda p=peer, s=seconds: host.start(clock.now_s, p, s, lambda: done.setdefault(p, clock.now_s))
        )
    clock.run()
    return done


@pytest.mark.parametrize(("n_cores", "k"), [(1, 1), (1, 3), (2, 2), (2, 3), (4, 3), (0.5, 1)])
def test_k_peers_share_c_cores_evenly(n_cores, k):
    """Each goes at min(1, c / k)."""
    done = finished(n_cores, [(0.0, peer, 6.0) for peer in range(k)])
    assert done == pytest.approx(dict.fromkeys(range(k), 6.0 / min(1.0, n_cores / k)))


def test_rates_change_when_work_comes_and_goes():
    """One core. Peer 0 alone for 1 s; both share until peer 1 has its 1 s at t = 3; peer 0 has 2 s left."""
    assert finished(1, [(0.0, 0, 4.0), (1.0, 1, 1.0)]) == pytest.approx({1: 3.0, 0: 5.0})


def test_a_run_on_one_core_takes_the_sum_of_all_work():
    config = make_config(2, pipelines=2, microbatches=6)
    assert step_s(config, n_cores=1) == pytest.approx(2 * 6 * (F_S + B_S))
    assert step_s(config, n_cores=4) == pytest.approx(step_s(config))


def test_devices_that_sleep_while_they_are_emulated_share_a_core_without_waiting_much():
    """Where a core computes a tenth of each Work, four peers are as fast on one core as on four; with nine tenths the
    core is what decides."""
    config = make_config(2, pipelines=2, microbatches=6)
    work = dict(F=F_S, B=B_S, E=F_S, G=0.0, U=0.0)
    emulated = work | {"F" + ON_A_CORE: F_S / 10, "B" + ON_A_CORE: B_S / 10}
    seconds = dict.fromkeys(default_plan(config).peers, emulated)
    assert step_s(config, seconds=seconds, n_cores=4) == pytest.approx(step_s(config))
    assert step_s(config, seconds=seconds, n_cores=1) == pytest.approx(step_s(config))
    computed = work | {"F" + ON_A_CORE: 0.9 * F_S, "B" + ON_A_CORE: 0.9 * B_S}
    seconds = dict.fromkeys(default_plan(config).peers, computed)
    assert step_s(config, seconds=seconds, n_cores=1) == pytest.approx(0.9 * 2 * 6 * (F_S + B_S), rel=0.1)


HANDLED_S = 0.25


def handling(plan):
    return dict.fromkeys(plan.peers, dict(F=F_S, B=B_S, E=0, G=0, U=0, message=HANDLED_S))


def test_a_message_is_handled_at_both_ends_of_its_link():
    """Four messages one after another: an activation, its gradient, one to the coordinator and its answer."""
    config = make_config(2)
    seconds = handling(default_plan(config))
    assert step_s(config, seconds=seconds, n_cores=16) == pytest.approx(2 * (F_S + B_S) + 8 * HANDLED_S)


def test_handling_takes_from_cores_that_all_compute():
    config = make_config(2, microbatches=6, schedule="gpipe")
    seconds = handling(default_plan(config))
    tensors_s = 6 * 4 * HANDLED_S
    sixteen, two, one = (step_s(config, seconds=seconds, n_cores=n_cores) for n_cores in (16, 2, 1))
    assert step_s(config) < sixteen < two < 2 * 6 * (F_S + B_S) + tensors_s < one


# --------------------------------------------------------------------------------------------------------- determinism


UNEVEN = Plan(4, ((0, 1), (1, 4)), ((3, 0), (1, 2)), (4, 1), in_flight=(4, 2))


def trace_of_a_run():
    lines = []
    link = lambda src, dst: Link(0.01 * ((src * 7 + dst * 3) % 5), 1e-3)  # noqa: E731
    config = make_config(2, pipelines=2, microbatches=5, steps=4, eval_every_steps=2, slice_bytes=256)
    outcome = simulate(config, UNEVEN, conditions(UNEVEN, link=link, n_cores=3, persist_s=0.01), Trace(lines.append))
    assert {stop.code for stop in outcome.stopped.values()} == {0}
    return "".join(lines).encode()


def test_equal_inputs_give_equal_traces_byte_for_byte():
    first = trace_of_a_run()
    assert first == trace_of_a_run()
    assert first.count(b'"what": "run"') == 4 * (2 * (2 * 5) + 2 * 4) + 2 * 2 * 4


SPEEDS = st.lists(st.floats(0.1, 3.0), min_size=4, max_size=4)
SCHEDULE = st.sampled_from(["gpipe", "1f1b"])
MILLISECONDS = st.lists(st.integers(0, 3000), min_size=25, max_size=25)


@settings(max_examples=25)
@given(SPEEDS, MILLISECONDS, st.integers(0, 3), st.integers(0, 24), st.sampled_from([1, 2, 4]), SCHEDULE)
def test_a_faster_device_or_link_never_makes_a_step_slower(speeds, latency_ms, device, pair, stages, schedule):
    """Each stage follows its order whatever arrives first, so times are maxima and sums of values that may only shrink.
    This holds for peers with devices and links of their own. Where peers share cores or an access line, something that
    comes earlier may compete with what all others wait for, and a step can be some tenths of a percent longer."""
    config = make_config(stages, pipelines=4 // stages, microbatches=4, steps=3, slice_bytes=256, schedule=schedule)
    plan = default_plan(config)

    def duration_s(speeds, latency_ms, gbps):
        seconds = {p: dict(F=1 / v, B=2 / v, E=0, G=0.1 / v, U=0.1 / v) for p, v in enumerate(speeds)}
        link = lambda src, dst: Link(latency_ms[5 * src + dst] / 1e3, gbps)  # noqa: E731
        outcome = simulate(config, plan, conditions(plan, link=link, seconds=seconds))
        return sum(fields["step_s"] for fields in report_fields(outcome, "step"))

    before_s = duration_s(speeds, latency_ms, 1e-5)
    better_speeds = [v * 1.5 if i == device else v for i, v in enumerate(speeds)]
    better_ms = [ms // 2 if i == pair else ms for i, ms in enumerate(latency_ms)]
    assert duration_s(better_speeds, latency_ms, 1e-5) <= before_s + 1e-9
    assert duration_s(speeds, better_ms, 1e-5) <= before_s + 1e-9
    assert duration_s(speeds, latency_ms, 2e-5) <= before_s + 1e-9


# --------------------------------------------------------------------------------------------------------------- faults


class Crashing:
    """A machine that stops at crash_s: it answers nothing any more, and the driver forgets it."""

    def __init__(self, machine, crash_s):
        self.machine, self.crash_s = machine, crash_s

    def handle(self, now_s, event):
        return [ev.Stop(-9, "crashed")] if now_s >= self.crash_s else self.machine.handle(now_s, event)


class Watched:
    """Writes down which steps a machine updates, and which records it announces."""

    def __init__(self, machine):
        self.machine, self.updates, self.announced = machine, [], []

    def handle(self, now_s, event):
        actions = self.machine.handle(now_s, event)
        self.updates += [a.work.step for a in actions if isinstance(a, ev.Run) and a.work.kind == "U"]
        self.announced += [
            a.body.record.step for a in actions if isinstance(a, ev.Send) and isinstance(a.body, ev.Committed)
        ]
        return actions


def run_with_a_crash(victim, crash_s):
    """Two stages by two pipelines, eight steps of about 15 s; `victim` may be the coordinator."""
    # Peers wait long for a coordinator, and each heartbeat is an event.
    net = dict(heartbeat_s=10.0, deadline_floor_s=60.0) if victim == ev.COORDINATOR else dict(heartbeat_s=1.0)
    config = make_config(2, pipelines=2, microbatches=6, steps=8, net=dict(deadline_floor_s=6.0) | net)
    plan = default_plan(config)
    machines = {peer: build_peer(config, plan, peer, START) for peer in plan.peers}
    machines[ev.COORDINATOR] = build_coordinator(config, plan, START)
    watched = {peer: Watched(machine) for peer, machine in machines.items()}
    driven = watched | {victim: Crashing(watched[victim], crash_s)}
    how = conditions(plan)
    peers = {p: SimPeer(driven[p], NoTensors(1), how.host_of[p], how.seconds[p]) for p in plan.peers}
    environment = Environment(lambda src, dst: Link(0.3), how.cores, persist_s=0.2)
    return Simulation(driven[ev.COORDINATOR], peers, environment).run(), watched


# Each moment with one peer, and those around the end of a step with one of either stage.
CRASHES = [(0, 0.1), (1, 5.0), (0, 16.7), (3, 16.7), (0, 17.2), (1, 17.2)]
CRASHES += [(0, 17.9), (3, 17.9), (1, 18.3), (0, 18.3), (3, 40.0)]


@pytest.mark.parametrize(("victim", "crash_s"), CRASHES)
def test_a_crash_is_made_good_and_no_step_is_half_applied(victim, crash_s):
    """The pipeline borrows the replica of the other one, and all peers that are left apply each step once."""
    outcome, watched = run_with_a_crash(victim, crash_s)
    others = {peer for peer in outcome.stopped if peer != victim}
    assert {outcome.stopped[peer].code for peer in others} == {0}
    assert sorted(set(watched[ev.COORDINATOR].announced)) == list(range(8))
    for peer in others - {ev.COORDINATOR}:
        assert watched[peer].updates == list(range(8))
    assert watched[victim].updates == list(range(len(watched[victim].updates)))
    assert len(watched[victim].updates) < 8


@pytest.mark.parametrize("crash_s", [5.0, 17.2, 40.0])
def test_a_crash_of_the_coordinator_stops_every_peer_with_what_was_committed(crash_s):
    outcome, watched = run_with_a_crash(ev.COORDINATOR, crash_s)
    peers = {peer: stop for peer, stop in outcome.stopped.items() if peer != ev.COORDINATOR}
    assert {stop.code for stop in peers.values()} == {3}
    assert all(stop.reason.startswith("coordinator: lost, silent") for stop in peers.values())
    announced = sorted(set(watched[ev.COORDINATOR].announced))
    assert all(watched[peer].updates == announced for peer in peers)


def test_a_simulation_in_which_nothing_can_happen_says_so():
    class Silent:
        def handle(self, now_s, event):
            return []

    peers = {0: SimPeer(Silent(), NoTensors(1), "h", {})}
    with pytest.raises(RuntimeError, match="nothing left to happen at 0.0 s"):
        Simulation(Silent(), peers, Environment(lambda src, dst: Link(), cores={"h": 1})).run()


def test_a_simulation_can_be_cut_short():
    config = make_config(1, steps=100)
    plan = default_plan(config)
    how = conditions(plan)
    peers = {0: SimPeer(build_peer(config, plan, 0, START), NoTensors(1), "h0", how.seconds[0])}
    environment = Environment(how.link, how.cores)
    outcome = Simulation(build_coordinator(config, plan, START), peers, environment).run(until_s=30.0)
    assert len(report_fields(outcome, "step")) == 10 and not outcome.stopped


class Diverging(NoTensors):
    """Sums whose norm is not finite, in the first run through step 1."""

    def __init__(self):
        super().__init__(1)
        self.restored = []

    def sum(self, key, members):
        return 0, float("nan") if key.round.number == 1 and not self.restored else 1.0

    def restore(self, restore):
        self.restored.append((restore.version, restore.generation, restore.n_reseeds))


@pytest.mark.parametrize(
    ("policy", "code", "verdicts", "restored"),
    [
        ("stop", 4, ["apply"], []),
        ("skip", 0, ["apply", "skip", "apply"], []),
        ("rollback", 0, ["apply", "apply", "apply", "apply"], [(0, 1, 1)]),
    ],
)
def test_a_gradient_that_is_not_finite(policy, code, verdicts, restored):
    """All peers do what the config says; with two replicas the sums are compared between them."""
    config = make_config(2, pipelines=2, microbatches=4, steps=3, on_nonfinite=policy)
    plan = default_plan(config)
    how = conditions(plan)
    tensors = {peer: Diverging() for peer in plan.peers}
    peers = {
        p: SimPeer(build_peer(config, plan, p, START), tensors[p], how.host_of[p], how.seconds[p]) for p in plan.peers
    }
    environment = Environment(how.link, how.cores)
    outcome = Simulation(build_coordinator(config, plan, START), peers, environment).run()
    assert {stop.code for stop in outcome.stopped.values()} == {code}
    assert [fields["verdict"] for fields in report_fields(outcome, "step")] == verdicts
    assert all(diverging.restored == restored for diverging in tensors.values())


# --------------------------------------------------------------------------------------------------------- conditions


def test_device_links_put_the_coordinator_beside_a_device():
    network = uniform(3, 0.1, 2.0)
    link = device_links(network, coordinator_device=1)
    assert link(0, 2) == Link(0.1, 2.0)
    assert link(0, ev.COORDINATOR) == Link(0.1, 2.0)
    assert link(ev.COORDINATOR, 1) == Link()
    assert device_links(None)(0, 1) == Link()
