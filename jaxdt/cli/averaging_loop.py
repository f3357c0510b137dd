"""A loop with its transport for processes that average a vector and train nothing: bench_averaging, kill_averaging."""

import threading
from collections.abc import Callable
from pathlib import Path

from jaxdt.membership.peer import DrivenMachine
from jaxdt.protocol import events as ev
from jaxdt.protocol.message import from_plain
from jaxdt.protocol.reports import Report
from jaxdt.protocol.trace import Trace
from jaxdt.runtime.compute import compute
from jaxdt.runtime.identity import authority
from jaxdt.runtime.identity.credential import load
from jaxdt.runtime.loop import Loop
from jaxdt.runtime.net.address import format_address
from jaxdt.runtime.net.options import TransportCallbacks, TransportSettings
from jaxdt.runtime.net.transport import Transport
from jaxdt.runtime.storage.durable import FileStore

RUN = "averaging"


class NoCheckpoints:
    """Accepts every checkpoint and writes nothing."""

    @property
    def disk(self) -> str:
        return ""

    def save(self, write_checkpoint: ev.WriteCheckpoint, store, post) -> None:
        post(ev.WroteCheckpoint(write_checkpoint.version, generation=write_checkpoint.generation))

    def find(self, action: ev.FindPart, post) -> None:
        post(ev.FoundPart(action.digest, 0))

    def keep(self, part: ev.Part, post) -> None:
        raise NotImplementedError

    def read_slice(self, key: ev.StateKey):
        raise NotImplementedError

    def put_slice(self, key: ev.StateKey, words) -> None:
        raise NotImplementedError

    def mark_complete(self, checkpoint: ev.Checkpoint, post) -> None:
        return None

    def wait(self) -> None:
        return None


def open_loop(
    peer: int,
    machine: DrivenMachine,
    credentials: Path | None,
    report: Callable[[Report], None],
    durable: FileStore | None = None,
) -> tuple[Loop, str]:
    """A loop for `machine` whose transport listens on loopback, and the address of that transport. `credentials`: the
    folder with the credentials of all processes; None for plaintext."""
    loop = Loop(peer, machine, Trace(lambda line: None, 0), report, NoCheckpoints(), durable)
    loaded = None
    if credentials is not None:
        is_peer = peer != ev.COORDINATOR
        loaded = load(authority.peer_file(credentials, peer) if is_peer else authority.coordinator_file(credentials))
    callbacks = TransportCallbacks(loop.on_message, loop.on_link, loop.expect, read=from_plain)
    settings = TransportSettings(incarnation=loop.process)
    loop.transport = Transport(peer, RUN, ("127.0.0.1", 0), loaded, callbacks, settings)
    address = loop.transport.start()
    assert address is not None  # it listens
    return loop, format_address(address)


def run_peer_loop(loop: Loop, address: str) -> None:
    """Run the loop of a peer that needs no preparation, with its compute thread, until the machine stops."""
    threading.Thread(target=compute, args=(loop, lambda: ev.Ready({})), name="compute", daemon=True).start()
    loop.run(address)
