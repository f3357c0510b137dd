"""Links between the processes of a local fleet that break and heal, without a firewall.

A file names the pairs of peers that cannot reach each other at present. Connections of such a pair end, dialing fails,
and a peer that is dialed ends the connection.
"""

import json
import threading
from pathlib import Path

from jaxdt.protocol import events as ev
from jaxdt.runtime.net.acceptor import Acceptor
from jaxdt.runtime.net.dialer import Dialer
from jaxdt.runtime.net.transport import Transport

POLL_S = 0.02


def cut(path: Path, *pairs: tuple[int, int]) -> None:
    """From now on these pairs, and no others, cannot reach each other; -1 is the coordinator."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(pairs))
    temporary.replace(path)


def off(peer: int, others) -> list[tuple[int, int]]:
    """The pairs that cut a peer off from all others and the coordinator."""
    return [(peer, other) for other in (ev.COORDINATOR, *others) if other != peer]


def install(file: str) -> None:
    """Make the transport of this process obey the file."""
    path = Path(file)

    def others(me: int) -> set[int]:
        pairs = json.loads(path.read_text())
        return {a + b - me for a, b in pairs if me in (a, b)}

    attempt = Dialer.attempt
    read_greeting = Acceptor._read_greeting
    start = Transport.start

    def attempt_unless_cut(self, address, hello):
        if hello.dst in others(hello.src):
            self._fail(self._link_state.unreachable, f"{address[0]}:{address[1]}: cut", self._pause_s)
            return None
        return attempt(self, address, hello)

    def read_greeting_unless_cut(self, connection, host):
        hello = read_greeting(self, connection, host)
        return None if hello and hello.src in others(hello.dst) else hello

    def start_and_watch(self):
        def watch():
            unreachable = set()
            tick = threading.Event()
            while not tick.wait(POLL_S):
                before = unreachable
                unreachable = others(self._peer_id)
                for peer in unreachable - before:
                    with self._lock:
                        known = self._peers.get(peer)
                        inbound = [channel for (src, _), channel in self._inbound.items() if src == peer]
                    for one in ([known] if known else []) + inbound:
                        one.cut()

        threading.Thread(target=watch, name="cuts", daemon=True).start()
        return start(self)

    Dialer.attempt = attempt_unless_cut
    Acceptor._read_greeting = read_greeting_unless_cut
    Transport.start = start_and_watch
