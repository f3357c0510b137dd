"""The step protocol under faults of all kinds: many seeds, all invariants at every event.

More on demand: python scripts/experiments/fuzz_protocol.py --seeds=60:10000"""

from pathlib import Path

import pytest
from forks import run_scripts

from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import ReturnedReport, RollbackReport, VacantReport
from jaxdt.sim.faults import (
    COMMAND_OF,
    DRAWERS,
    FAIL,
    JOIN,
    LATE,
    LEAVE,
    PERTURB,
    RESTART,
    STALE,
    TAKEOVER,
    TWICE,
    spares_every_stage,
)
from jaxdt.testing.case import finding, play
from jaxdt.testing.cases import draw_case

ROOT = Path(__file__).resolve().parents[2]
N_SEEDS = 60
N_DRAWN = 300


@pytest.mark.parametrize("low", range(0, N_SEEDS, 30))
def test_invariants_hold_under_all_faults(low):
    found = {seed: line for seed in range(low, low + 30) if (line := finding(draw_case(seed)))}
    assert not found


def test_the_seeds_draw_all_kinds_and_both_ends():
    """Otherwise the fuzzer would check less than it claims."""
    cases = [draw_case(seed) for seed in range(N_DRAWN)]
    kinds = {fault.kind for case in cases for fault in case.faults}
    assert kinds == {*DRAWERS, FAIL, JOIN, RESTART, LEAVE, LATE, STALE, TAKEOVER, TWICE, PERTURB, *COMMAND_OF}
    fatal = [case for case in cases if not spares_every_stage(case.faults, case.plan.placement)]
    wait = [case for case in fatal if case.config.wiring.on_stage_lost == "wait"]
    assert N_DRAWN // 15 <= len(fatal) - len(wait) <= N_DRAWN // 6 and len(wait) >= N_DRAWN // 5
    assert {case.config.sync.codec for case in cases} == {"none", "bf16", "int8"}
    assert {case.config.train.on_nonfinite for case in cases} == {"stop", "skip", "rollback"}


def test_equal_seeds_play_equally():
    def events(seed):
        lines = []
        play(draw_case(seed), observer=lambda *observed: lines.append(str(observed)))
        return lines

    seed = next(seed for seed in range(N_SEEDS) if len(draw_case(seed).faults) == 4)
    first = events(seed)
    assert first == events(seed) and len(first) > 100


def test_a_run_that_loses_a_stage_ends_for_all():
    """Where faults may take all peers of a stage, some do: the run ends with code 3, and no invariant is broken."""
    cases = (draw_case(seed) for seed in range(N_SEEDS))
    stop = [case for case in cases if case.config.wiring.on_stage_lost == "stop"]
    fatal = [case for case in stop if not spares_every_stage(case.faults, case.plan.placement)]
    assert any(play(case)[0].stopped[ev.COORDINATOR].code == 3 for case in fatal)


def test_a_run_that_waits_sees_its_last_replicas_return_take_over_and_end():
    """Else the invariant on rollbacks would hold because nothing happens."""
    cases = [draw_case(seed) for seed in (7, 9, 14, 22)]
    reports = {type(report) for case in cases for _, _, report in play(case)[0].reports}
    assert {VacantReport, ReturnedReport, RollbackReport} <= reports


def test_the_script_prints_the_rate_and_refuses_what_is_no_range():
    script = "scripts/experiments/fuzz_protocol.py"
    commands = [(script, "--seeds=3:4", "--verbose"), (script, "--seeds=4:3")]
    (code, out, _), refused = run_scripts(commands, ROOT, without_jax=True)
    assert code == 0 and "1 seeds, 0 with a finding" in out and "seed 3: " in out
    assert refused == [2, "", "--seeds: got '4:3', expected LOW < HIGH\n"]
