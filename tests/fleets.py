"""Fleets of real processes, and what they are compared with."""

import functools
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
import pytest
from fork_server import Forked

from jaxdt.api.config import fields_of
from jaxdt.model.batches import Samples
from jaxdt.model.chain import Chain
from jaxdt.model.data import write_tokens
from jaxdt.run import config as configs
from jaxdt.runtime.compute_environment import ONE_THREAD
from jaxdt.runtime.run_dir import token_flag
from jaxdt.runtime.storage.entries import initial_params, load_entries
from jaxdt.runtime.storage.parts import step_folder
from jaxdt.runtime.storage.store import stage_functions

ROOT = Path(__file__).resolve().parents[1]
CONFIG = """
from jaxdt.config_file import base_config


def get_config():
    config = base_config("debug")
    config.model.n_layers = 2
    config.model.d_model = 32
    config.model.n_heads = 2
    config.model.d_ff = 64
    config.data.seq_len = 16
    config.model.tied_head = True
    config.plan.stages = 2
    config.plan.pipelines = 2
    config.plan.microbatches = 3
    config.train.microbatch_size = 2
    config.train.steps = 6
    config.train.checkpoint_every_steps = 2
    config.remat = "dots"
    config.data.path = {tokens!r}
    return config
"""
CHANGED = """import runpy, sys
sys.path[:0] = {paths!r}
{change}
runpy.run_path({script!r}, run_name="__main__")
"""
N_TOKENS = 50_000
N_STEPS = 120
STEPS = (f"--config.train.steps={N_STEPS}", "--config.train.checkpoint_every_steps=4", "--config.plan.microbatches=4")
# A checkpoint takes as long as several steps.
ENDLESS = (
    "--config.train.steps=100000",
    "--config.train.checkpoint_every_steps=4",
    "--config.train.keep_checkpoints=100000",
    "--config.train.checkpoint_on_stop=false",
    "--config.plan.microbatches=4",
)
# A run that ends when the test has seen what it waits for. Meanwhile it sleeps more than it computes.
MANY_STEPS = ("--config.train.steps=100000", "--emulate_forward_s=0.02")
ONE_PROCESS = ("--config.plan.stages=1", "--config.plan.pipelines=1")
QUICK = ("--config.net.heartbeat_s=0.2", "--config.net.deadline_floor_s=2.0")
SWARM = ("--config.wiring.kind=swarm", *QUICK)


def write_config(folder: Path) -> Path:
    """The config of these fleets. Its text is a small one of its own: every process of a run reads the text, and the
    corpus takes each a third of a second of processor time."""
    jumps = np.random.default_rng(0).integers(1, 4, N_TOKENS)
    tokens = np.cumsum(jumps) % 256
    file = write_tokens(folder / "text.tok", "bytes", 256, tokens[: N_TOKENS // 2], tokens[N_TOKENS // 2 :])
    path = folder / "config.py"
    path.write_text(CONFIG.format(tokens=str(file.path)))
    return path


def with_changes(folder: Path, changes: Mapping[str, str]) -> Path:
    """The folder, with variants of the scripts that do `changes[script]` first."""
    for script in ("train.py", "coordinate.py"):
        path = str(ROOT / "scripts" / script)
        paths = [str(ROOT / "tests"), str(ROOT / "scripts")]
        change = changes.get(script, "")
        (folder / script).write_text(CHANGED.format(paths=paths, change=change, script=path))
    return folder


def one_thread() -> dict[str, str]:
    """The variable with which processes compute on one thread each."""
    return {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {ONE_THREAD}"}


class Finished:
    """The folder of a run."""

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir

    def losses(self) -> list[float]:
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line)["loss"] for line in lines if line.endswith("}")]


class Launched(Finished):
    """A local fleet, whose processes are forks (fork_server.py); leaves nothing behind. `changes[script]` is done
    before a script of its processes. Peers compute on one thread each, on a machine with many cores too, so that their
    sums are those of a replay."""

    def __init__(
        self,
        tmp_path: Path,
        *flags: str,
        run_dir: str = "run",
        file_bytes_max: int = resource.RLIM_INFINITY,
        changes: Mapping[str, str] | None = None,
    ):
        super().__init__(tmp_path / run_dir)
        config = write_config(tmp_path)
        scripts = with_changes(tmp_path, changes) if changes else ROOT / "scripts"
        launcher = [sys.executable, str(ROOT / "tests/launch_from.py"), str(scripts), str(file_bytes_max)]
        self.process = Forked(
            [*launcher, f"--config={config}", f"--run_dir={self.run_dir}", "--report=false", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | one_thread(),
        )

    def ended(self, timeout_s: float = 240) -> int:
        self.output = self.process.communicate(timeout=timeout_s)[0]
        return self.process.returncode

    def kill(self) -> None:
        """End the launcher, if it runs; its children follow."""
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def children(self) -> dict[int, int]:
        """peer -> pid of the launcher's children that are peers, or workers of a pool."""
        prefix = "--peer="
        words = ((pid, word) for pid, words in self._commands() for word in words if word.startswith(prefix))
        return {int(word.removeprefix(prefix)): pid for pid, word in words}

    def workers(self) -> dict[int, int]:
        """worker -> pid of the launcher's children that are a pool's workers."""
        pids = {pid for pid, words in self._commands() if "--as=worker" in words}
        return {worker: pid for worker, pid in self.children().items() if pid in pids}

    def coordinator(self) -> int:
        """Its pid."""
        return next(pid for pid, words in self._commands() if any(word.endswith("coordinate.py") for word in words))

    def _commands(self) -> list[tuple[int, list[str]]]:
        """pid and command line of the launcher's children."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue
            if parent == self.process.pid:
                found.append((int(entry.name), words))
        return found

    def wait_for_step(self, n: int, timeout_s: float = 120) -> None:
        deadline_s = time.monotonic() + timeout_s
        while len(self.losses()) < n:
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline_s
            time.sleep(0.05)

    def wait_for(self, true, what: str, timeout_s: float = 60) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not true():
            assert self.process.poll() is None, (what, self.process.communicate()[0])
            assert time.monotonic() < deadline_s, what
            time.sleep(0.05)

    def views(self, peer: int) -> int:
        """The number of views that a peer of the plan has adopted."""
        return (self.run_dir / "logs" / f"peer_{peer}.log").read_text().count(" is in view ")

    def last_line(self, peer: int) -> str:
        return (self.run_dir / "logs" / f"peer_{peer}.log").read_text().strip().splitlines()[-1]


class Churning(Launched):
    """An elastic fleet and its newcomers."""

    newcomer: subprocess.Popen | None = None
    n_newcomers = 0

    def join(self) -> None:
        """A newcomer that has the state when this returns."""
        self.ask_to_join()
        self.wait_for_download()

    def wait_for_download(self) -> None:
        """Until the newcomer has the state."""
        self.wait_for(lambda: " has the state of step " in self.log.read_text(), "the newcomer's download")

    def end(self) -> None:
        """End the fleet and its newcomer, if they run."""
        self.kill()
        if self.newcomer:
            self.newcomer.kill()
            self.newcomer.wait()

    def ask_to_join(self, *flags: str) -> None:
        """Start a newcomer, with one token and one address."""
        address = (self.run_dir / "coordinator_address").read_text()
        command = [sys.executable, str(ROOT / "scripts/train.py"), f"--join={address}"]
        self.n_newcomers += 1
        command += [token_flag(self.run_dir, f"newcomer_{self.n_newcomers}"), f"--run_dir={self.run_dir}", *flags]
        self.log = self.run_dir.parent / "newcomer.log"
        with self.log.open("w") as log:
            self.newcomer = Forked(command, stdout=log, stderr=log)

    def reports(self, kind: str) -> list[dict]:
        """The fields of the coordinator's reports of a kind."""
        lines = (self.run_dir / "trace" / "coordinator.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines if line.endswith("}")]
        return [record["fields"] for record in records if record["what"] == "report" and record["kind"] == kind]


def alive(pids) -> list[int]:
    """Those that have not ended, whether or not somebody has asked for their exit codes."""
    stats = [(pid, Path(f"/proc/{pid}/stat")) for pid in pids]
    return [pid for pid, stat in stats if stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"]


def parameters(run_dir: Path, version: int = N_STEPS) -> dict:
    return {name: entry["params"] for name, entry in load_entries(step_folder(run_dir, version)).items()}


def relative_l2(got, expected) -> float:
    square = lambda tree: sum(float(np.sum(np.square(leaf, dtype=np.float64))) for leaf in jax.tree.leaves(tree))  # noqa: E731
    difference = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), got, expected)
    return (square(difference) / square(expected)) ** 0.5


def assert_equal(fleet: Finished, one: Finished) -> None:
    """The same losses as the run of one process, which did N_STEPS, and the same parameters at the newest checkpoint
    that both have."""
    n_steps = min(len(fleet.losses()), N_STEPS)
    assert n_steps > 0 and len(one.losses()) == N_STEPS
    assert fleet.losses()[:n_steps] == pytest.approx(one.losses()[:n_steps], rel=1e-5)
    version = max(version for version in versions(fleet.run_dir) if version <= N_STEPS)
    assert relative_l2(parameters(fleet.run_dir, version), parameters(one.run_dir, version)) < 1e-4


def replayed(run_dir: Path, *flags: str) -> str:
    """What scripts/tools/replay.py prints of a run, which must be equal to its replay. It finds the programs that the
    peers have compiled."""
    command = [sys.executable, str(ROOT / "scripts/tools/replay.py"), f"--run_dir={run_dir}", *flags]
    environment = os.environ | one_thread() | {"JAX_COMPILATION_CACHE_DIR": os.path.expanduser("~/.cache/jaxdt")}
    process = Forked(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 0 and "are equal" in said, said
    return said


def trained_in_one_process(run):
    """(losses, parameters) after the steps of a run that `jaxdt.api.launch.check` has checked, by the functions of the
    whole model."""
    config, train, n = run.config, run.config.train, run.config.plan.microbatches
    alone = configs.parse({**fields_of(config), "plan": {"microbatches": n}})
    functions = stage_functions(alone, configs.default_plan(alone), 0)
    chain = Chain([functions], train.seed, config.optim.clip_norm)
    if config.init.path:
        chain.params = [dict(initial_params(config, [entry.name for entry in config.model.facts.entries]))]
    samples = functools.partial(Samples(run.data, train, n, config.data.borders).train, train.seed)
    together, seq_len = range(n), config.seq_len
    losses = [chain.step([samples(step, m, seq_len, together) for m in together]) for step in range(train.steps)]
    return losses, chain.params[0]


def versions(run_dir: Path) -> list[int]:
    """The versions of the complete checkpoints."""
    return [int(path.parent.name) for path in (run_dir / "checkpoints").glob("*/complete.json")]
