"""A question to a coordinator that is not there or not the one that was meant: one line that says what to look at."""

import contextlib
import json
import os
import socket
import threading
from dataclasses import replace

import pytest

from jaxdt.protocol import events as ev
from jaxdt.run import serialize
from jaxdt.run.config import parse
from jaxdt.run.errors import BadInput
from jaxdt.runtime.coordinator_client import SAID_S, ask_coordinator, without_address
from jaxdt.runtime.identity import authority
from jaxdt.runtime.identity.credential import load
from jaxdt.runtime.joining import credential_for
from jaxdt.runtime.net.transport import Transport
from jaxdt.runtime.run_end import ended_run
from jaxdt.runtime.storage.checkpoint import about_run, mark_complete


@pytest.fixture
def stranger():
    """The address of a program that greets as an SSH server does."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection, contextlib.suppress(ConnectionError):
                connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
                while connection.recv(4096):
                    continue

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield server.getsockname()
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join()


@pytest.fixture
def coordinator(tmp_path):
    """The address of a coordinator of another run."""
    authority.create_missing(tmp_path / "theirs")
    credential = load(authority.coordinator_file(tmp_path / "theirs"))
    transport = Transport(-1, "theirs", on_message=lambda *_: None, listen=("127.0.0.1", 0), credential=credential)
    yield transport.start()
    transport.close(0.0)


@pytest.fixture
def own(tmp_path):
    authority.create_missing(tmp_path / "own")
    return tmp_path / "own"


def refusal(address, credentials, patience_s=0.0):
    path = authority.operator_file(credentials) if credentials else None
    with pytest.raises(BadInput) as refused:
        request = ev.OperatorRequest("status")
        ask_coordinator(
            "status", ev.OPERATOR_IDS + 1, request, address, load(path) if path else None, False, patience_s
        )
    return str(refused.value)


def test_where_nobody_listens_the_line_says_so(own, capsys):
    line = "status: coordinator 127.0.0.1:{}: nobody listens there: the run has ended, or its coordinator is"
    with socket.socket() as reserved:  # bound, so that no other process gets the port
        reserved.bind(("127.0.0.1", 0))
        address = reserved.getsockname()
        line = line.format(address[1])
        assert refusal(address, own).startswith(line)
        assert not capsys.readouterr().out
        assert refusal(address, own, SAID_S).startswith(line)
    assert capsys.readouterr().out.startswith("waiting for the coordinator, for 2 s at most: nobody listens there")


def test_a_line_says_the_coordinators_address_once():
    reasons = ("127.0.0.1:7700: refused it", "cannot dial 127.0.0.1:7700: ECONNREFUSED", "no answer within 20 s")
    said = [without_address(reason, ("127.0.0.1", 7700)) for reason in reasons]
    assert said == ["refused it", "cannot dial: ECONNREFUSED", "no answer within 20 s"]


def test_another_run_is_named_with_the_file_of_this_one(own, coordinator):
    line = refusal(coordinator, own)
    assert f"127.0.0.1:{coordinator[1]}: the process there is of another run" in line
    assert str(authority.operator_file(own)) in line and "SSL" not in line


def test_a_token_of_another_run_is_named(own, coordinator):
    token = own / "new.token"
    authority.create_token(own, token)
    with pytest.raises(BadInput, match=f"coordinator .*:{coordinator[1]}: .* of another run.*{token}"):
        credential_for(token, coordinator)


def test_a_stranger_does_not_speak_tls(own, stranger):
    assert "the process there does not speak TLS" in refusal(stranger, own)


def test_a_coordinator_expects_a_credential(coordinator):
    assert "credential: got plaintext, expected TLS with a credential of this run" in refusal(coordinator, None)


def test_a_run_that_has_ended_says_how_and_what_goes_on(tmp_path):
    assert ended_run(tmp_path) == ""
    (tmp_path / "summary.json").write_text(json.dumps({"reason": "stopped by an operator after 7 steps"}))
    nothing = f"7 steps; there is nothing to go on from: {tmp_path}: holds no complete checkpoint; a run writes one"
    assert nothing in ended_run(tmp_path)
    (tmp_path / "run").write_text("r")
    assert nothing in ended_run(tmp_path) and ended_run(tmp_path).endswith(
        "the same command with --overwrite starts again"
    )
    command = f"python scripts/launch.py --resume --run_dir={tmp_path}"
    ended = f"the run in {tmp_path} has ended: stopped by an operator after 7 steps; to go on"
    config = parse({"model": {"preset": "debug"}})
    mark_complete(tmp_path, ev.Checkpoint(7), about_run(config, ""))
    for name in ("best", "00000007.backup", "00000009"):  # the user's, and one that is not whole
        (tmp_path / "checkpoints" / name).mkdir()
        (tmp_path / "checkpoints" / name / "complete.json").touch()
    for n_steps, flag in ((8, ""), (7, " --config.train.steps=14")):
        (tmp_path / "config.json").write_text(
            json.dumps(serialize.write(replace(config, train=replace(config.train, steps=n_steps))))
        )
        assert ended_run(tmp_path) == f"{ended} from step 7: {command}{flag}"
    (tmp_path / "run").unlink()  # of processes that were started by hand
    by_hand = f"start each process again with its flag file and --resume_from={tmp_path}/checkpoints/00000007"
    assert ended_run(tmp_path).endswith(f"to go on from step 7: {by_hand} --config.train.steps=14")
    (tmp_path / "coordinator_address").write_text("127.0.0.1:1")
    os.utime(tmp_path / "summary.json", (1.0, 1.0))
    assert ended_run(tmp_path) == "", "its coordinator was started again"
