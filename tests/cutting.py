"""Links between the processes of a local fleet that break and heal, without a firewall.

A file names the pairs of peers that cannot reach each other at present. Connections of such a pair end, dialing fails,
and a peer that is dialed ends the connection.
"""

import json
import os
import sys
import threading
from pathlib import Path

from jaxdt.protocol.events import COORDINATOR
from jaxdt.runtime.net.acceptor import Acceptor
from jaxdt.runtime.net.dialer import Dialer
from jaxdt.runtime.net.transport import Transport

VARIABLE = "JAXDT_TEST_CUTS"
PROGRAM = """import runpy, sys
sys.path[:0] = [{tests!r}, {scripts!r}]
import cutting
cutting.install()
runpy.run_path({script!r}, run_name="__main__")
"""
POLL_S = 0.02


def write_scripts(folder: Path, root: Path) -> None:
    """Variants of train.py and coordinate.py that obey the file, for a launcher that looks for them in this folder."""
    for name in ("train.py", "coordinate.py"):
        paths = dict(tests=str(root / "tests"), scripts=str(root / "scripts"), script=str(root / "scripts" / name))
        (folder / name).write_text(PROGRAM.format(**paths))


def cut(path: Path, *pairs: tuple[int, int]) -> None:
    """From now on these pairs, and no others, cannot reach each other; -1 is the coordinator."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(pairs))
    temporary.replace(path)


def off(peer: int, others) -> list[tuple[int, int]]:
    """The pairs that cut a peer off from all others and the coordinator."""
    return [(peer, other) for other in (COORDINATOR, *others) if other != peer]


def install() -> None:
    """Make the transport of this process obey the file."""
    path = Path(os.environ[VARIABLE])

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


if __name__ == "__main__":  # a launcher: cutting.py FOLDER FLAGS, with the folder of `write_scripts`
    folder = Path(sys.argv[1])
    sys.argv = [sys.argv[0], *sys.argv[2:]]
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
    import launch

    from jaxdt.api import launch as api
    from jaxdt.cli import run_flags

    api.SCRIPTS = folder
    run_flags.run(launch.main)
