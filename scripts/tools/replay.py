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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from absl import flags
from replayed_log import checkpoint_means, compared, fields_of, incarnations_of, peers_by_threads, take_threads

from jaxdt.cli import environment, run_flags, run_inputs
from jaxdt.model.data import TokenFile
from jaxdt.model.group_replay import GroupReplay, LoggedGroup, logged_group, mean_tree
from jaxdt.model.server_replay import ServerAct, ServerReplay, SnapshotAct
from jaxdt.model.stage import StageFunctions
from jaxdt.protocol import trace
from jaxdt.protocol.incarnations import Incarnation, Incarnations
from jaxdt.protocol.reports import (
    GroupReport,
    KeptReport,
    PullReport,
    PushReport,
    ReadyReport,
    RestartedReport,
    SnapshotReport,
    StateMeanReport,
    StepReport,
    ViewReport,
)
from jaxdt.run import config as configs
from jaxdt.run import plan as plans
from jaxdt.run.config import RunConfig
from jaxdt.run.errors import BadInput
from jaxdt.run.plan import Plan
from jaxdt.run.run_folder import kept_lines
from jaxdt.run.serialize import parse_json
from jaxdt.runtime.storage.checkpoint import complete_record, newest_whole, whole_checkpoints
from jaxdt.runtime.storage.entries import join_entries, load_entries, split_entries
from jaxdt.runtime.storage.store import stage_functions
from jaxdt.sync.matching.mixing import mixing_lines

DEVICES = flags.DEFINE_integer("devices", 1, "Local devices of each stage, as in the run.", 1)
START = flags.DEFINE_string("start", None, "Folder of the checkpoint with which a run began that was resumed.")


def main() -> int:
    environment.compute_on_cpu()
    run_flags.required("run_dir")
    run_dir = Path(run_flags.RUN_DIR.value)
    try:
        config = configs.parse(parse_json((run_dir / "config.json").read_text()))
        lines = kept_lines(run_dir / "trace" / "coordinator.jsonl")
    except (OSError, ValueError) as error:
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
    functions = [stage_functions(config, plan, stage, DEVICES.value) for stage in range(plan.n_stages)]
    place = ReplayPlace(run_dir, plan, functions, run_inputs.token_file(config.data.path), frozenset(folders))
    what, states_of = REPLAYS[config.sync.kind](config, place, reports, incarnations)
    ends = [(one, incarnations.n_steps[number]) for number, one in enumerate(incarnations.all)]
    steps = ", ".join(f"{steps_of(one, n)} of pipeline {one.pipeline}" for one, n in ends)
    print(f"replayed {what} and local steps {steps}")
    found = [differs(folders[version], states_of[version]) for version in sorted(folders) if version in states_of]
    if not found:
        raise BadInput(
            f"run_dir: {run_dir}: the log made none of the checkpoints {sorted(folders)}, expected one of them"
        )
    return 1 if any(found) else 0


def ready_reports(run_dir: Path) -> Iterator[trace.TraceRecord]:
    """The reports of the peers whose logs are here that they were ready to compute."""
    for path in sorted((run_dir / "trace").glob("peer_*.jsonl")):
        for record in trace.read(kept_lines(path), str(path)):
            if record["what"] == "report" and record["kind"] == ReadyReport.kind:
                yield record


def differs(folder: Path, states: Sequence[tuple[Any, Any]]) -> bool:
    """Whether a checkpoint is not what was replayed; a line says so."""
    made = {name: entry for state in states for name, entry in split_entries(state).items()}
    n_unequal, n_numbers = compared(made, load_entries(folder))
    print(
        f"{folder}: {n_unequal} of {n_numbers} numbers differ" if n_unequal else f"{folder}: all {n_numbers} are equal"
    )
    return n_unequal > 0


def steps_of(one: Incarnation, n_steps: int) -> str:
    """For people, the local steps of a pipeline up to so many."""
    return str(n_steps) if one.donor is None else f"{one.first_step} to {n_steps}"


@dataclass(frozen=True)
class ReplayPlace:
    """The inputs of a replay beside the config and the log of the run. `versions`: of the run's checkpoints."""

    run_dir: Path
    plan: Plan
    functions: Sequence[StageFunctions]
    data: TokenFile
    versions: frozenset[int]


def replay_groups(
    config: RunConfig, place: ReplayPlace, reports: list[trace.TraceRecord], incarnations: Incarnations
) -> tuple[str, dict[int, list[tuple[Any, Any]]]]:
    """Averaging groups: what was replayed, and the state of each stage in the checkpoints, by version."""

    def logged(report: GroupReport | StateMeanReport) -> LoggedGroup:
        return logged_group(place.plan, incarnations, report)

    formed = [GroupReport(**fields) for fields in fields_of(reports, GroupReport.kind)]
    for line in mixing_lines(place.plan, formed):
        print(line)
    groups = [logged(report) for report in formed]
    means = {(mean.version, mean.stage): logged(mean).places for mean in checkpoint_means(reports, place.versions)}
    replay = GroupReplay(config, place.plan, place.functions, place.data, incarnations)
    begin(replay, [row[0] for row in replay.states], fields_of(reports, StepReport.kind))
    kept = replay.run(groups, incarnations.n_steps, {member for places in means.values() for member in places})
    states_of: dict[int, list[tuple[Any, Any]]] = {}
    for version in place.versions:
        places_of = [means.get((version, stage), []) for stage in range(place.plan.n_stages)]
        if all(places_of):
            states_of[version] = [mean_tree([kept[member] for member in places]) for places in places_of]
    return f"{len(groups)} groups", states_of


def replay_servers(
    config: RunConfig, place: ReplayPlace, reports: list[trace.TraceRecord], incarnations: Incarnations
) -> tuple[str, dict[int, list[tuple[Any, Any]]]]:
    """The same replay for pushes to servers and pulls from them, and for all checkpoints."""
    plan = place.plan
    logs = [server_log(place, server) for (server,) in plan.roles.servers]
    kept = [kept_by_workers(place, row) for row in plan.placement]
    replay = ServerReplay(config, plan, place.functions, place.data)
    like = [replay.state(stage, row) for stage, row in enumerate(plan.placement)]
    begin(replay, like, fields_of(reports, StepReport.kind))
    moments = {of_stage[version] for of_stage in kept for version in of_stage if version in place.versions}
    n_steps = {
        p: max([n, *(step for pipeline, step in moments if pipeline == p)]) for p, n in incarnations.n_steps.items()
    }
    replay.run(logs, n_steps, moments)
    acts = [act for log in logs for act in log if isinstance(act, ServerAct)]
    n_pushes = sum(act.is_push for act in acts)
    what = f"{n_pushes} pushes, {len(acts) - n_pushes} pulls"
    views = [report["fields"] for report in reports if report["kind"] in (ViewReport.kind, RestartedReport.kind)]
    members = {int(peer) for peer in views[-1]["members"]}
    states_of = {config.train.steps: [replay.state(stage, members) for stage in range(plan.n_stages)]}
    for version in set.intersection(*(set(of_stage) for of_stage in kept)) & place.versions:
        states_of[version] = [replay.kept(version, stage, *kept[stage][version]) for stage in range(plan.n_stages)]
    return what, states_of


def server_log(place: ReplayPlace, server: int) -> list[ServerAct | SnapshotAct]:
    """The acts of a server, in their order."""
    acts: list[ServerAct | SnapshotAct] = []
    for record in peer_records(place, server):
        kind, fields = record["kind"], record["fields"]
        if kind in (PushReport.kind, PullReport.kind):
            pipeline = place.plan.seat(fields["worker"])[1]
            acts.append(ServerAct(kind == PushReport.kind, pipeline, fields["step"]))
        elif kind == SnapshotReport.kind:
            acts.append(SnapshotAct((fields["version"], fields["is_checkpoint"]), fields["cut"]))
    return acts


def kept_by_workers(place: ReplayPlace, workers: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Version -> the pipeline and the local steps of the worker of a stage that has kept it for a checkpoint: the last
    of several, of whom the others were lost."""
    kept: dict[int, tuple[int, int]] = {}
    for pipeline, worker in enumerate(workers):
        found = [record["fields"] for record in peer_records(place, worker) if record["kind"] == KeptReport.kind]
        kept |= {fields["version"]: (pipeline, fields["step"]) for fields in found}
    return kept


def peer_records(place: ReplayPlace, peer: int) -> list[trace.TraceRecord]:
    """The reports of a peer, in their order."""
    path = place.run_dir / "trace" / f"peer_{peer}.jsonl"
    try:
        lines = kept_lines(path)
    except OSError as error:
        raise BadInput(f"run_dir: the log of peer {peer} is missing ({error})") from None
    return [record for record in trace.read(lines, str(path)) if record["what"] == "report"]


def begin(replay: GroupReplay | ServerReplay, like: Sequence[tuple[Any, Any]], rows: list[dict[str, Any]]) -> None:
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
    replay.begin(version, [join_entries(entries, state) for state in like])


REPLAYS = {"groups": replay_groups, "server": replay_servers}


if __name__ == "__main__":
    run_flags.run(main)
