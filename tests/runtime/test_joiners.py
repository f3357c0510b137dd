"""Processes that do not belong, against a real run: both sides say why in one line, and the run does not notice."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fleets import MANY_STEPS, N_STEPS, ONE_PROCESS, ROOT, SWARM
from fork_server import Forked

from jaxdt.build import RunStart, build_newcomer
from jaxdt.model.data import write_tokens
from jaxdt.protocol import events as ev
from jaxdt.protocol.trace import Trace
from jaxdt.run import config as configs
from jaxdt.run import plan as plans
from jaxdt.run.errors import BadInput
from jaxdt.runtime.identity import authority
from jaxdt.runtime.identity.credential import load as load_credential
from jaxdt.runtime.joining import ask_to_join, credential_for
from jaxdt.runtime.loop import Loop
from jaxdt.runtime.net.address import parse_address
from jaxdt.runtime.run_dir import job_flags, peer_credential, token_flag
from jaxdt.runtime.storage.checkpointer import Checkpointer

SLOW = ("--emulate_forward_s=0.05",)  # the steps that are compared last until all have been refused
OF_ANOTHER_CONFIG = "peer 0: coordinator: run: a process that asks to be a peer is of run '"
COORDINATE = str(ROOT / "scripts/coordinate.py")
TRAIN = str(ROOT / "scripts/train.py")
OTHER_VERSION = f"""
import runpy, sys
from jaxdt.runtime.net import frame

frame.VERSION = 9
sys.path.insert(0, {str(ROOT / "scripts")!r})
runpy.run_path({TRAIN!r}, run_name="__main__")
"""


def come_with_another_shape(address: str, token: Path, run_dir: Path) -> ev.Stop:
    """A newcomer whose libraries make another optimizer state of the same config: 1000 words."""
    credential = credential_for(token, parse_address("coordinator", address))
    welcome = ask_to_join(parse_address("coordinator", address), credential)
    config = configs.parse(json.loads(welcome.job["config"]))
    plan = plans.parse(welcome.job["plan"], "plan")
    machine = build_newcomer(config, plan, welcome.peer, welcome.stage, RunStart(welcome.run))
    fitting = dataclasses.replace(machine.membership.identity, fingerprint=welcome.fingerprint)
    machine.membership.identity = fitting
    checkpointer = Checkpointer(run_dir, welcome.run, {}, 1, (plan.n_stages, welcome.stage))
    loop = Loop(welcome.peer, machine, Trace(lambda line: None, 0), lambda report: None, checkpointer)
    host, port = loop.open_transport(
        f"{welcome.run}, {welcome.fingerprint}",
        listen=("127.0.0.1", 0),
        credential=load_credential(credential),
        incarnation=loop.process,
    )
    loop.transport.connect(ev.COORDINATOR, parse_address("coordinator", address))
    loop.tensors = Keeps()
    loop.post(ev.Ready({}, 1000))
    return loop.run(f"{host}:{port}")


def refuse_strangers(fleet, tmp_path):
    """Each of them is told why in one line."""
    address, token = (fleet.run_dir / "coordinator_address").read_text(), token_flag(fleet.run_dir, "newcomer")
    folder = lambda name: f"--run_dir={tmp_path / name}"  # noqa: E731
    join = (f"--join={address}", folder("newcomer"))
    authority.create_run(tmp_path / "other" / "credentials")
    tokens = write_tokens(tmp_path / "other.tok", "bytes", 256, np.arange(4000) % 256, np.arange(1000) % 256)
    (tmp_path / "other_version.py").write_text(OTHER_VERSION)
    job = job_flags(fleet.run_dir)
    peer = [TRAIN, "--peer=0", *job, f"--coordinator={address}"]
    own = peer_credential(fleet.run_dir, 0)
    commands = {
        "coordinator 127.0.0.1:": [TRAIN, *join, token_flag(tmp_path / "other", "newcomer")],
        "--data: ": [TRAIN, *join, token, f"--data={tokens.path}"],
        "--join: coordinator 127.0.0.1:": [str(tmp_path / "other_version.py"), *join, token],
        OF_ANOTHER_CONFIG: [*peer, own, folder("other_config"), "--config.model.d_ff=128"],
        "peer 0 (stage 0): runs at 127.0.0.1:": [*peer, own, folder("second")],
        "peer 0: coordinator: ": [*peer, peer_credential(tmp_path / "other", 0), folder("intruder")],
        "run_dir: ": [COORDINATE, *job, f"--run_dir={fleet.run_dir}"],
    }
    said = []
    for expected, command in commands.items():
        stranger = Forked([sys.executable, *command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        error = stranger.communicate()[1]
        said.append(error.strip().splitlines()[-1])
        assert stranger.returncode == 2 and said[-1].startswith(expected), (expected, stranger.returncode, error)
    assert "protocol version: got " in said[2] and "expected 9" in said[2]
    assert "and answers; a second one, 127.0.0.1:0 (process " in said[4]
    assert "has a coordinator already (process " in said[6]
    other = Path(token_flag(fleet.run_dir, "other").removeprefix("--token="))
    stop = come_with_another_shape(address, other, tmp_path / "newcomer")
    assert stop.code == 2 and "asks for words 0..1000 of a state that has" in stop.reason, stop


@pytest.mark.timeout(600)
def test_who_does_not_belong_is_refused_and_a_resumed_run_outlives_its_coordinators(
    launched, resumable, alone, tmp_path
):
    """Newcomers that do not belong; a second coordinator, a second process of a peer, and one of another run and of
    another config; then the run's own coordinator is killed, terminated, and ended by another signal."""
    begins_at = 20
    began_from = resumable(begins_at) / f"checkpoints/{begins_at:08d}"
    fleet = launched(*ONE_PROCESS, "--resume", *SWARM, *MANY_STEPS, *SLOW, "--config.train.keep_checkpoints=1")
    fleet.wait_for_step(begins_at + 3)
    assert began_from.exists(), "a peer that is started again begins with it"
    shutil.rmtree(began_from)  # the coordinator does without
    n_steps = len(fleet.losses())
    refuse_strangers(fleet, tmp_path)
    fleet.wait_for_step(len(fleet.losses()) + 2)  # steps wait for a joining peer, so it has been put out by then
    for number in (signal.SIGKILL, signal.SIGTERM):
        before = fleet.losses()
        os.kill(fleet.coordinator(), number)
        fleet.wait_for_step(len(before) + 3)
        assert fleet.losses()[: len(before)] == before
    os.kill(fleet.coordinator(), signal.SIGUSR1)  # a failure, which no new start would mend
    assert fleet.ended(timeout_s=60) == 3, fleet.output
    # The newcomer of another config refuses the coordinator too, and may hang up before it is refused.
    reasons = ["is of another run", "protocol version: got 9", "asks for words 0..1000", "refused"]
    for reason in reasons:
        assert reason in fleet.output.lower(), fleet.output
    assert "coordinator: killed, started again" in fleet.output
    assert "coordinator: terminated, started again" in fleet.output
    assert "coordinator: lost, " in fleet.output
    assert "peer 0 (stage 0): lost, " not in fleet.output
    n_steps_compared = min(len(fleet.losses()), N_STEPS)
    assert n_steps_compared > n_steps + 2
    assert fleet.losses()[:n_steps_compared] == pytest.approx(alone.losses()[:n_steps_compared], rel=1e-5)


class Keeps:
    """Tensors of a peer, as far as their shapes are asked for."""

    def expect(self, body, table):
        return [np.zeros(3, np.int32)]

    def free(self, step, rounds):
        """It keeps nothing of steps that are over."""

    def discard(self, key):
        """A download begins, and nothing of one before is here."""


class Asks:
    """A machine that fetches a slice from peer 1."""

    def handle(self, now_s, event):
        return [ev.Send(1, ev.Fetch(ev.StateKey(4, 0, 2)), header=ev.Header("r", 0, 1, 0))]


def test_a_slice_of_state_is_taken_only_from_whom_it_was_asked_of():
    class Nowhere:
        def pack(self, head):
            return [head]

        def send(self, *arguments, **options):
            return True

    loop = Loop(0, Asks(), Trace(lambda line: None, 0), lambda report: None)
    loop.tensors, loop.transport = Keeps(), Nowhere()
    table = [(np.dtype(np.int32), (3,))]
    answer = ev.Received(ev.Header("r", 0, 1, 1), ev.State(ev.StateKey(4, 0, 2)))
    with pytest.raises(BadInput, match="message.State: .* was not asked of peer 1"):
        loop.expect(1, answer, table)
    loop._handle(ev.Ready({}))
    assert len(loop.expect(1, answer, table)) == 1
    with pytest.raises(BadInput, match="was not asked of peer 2"):
        loop.expect(2, answer, table)
