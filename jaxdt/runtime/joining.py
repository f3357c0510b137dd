"""What a process asks the coordinator before it is a peer, under a temporary id.

A newcomer asks for a peer id and a stage, and a process of a known peer whether it may be that peer."""

import os
import secrets
import socket
from pathlib import Path
from queue import Empty, SimpleQueue

from jaxdt.membership.claims import Claimant
from jaxdt.protocol.events import COORDINATOR, TEMPORARY_IDS, Ended, Header, Join, Message, Received, Stop, Welcome
from jaxdt.protocol.message import from_plain, to_plain
from jaxdt.protocol.trace import Trace
from jaxdt.runtime.loop import Loop
from jaxdt.runtime.net.address import Address, format_address
from jaxdt.runtime.net.credential import load as load_credential
from jaxdt.runtime.net.options import TransportCallbacks, TransportSettings
from jaxdt.runtime.net.transport import Transport
from jaxdt.runtime.run_job import RunJob
from jaxdt.runtime.stop_requests import StopRequests
from jaxdt.runtime.transport_setup import OwnAddress, start_transport
from jaxdt.spec.errors import BadInput

ANSWER_S = 30.0


def ask_to_join(coordinator: Address, credential: Path | None, allow_plaintext: bool = False) -> Welcome:
    """Ask the coordinator for a place in the run. BadInput if it refuses or does not answer."""
    answers: SimpleQueue[Message | str] = SimpleQueue()

    def on_message(src: int, event: Received, leaves: list) -> None:
        answers.put(event.body)

    def on_link(peer: int | None, state: str, reason: str) -> None:
        if state == "refused":
            answers.put(reason)

    temporary_id = _temporary_id()
    transport = Transport(
        temporary_id,
        "",
        None,
        load_credential(credential) if credential else None,
        TransportCallbacks(on_message, on_link, expect=lambda src, event, table: None, read=from_plain),
        TransportSettings(allow_plaintext=allow_plaintext),
    )
    where = f"coordinator {format_address(coordinator)}"
    try:
        transport.connect(COORDINATOR, coordinator)
        transport.send(COORDINATOR, to_plain(Header("", 0, 0, temporary_id), Join()))
        answer = answers.get(timeout=ANSWER_S)
    except Empty:
        raise BadInput(f"--join: {where}: no answer within {ANSWER_S:.0f} s") from None
    finally:
        transport.close(0.0)
    if isinstance(answer, Welcome):
        return answer
    raise BadInput(f"--join: {where}: {answer.reason if isinstance(answer, Ended) else answer}")


def claim_peer(job: RunJob, peer: int, coordinator: Address, listen: str, stop_requests: StopRequests) -> Stop:
    """Ask the coordinator whether this process may be `peer` and would listen at `listen`. The Stop has code 0 and no
    reason if it may; else it says why this process has to end."""
    temporary_id = _temporary_id()
    where = f"{listen or 'no address'} (process {os.getpid()} on {socket.gethostname()})"
    machine = Claimant(job.run, peer, temporary_id, where)
    loop = Loop(temporary_id, machine, Trace(lambda text: None), report=lambda report: None)
    start_transport(job, loop, temporary_id, OwnAddress(""))
    loop.transport.connect(COORDINATOR, coordinator)
    stop_requests.deliver_to(loop)
    answer = loop.run("")
    assert isinstance(answer, Stop), "only a peer moves to another stage"
    return answer


def _temporary_id() -> int:
    return TEMPORARY_IDS + secrets.randbelow(TEMPORARY_IDS)
