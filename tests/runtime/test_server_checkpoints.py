"""Servers that hold the parameters, as real processes: checkpoints and held-out losses on the way, an interrupt, and a
run that goes on from it. All of it is bit for bit the replay of the servers' logs."""

import json
import signal

from fleets import replayed, versions

from jaxdt.runtime.storage.checkpoint import complete_record
from jaxdt.runtime.storage.parts import step_folder

SERVERS = (
    "--config.sync.kind=server",
    "--config.sync.server.wave=2",
    "--config.plan.servers=1",
    "--config.plan.stages=1",  # tests/sync/test_server_snapshots.py: all stages have the same pushes
    "--config.model.tied_head=false",
    "--config.plan.microbatches=4",
    "--config.train.steps=18",
    "--config.train.checkpoint_every_steps=3",
    "--config.train.keep_checkpoints=9",
    "--config.train.eval_every_steps=3",
    "--config.train.eval_microbatches=2",
    "--emulate_forward_s=0.05",
)


def test_a_run_with_servers_is_stopped_and_goes_on_and_equals_the_replay(launched):
    fleet = launched(*SERVERS)
    fleet.wait_for_step(4)
    fleet.process.send_signal(signal.SIGINT)
    assert fleet.ended() == 130, fleet.output
    rows = [json.loads(line) for line in (fleet.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert rows[2]["eval_loss"] > 0 and "eval_loss" not in rows[3], rows
    version = max(versions(fleet.run_dir))
    assert f"interrupted after {version} steps" in fleet.output, fleet.output
    (members,) = complete_record(step_folder(fleet.run_dir, version)).checkpoint.mean_of
    assert [peer for peer, _ in members] == [0, 1] and version < 18
    assert f"{step_folder(fleet.run_dir, version)}: all" in replayed(fleet.run_dir)

    fleet = launched(*SERVERS, "--resume")
    assert fleet.ended() == 0, fleet.output
    started = step_folder(fleet.run_dir, version)
    lines = replayed(fleet.run_dir, f"--start={started}")
    assert f"{step_folder(fleet.run_dir, 18)}: all" in lines and len(lines.splitlines()) > 2, lines
