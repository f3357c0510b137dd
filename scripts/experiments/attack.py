"""Attack the coordinator of a small run from one address, and measure how long a member's reconnect takes.

    python scripts/experiments/attack.py --run_dir=runs/attack --seconds=60

Starts a coordinator and two peers of configs/two_hosts.py on this machine, over TCP. One peer reaches the coordinator
through a forwarder, which cuts its connections every few seconds and sees when they are back. For a while nothing else
happens; then another address (127.0.0.2) attacks in three ways, one after another:

silent   opens connections and says nothing
garbage  sends two kinds of nonsense in turn, and closes
slow     begins a TLS handshake and sends a byte each half second

Prints one line for each, and exits with 1 unless the longest reconnect of each attack is at most 2 s above the longest
of the calm, and no member was evicted.
"""

import contextlib
import json
import multiprocessing
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from absl import flags

from jaxdt.cli import script_main
from jaxdt.protocol import trace

SECONDS = flags.DEFINE_float("seconds", 60.0, "Seconds of attack, a third for each way, after a calm of a third.", 6.0)
RUN_DIR = flags.DEFINE_string("run_dir", None, "Folder for the run; an earlier one is deleted.", required=True)
PORT = flags.DEFINE_integer("port", 7790, "Port of the coordinator; the peers get the next ones.")

ROOT = Path(__file__).resolve().parents[2]
SOURCE = "127.0.0.2"
PAUSE_S = 2.0  # after a reconnect, before the next cut
GIVEN_UP_S = 60.0  # waits so long for the last reconnect, which then counts for as long as it has taken
N_ANSWERS = 3  # of the coordinator in a handshake: TLS, its share of the keys, its greeting
N_OPEN_MAX = 500
MORE_S_MAX = 2.0
READ_BYTES = 1 << 16
CLIENT_HELLO = b"\x16\x03\x01\x02\x00"
GARBAGE = (b"GET / HTTP/1.1\r\n\r\n", b"jxdt" + bytes(300))


class Forwarder:
    """Forwards connections to the coordinator, and cuts all of them now and then."""

    def __init__(self, target: tuple[str, int]):
        self._target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._server.getsockname()
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


def connection(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), 1.0, source_address=(SOURCE, 0))


def silent(port: int) -> Iterator[None]:
    """Open connections without end; the oldest are closed when there are too many."""
    opened: list[socket.socket] = []
    while True:
        with contextlib.suppress(OSError):
            opened.append(connection(port))
        for sock in opened[:-N_OPEN_MAX]:
            sock.close()
        del opened[:-N_OPEN_MAX]
        yield


def garbage(port: int) -> Iterator[None]:
    """Send nonsense of two kinds in turn."""
    while True:
        for noise in GARBAGE:
            with contextlib.suppress(OSError), connection(port) as sock:
                sock.sendall(noise)
            yield


def slow(port: int) -> Iterator[None]:
    """Keep handshakes going that do not end, as many as the other side lets in."""
    opened: list[socket.socket] = []
    drip_s = time.monotonic()
    while True:
        with contextlib.suppress(OSError):
            opened.append(connection(port))
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


def attack(way: Callable[[int], Iterator[None]], port: int, n_made) -> None:
    """Attack until this process is ended; counts the connections."""
    for _ in way(port):
        n_made.value += 1


def start_fleet(folder: Path, port: int, forwarder: Forwarder) -> list[subprocess.Popen]:
    """The coordinator, and the two peers, of which the second one uses the forwarder."""
    shutil.rmtree(folder, ignore_errors=True)
    python = [sys.executable, str(ROOT / "scripts/launch.py"), f"--config={ROOT / 'configs/two_hosts.py'}"]
    python += ["--config.train.steps=1000000", "--config.train.checkpoint_every_steps=0", f"--port={port}"]
    subprocess.run([*python, f"--emit={folder}", "--hosts=127.0.0.1,127.0.0.1"], check=True)
    everywhere = [f"--listen=0.0.0.0:{port}", f"--advertise=127.0.0.1:{port}"]
    through = "--coordinator={}:{}".format(*forwarder.address)
    commands = [
        ("coordinate.py", "coordinator", everywhere),
        ("train.py", "host_0", []),
        ("train.py", "host_1", [through]),
    ]
    processes = []
    for script, name, more in commands:
        command = [sys.executable, str(ROOT / "scripts" / script), f"--flagfile={folder / name}.flags", *more]
        with (folder / f"{name}.log").open("w") as log:
            processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
    return processes


def coordinator_reports(folder: Path, kind: str) -> list[dict]:
    path = folder / "run_dir" / "trace" / "coordinator.jsonl"
    records = trace.read(path.read_text().splitlines(), str(path)) if path.exists() else []
    return [record["fields"] for record in records if record["what"] == "report" and record["kind"] == kind]


def measured(name: str, way: Callable[[int], Iterator[None]] | None, forwarder: Forwarder, folder: Path) -> dict:
    """Cut the member's connections again and again while somebody attacks, or nobody if `way` is None."""
    n_made = multiprocessing.Value("l", 0)
    n_steps, n_refused = len(coordinator_reports(folder, "step")), len(coordinator_reports(folder, "refused"))
    attacker = multiprocessing.Process(target=attack, args=(way, PORT.value, n_made), daemon=True) if way else None
    forwarder.reconnects_s.clear()
    if attacker:
        attacker.start()
    end_s = time.monotonic() + SECONDS.value / 3
    while time.monotonic() < end_s:
        n_before = len(forwarder.reconnects_s)
        forwarder.cut()
        while len(forwarder.reconnects_s) == n_before and time.monotonic() < end_s + GIVEN_UP_S:
            time.sleep(0.01)
        time.sleep(PAUSE_S)
    forwarder.count()
    if attacker:
        attacker.kill()
        attacker.join()
    return {
        "attack": name,
        "connections": n_made.value,
        "reconnects": len(forwarder.reconnects_s),
        "reconnect_s_p50": round(statistics.median(forwarder.reconnects_s), 3),
        "reconnect_s_max": round(max(forwarder.reconnects_s), 3),
        "steps": len(coordinator_reports(folder, "step")) - n_steps,
        "reports": len(coordinator_reports(folder, "refused")) - n_refused,
        "evictions": len(coordinator_reports(folder, "lost")),
    }


def main() -> int:
    folder = Path(RUN_DIR.value).resolve()
    forwarder = Forwarder(("127.0.0.1", PORT.value))
    processes = start_fleet(folder, PORT.value, forwarder)
    try:
        while len(coordinator_reports(folder, "step")) < 5:
            time.sleep(0.5)
            if any(process.poll() is not None for process in processes):
                sys.exit(f"a process of the run has ended; see {folder}/*.log")
        calm = measured("none", None, forwarder, folder)
        ways = {"silent": silent, "garbage": garbage, "slow": slow}
        results = [calm, *(measured(name, way, forwarder, folder) for name, way in ways.items())]
    finally:
        processes[0].send_signal(signal.SIGINT)
        for process in processes:
            process.wait()
    for result in results:
        print(json.dumps(result))
    limit_s = calm["reconnect_s_max"] + MORE_S_MAX
    return 0 if all(r["reconnect_s_max"] <= limit_s and not r["evictions"] for r in results) else 1


if __name__ == "__main__":
    script_main.run(main)
