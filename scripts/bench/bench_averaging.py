"""Time one averaging round of a vector among local peers, through the real machines, loop and sockets. Prints JSON.

    python scripts/bench/bench_averaging.py [--n_peers=4] [--n_elements=25000000] [--tls] [--rival "CMD"]

  allreduce_s   seconds from the frozen vectors to the complete averaged result of the slowest peer, median of rounds
  rival_s       with --rival: an external baseline that runs in turn with ours. CMD is its command; the value is the
                median of --rival_key in the JSON object on the last line of its output

Quote the results from an otherwise idle machine only.
"""

import json
import multiprocessing
import os
import statistics
import tempfile
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from absl import flags
from external_baseline import baseline_seconds, check_command

from jaxdt.cli import environment, script_main
from jaxdt.cli.averaging_loop import RUN, open_loop, run_peer_loop
from jaxdt.membership.commit import TwoPhaseCommit
from jaxdt.membership.coordinator import Coordinator
from jaxdt.membership.coordinator_config import CoordinatorConfig
from jaxdt.membership.member import Membership, PeerIdentity
from jaxdt.membership.peer import Peer
from jaxdt.protocol import events as ev
from jaxdt.protocol.message import tensor_key
from jaxdt.protocol.reports import Report
from jaxdt.run.seq_lengths import SeqLengths
from jaxdt.run.sizes import Group
from jaxdt.runtime.compute_environment import MALLOC_ENVIRONMENT
from jaxdt.runtime.identity import authority
from jaxdt.runtime.net.address import parse_address
from jaxdt.runtime.storage.aligned_buffer import aligned_empty
from jaxdt.runtime.storage.durable import FileStore
from jaxdt.runtime.storage.gradient_slices import GradientSlices
from jaxdt.sync.allreduce import AllReduce

N_PEERS = flags.DEFINE_integer("n_peers", 4, "Processes.", 2)
N_ELEMENTS = flags.DEFINE_integer("n_elements", 25_000_000, "fp32 numbers of the vector.", 1)
N_ROUNDS = flags.DEFINE_integer("rounds", 6, "Rounds of one start; the first is not counted.", 2)
N_STARTS = flags.DEFINE_integer("starts", 3, "How many times all processes are started, in turn with the baseline.", 1)
SLICE_BYTES = flags.DEFINE_integer("slice_bytes", 1 << 22, "Unit of the exchange.", 4)
TLS = flags.DEFINE_bool("tls", False, "With a credential, as runs have by default: mutual TLS, then AEAD records.")
RIVAL = flags.DEFINE_string("rival", None, "Command of an external baseline that averages the same vector.")
RIVAL_KEY = flags.DEFINE_string("rival_key", "allreduce_s_median", "Key of its seconds in the baseline's JSON.")

HEARTBEAT_S, DEADLINE_FLOOR_S = 1.0, 60.0


@dataclass(frozen=True)
class Options:
    """The options of one fleet. `credentials`: the folder of its credentials; None for plaintext."""

    n_peers: int
    n_elements: int
    n_rounds: int
    slice_bytes: int
    credentials: Path | None


class NoWork:
    """A wiring without Work: each peer reports one accumulated sample as soon as a step begins."""

    READS = frozenset({ev.Updated})

    def __init__(self, peer: int, n_steps: int):
        self._peer = peer
        self._n_steps = n_steps

    def handle(self, now_s: float, event) -> list:
        match event:
            case ev.Updated(_, version):
                return self._begin(version)
        return []

    def _begin(self, step: int) -> list:
        return [ev.Accumulated(step, 0, self._peer, 1, None), ev.Drained(step)] if step < self._n_steps else []


class Vectors:
    """The tensors of a peer: one vector, and by step the moments at which the exchange begins and the result is
    complete."""

    def __init__(self, peer: int, n_elements: int):
        self._vector = np.random.default_rng(peer).standard_normal(n_elements, dtype=np.float32)
        self._vector_crc = zlib.crc32(self._vector)
        self._slices = GradientSlices(peer)
        self.began_s: dict[int, float] = {}
        self.ended_s: dict[int, float] = {}

    def run(self, work, scale: float, rounds=()) -> dict:
        if work.kind == "G":
            for round in rounds:
                self._slices.offer(round, self._vector)
            self.began_s[work.step] = time.monotonic()
        return {}

    def tensor_to_send(self, body):
        return self._slices.part_to_send(tensor_key(body))

    def put(self, body, src, part) -> None:
        self._slices.put(tensor_key(body), part)
        self._note_slice(tensor_key(body))

    def expect(self, body, table):
        key = tensor_key(body)
        return [aligned_empty((key.hi - key.lo,), np.dtype(np.float32))]

    def sum(self, key, members):
        result = self._slices.sum(key, members)
        self._note_slice(key)
        return result

    def free(self, step: int, rounds) -> None:
        self._slices.free(rounds)
        if zlib.crc32(self._vector) != self._vector_crc:
            raise RuntimeError("the exchange wrote into its input")

    def drop_results(self, step: int) -> None:
        """Its Work leaves no results."""

    def _note_slice(self, key) -> None:
        """The last slice that arrives or is added up completes the result of its step."""
        self.ended_s[key.round.number] = time.monotonic()


def ignore(report: Report) -> None:
    """Drop a report of a machine."""


def be_peer(peer: int, options: Options, coordinator: tuple[str, int], results) -> None:
    """Run one peer in this process. Its moments go to the queue `results` as (peer, began_s, ended_s)."""
    identity = PeerIdentity(
        run=RUN,
        fingerprint="",
        peer=peer,
        stage=0,
        start_version=0,
        start_generation=0,
        n_steps=options.n_rounds,
        checkpoint_every_steps=0,
        heartbeat_s=HEARTBEAT_S,
        deadline_floor_s=DEADLINE_FLOOR_S,
    )
    group = Group(0, (0,), options.n_elements)
    sync = AllReduce(peer, 0, (group,), options.n_peers, options.slice_bytes)
    machine = Peer(Membership(identity), NoWork(peer, options.n_rounds), sync)
    loop, address = open_loop(peer, machine, options.credentials, ignore)
    loop.tensors = Vectors(peer, options.n_elements)
    loop.transport.connect(ev.COORDINATOR, coordinator)
    run_peer_loop(loop, address)
    results.put((peer, loop.tensors.began_s, loop.tensors.ended_s))


def rounds_s(options: Options) -> list[float]:
    """Start all processes once. Seconds of each counted round."""
    config = CoordinatorConfig(
        run=RUN,
        fingerprint="",
        stage_of=dict.fromkeys(range(options.n_peers), 0),
        n_stages=1,
        start_version=0,
        start_generation=0,
        n_steps=options.n_rounds,
        tokens_per_sample=SeqLengths(1),
        on_nonfinite="stop",
        heartbeat_s=HEARTBEAT_S,
        deadline_floor_s=DEADLINE_FLOOR_S,
    )
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        agreement = TwoPhaseCommit(config)
        durable = FileStore(Path(folder))
        loop, address = open_loop(ev.COORDINATOR, Coordinator(config, agreement), options.credentials, ignore, durable)
        peers = [
            context.Process(target=be_peer, args=(peer, options, parse_address("coordinator", address), results))
            for peer in range(options.n_peers)
        ]
        for process in peers:
            process.start()
        loop.run(address)
        times = [results.get() for _ in peers]
        for process in peers:
            process.join()
    return [
        max(ended[r] for _, _, ended in times) - max(began[r] for _, began, _ in times)
        for r in range(1, options.n_rounds)
    ]


def main() -> None:
    environment.compute_on_cpu()
    os.environ.update(MALLOC_ENVIRONMENT)  # for the peers, which are child processes, as train.py has it
    check_command(RIVAL.value)
    ours: list[float] = []
    baseline: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        credentials = Path(folder) if TLS.value else None
        if credentials:
            authority.create_missing(credentials, range(N_PEERS.value))
        options = Options(N_PEERS.value, N_ELEMENTS.value, N_ROUNDS.value, SLICE_BYTES.value, credentials)
        for _ in range(N_STARTS.value):
            ours.append(statistics.median(rounds_s(options)))
            if RIVAL.value:
                baseline.append(baseline_seconds(RIVAL.value, RIVAL_KEY.value))
    result = {"allreduce_s": statistics.median(ours), "starts": ours, "tls": TLS.value}
    if baseline:
        result |= {"rival_s": statistics.median(baseline), "rival_starts": baseline}
    print(json.dumps(result))


if __name__ == "__main__":
    script_main.run(main)
