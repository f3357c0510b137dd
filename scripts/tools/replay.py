"""Do a run whose replicas may differ again in one process, from its log, and compare the parameters.

    python scripts/tools/replay.py --run_dir=runs/x

Reads config.json, plan.json and trace/coordinator.jsonl of a run with sync.kind "groups" or "server" that has ended or
was stopped, and the checkpoints that are there; with "server" also trace/peer_N.jsonl of each server, which has the
order of pushes and pulls, and of workers. A run that was stopped is done again up to its last checkpoint.
Prints who met whom in averaging groups, with a warning where replicas never met, and how many numbers of the parameters
and of the optimizer's state are not equal bit for bit. On another device or build than the run's, rounding differs. It
differs with the number of threads, too, so this process takes as many as the log says of the run's peers; a run whose
peers had different numbers is refused. Exit codes: 0 all are equal, 1 some are not, 2 bad input.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from absl import flags
from replayed_log import checkpoint_means, compared, fields_of, incarnations_of, peers_by_threads, take_threads

from jaxdt.cli import environment, option_flags, run_inputs, script_main
from jaxdt.cli.run_inputs import ProcessOptions
from jaxdt.codec.vectors import VectorCodec
from jaxdt.model.base import Params
from jaxdt.model.stage import StageFunctions
from jaxdt.model.stage_arithmetic import StageArithmetic
from jaxdt.model.vectors import trained, with_trained
from jaxdt.protocol import trace
from jaxdt.protocol.incarnations import Incarnation, Incarnations
from jaxdt.protocol.reports import (
    GroupReport,
    KeptReport,
    PullReport,
    PushReport,
    ReadyReport,
    Report,
    RestartedReport,
    SnapshotReport,
    StepReport,
    ViewReport,
)
from jaxdt.run import config as configs
from jaxdt.run import plan as plans
from jaxdt.run.config import RunConfig
from jaxdt.run.errors import BadInput, read_text
from jaxdt.run.model_spec import ModelSpec
from jaxdt.run.plan import Plan
from jaxdt.run.run_folder import kept_lines
from jaxdt.run.serialize import parse_json
from jaxdt.runtime.storage.checkpoint import complete_record, newest_whole, whole_checkpoints
from jaxdt.runtime.storage.entries import initial_params, join_entries, load_entries, split_entries
from jaxdt.runtime.storage.store import stage_functions
from jaxdt.sync.matching.mixing import mixing_lines
from jaxdt.testing.replay import Replay

option_flags.define(ProcessOptions, "run_dir")
DEVICES = flags.DEFINE_integer("devices", 1, "Local devices of each stage, as in the run.", 1)
START = flags.DEFINE_string("start", None, "Folder of the checkpoint with which a run began that was resumed.")


def main() -> int:
    environment.compute_on_cpu()
    run_dir = Path(script_main.required("run_dir"))
    try:
        config = configs.parse(parse_json(read_text(run_dir / "config.json")))
        lines = kept_lines(run_dir / "trace" / "coordinator.jsonl")
    except (OSError, ValueError, BadInput) as error:
        raise BadInput(f"run_dir: {run_dir} holds no run ({error})") from None
    if config.sync.kind not in REPLAYS:
        raise BadInput(f"sync.kind: got {config.sync.kind}, expected {' or '.join(REPLAYS)}, which have a log")
    plan = plans.load(run_dir / "plan.json")
    reports = [record for record in trace.read(lines) if record["what"] == "report"]
    take_threads(peers_by_threads([*reports, *ready_reports(run_dir)]))  # before jax computes
    newest_whole(run_dir, {})  # one line for a run without a checkpoint, before all else
    problems: list[str] = []
    folders = {found.version: found.folder for found in whole_checkpoints(run_dir, {}, problems)}
    for problem in problems:
        print(f"not compared: {problem}")
    incarnations = incarnations_of(plan, reports, folders)
    data, stages = run_inputs.token_file(config.data.path), range(plan.n_stages)
    options = dict(devices=DEVICES.value, vocab_size=data.vocab_size)
    functions = [stage_functions(config, plan, stage, **options) for stage in stages]
    if config.init.digest:
        functions = [begun_with_model(config, one) for one in functions]
    arithmetic = StageArithmetic(config, plan, functions, data, VectorCodec(config.sync.codec_spec))
    replay = Replay(config, plan, arithmetic, incarnations)
    fresh = [arithmetic.fresh_state(stage) for stage in stages]
    begin(replay, config.model, fresh, fields_of(reports, StepReport.kind))
    log = RunLog(run_dir, plan, reports, frozenset(folders), incarnations)
    what, states_of = REPLAYS[config.sync.kind](replay, log)
    ends = [(one, incarnations.n_steps[number]) for number, one in enumerate(incarnations.all)]
    steps = ", ".join(f"{steps_of(one, n)} of pipeline {one.pipeline}" for one, n in ends)
    print(f"replayed {what} and local steps {steps}")
    replayed = [version for version in sorted(folders) if version in states_of]
    found = [differs(folders[version], config.model, states_of[version]) for version in replayed]
    if not found:
        raise BadInput(
            f"run_dir: {run_dir}: the log made none of the checkpoints {sorted(folders)}, expected one of them"
        )
    return 1 if any(found) else 0


def begun_with_model(config: RunConfig, functions: StageFunctions) -> StageFunctions:
    """The functions of a stage, whose initial parameters are those of the model with which the run began."""

    def init(seed: int) -> Params:
        return {name: functions.place(tree) for name, tree in initial_params(config, list(functions.init(seed)))}

    return replace(functions, init=init)


def ready_reports(run_dir: Path) -> Iterator[trace.TraceRecord]:
    """The reports of the peers whose logs are here that they were ready to compute."""
    for path in sorted((run_dir / "trace").glob("peer_*.jsonl")):
        for record in trace.read(kept_lines(path), str(path)):
            if record["what"] == "report" and record["kind"] == ReadyReport.kind:
                yield record


def differs(folder: Path, model: ModelSpec, states: Sequence[tuple[Any, Any]]) -> bool:
    """Whether a checkpoint is not what was replayed; a line says so."""
    made = {
        name: entry for params, own in states for name, entry in split_entries((trained(model, params), own)).items()
    }
    n_unequal, n_numbers = compared(made, load_entries(folder))
    print(
        f"{folder}: {n_unequal} of {n_numbers} numbers differ" if n_unequal else f"{folder}: all {n_numbers} are equal"
    )
    return n_unequal > 0


def steps_of(one: Incarnation, n_steps: int) -> str:
    """For people, the local steps of a pipeline up to so many."""
    return str(n_steps) if one.donor is None else f"{one.first_step} to {n_steps}"


@dataclass(frozen=True)
class RunLog:
    """What is known of a run besides its config. `reports`: the coordinator's; `versions`: of the run's checkpoints."""

    run_dir: Path
    plan: Plan
    reports: list[trace.TraceRecord]
    versions: frozenset[int]
    incarnations: Incarnations

    def of_peer(self, peer: int, *kinds: type[Report]) -> list[Any]:
        """The reports of these kinds in a peer's own log, in their order."""
        path = self.run_dir / "trace" / f"peer_{peer}.jsonl"
        try:
            lines = kept_lines(path)
        except OSError as error:
            raise BadInput(f"run_dir: the log of peer {peer} is missing ({error})") from None
        by_name = {kind.kind: kind for kind in kinds}
        records = [record for record in trace.read(lines, str(path)) if record["what"] == "report"]
        return [by_name[record["kind"]](**record["fields"]) for record in records if record["kind"] in by_name]


StatesOf = dict[int, list[tuple[Any, Any]]]  # version -> the state of each stage


def replay_groups(replay: Replay, log: RunLog) -> tuple[str, StatesOf]:
    """Averaging groups: what was replayed, and the states in the checkpoints."""
    groups = [GroupReport(**fields) for fields in fields_of(log.reports, GroupReport.kind)]
    for line in mixing_lines(log.plan, groups):
        print(line)
    means = {(mean.version, mean.stage): mean for mean in checkpoint_means(log.reports, log.versions)}
    replay.run(log.incarnations.n_steps, groups, keep=list(means.values()))
    stages = range(log.plan.n_stages)
    whole = [version for version in log.versions if all((version, stage) in means for stage in stages)]
    states_of = {version: [replay.mean_state(means[version, stage]) for stage in stages] for version in whole}
    return f"{len(groups)} groups", states_of


def replay_servers(replay: Replay, log: RunLog) -> tuple[str, StatesOf]:
    """The same for pushes to servers and pulls from them. Of several workers of a stage that have kept a version for a
    checkpoint the last one counts: the others were lost."""
    plan = log.plan
    logs = [log.of_peer(server, PushReport, PullReport, SnapshotReport) for (server,) in plan.roles.servers]
    found = [one for row in plan.placement for worker in row for one in log.of_peer(worker, KeptReport)]
    kept = {(one.version, one.stage): one for one in found if one.version in log.versions}
    replay.run(log.incarnations.n_steps, logs=logs, keep=list(kept.values()))
    acts = [act for of_stage in logs for act in of_stage if not isinstance(act, SnapshotReport)]
    n_pushes = sum(isinstance(act, PushReport) for act in acts)
    kinds = (ViewReport.kind, RestartedReport.kind)
    views = [report["fields"] for report in log.reports if report["kind"] in kinds]
    members = {int(peer) for peer in views[-1]["members"]}
    last = [min(peer for peer in row if peer in members) for row in plan.placement]
    states = [replay.states[plan.seat(worker)] for worker in last]
    states_of = {replay.n_rows: [replay.served_state(stage, state) for stage, state in enumerate(states)]}
    stages = range(plan.n_stages)
    for version in log.versions:
        if all((version, stage) in kept for stage in stages):
            aside = replay.snapshots[version, True]
            workers = [replay.states_of(kept[version, stage])[0] for stage in stages]
            states_of[version] = [replay.served_state(s, state, aside[s].vector) for s, state in enumerate(workers)]
    return f"{n_pushes} pushes, {len(acts) - n_pushes} pulls", states_of


def begin(replay: Replay, model: ModelSpec, like: Sequence[tuple[Any, Any]], rows: list[dict[str, Any]]) -> None:
    """A run that was resumed begins with a checkpoint; `like`: states of each stage."""
    first = rows[0]["step"] if rows else 0
    if not START.value:
        if first:
            raise BadInput(
                f"--start: got no checkpoint, and the log begins after {first} steps: the run was resumed there, or it "
                "is so long that the beginning of its log is gone"
            )
        return
    folder = Path(START.value)
    version = complete_record(folder).checkpoint.version
    if version != first:
        raise BadInput(f"--start: {folder} has {version} steps, the log of the run begins after {first}")
    entries = load_entries(folder)
    states = [(params, join_entries(entries, (trained(model, params), own))) for params, own in like]
    replay.begin(version, [(with_trained(params, part), own) for params, (part, own) in states])


REPLAYS = {"groups": replay_groups, "server": replay_servers}


if __name__ == "__main__":
    script_main.run(main)
