"""A search for a better plan of a run's members, by `python -m planner replan` in a child process of least priority.

The planner gets the run's config, its plan and network, and seconds of each peer's device, which follow from the peers'
own timings of their stages. Its plan stands in a new folder run_dir/replan/N; nothing refers to the plan before a
person takes it.
"""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jaxdt
from jaxdt.cli import run_inputs
from jaxdt.protocol.reports import ReplanReport
from jaxdt.run import codec as codecs
from jaxdt.run import network as networks
from jaxdt.run import plan as plans
from jaxdt.run import profile as profiles
from jaxdt.run import serialize
from jaxdt.run.config import ADVISE, RunConfig
from jaxdt.run.errors import BadInput, shell_line
from jaxdt.run.network import Network
from jaxdt.run.plan import Plan
from jaxdt.run.profile import NO_CODEC, DeviceKind, PartTimes, Profile
from jaxdt.run.work import WorkKind
from jaxdt.runtime.reporting.replan_advice import Seconds, StartSearch
from jaxdt.runtime.run_dir import CONFIG_PY
from jaxdt.runtime.run_folders import RunFolders
from jaxdt.runtime.run_job import RunJob

SEARCH_S = 10.0
CHILD_S = 180.0  # on first use the planner compiles its search, at the least priority
LEAST_PRIORITY = 19
GAIN_FRAC_MIN = 0.01  # the simulator is no more exact than that
FORWARD_FRAC = 1 / 3  # of the fused forward and backward of the last stage; only their sum counts there


@dataclass(frozen=True)
class RunToReplan:
    """The run whose members are to be replanned. `network`: its links, with the plan's devices; `emulates`: whether the
    run's transport emulates them."""

    config: RunConfig
    plan: Plan
    network: Network
    run_dir: Path
    emulates: bool


def searches(job: RunJob, network_file: str | None, emulate_file: str | None) -> StartSearch | None:
    """The function that starts searches, for a run whose config asks for advice; None without a network to search on.
    BadInput for a network without the plan's devices."""
    path = network_file or emulate_file
    if job.config.wiring.replan != ADVISE or path is None:
        return None
    network = run_inputs.network_of(path, job.plan)
    names = tuple(device.name for device in network.devices)
    if job.plan.devices and job.plan.devices != names:
        raise BadInput(f"{path}: devices: differ from those of the run's plan, expected {', '.join(job.plan.devices)}")
    run = RunToReplan(job.config, job.plan, network, job.run_dir, emulate_file is not None)
    return lambda present, seconds: ReplanSearch(run, present, seconds)


class ReplanSearch:
    """One search, for the members `present`; `seconds` as the coordinator knows them."""

    def __init__(self, run: RunToReplan, present: frozenset[int], seconds: Seconds):
        self._run = run
        self._present = sorted(present)
        self._seconds = seconds
        self._child: subprocess.Popen | None = None
        self._is_cancelled = False

    def cancel(self) -> None:
        """End the search."""
        self._is_cancelled = True
        if self._child is not None:
            self._child.kill()

    def run(self) -> ReplanReport:
        """Search; the report says what was found, or the planner's one line about what it cannot do."""
        folder = new_folder(self._run.run_dir / "replan")
        self._write_files(folder)
        self._plan(folder)
        plan = plans.load(folder / "plan.json")
        found = plan.found["replan"]
        step_s, step_s_now = plan.found["step_s"], found.get("unchanged_s")
        is_better = step_s_now is None or step_s < (1 - GAIN_FRAC_MIN) * step_s_now
        command = self._command(folder, step_s_now is not None) if is_better else None
        return ReplanReport(self._present, step_s_now, step_s, found["move_s"], command)

    def _write_files(self, folder: Path) -> None:
        """The planner's input. Each device is of a kind of its own, since each has been timed."""
        run = self._run
        peers = set(run.plan.peers)
        devices = tuple(
            replace(device, kind=device.name) if d in peers else device for d, device in enumerate(run.network.devices)
        )
        names = tuple(device.name for device in devices)
        kinds = {names[peer]: device_kind(run.config, run.plan, peer, self._seconds) for peer in self._present}
        train = run.config.train
        profile = Profile(run.config.model, train.microbatch_size, kinds, run.config.dtype, run.config.remat, "the run")
        content: Mapping[str, Any] = {
            "config.json": serialize.write(run.config),
            "from.json": plans.to_json(replace(run.plan, devices=names, found={})),
            "network.json": networks.to_json(replace(run.network, devices=devices)),
            "profile.json": profiles.to_json(profile),
        }
        for name, data in content.items():
            (folder / name).write_text(json.dumps(data) + "\n")
        (folder / "config.py").write_text(CONFIG_PY)

    def _plan(self, folder: Path) -> None:
        """Run the planner on the files of a folder; BadInput with its last line if it finds no plan."""
        flags = {"from": "from.json", "network": "network.json", "config": "config.py", "profile": "profile.json"}
        flags |= {"out": "plan.json", "out_network": "after.json"}
        words = [f"--{name}={folder / file}" for name, file in flags.items()]
        present = set(self._present)
        absent = [device.name for d, device in enumerate(self._run.network.devices) if d not in present]
        words += [f"--without={','.join(absent)}", "--objective=step_time", f"--time_limit_s={SEARCH_S}", "--unchanged"]
        root = str(Path(jaxdt.__file__).parents[1])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._child = child = subprocess.Popen(
            [sys.executable, "-m", "planner", "replan", *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,  # a signal for the coordinator is not for this process
        )
        os.setpriority(os.PRIO_PROCESS, child.pid, LEAST_PRIORITY)
        if self._is_cancelled:
            child.kill()
        try:
            _, errors = child.communicate(timeout=CHILD_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()
            raise BadInput(f"the planner took longer than {CHILD_S:.0f} s") from None
        if child.returncode:
            lines = errors.decode(errors="replace").strip().splitlines() or [f"exit code {child.returncode}"]
            raise BadInput(lines[-1].removeprefix("error: "))

    def _command(self, folder: Path, is_running: bool) -> str:
        """The command that a person types to take the plan. A run that stands still makes no checkpoint, and is
        interrupted."""
        run_dir = f"--run_dir={self._run.run_dir}"
        stop = f"{shell_line('python', 'scripts/fleet.py', 'stop', run_dir)} && "
        network = f"--{'emulate' if self._run.emulates else 'network'}={folder / 'after.json'}"
        job = RunFolders.of(self._run.run_dir).job
        where = run_dir if job == self._run.run_dir else f"--emit={job}"
        words = ("python", "scripts/launch.py", where, "--resume", f"--plan={folder / 'plan.json'}", network)
        return f"{stop if is_running else 'interrupt the run, then '}{shell_line(*words)}"


def new_folder(parent: Path) -> Path:
    """A new folder parent/N with the first number that is free: earlier ones may be what the run goes by."""
    for number in itertools.count(1):
        folder = parent / str(number)
        if not folder.exists():
            folder.mkdir(parents=True)
            return folder
    raise AssertionError("numbers do not end")


def device_kind(config: RunConfig, plan: Plan, peer: int, seconds: Seconds) -> DeviceKind:
    """Seconds of a layer on a peer's device: those of its stage, in equal parts for its layers, with what embedding and
    head add on the first and the last stage. The timings hold encoding and decoding already."""
    if peer not in seconds:
        raise BadInput(f"the timings of peer {peer} are not known; a coordinator that was started again has none")
    timed = seconds[peer]
    lo, hi = plan.stages[plan.seat(peer)[0]]
    forward_s, backward_s = timed[WorkKind.FORWARD], timed[WorkKind.BACKWARD]
    if hi == plan.n_layers:  # its forward is fused into its backward
        forward_s, backward_s = FORWARD_FRAC * backward_s, (1 - FORWARD_FRAC) * backward_s
    n_layers, n_runs = hi - lo, config.model.facts.n_runs(lo, hi)
    gather_s, update_s = (timed.get(kind, 0.0) / n_runs for kind in (WorkKind.GATHER, WorkKind.UPDATE))
    layer = PartTimes(forward_s / n_layers, backward_s / n_layers, gather_s, update_s)
    return DeviceKind(layer, codecs=dict.fromkeys(codecs.FAMILIES, NO_CODEC))
