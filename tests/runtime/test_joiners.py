"""Newcomers that do not belong, against a real run: both sides say why in one line, and the run does not notice."""

import dataclasses
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from fleets import ENDLESS, ROOT, SWARM, assert_equal
from forks import run_scripts

from jaxdt.build import RunStart, build_newcomer
from jaxdt.model.data import write_tokens
from jaxdt.protocol import events as ev
from jaxdt.protocol.trace import Trace
from jaxdt.run import config as configs
from jaxdt.run import plan as plans
from jaxdt.run.errors import BadInput
from jaxdt.run.plan import Plan
from jaxdt.runtime.compute_environment import MALLOC_ENVIRONMENT
from jaxdt.runtime.identity import authority
from jaxdt.runtime.identity.credential import load as load_credential
from jaxdt.runtime.joining import ask_to_join, credential_for
from jaxdt.runtime.loop import Loop
from jaxdt.runtime.net.address import parse_address
from jaxdt.runtime.run_dir import job_flags, peer_credential, token_flag
from jaxdt.runtime.storage.checkpointer import Checkpointer

PEER = "import jaxdt.cli.run_flags, jaxdt.runtime.peer_process"
UNEQUAL = Plan(2, ((0, 1), (1, 2)), ((1,), (0, 2)), (4,))  # as many microbatches as the run of one process has
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


def test_who_does_not_belong_is_refused_on_both_sides_and_harms_nobody(churning, alone, tmp_path, slow_links):
    """The plan has unequal numbers of replicas."""
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(plans.to_json(UNEQUAL)))
    fleet = churning(*ENDLESS, *SWARM, slow_links, f"--plan={plan}")
    fleet.wait_for_step(1)
    address, token = (fleet.run_dir / "coordinator_address").read_text(), token_flag(fleet.run_dir, "newcomer")
    elsewhere = f"--run_dir={tmp_path / 'newcomer'}"
    join = (f"--join={address}", elsewhere)
    authority.create_run(tmp_path / "other" / "credentials")
    tokens = write_tokens(tmp_path / "other.tok", "bytes", 256, np.arange(4000) % 256, np.arange(1000) % 256)
    (tmp_path / "other_version.py").write_text(OTHER_VERSION)
    flags = [*job_flags(fleet.run_dir), peer_credential(fleet.run_dir, 1), f"--coordinator={address}", elsewhere]
    commands = {
        "coordinator 127.0.0.1:": [TRAIN, *join, token_flag(tmp_path / "other", "newcomer")],
        "--data: ": [TRAIN, *join, token, f"--data={tokens.path}"],
        "--join: coordinator 127.0.0.1:": [str(tmp_path / "other_version.py"), *join, token],
        "peer 1: coordinator: run: a process that asks to be a peer is of run '": [
            *(TRAIN, "--peer=1", *flags, "--config.model.d_ff=128")
        ],
    }
    environment = os.environ | MALLOC_ENVIRONMENT | {"LD_PRELOAD": ""}
    results = run_scripts(list(commands.values()), PEER, tmp_path, environment)
    for expected, (code, _, said) in zip(commands, results, strict=True):
        assert code == 2 and said.splitlines()[-1].startswith(expected), (expected, code, said)
    assert "protocol version: got " in results[2][2] and "expected 9" in results[2][2]
    other = Path(token_flag(fleet.run_dir, "other").removeprefix("--token="))
    stop = come_with_another_shape(address, other, tmp_path / "newcomer")
    assert stop.code == 2 and "asks for words 0..1000 of a state that has" in stop.reason, stop
    fleet.wait_for_step(len(fleet.losses()) + 2)  # steps wait for a joining peer, so it has been put out by then
    fleet.process.send_signal(signal.SIGINT)
    assert fleet.ended() == 130, fleet.output
    # The newcomer of another config refuses the coordinator too, and may hang up before it is refused.
    reasons = ["is of another run", "protocol version: got 9", "asks for words 0..1000"]
    for reason in reasons:
        assert reason in fleet.output.lower(), fleet.output
    assert_equal(fleet, alone)


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
