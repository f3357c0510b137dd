"""Real processes over real sockets: what happens when some of them are killed, and how a run continues. That several
train as one process does is shown in test_churn.py and test_rebalance_run.py."""

import os
import signal
import time

import pytest
from fleets import MANY_STEPS, N_STEPS, ONE_PROCESS, alive, versions

FOUR_MICROBATCHES = "--config.plan.microbatches=4"  # as the run of one process has them
ONE_PIPELINE = "--config.plan.pipelines=1"


def test_the_last_peer_of_a_stage_ends_the_run_which_resumes_on_another_cut_with_the_same_losses(launched, alone):
    """If the config says so, everywhere with code 3. Here it is the first stage, in the simulator the last one. The
    launcher of the resumed run is killed in the end, and takes its children along."""
    fleet = launched(FOUR_MICROBATCHES, *MANY_STEPS, ONE_PIPELINE, "--config.wiring.on_stage_lost=stop")
    fleet.wait_for(lambda: versions(fleet.run_dir), "a checkpoint", timeout_s=120)
    fleet.wait_for_step(len(fleet.losses()) + 1)
    pids = fleet.children()
    assert sorted(pids) == [0, 1]
    os.kill(pids[0], signal.SIGKILL)
    assert fleet.ended(timeout_s=60) == 3, fleet.output
    assert "peer 0 (stage 0): lost" in fleet.output
    assert "peer 0 (stage 0): lost" in fleet.last_line(1)
    assert not alive(pids.values())
    newest = max(path.parent.name for path in fleet.run_dir.glob("checkpoints/*/complete.json"))
    go_on = f"to go on from step {int(newest)}: python scripts/launch.py --resume --run_dir={fleet.run_dir}"
    assert go_on in fleet.output.splitlines()

    n_steps = max(8, len(fleet.losses()) + 1)  # so that some are the resumed run's
    resumed = launched(FOUR_MICROBATCHES, "--resume", *MANY_STEPS, *ONE_PROCESS)
    resumed.wait_for_step(n_steps)
    pids = resumed.children()
    assert sorted(pids) == [0]
    resumed.process.kill()
    deadline_s = time.monotonic() + 60
    while alive(pids.values()) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not alive(pids.values())
    resumed.ended()
    assert resumed.losses()[:8] == pytest.approx(alone.losses()[:8], rel=1e-5)


def test_a_resume_goes_back_to_a_checkpoint_that_is_whole(launched, resumable, alone):
    """After a loss of power the newest one has an empty file; with that in both, nothing is started."""
    ended = resumable(N_STEPS - 4, N_STEPS)
    parts = [next(ended.glob(f"checkpoints/{version:08d}/stage_0-*")) for version in (N_STEPS - 4, N_STEPS)]
    (parts[1] / "_METADATA").write_bytes(b"")
    resumed = launched(*ONE_PROCESS, "--resume", f"--config.train.steps={N_STEPS}")
    assert resumed.ended() == 0, resumed.output
    assert f"so the run continues from step {N_STEPS - 4}: {parts[1] / '_METADATA'}: damaged" in resumed.output
    assert resumed.losses() == alone.losses()
    for part in ended.glob("checkpoints/*/stage_0-*"):
        (part / "_METADATA").write_bytes(b"")
    metrics = (ended / "metrics.jsonl").read_bytes()
    refused = launched(*ONE_PROCESS, "--resume", f"--config.train.steps={N_STEPS + 2}")
    assert refused.ended() == 2, refused.output
    assert "_METADATA: damaged" in refused.output and "Traceback" not in refused.output
    assert (ended / "metrics.jsonl").read_bytes() == metrics


def test_a_disk_that_is_full_ends_the_run_with_code_2(launched):
    """A file may not grow beyond 200 kB: the metrics fit, a checkpoint does not. One that fails is tried again with the
    next; when three in a row have failed and no other peer of the stage can write them, a person has to mend it."""
    fleet = launched(*ONE_PROCESS, "--config.train.steps=100000", "--config.model.d_model=128", file_bytes_max=200_000)
    assert fleet.ended() == 2, fleet.output
    assert "peer 0: could not write its part of the checkpoint of 2 steps (1 in a row have failed): " in fleet.output
    assert "\npeer 0 (stage 0): 3 checkpoints in a row could not be written, the last of 6 steps: " in fleet.output
    assert "Traceback" not in fleet.output
    assert not list(fleet.run_dir.glob("checkpoints/*/complete.json"))


def test_a_peer_that_dies_before_anyone_knew_it_ends_the_run_with_one_line(launched):
    fleet = launched(*MANY_STEPS, ONE_PIPELINE)
    deadline_s = time.monotonic() + 60
    while 1 not in (pids := fleet.children()) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    os.kill(pids[1], signal.SIGKILL)
    assert fleet.ended(timeout_s=60) == 3, fleet.output
    assert "peer 1 (stage 1): lost" in fleet.output
    assert "peer 1 (stage 1): lost" in fleet.last_line(0)
