"""The enforcement token with real processes: without it two stages that enforce wait for each other for ever.

pytest tests/runtime/test_enforcement_token.py --stuck
"""

import time

import pytest
from fleets import Launched

# Stalls in the backward too, and no clipping: else the stages of a pipeline are ready at the same time. In the
# simulator five of six seeds get stuck within 60 rows without the token, and none with it.
ENFORCING = (
    "--config.plan.pipelines=3",
    "--config.plan.microbatches=6",
    "--config.model.tied_head=false",
    "--config.optim.clip_norm=0",
    "--config.train.checkpoint_every_steps=0",
    "--config.sync.kind=groups",
    "--config.sync.groups.match=window",
    "--config.sync.groups.window_s=0.02",
    "--config.sync.groups.connectivity_groups=4",
    "--emulate_forward_s=0.01",
    "--stall=0.1,0.3,4,work",
)
WITHOUT_TOKEN = """
from jaxdt.sync.matching.token import EnforcementToken
EnforcementToken.take = lambda token, holder: True
"""
N_ROWS = 120
STILL_S = 20.0  # a row takes about half a second


@pytest.mark.slow
@pytest.mark.timeout(900)  # the run without the token may go on for minutes
def test_a_run_stands_still_without_the_token_and_ends_with_it(tmp_path, request):
    if not request.config.getoption("--stuck"):
        pytest.skip("three minutes: pytest tests/runtime/test_enforcement_token.py --stuck")
    stuck = Launched(tmp_path, *ENFORCING, "--config.train.steps=1000", changes={"coordinate.py": WITHOUT_TOKEN})
    try:
        stuck.wait_for_step(1)
        assert stands_still(stuck), f"{len(stuck.losses())} rows"
    finally:
        stuck.kill()
    n_rows = len(stuck.losses())
    assert n_rows < 1000

    whole = Launched(tmp_path, *ENFORCING, f"--config.train.steps={max(N_ROWS, n_rows + 20)}", run_dir="whole")
    try:
        assert whole.ended(timeout_s=400) == 0, whole.output
    finally:
        whole.kill()


def stands_still(run: Launched) -> bool:
    """Whether no row comes for STILL_S, though all processes live. False if rows come for minutes."""
    end_s = time.monotonic() + 300.0
    n_rows, since_s = 0, time.monotonic()
    while time.monotonic() < end_s:
        assert run.process.poll() is None, run.process.communicate()[0]
        if len(run.losses()) > n_rows:
            n_rows, since_s = len(run.losses()), time.monotonic()
        if time.monotonic() - since_s > STILL_S:
            return True
        time.sleep(0.5)
    return False
