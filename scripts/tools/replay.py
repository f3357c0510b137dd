"""Do a run whose replicas may differ again in one process, from its log of groups, and compare the parameters.

    python scripts/tools/replay.py --run_dir=runs/x

Reads config.json, plan.json and trace/coordinator.jsonl of a run with sync.kind "groups" that has ended, and its last
checkpoint. Prints how many numbers of the parameters and of the optimizer's state are not equal bit for bit. On another
device or build than the run's, rounding differs. Exit codes: 0 all are equal, 1 some are not, 2 bad input.
"""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags

from jaxdt.cli import environment, run_flags, run_inputs
from jaxdt.model.group_replay import GroupReplay, logged_group
from jaxdt.protocol import trace
from jaxdt.protocol.reports import GroupReport, PipelineEndReport, StepReport
from jaxdt.runtime.storage.checkpoint import complete_record, newest
from jaxdt.runtime.storage.entries import join_entries, load_entries, split_entries
from jaxdt.runtime.storage.store import stage_functions
from jaxdt.spec import config as configs
from jaxdt.spec import plan as plans
from jaxdt.spec.errors import BadInput

DEVICES = flags.DEFINE_integer("devices", 1, "Local devices of each stage, as in the run.", 1)
START = flags.DEFINE_string("start", None, "Folder of the checkpoint with which a run began that was resumed.")


def main() -> int:
    environment.compute_on_cpu()
    run_flags.required("run_dir")
    run_dir = Path(run_flags.RUN_DIR.value)
    try:
        config = configs.parse(json.loads((run_dir / "config.json").read_text()))
        lines = (run_dir / "trace" / "coordinator.jsonl").read_text().splitlines()
    except (OSError, ValueError) as error:
        raise BadInput(f"run_dir: {run_dir} holds no run ({error})") from None
    plan = plans.load(run_dir / "plan.json")
    reports = [record for record in trace.read(lines) if record["what"] == "report"]
    groups = [
        logged_group(plan, fields["stage"], fields["members"], fields["steps"])
        for fields in fields_of(reports, GroupReport.kind)
    ]
    n_steps = {fields["pipeline"]: fields["n_steps"] for fields in fields_of(reports, PipelineEndReport.kind)}
    if set(n_steps) != set(range(plan.n_pipelines)):
        raise BadInput(f"run_dir: {run_dir}: the log has the last steps of pipelines {sorted(n_steps)}, expected all")
    functions = [stage_functions(config, plan, stage, DEVICES.value) for stage in range(plan.n_stages)]
    replay = GroupReplay(config, plan, functions, run_inputs.token_file(config.data.path))
    begin(replay, fields_of(reports, StepReport.kind))
    replay.run(groups, n_steps)
    replay.average_states()
    made = {name: entry for states in replay.states for name, entry in split_entries(states[0]).items()}
    folder = newest(run_dir)
    n_unequal, n_numbers = compared(made, load_entries(folder))
    steps = ", ".join(f"{n_steps[pipeline]} of pipeline {pipeline}" for pipeline in sorted(n_steps))
    print(f"replayed {len(groups)} groups and local steps {steps}")
    print(
        f"{folder}: {n_unequal} of {n_numbers} numbers differ" if n_unequal else f"{folder}: all {n_numbers} are equal"
    )
    return 1 if n_unequal else 0


def begin(replay: GroupReplay, rows: list[dict[str, Any]]) -> None:
    """A run that was resumed begins with a checkpoint."""
    first = rows[0]["step"] if rows else 0
    if not START.value:
        if first:
            raise BadInput(f"--start: got no checkpoint, and the run was resumed from one of {first} steps")
        return
    folder = Path(START.value)
    version = complete_record(folder).checkpoint.version
    if version != first:
        raise BadInput(f"--start: {folder} has {version} steps, the log of the run begins after {first}")
    entries = load_entries(folder)
    replay.begin(version, [join_entries(entries, row[0]) for row in replay.states])


def fields_of(reports: list[trace.TraceRecord], kind: str) -> list[dict[str, Any]]:
    """The fields of all reports of a kind, in their order."""
    return [report["fields"] for report in reports if report["kind"] == kind]


def compared(made: dict[str, dict], kept: dict[str, dict]) -> tuple[int, int]:
    """How many numbers of two states differ, and how many there are."""
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(*map(jax.tree.leaves, (made, kept)), strict=True)]
    return sum(int(np.sum(a != b)) for a, b in pairs), sum(a.size for a, _ in pairs)


if __name__ == "__main__":
    run_flags.run(main)
