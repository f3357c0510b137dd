"""Pipelines that average in groups: no run gets stuck, replicas come together, and stragglers cost what they should."""

import itertools
import math
import random
from dataclasses import asdict, replace

import pytest

from jaxdt.run.config import GroupsConfig, default_plan, parse
from jaxdt.run.network import Link
from jaxdt.sim.predict import Conditions, simulate
from jaxdt.sim.stragglers.group_timing import FLUSH, STASH, GroupTiming, order_of, time_groups
from jaxdt.sim.stragglers.server_line import ServerTiming
from jaxdt.sim.stragglers.stalls import WORK, Stalls
from jaxdt.sync.matching.token import EnforcementToken

STEP_S = 0.075
SEEDS = range(30)


class NoToken(EnforcementToken):
    """Every stage may enforce."""

    def take(self, holder):
        return True


def groups(match="window", **fields):
    return GroupsConfig(match=match, **fields)


def system(seed):
    """A random system with a stall before any Work, also before backwards."""
    rng = random.Random(f"system {seed}")
    n_stages, n_pipelines = rng.randint(2, 6), rng.randint(3, 6)
    rules = groups(window_s=rng.choice((0.005, 0.02, STEP_S)), connectivity_groups=rng.randint(2, 8))
    stalls = Stalls(0.1, 0.3, seed, WORK)
    schedule = (FLUSH, STASH)[seed % 2]
    sends_first = rng.random() < 0.5
    return GroupTiming(n_stages, n_pipelines, 30, rules, schedule, stalls=stalls, sends_first=sends_first)


def test_no_system_gets_stuck():
    for seed in SEEDS:
        outcome = time_groups(system(seed), to_the_end=True)
        assert not outcome.is_stuck, system(seed)


def test_without_the_token_some_systems_get_stuck():
    stuck = [seed for seed in SEEDS if time_groups(system(seed), True, NoToken()).is_stuck]
    assert sum(seed % 2 == 0 for seed in stuck) > 2 and sum(seed % 2 for seed in stuck) > 1


@pytest.mark.parametrize("rules", [groups("pairs"), groups("all")], ids=["pairs", "all"])
def test_rules_without_a_timer_do_not_get_stuck(rules):
    for seed in range(10):
        assert not time_groups(replace(system(seed), groups=rules), to_the_end=True).is_stuck


@pytest.mark.parametrize("match", ["window", "pairs", "all"])
def test_pipelines_may_leave_at_any_time(match):
    for seed in range(10):
        timing, rng = system(seed), random.Random(f"departures {seed}")
        leaving = rng.sample(range(timing.n_pipelines), rng.randint(1, timing.n_pipelines - 1))
        departures_s = {pipeline: rng.uniform(0.0, 4.0) for pipeline in leaving}
        timing = replace(timing, groups=replace(timing.groups, match=match), departures_s=departures_s)
        assert not time_groups(timing, to_the_end=True).is_stuck, timing


def test_averages_keep_the_mean_and_bring_replicas_together():
    outcome = time_groups(replace(system(3), groups=groups(window_s=0.01, connectivity_groups=8)))
    for row in outcome.groups:
        values = {peer: float(peer % 7) for _, group in row for peer in group.members}
        mean = math.fsum(values.values()) / len(values)
        apart = max(values.values()) - min(values.values())
        for _, group in row:
            average = math.fsum(values[peer] for peer in group.members) / len(group.members)
            values |= dict.fromkeys(group.members, average)
        assert math.fsum(values.values()) / len(values) == pytest.approx(mean)
        assert max(values.values()) - min(values.values()) < 0.1 * apart


def test_orders_of_work():
    timing = GroupTiming(3, 1, 2, groups("all"), n_microbatches=3)
    text = lambda stage: " ".join(f"{kind}{n}" for kind, n in order_of(timing, stage))  # noqa: E731
    assert text(0) == "F0 F1 F2 B0 B1 B2 F3 F4 F5 B3 B4 B5"
    assert text(2) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5"
    timing = replace(timing, schedule=STASH, n_steps=4)
    assert text(1) == "F0 F1 B0 F2 B1 F3 B2 B3"


@pytest.mark.parametrize(
    ("schedule", "step_s"),
    [(FLUSH, (4 + 3 - 1) * 0.06 / 4 + 0.015), (STASH, STEP_S)],
)
def test_seconds_of_a_step_without_stalls(schedule, step_s):
    """A flush has (microbatches + stages - 1) slots; with stash a stage is never idle, as in the long run."""
    outcome = time_groups(GroupTiming(3, 2, 200, groups("all"), schedule))
    assert outcome.seconds / 200 == pytest.approx(step_s, rel=0.03)


# --------------------------------------------------------------------------------------------- what stragglers cost


def speed(rules, n_pipelines=8, h=0.3, **fields):
    """Steps a second, over two seeds."""
    runs = [
        time_groups(GroupTiming(4, n_pipelines, 60, rules, stalls=Stalls(0.1, h, seed), **fields)) for seed in range(2)
    ]
    return sum(run.steps_per_s for run in runs)


def sdpipe(n_pipelines=8, **fields):
    return groups(window_s=STEP_S / n_pipelines, **dict(connectivity_groups=10) | fields)


def test_it_is_faster_than_pairs_and_these_than_a_barrier():
    barrier, pairs, first_come = groups("all"), groups("pairs"), sdpipe(group_size_max=2, connectivity_groups=0)
    speeds = [speed(rules) for rules in (barrier, pairs, sdpipe(), first_come, groups("none"))]
    assert speeds == sorted(speeds)
    assert 1.3 < speeds[2] / speeds[0] < 2.4


def test_its_gain_grows_with_the_stalls_and_the_pipelines():
    gain = lambda n, h: speed(sdpipe(n), n, h) / speed(groups("all"), n, h)  # noqa: E731
    assert gain(8, 0.0) == pytest.approx(1.0, abs=0.01)
    for less, more in itertools.pairwise([gain(8, h) for h in (0.1, 0.6)] + [math.inf]):
        assert less < more
    assert gain(4, 0.3) < gain(16, 0.3)


def test_a_slow_pipeline_holds_a_barrier_up_and_hardly_the_others():
    slow = dict(n_pipelines=4, h=0.0, slow={1: 4.0})
    assert speed(sdpipe(4), **slow) > 2 * speed(groups("all"), **slow)


def test_answers_that_travel_cost_time():
    assert speed(sdpipe(), answer_s=0.05) < 0.95 * speed(sdpipe())


def test_few_groups_are_suspended_if_many_may_connect():
    timing = GroupTiming(4, 8, 60, sdpipe(), stalls=Stalls(0.1, 0.3))
    assert 0.15 < time_groups(timing).suspended_frac < 0.45
    assert time_groups(replace(timing, groups=sdpipe(connectivity_groups=-1))).suspended_frac < 0.1


def test_an_endless_window_gives_the_groups_of_a_barrier():
    endless = GroupTiming(3, 4, 30, groups(window_s=math.inf, connectivity_groups=0), stalls=Stalls(0.2, 0.3))
    assert time_groups(endless).groups == time_groups(replace(endless, groups=groups("all"))).groups


# ------------------------------------------------------------------------------------------ the machines of a real run


def engine_speed(rules, n_pipelines=4, n_steps=40):
    """Steps a second of the machines of a run, without a network, with the seconds and stalls of GroupTiming."""
    model = dict(preset="debug", n_layers=4, d_model=8, n_heads=2, max_len=4, vocab_size=16, tied_head=False)
    config = parse(
        dict(
            model=model,
            plan=dict(stages=4, pipelines=n_pipelines, microbatches=4 * n_pipelines),
            train=dict(steps=n_steps),
            net=dict(heartbeat_s=1000.0, deadline_floor_s=10000.0),
            sync=dict(kind="groups", groups=asdict(rules)),
        )
    )
    plan = default_plan(config)
    seconds = dict(F=0.06 / 4 / 3, B=0.06 / 4 * 2 / 3, E=0.0, G=0.015 / 2, U=0.0)  # G: laying out, and adopting
    hosts = {peer: f"h{peer}" for peer in plan.peers}
    cores, stalls = dict.fromkeys(hosts.values(), 1.0), Stalls(0.1, 0.3)
    everywhere = dict.fromkeys(plan.peers, seconds)
    conditions = Conditions(everywhere, lambda src, dst: Link(), hosts, cores, stalls=stalls)
    return n_steps * n_pipelines / simulate(config, plan, conditions).now_s


def test_the_machines_of_a_run_gain_as_much():
    gain = engine_speed(sdpipe(4)) / engine_speed(groups("all"))
    assert gain == pytest.approx(speed(sdpipe(4), 4) / speed(groups("all"), 4), rel=0.1)
    assert 1.3 < gain < 2.4


# ------------------------------------------------------------------------------------------------------------- servers


def test_the_line_of_the_servers_limits_all_pipelines():
    """Four stages push 10 ms each a step, and pull once in ten steps; without that cost nobody waits for anybody."""
    at_most = 1 / (4 * 0.01 * 1.1)
    timing = GroupTiming(4, 8, 60, ServerTiming(0.01, 10, 4), stalls=Stalls(0.1, 0.3))
    assert 0.9 * at_most < time_groups(timing).steps_per_s < 1.07 * at_most
    free = replace(timing, groups=ServerTiming(0.0, 10, 100))
    assert time_groups(free).n_done == time_groups(replace(timing, groups=groups("none"))).n_done


def test_clocks_of_pipelines_with_servers_stay_within_the_bound_and_nobody_gets_stuck():
    for seed in range(20):
        wave, staleness = 1 + seed % 3, seed % 4
        timing = replace(system(seed), groups=ServerTiming(0.02, wave, staleness))
        outcome = time_groups(timing, to_the_end=True)
        assert not outcome.is_stuck
        for row in outcome.transfers:
            n_added = dict.fromkeys(sorted({act.peer for act in row}), 0)
            for act in row:
                if act.is_push:
                    n_added[act.peer] += 1
                    assert act.step == n_added[act.peer]
                else:
                    behind = min(n for n in n_added.values() if n < timing.n_steps or n == max(n_added.values()))
                    assert act.step == n_added[act.peer] and act.step // wave - behind // wave <= staleness
            assert set(n_added.values()) == {timing.n_steps}
