"""`python -m planner replan --run_dir`: what the folder of a run says of its members, their links and their devices."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jaxdt.membership.coordinator_config import LastView
from jaxdt.membership.run_state import VIEW
from jaxdt.protocol import events as ev
from jaxdt.protocol import trace
from jaxdt.run import codec as codecs
from jaxdt.run import config as configs
from jaxdt.run import network as networks
from jaxdt.run import plan as plans
from jaxdt.run import serialize
from jaxdt.run.config import RunConfig
from jaxdt.run.errors import BadInput, shell_line, unreadable
from jaxdt.run.network import Network
from jaxdt.run.plan import Plan
from jaxdt.run.profile import NO_CODEC, DeviceKind, PartTimes, Profile
from jaxdt.run.run_folder import RunFolders, has_ended, kept_lines, launch_flags, read_json
from jaxdt.run.work import TIMED_AS, Work, WorkKind, parse_work
from planner.api.job import Job

FORWARD_FRAC = 1 / 3  # of the fused forward and backward of the last stage; only their sum counts there

NETWORK_FLAGS = ("emulate", "network")  # emulated links are the ones that a run has


@dataclass(frozen=True)
class RunToReplan:
    """A run whose members are to be planned for. `network`: the one before the change, in which the device of each peer
    of the plan is of a kind of its own; `profile`: the seconds of those kinds. `without`: devices of no member.
    `launched`: the flags of its launch."""

    folders: RunFolders
    config: RunConfig
    plan: Plan
    network: Network
    profile: Profile
    without: tuple[str, ...]
    launched: Mapping[str, str]

    @property
    def job(self) -> Job:
        """A step of the run, by the seconds of its own devices."""
        return Job(self.config, self.plan.n_stages, self.plan.n_pipelines, self.profile)

    def command(self, found: Plan, plan_file: str, network_file: str, is_running: bool) -> str:
        """The command that a person types to take the plan `found` of this file. A run that stands still makes no
        checkpoint, so it is interrupted."""
        job, run_dir = self.folders.job, self.folders.run_dir
        where = f"--run_dir={run_dir}" if job == run_dir else f"--emit={job}"
        given = [name for name in NETWORK_FLAGS if name in self.launched] or ["network"]
        networks = [f"--{name}={network_file}" for name in given]
        hosts = [f"--hosts={','.join(self._hosts(found))}"] if self.launched.get("hosts") else []
        launch = shell_line("python", "scripts/launch.py", where, "--resume", f"--plan={plan_file}", *networks, *hosts)
        if has_ended(run_dir):
            return launch
        if not is_running:
            return f"interrupt the run, then {launch}"
        return f"{shell_line('python', 'scripts/fleet.py', 'stop', f'--run_dir={run_dir}')} && {launch}"

    def _hosts(self, found: Plan) -> list[str]:
        """The addresses of a plan's peers, in their order; only a person knows that of an added device."""
        addresses = self.launched["hosts"].split(",")
        known = {self.plan.devices[peer]: host for peer, host in zip(sorted(self.plan.peers), addresses, strict=True)}
        names = [found.devices[peer] for peer in sorted(found.peers)]
        return [known.get(name, f"ADDRESS_OF_{name}") for name in names]


def read(folder: str, network_file: str | None) -> RunToReplan:
    """Reads the folder of a run that goes on or has ended. `network_file`: its links, where they are not those that the
    run was launched with. BadInput in one line for what is missing."""
    folders = RunFolders.of(Path(folder))
    run_dir = folders.run_dir
    config, plan = _config(run_dir / "config.json"), plans.load(run_dir / "plan.json")
    if plan.roles:
        raise BadInput(f"plan.roles: got {', '.join(plan.roles.used)}, which `replan` does not know, expected none")
    launched = launch_flags(folders.job)
    path = network_file or next((launched[name] for name in NETWORK_FLAGS if launched.get(name)), None)
    if not path:
        raise BadInput(
            f"--network: missing, since {folders.job} was launched with none, expected the links between the devices "
            "(measure.py links writes them)"
        )
    network = _of_plan(networks.load(path), plan, path)
    names = tuple(device.name for device in network.devices)
    members = _members(run_dir)
    if unknown := sorted(set(members) - set(plan.peers)):
        newcomers = ", ".join(map(str, unknown))
        raise BadInput(f"{path}: does not say which devices the newcomers {newcomers} are, expected a run without any")
    devices = tuple(replace(one, kind=one.name) if d in plan.peers else one for d, one in enumerate(network.devices))
    kinds = {names[peer]: device_kind(config, plan, peer, _works(run_dir, member)) for peer, member in members.items()}
    size, seq_len = config.train.microbatch_size, config.data.seq_len
    return RunToReplan(
        folders=folders,
        config=config,
        plan=replace(plan, devices=names),
        network=replace(network, devices=devices),
        profile=Profile(config.model, size, kinds, config.dtype, config.remat, str(run_dir), seq_len),
        without=tuple(name for d, name in enumerate(names) if d not in members),
        launched=launched,
    )


def _config(path: Path) -> RunConfig:
    try:
        fields = serialize.parse_json(path.read_bytes())
    except OSError as error:
        raise unreadable(path, error) from None
    except ValueError as error:
        raise BadInput(f"{path}: not JSON ({error}), expected what a run wrote") from None
    if not serialize.is_object(fields):
        raise BadInput(f"{path}: got {fields!r:.40}, expected an object")
    return configs.parse(fields)


def _of_plan(network: Network, plan: Plan, path: str) -> Network:
    """The network, checked: a peer's id is the index of its device."""
    names = tuple(device.name for device in network.devices)
    if plan.devices and plan.devices != names:
        raise BadInput(f"{path}: devices: differ from those of the run's plan, expected {', '.join(plan.devices)}")
    network.require_devices(plan.peers, path)
    return network


def _members(run_dir: Path) -> dict[int, ev.Member]:
    """The members of the last view."""
    path = run_dir / "coordinator" / f"{VIEW}.json"
    if not path.exists():
        raise BadInput(f"{path}: missing, expected the folder of a run that has begun, on its coordinator's host")
    view = serialize.read_known(LastView, read_json(path), str(path))
    return {member.peer: member for member in view.members}


def _works(run_dir: Path, member: ev.Member) -> list[tuple[Work, float]]:
    """The Work of a member's first steps, with its seconds."""
    path = run_dir / "trace" / f"peer_{member.peer}.jsonl"
    try:
        records = trace.read(kept_lines(path), str(path))
        return [(parse_work(one["work"]), one["s"]) for one in records if one["what"] == "run"]
    except FileNotFoundError:
        host = member.address.rpartition(":")[0] or "its host"
        raise BadInput(f"{path}: missing, expected the timings of peer {member.peer}; bring it from {host}") from None


def device_kind(config: RunConfig, plan: Plan, peer: int, works: Sequence[tuple[Work, float]]) -> DeviceKind:
    """Seconds of a layer on a peer's device: the medians of the Work of its stage, in equal parts for its layers, with
    what embedding and head add on the first and the last stage. The timings hold encoding and decoding already."""
    timed: Mapping[WorkKind, list[float]] = defaultdict(list)
    stage = works[-1][0].stage if works else 0  # a peer may have moved to it
    for work, seconds in works:
        if work.stage == stage:
            timed[work.kind].append(seconds)
    if not timed[WorkKind.FORWARD] or not timed[WorkKind.BACKWARD] or stage >= plan.n_stages:
        raise BadInput(f"the trace of peer {peer} has no forward and backward of a stage, expected those of a step")
    lo, hi = plan.stages[stage]
    forward_s, backward_s = _median_s(timed, WorkKind.FORWARD), _median_s(timed, WorkKind.BACKWARD)
    if hi == plan.n_layers:  # its forward is fused into its backward
        forward_s, backward_s = FORWARD_FRAC * backward_s, (1 - FORWARD_FRAC) * backward_s
    n_layers, n_runs = hi - lo, config.model.facts.n_runs(lo, hi)
    gather_s, update_s = (_median_s(timed, kind) / n_runs for kind in (WorkKind.GATHER, WorkKind.UPDATE))
    layer = PartTimes(forward_s / n_layers, backward_s / n_layers, gather_s, update_s)
    return DeviceKind(layer, codecs=dict.fromkeys(codecs.FAMILIES, NO_CODEC))


def _median_s(timed: Mapping[WorkKind, list[float]], kind: WorkKind) -> float:
    """Of Work of this kind, else of the kinds that take as long; 0 where a run has none."""
    alike = [seconds for other, as_kind in TIMED_AS.items() if as_kind == kind for seconds in timed[other]]
    return statistics.median(timed[kind] or alike or [0.0])
