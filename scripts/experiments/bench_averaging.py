"""Times one averaging round of a vector among local peers, through the real machines, loop and sockets; prints JSON.

    python scripts/experiments/bench_averaging.py [--n_peers=4] [--n_elements=25000000] [--tls] [--rival "CMD"]

  allreduce_s   from a peer's frozen vector to its whole averaged result: the slowest peer of a round, median of rounds
  rival_s       with --rival: the median of what CMD's last line of JSON says under --rival_key, alternated with ours

Quote it from an otherwise idle machine only.
"""

import json
import multiprocessing
import os
import statistics
import tempfile
import time
import zlib
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.update(MALLOC_MMAP_THRESHOLD_="1073741824", MALLOC_TRIM_THRESHOLD_="2147483647", MALLOC_TOP_PAD_="67108864")
os.environ.update(MALLOC_ARENA_MAX="1")  # what train.py sets for itself; the peers are started with it

import numpy as np  # noqa: E402
from absl import flags  # noqa: E402
from averaging_peers import open_loop  # noqa: E402
from external_baseline import check, rival_seconds  # noqa: E402

from jaxdt.cli import script_main  # noqa: E402
from jaxdt.membership.coordinator import Coordinator
from jaxdt.membership.coordinator_config import CoordinatorConfig  # noqa: E402
from jaxdt.membership.member import Membership, PeerIdentity  # noqa: E402
from jaxdt.membership.peer import Peer  # noqa: E402
from jaxdt.protocol.events import COORDINATOR, Accumulated, Drained, Ready, Updated  # noqa: E402
from jaxdt.protocol.message import tensor_key  # noqa: E402
from jaxdt.runtime.net import credential  # noqa: E402
from jaxdt.runtime.storage.aligned_buffer import aligned_empty  # noqa: E402
from jaxdt.runtime.storage.durable import FileStore  # noqa: E402
from jaxdt.runtime.storage.gradient_slices import Slices  # noqa: E402
from jaxdt.spec.delay import NO_DELAY
from jaxdt.spec.seq_lengths import SeqLengths  # noqa: E402
from jaxdt.spec.sizes import Group  # noqa: E402
from jaxdt.sync.allreduce import AllReduce  # noqa: E402

N_PEERS = flags.DEFINE_integer("n_peers", 4, "Processes.", 2)
N_ELEMENTS = flags.DEFINE_integer("n_elements", 25_000_000, "fp32 numbers of the vector.", 1)
N_ROUNDS = flags.DEFINE_integer("rounds", 6, "Rounds of one start; the first is not counted.", 2)
N_STARTS = flags.DEFINE_integer("starts", 3, "How often all processes are started, in turn with the rival.", 1)
SLICE_BYTES = flags.DEFINE_integer("slice_bytes", 1 << 22, "Unit of the exchange.", 4)
TLS = flags.DEFINE_bool("tls", False, "With a credential, as runs have by default: mutual TLS, then AEAD records.")
RIVAL = flags.DEFINE_string("rival", None, "Command of another system's all-reduce of the same vector.")
RIVAL_KEY = flags.DEFINE_string("rival_key", "allreduce_s_median", "Where its JSON says the seconds of a round.")

LEASE_S = 60.0


class AlwaysReady:
    """A wiring that has nothing to compute: each step is one sample, at once."""

    def __init__(self, peer: int, n_steps: int):
        self._peer, self._n_steps = peer, n_steps

    def handle(self, now_s: float, event) -> list:
        match event:
            case Updated(_, version):
                return self._begin(version)
        return []

    def _begin(self, step: int) -> list:
        return [Accumulated(step, 0, self._peer, 1, None), Drained(step)] if step < self._n_steps else []


class Vectors:
    """A peer's tensors: one vector, and the instants at which a round begins and its result is whole."""

    def __init__(self, peer: int, n_elements: int):
        self._vector = np.random.default_rng(peer).standard_normal(n_elements, dtype=np.float32)
        self._before = zlib.crc32(self._vector)
        self._slices = Slices(peer)
        self.began_s: dict[int, float] = {}
        self.ended_s: dict[int, float] = {}

    def run(self, work, scale: float, rounds=()) -> dict:
        if work.kind == "G":
            self._slices.offer(work.step, "stage0", self._vector)
            self.began_s[work.step] = time.monotonic()
        return {}

    def take(self, body):
        return self._slices.take(tensor_key(body))

    def put(self, body, src, part) -> None:
        self._slices.put(tensor_key(body), part)
        self._touched(tensor_key(body))

    def expect(self, body, table):
        key = tensor_key(body)
        return [aligned_empty((key.hi - key.lo,), np.dtype(np.float32))]

    def sum(self, key, members):
        result = self._slices.sum(key, members)
        self._touched(key)
        return result

    def free(self, step: int) -> None:
        self._slices.free(step)
        if zlib.crc32(self._vector) != self._before:
            raise RuntimeError("the exchange wrote into its input")

    def _touched(self, key) -> None:
        """The last slice that comes or is added up makes the step's result whole."""
        self.ended_s[key.round.step] = time.monotonic()


def quiet(report) -> None:
    """Nothing is said to people."""


def be_peer(peer: int, options: dict, coordinator: tuple[str, int], results) -> None:
    """One process: its round times go into the queue."""
    seat = PeerIdentity("bench", "", peer, 0, 0, 0, options["rounds"], 0, 1.0, LEASE_S)
    group = Group("stage0", (0,), options["n_elements"])
    sync = AllReduce(peer, 0, (group,), options["n_peers"], options["slice_bytes"], 0.0, NO_DELAY)
    machine = Peer(Membership(seat), AlwaysReady(peer, options["rounds"]), sync)
    loop, address = open_loop(peer, machine, options["secret"], quiet)
    loop.tensors = Vectors(peer, options["n_elements"])
    loop.transport.connect(COORDINATOR, coordinator)
    loop.run(address, lambda: Ready({}))
    results.put((peer, loop.tensors.began_s, loop.tensors.ended_s))


def rounds_s(options: dict) -> list[float]:
    """Seconds of each counted round of one start."""
    terms = CoordinatorConfig(
        run="bench",
        fingerprint="",
        stage_of=dict.fromkeys(range(options["n_peers"]), 0),
        n_stages=1,
        start_version=0,
        start_generation=0,
        n_steps=options["rounds"],
        tokens_per_sample=SeqLengths(1),
        on_nonfinite="stop",
        heartbeat_s=1.0,
        deadline_floor_s=LEASE_S,
    )
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        loop, address = open_loop(COORDINATOR, Coordinator(terms), options["secret"], quiet, FileStore(Path(folder)))
        host, _, port = address.rpartition(":")
        peers = [
            context.Process(target=be_peer, args=(peer, options, (host, int(port)), results))
            for peer in range(options["n_peers"])
        ]
        for process in peers:
            process.start()
        loop.run(address)
        times = [results.get() for _ in peers]
        for process in peers:
            process.join()
    return [
        max(ended[r] for _, _, ended in times) - max(began[r] for _, began, _ in times)
        for r in range(1, options["rounds"])
    ]


def main() -> None:
    check(RIVAL.value)
    ours, rival = [], []
    with tempfile.TemporaryDirectory() as folder:
        secret = None
        if TLS.value:
            secret = str(Path(folder) / "credential.pem")
            credential.create(secret)
        options = {
            "n_peers": N_PEERS.value,
            "n_elements": N_ELEMENTS.value,
            "rounds": N_ROUNDS.value,
            "slice_bytes": SLICE_BYTES.value,
            "secret": secret,
        }
        for _ in range(N_STARTS.value):
            ours.append(statistics.median(rounds_s(options)))
            if RIVAL.value:
                rival.append(rival_seconds(RIVAL.value, RIVAL_KEY.value))
    result = {"allreduce_s": statistics.median(ours), "starts": ours, "tls": TLS.value}
    if rival:
        result |= {"rival_s": statistics.median(rival), "rival_starts": rival}
    print(json.dumps(result))


if __name__ == "__main__":
    script_main.run(main)
