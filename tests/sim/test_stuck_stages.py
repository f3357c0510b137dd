"""Stages that enforce at the same time get stuck, and the token prevents it: the machines of a run, without arithmetic.

Two stages that each wait without a limit for a replica whose pipeline the other one holds wait for ever. That needs
stalls in the backward too, and gradients that are not clipped.

500 systems: STUCK_SYSTEMS=500 pytest tests/sim/test_stuck_stages.py"""

import os
import random
from unittest import mock

from jaxdt.protocol import events as ev
from jaxdt.run.config import default_plan, parse
from jaxdt.run.network import Link
from jaxdt.sim.predict import Conditions, simulate
from jaxdt.sim.stragglers.stalls import WORK, Stalls
from jaxdt.sync.matching.token import EnforcementToken

N_SYSTEMS = int(os.environ.get("STUCK_SYSTEMS", "8"))
STEP_S = 0.075
LIMIT_S = 900.0  # ten times what the longest of them takes


def is_stuck(seed):
    """Whether a random system, with a stall before a tenth of all Work, is not over in time."""
    rng = random.Random(f"stuck {seed}")
    stages, pipelines = rng.randint(2, 6), rng.randint(3, 6)
    rules = dict(match="window", window_s=rng.choice((0.005, 0.02, STEP_S)), connectivity_groups=rng.randint(2, 8))
    model = dict(preset="debug", n_layers=6, d_model=8, n_heads=2, d_ff=8, max_len=4, vocab_size=16, tied_head=False)
    config = parse(
        dict(
            model=model,
            plan=dict(stages=stages, pipelines=pipelines, microbatches=4 * pipelines),
            train=dict(steps=30),
            optim=dict(clip_norm=0.0),  # else the stages of a pipeline are ready at the same time, as all need its norm
            net=dict(heartbeat_s=1000.0, deadline_floor_s=10000.0),
            sync=dict(kind="groups", groups=rules),
        )
    )
    plan = default_plan(config)
    seconds = dict(F=STEP_S / 15, B=STEP_S * 2 / 15, E=0.0, G=0.005, U=0.0)
    hosts = {peer: f"h{peer}" for peer in plan.peers}
    cores, stalls = dict.fromkeys(hosts.values(), 1.0), Stalls(0.1, 0.3, seed, WORK)
    everywhere = dict.fromkeys(plan.peers, seconds)
    conditions = Conditions(everywhere, lambda src, dst: Link(), hosts, cores, stalls=stalls)
    outcome = simulate(config, plan, conditions, until_s=LIMIT_S)
    return ev.COORDINATOR not in outcome.stopped


def test_no_system_is_stuck():
    assert not [seed for seed in range(N_SYSTEMS) if is_stuck(seed)]


def test_without_the_token_some_are():
    with mock.patch.object(EnforcementToken, "take", lambda token, holder: True):
        stuck = [seed for seed in range(8) if is_stuck(seed)]
    assert len(stuck) > 2, stuck
