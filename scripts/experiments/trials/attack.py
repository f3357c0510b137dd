"""Attack the coordinator of a small run from one address, and measure how long a member's reconnect takes.

A coordinator and two peers, over TCP. One peer reaches the coordinator through a forwarder, which cuts its connections
every few seconds and sees when they are back. For a while nothing else happens; then another address (127.0.0.2)
attacks in three ways, one after another. A minute and a half.

  silent   opens connections and says nothing
  garbage  sends two kinds of nonsense in turn, and closes
  slow     begins a TLS handshake and sends a byte each half second

The longest reconnect of each attack is at most 2 s above the longest of the calm, and no member is evicted.
"""

import contextlib
import itertools
import multiprocessing
import select
import socket
import statistics
import threading
import time
from collections.abc import Callable, Generator, Iterator

from processes import Played, Trial
from trial_fleets import HostFleet, Script, When

from jaxdt.runtime.net.address import Address, format_address, parse_address

SOURCE = "127.0.0.2"
PAUSE_S = 2.0  # after a reconnect, before the next cut
MARGIN_S = 5.0  # between the last cut of an attack and the next attack
GIVEN_UP_S = 60.0  # waits so long for the last reconnect, which then counts for as long as it has taken
N_ANSWERS = 3  # of the coordinator in a handshake: TLS, its share of the keys, its greeting
N_OPEN_MAX = 500
MORE_S_MAX = 2.0
READ_BYTES = 1 << 16
CLIENT_HELLO = b"\x16\x03\x01\x02\x00"
GARBAGE = (b"GET / HTTP/1.1\r\n\r\n", b"jxdt" + bytes(300))


class Forwarder:
    """Forwards connections to the coordinator, and cuts all of them now and then."""

    def __init__(self, target: Address):
        self._target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address: Address = self._server.getsockname()
        self._open: set[socket.socket] = set()
        self._cut_s = float("inf")
        self.reconnects_s: list[float] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """End all connections; the time until one is back is added to `reconnects_s`."""
        self._cut_s = time.monotonic()
        for sock in list(self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def count(self) -> None:
        """Count the time until now, unless one was back before."""
        if self._cut_s != float("inf"):
            self.reconnects_s.append(time.monotonic() - self._cut_s)
        self._cut_s = float("inf")

    def _accept(self) -> None:
        while True:
            near, _ = self._server.accept()
            threading.Thread(target=self._forward, args=(near,), daemon=True).start()

    def _forward(self, near: socket.socket) -> None:
        with contextlib.suppress(OSError), near, socket.create_connection(self._target) as far:
            self._open |= {near, far}
            n_answers = 0
            last = far
            while True:
                for sock in select.select([near, far], [], [])[0]:
                    data = sock.recv(READ_BYTES)
                    if not data:
                        self._open -= {near, far}
                        return
                    (near if sock is far else far).sendall(data)
                    n_answers += sock is far and last is near
                    last = sock
                    if n_answers == N_ANSWERS and self._cut_s != float("inf"):
                        self.count()


# ------------------------------------------------------------------------------------------------------------- attacks


def connection(target: Address) -> socket.socket:
    return socket.create_connection(target, 1.0, source_address=(SOURCE, 0))


def silent(target: Address) -> Iterator[None]:
    """Open connections without end; the oldest are closed when there are too many."""
    opened: list[socket.socket] = []
    while True:
        with contextlib.suppress(OSError):
            opened.append(connection(target))
        for sock in opened[:-N_OPEN_MAX]:
            sock.close()
        del opened[:-N_OPEN_MAX]
        yield


def garbage(target: Address) -> Iterator[None]:
    """Send nonsense of two kinds in turn."""
    for noise in itertools.cycle(GARBAGE):
        with contextlib.suppress(OSError), connection(target) as sock:
            sock.sendall(noise)
        yield


def slow(target: Address) -> Iterator[None]:
    """Keep handshakes going that do not end, as many as the other side lets in."""
    opened: list[socket.socket] = []
    drip_s = time.monotonic()
    while True:
        with contextlib.suppress(OSError):
            opened.append(connection(target))
            opened[-1].sendall(CLIENT_HELLO)
        if time.monotonic() > drip_s:
            drip_s += 0.5
            alive = []
            for sock in opened[-N_OPEN_MAX:]:
                with contextlib.suppress(OSError):
                    sock.sendall(b"\0")
                    alive.append(sock)
            opened = alive
        yield


def attack(way: Callable[[Address], Iterator[None]], target: Address, n_made) -> None:
    """Attack until this process is ended; counts the connections."""
    for _ in way(target):
        n_made.value += 1


# ----------------------------------------------------------------------------------------------------------- the trial

WAYS = {"none": None, "silent": silent, "garbage": garbage, "slow": slow}


def attacks(fleet: HostFleet) -> Script:
    """All in turn, with equal shares of the time."""
    target = parse_address("coordinator", fleet.address)
    forwarder = Forwarder(target)
    fleet.coordinator.words += [f"--listen=0.0.0.0:{target[1]}", f"--advertise={fleet.address}"]
    fleet.host("host_1").words.append(f"--coordinator={format_address(forwarder.address)}")
    found = fleet.played.figures.setdefault("attacks", {})
    yield 0.0
    for name in WAYS:
        fleet.happened("attack", name)
        found[name] = yield from measured(fleet, name, forwarder, target)


def measured(
    fleet: HostFleet, name: str, forwarder: Forwarder, target: Address
) -> Generator[When, None, dict[str, float]]:
    """Cut the member's connections again and again while somebody attacks, or nobody."""
    n_made, way = multiprocessing.Value("l", 0), WAYS[name]
    attacker = multiprocessing.Process(target=attack, args=(way, target, n_made), daemon=True) if way else None
    forwarder.reconnects_s.clear()
    n_steps, n_refused = len(fleet.rows_s), len([*fleet.played.reports("refused")])
    if attacker:
        attacker.start()
    end_s = fleet.now_s + fleet.trial.seconds / len(WAYS) - MARGIN_S
    while fleet.now_s < end_s:
        n_before = len(forwarder.reconnects_s)
        forwarder.cut()
        yield from fleet.within(GIVEN_UP_S, lambda n=n_before: len(forwarder.reconnects_s) > n)
        yield fleet.now_s + PAUSE_S
    forwarder.count()
    if attacker:
        attacker.kill()
        attacker.join()
    reconnects_s = forwarder.reconnects_s
    return {
        "connections": n_made.value,
        "reconnects": len(reconnects_s),
        "reconnect_s_p50": round(statistics.median(reconnects_s), 3),
        "reconnect_s_max": round(max(reconnects_s), 3),
        "steps": len(fleet.rows_s) - n_steps,
        "reports": len([*fleet.played.reports("refused")]) - n_refused,
    }


def has_quick_reconnects(played: Played) -> str:
    found, n_evicted = played.figures["attacks"], len([*played.reports("lost")])
    if found.keys() < WAYS.keys():
        return f"attacks that have ended: {', '.join(found) or 'none'}, expected {', '.join(WAYS)}"
    limit_s = found["none"]["reconnect_s_max"] + MORE_S_MAX
    late = [name for name, one in found.items() if one["reconnect_s_max"] > limit_s]
    evicted = f"{n_evicted} members were evicted, expected none; " if n_evicted else ""
    return f"{evicted}a reconnect took more than {limit_s:.1f} s: {', '.join(late)}" if late else evicted


TRIAL = Trial(
    config="configs/two_hosts.py",
    flags=("--config.train.checkpoint_every_steps=0",),
    seconds=80.0,
    begins=5,
    n_hosts=2,
    disturbances=(attacks,),
    expected=(has_quick_reconnects,),
)
