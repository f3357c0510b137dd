"""Merge the traces of a run and draw them: trace.jsonl, timeline.json (opens in ui.perfetto.dev) and report.png.

    python scripts/report.py --run_dir=runs/x [--tensorboard]
    python scripts/report.py --run_dir=runs/x --against=runs/y,runs/z

The second command also compares the run with others: held-out loss at equal tokens and at equal seconds, tokens per
second over the whole time, and bytes by kind of link. It prints a table and writes comparison.png to the folder.
"""

import check_installed  # noqa: F401

from jaxdt.cli import interrupts  # noqa: F401

# isort: split
import json
import math
import re
from pathlib import Path

from absl import flags

from jaxdt.cli import option_flags, plots, run_comparison, script_main
from jaxdt.cli.run_inputs import ProcessOptions
from jaxdt.protocol import events as ev
from jaxdt.protocol import trace
from jaxdt.protocol.perfetto import chrome
from jaxdt.run import plan as plans
from jaxdt.run.errors import BadInput, read_text, shell_line
from jaxdt.run.plan import Plan
from jaxdt.run.run_folder import RunFolders, launch_flags, older_part
from jaxdt.run.serialize import parse_json
from jaxdt.runtime.coordinator_folder import last_members

option_flags.define(ProcessOptions, "run_dir")
AGAINST = flags.DEFINE_list("against", [], "Folders of other runs to compare this one with.")
TENSORBOARD = flags.DEFINE_bool("tensorboard", False, "Also write TensorBoard files (needs the extra `tensorboard`).")
SUMMARY_NUMBERS = ("step_s_measured", "step_s_predicted", "step_s_predicted_uncompressed", "tokens_per_s")
SUMMARY_NUMBERS += ("tokens_per_s_overall",)
LINK = re.compile(r"\d+->\d+")


def main() -> int:
    run_dir = RunFolders.of(Path(script_main.required("run_dir"))).run_dir
    plan, summary, metrics, records = read(run_dir, "run_dir")
    others = {name: read(RunFolders.of(Path(name)).run_dir, "--against") for name in AGAINST.value}
    with (run_dir / "trace.jsonl").open("w") as file:
        file.writelines(json.dumps(record, sort_keys=True) + "\n" for record in records)
    (run_dir / "timeline.json").write_text(json.dumps(chrome(records, stages_of_peers(plan, records))))
    if not plots.report(run_dir / "report.png", metrics, records, summary):
        raise BadInput(f"run_dir: {run_dir} is of a run that has done no step, expected one with something to draw")
    if TENSORBOARD.value:
        write_tensorboard(run_dir / "tensorboard", metrics)
    print(f"wrote {run_dir / 'trace.jsonl'}, {run_dir / 'timeline.json'}, {run_dir / 'report.png'}")
    for line in missing_traces(run_dir, plan, records):
        print(line)
    if others:
        read_runs = {str(run_dir): (plan, summary, metrics, records), **others}
        runs = [
            run_comparison.run_of(name, summary, metrics, stages_of_peers(plan, records))
            for name, (plan, summary, metrics, records) in read_runs.items()
        ]
        plots.comparison(run_dir / "comparison.png", runs)
        print(run_comparison.table(runs))
        print(f"wrote {run_dir / 'comparison.png'}")
    return 0


def read(run_dir: Path, flag: str) -> tuple[Plan, dict, list[dict], list[dict]]:
    """Plan, summary, metrics and merged trace of a run that has ended. Errors name `flag`, which gave its folder."""
    if not (run_dir / "summary.json").exists():
        raise BadInput(f"{flag}: {run_dir} has no summary.json, expected the folder of a run that has ended")
    plan = plans.load(run_dir / "plan.json")
    summary = read_summary(run_dir / "summary.json")
    metrics = read_metrics(run_dir / "metrics.jsonl")
    return plan, summary, metrics, merged(run_dir, plan, summary["clock_offset_s"])


def read_summary(path: Path) -> dict:
    """The summary. BadInput if a value that is used here is damaged."""
    try:
        summary = parse_json(read_text(path))
    except ValueError as error:
        raise BadInput(f"{path}: not JSON ({error}), expected what a run wrote") from None
    if not isinstance(summary, dict):
        raise BadInput(f"{path}: got {summary!r:.40}, expected an object")
    for name in SUMMARY_NUMBERS:
        if summary.get(name) is not None and not is_number(summary[name]):
            raise BadInput(f"{path}: {name}: got {summary[name]!r:.40}, expected a number")
    n_bytes = summary.get("bytes_on_links", {})
    if (
        not isinstance(n_bytes, dict)
        or not all(map(LINK.fullmatch, n_bytes))
        or not all(map(is_number, n_bytes.values()))
    ):
        raise BadInput(f"{path}: bytes_on_links: got {n_bytes!r:.40}, expected bytes per link, such as '0->1'")
    offsets_s, codecs = summary.get("clock_offset_s"), summary.get("codec_on_links", {})
    if not isinstance(offsets_s, dict) or not all(map(is_number, offsets_s.values())):
        raise BadInput(f"{path}: clock_offset_s: got {offsets_s!r:.40}, expected seconds per peer")
    resumes = summary.get("resumes", [])
    if not isinstance(resumes, list) or not all(isinstance(step, int) for step in resumes):
        raise BadInput(f"{path}: resumes: got {resumes!r:.40}, expected a list of steps")
    if not isinstance(codecs, dict) or not all(isinstance(codec, str) for codec in codecs.values()):
        raise BadInput(f"{path}: codec_on_links: got {codecs!r:.40}, expected a codec per link")
    return summary


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def read_metrics(path: Path) -> list[dict]:
    """The steps of metrics.jsonl. BadInput names the first line that is not a step."""
    steps = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        try:
            step = parse_json(line)
        except ValueError:
            step = None
        kinds = {"step": int, "loss": int | float, "step_s": int | float, "tokens_per_s": int | float}
        kinds |= {"eval_loss": int | float} if isinstance(step, dict) and "eval_loss" in step else {}
        if not isinstance(step, dict) or not all(isinstance(step.get(name), kind) for name, kind in kinds.items()):
            raise BadInput(f"{path}: line {number}: got {line!r:.40}, expected a step")
        steps.append(step)
    return steps


def merged(run_dir: Path, plan: Plan, offsets_s: dict[str, float]) -> list[dict]:
    """The records of all processes of the run, newcomers too, with times of the coordinator's clock, in order of time.
    Traces of other peers, which an earlier run with other stages may have left, are not read."""
    records = traced(run_dir / "trace" / "coordinator.jsonl", 0.0)
    for peer in sorted({*plan.peers, *stages_in_views(records), *stages_of_workers(records)}):
        records += traced(run_dir / "trace" / f"peer_{peer}.jsonl", offsets_s.get(str(peer), 0.0))
    return sorted(records, key=lambda record: record["t"])


def missing_traces(run_dir: Path, plan: Plan, records: list[dict]) -> list[str]:
    """A line for each other host whose peers have left their traces there: which files have to be brought here. A
    newcomer's lie in the run_dir that its own command named."""
    job = RunFolders.of(run_dir).job
    if job == run_dir:  # launched here
        return []
    hosts = dict(zip(sorted(plan.peers), launch_flags(job).get("hosts", "").split(","), strict=False))
    hosts |= {member.peer: member.address.rpartition(":")[0] for member in last_members(run_dir)}
    missing: dict[str, list[Path]] = {}
    for peer in sorted({*plan.peers, *stages_in_views(records)}):
        path = run_dir / "trace" / f"peer_{peer}.jsonl"
        if not path.exists():
            host = hosts.get(peer) or f"the host of peer {peer}"
            where = host if peer in plan.peers else f"{host}, out of trace/ in the newcomer's own --run_dir"
            missing.setdefault(where, []).append(path)
    begin = "not in this report, and to bring to the same place here"
    return [f"{begin} from {where}: {shell_line(*paths)}" for where, paths in missing.items()]


def traced(path: Path, offset_s: float) -> list[dict]:
    """The records of one process, with offset_s added to their times; none if it left no file."""
    records = []
    for part in filter(Path.exists, (older_part(path), path)):
        for record in trace.read(read_text(part).splitlines(), str(part)):
            record["t"] = round(record["t"] + offset_s, 6)
            records.append(record)
    return records


def stages_of_peers(plan: Plan, records: list[dict]) -> dict[int, int]:
    """Every peer and every worker of a run -> its last stage."""
    planned = {peer: plan.seat(peer)[0] for peer in plan.peers}
    return planned | stages_in_views(records) | stages_of_workers(records)


def stages_in_views(records: list[dict]) -> dict[int, int]:
    """Every peer that a view of the coordinator names -> its last stage."""
    views = [record for record in records if record["what"] == "report" and record["kind"] == "view"]
    return {
        int(peer): stage
        for view in views
        if view["peer"] == ev.COORDINATOR
        for peer, stage in view["fields"]["members"].items()
    }


def stages_of_workers(records: list[dict]) -> dict[int, int]:
    """Every worker of a pool that the coordinator has placed -> its stage."""
    placed = [
        record["fields"] for record in records if record["what"] == "report" and record["kind"] == "worker_placed"
    ]
    return {fields["worker"]: fields["stage"] for fields in placed}


def write_tensorboard(folder: Path, metrics: list[dict]) -> None:
    """Write one scalar per number of metrics.jsonl."""
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


if __name__ == "__main__":
    script_main.run(main)
