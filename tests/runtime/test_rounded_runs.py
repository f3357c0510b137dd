"""Processes that exchange gradients in few bytes, over sockets."""

import shutil

from fleets import N_STEPS, STEPS

FEW_BYTES = ("--config.sync.codec=int8", f"--config.train.keep_checkpoints={N_STEPS}")


def test_a_run_that_is_resumed_has_the_losses_of_one_that_was_not_stopped(launched):
    """Bit for bit: what the members owe is there too."""
    run = launched(*STEPS, *FEW_BYTES)
    assert run.ended() == 0, run.output
    calm, folder = run.losses(), run.run_dir
    assert len(calm) == N_STEPS
    owed = {
        path.parent.name: len(list(path.parent.glob("owed_*.npz")))
        for path in folder.glob("checkpoints/*/complete.json")
    }
    assert set(owed.values()) == {4}
    for later in sorted(owed)[1:]:
        shutil.rmtree(folder / "checkpoints" / later)
    n_done = int(min(owed))
    rows = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(rows[:n_done]))
    resumed = launched("--resume", f"--config.train.steps={N_STEPS}")
    assert resumed.ended() == 0, resumed.output
    assert resumed.losses() == calm
