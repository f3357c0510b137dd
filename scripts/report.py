"""Merge a run's traces and draw it: trace.jsonl, timeline.json (opens in ui.perfetto.dev) and report.png.

python scripts/report.py --run_dir=runs/x [--tensorboard]
"""

import json
import sys
from pathlib import Path

from absl import app, flags

from jaxdt import plots
from jaxdt.core import plan as plans
from jaxdt.core import trace
from jaxdt.core.errors import BadInput
from jaxdt.core.perfetto import chrome

RUN_DIR = flags.DEFINE_string("run_dir", None, "Folder of the run.")
TENSORBOARD = flags.DEFINE_bool("tensorboard", False, "Also write TensorBoard files (needs the extra `tensorboard`).")


def main() -> int:
    run_dir = Path(RUN_DIR.value or "")
    if not (run_dir / "summary.json").exists():
        raise BadInput(f"run_dir: {run_dir} has no summary.json, expected the folder of a run that has ended")
    summary = json.loads((run_dir / "summary.json").read_text())
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    plan = plans.load(run_dir / "plan.json")
    records = merged(run_dir, summary["clock_offset_s"])
    with (run_dir / "trace.jsonl").open("w") as file:
        file.writelines(json.dumps(record, sort_keys=True) + "\n" for record in records)
    stage_of = {peer: plan.seat(peer)[0] for peer in plan.peers}
    (run_dir / "timeline.json").write_text(json.dumps(chrome(records, stage_of)))
    plots.report(run_dir / "report.png", metrics, records, summary)
    if TENSORBOARD.value:
        write_tensorboard(run_dir / "tensorboard", metrics)
    print(f"wrote {run_dir / 'trace.jsonl'}, {run_dir / 'timeline.json'}, {run_dir / 'report.png'}")
    return 0


def merged(run_dir: Path, offsets_s: dict[str, float]) -> list[dict]:
    """All records on the coordinator's clock, in order of time."""
    records = []
    for path in sorted((run_dir / "trace").glob("*.jsonl")):
        offset_s = offsets_s.get(path.stem.removeprefix("peer_"), 0.0)
        for record in trace.read(path.read_text().splitlines()):
            record["t"] = round(record["t"] + offset_s, 6)
            records.append(record)
    return sorted(records, key=lambda record: record["t"])


def write_tensorboard(folder: Path, metrics: list[dict]) -> None:
    """One scalar per number of metrics.jsonl."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise BadInput(
            "--tensorboard: tensorboardX is not installed, expected: pip install -e .[tensorboard]"
        ) from None
    with SummaryWriter(str(folder)) as writer:
        for fields in metrics:
            for name, value in fields.items():
                if isinstance(value, int | float) and name != "step":
                    writer.add_scalar(name, value, fields["step"])


def guarded(_) -> None:
    try:
        sys.exit(main())
    except BadInput as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    app.run(guarded)
