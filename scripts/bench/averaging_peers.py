"""Processes that only average a synthetic vector, through the real machines, loop and sockets; for averaging.py.

Peer m owns microbatch m of a step. When that peer is gone, the member with the least id owns it. The vector that a peer
adds for a microbatch depends on the peer: two sums of one step by different peers differ in every element, so a vector
that is partly one sum and partly the other equals neither.
"""

import multiprocessing
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import numpy as np

from jaxdt.membership.commit import TwoPhaseCommit
from jaxdt.membership.coordinator import Coordinator
from jaxdt.membership.coordinator_config import CoordinatorConfig
from jaxdt.membership.member import Membership, PeerIdentity
from jaxdt.membership.peer import DrivenMachine, Peer
from jaxdt.protocol import events as ev
from jaxdt.protocol.message import tensor_key
from jaxdt.protocol.reports import Report
from jaxdt.protocol.round_id import RoundId
from jaxdt.run.seq_lengths import SeqLengths
from jaxdt.run.sizes import Group
from jaxdt.run.work import Work, WorkKind
from jaxdt.runtime.identity import authority
from jaxdt.runtime.identity.credential import load
from jaxdt.runtime.loop import Loop
from jaxdt.runtime.net.address import Address, format_address, parse_address
from jaxdt.runtime.process import compute
from jaxdt.runtime.storage.durable import FileStore
from jaxdt.runtime.storage.gradient_slices import GradientSlices
from jaxdt.runtime.storage.words import aligned_empty
from jaxdt.sync.allreduce import AllReduce

RUN, STAGE = "averaging", 0


@dataclass(frozen=True)
class Options:
    """The options of one fleet. `credentials`: the folder of its credentials; None for plaintext."""

    n_peers: int
    n_elements: int
    n_steps: int
    slice_bytes: int
    credentials: Path | None
    heartbeat_s: float
    deadline_floor_s: float

    @property
    def of_run(self) -> dict[str, Any]:
        """The fields that the configs of the coordinator and of a peer have in common."""
        times = dict(heartbeat_s=self.heartbeat_s, deadline_floor_s=self.deadline_floor_s)
        return times | dict(run=RUN, fingerprint="", start_version=0, start_generation=0, n_steps=self.n_steps)


def owned(peer: int, members: Sequence[int], n_peers: int) -> list[int]:
    """The microbatches that a member owns."""
    return [m for m in range(n_peers) if (m if m in members else min(members)) == peer]


def vector(step: int, peer: int, microbatches: Sequence[int], n_elements: int) -> np.ndarray:
    """The vector that a peer adds to a step's sum for these microbatches."""
    generators = [np.random.Generator(np.random.SFC64([step, m, peer])) for m in microbatches]
    return np.add.reduce([generator.random(n_elements, np.float32) for generator in generators])


def whole_sum(step: int, members: Sequence[int], options: Options) -> int:
    """CRC-32 of the only correct result of a step among these members: the sum of their vectors in their order."""
    total = np.zeros(options.n_elements, np.float32)
    for peer in members:
        total += vector(step, peer, owned(peer, members, options.n_peers), options.n_elements)
    return zlib.crc32(total)


class OwnedMicrobatches:
    """The wiring: a peer runs the microbatches of each step that it owns in the current view."""

    READS = frozenset({ev.ViewChanged, ev.Updated, ev.Ran})

    def __init__(self, peer: int, n_peers: int, n_steps: int):
        self._peer = peer
        self._n_peers = n_peers
        self._n_steps = n_steps
        self._view: ev.View | None = None
        self._step = 0
        self._n_running = 0
        self._started: set[int] = set()  # microbatches of this step

    def handle(self, now_s: float, event) -> list:
        match event:
            case ev.ViewChanged(view):
                self._view = view
                return self._start_owned() if view.number > 1 and view.n_committed == self._step else []
            case ev.Updated(_, version):
                self._step = version
                self._started.clear()
                return self._start_owned()
            case ev.Ran(Work(kind="B", step=step, microbatch=m)):
                self._n_running -= 1
                return [ev.Accumulated(step, 0, m, 1, None), *self._drained()]
        return []

    def _start_owned(self) -> list:
        if self._step >= self._n_steps:
            return []
        members = self._view.stage_peers(0)
        new = set(owned(self._peer, members, self._n_peers)) - self._started
        self._started |= new
        self._n_running += len(new)
        works = [ev.Run(Work(0, WorkKind.BACKWARD, m, self._peer, self._step)) for m in sorted(new)]
        return works or self._drained()

    def _drained(self) -> list:
        return [] if self._n_running else [ev.Drained(self._step)]


class Vectors:
    """The tensors of a peer. `began_s[step]` is set to the moment at which the exchange of the step's vector begins,
    `ended_s[step]` to that at which the last slice of the result has arrived or is added up."""

    def __init__(self, peer: int, options: Options, began_s, ended_s):
        self._peer = peer
        self._options = options
        self._began_s = began_s
        self._ended_s = ended_s
        self._slices = GradientSlices(peer)
        self._accumulators: dict[int, np.ndarray] = {}

    def run(self, work: Work, scale: float, rounds: Sequence[RoundId] = ()) -> dict[str, float]:
        step = work.step
        if work.kind == WorkKind.BACKWARD:
            new = vector(step, self._peer, [work.microbatch], self._options.n_elements)
            sum_before = self._accumulators.get(step)  # it may be on its way to others, so it is not changed in place
            self._accumulators[step] = new if sum_before is None else sum_before + new
            return {"n_samples": 1.0}
        if work.kind == WorkKind.GATHER:
            for round in rounds:
                self._slices.offer(round, self._accumulators[step])
            self._began_s[step] = time.monotonic()
        return {"crc": float(self.crc(rounds[0]))} if work.kind == WorkKind.UPDATE else {}

    def crc(self, round: RoundId) -> int:
        """CRC-32 of the complete result of a round."""
        return zlib.crc32(self._slices.result(round))

    def tensor_to_send(self, body):
        return self._slices.part_to_send(tensor_key(body))

    def put(self, body, src, part) -> None:
        self._slices.put(tensor_key(body), part)
        self._ended_s[tensor_key(body).round.number] = time.monotonic()

    def expect(self, body, table) -> list[np.ndarray]:
        key = tensor_key(body)
        return [aligned_empty((key.hi - key.lo,), np.dtype(np.float32))]

    def sum(self, key, members) -> tuple[int, float]:
        result = self._slices.sum(key, members)
        self._ended_s[key.round.number] = time.monotonic()
        return result

    def reopen(self, round: RoundId) -> None:
        self._slices.reopen(round)

    def forget(self, round: RoundId) -> None:
        self._slices.forget(round)

    def free(self, step: int, rounds: Sequence[RoundId]) -> None:
        self._slices.free(rounds)
        self.drop_results(step)

    def drop_results(self, step: int) -> None:
        """Drop the sums of a step and of earlier ones; the compute thread does it once more, after its Work."""
        self._accumulators = {later: sum for later, sum in self._accumulators.items() if later > step}


class Observed:
    """Wraps the machine of a peer and writes to `out` each result, before any other process hears of it, and each
    update: ("prepared" or "applied", moment, round, CRC-32 of the vector)."""

    def __init__(self, machine: Peer, tensors: Vectors, out: Connection):
        self._machine = machine
        self._tensors = tensors
        self._out = out
        self._applying: dict[int, RoundId] = {}

    def handle(self, now_s: float, event) -> list:
        if isinstance(event, ev.Ran) and event.work.kind == WorkKind.UPDATE:
            self._record("applied", self._applying.pop(event.work.step), int(event.values["crc"]))
        actions = self._machine.handle(now_s, event)
        for action in actions:
            if isinstance(action, ev.StoreTensor):  # the loop stores it too, but a result is recorded here before
                self._tensors.put(action.body, action.src, action.tensor)
            if isinstance(action, ev.Send) and isinstance(action.body, ev.Prepared):
                for result in action.body.results:
                    self._record("prepared", result.round, self._tensors.crc(result.round))
            if isinstance(action, ev.Run) and action.work.kind == WorkKind.UPDATE:
                self._applying[action.work.step] = action.rounds[0]
        return actions

    def _record(self, what: str, round: RoundId, crc: int) -> None:
        self._out.send((what, time.monotonic(), round, crc))


class NoCheckpoints:
    """Accepts every checkpoint and writes nothing."""

    disk = ""

    def save(self, write_checkpoint: ev.WriteCheckpoint, store, post) -> None:
        post(ev.WroteCheckpoint(write_checkpoint.version, generation=write_checkpoint.generation))

    def find(self, action: ev.FindPart, post) -> None:
        post(ev.FoundPart(action.digest, 0))

    def mark_complete(self, checkpoint: ev.Checkpoint, post) -> None:
        return None

    def end(self) -> None:
        return None

    def wait(self) -> None:
        return None


def open_loop(
    peer: int, machine: DrivenMachine, credentials: Path | None, durable: FileStore | None = None
) -> tuple[Loop, str]:
    """A loop for `machine` whose transport listens on loopback, and the address of that transport."""
    loop = Loop(peer, machine, checkpointer=cast(Any, NoCheckpoints()), durable=durable)
    loaded = None
    if credentials is not None:
        is_peer = peer != ev.COORDINATOR
        loaded = load(authority.peer_file(credentials, peer) if is_peer else authority.coordinator_file(credentials))
    address = loop.open_transport(RUN, listen=("127.0.0.1", 0), credential=loaded, incarnation=loop.process)
    assert address is not None  # it listens
    return loop, format_address(address)


def be_peer(peer: int, options: Options, coordinator: Address, began_s, ended_s, out: Connection, observed: bool):
    """Run one peer in this process, until its run ends."""
    identity = PeerIdentity(peer=peer, stage=0, checkpoint_every_steps=0, outage_s=60.0, **options.of_run)
    group = Group(STAGE, (STAGE,), options.n_elements)
    sync = AllReduce(peer, 0, (group,), options.n_peers, options.slice_bytes)
    tensors = Vectors(peer, options, began_s, ended_s)
    machine = Peer(Membership(identity), OwnedMicrobatches(peer, options.n_peers, options.n_steps), sync)
    loop, address = open_loop(peer, Observed(machine, tensors, out) if observed else machine, options.credentials)
    loop.tensors = cast(Any, tensors)
    loop.transport.connect(ev.COORDINATOR, coordinator)
    threading.Thread(target=compute, args=(loop, lambda: ev.Ready({})), name="compute", daemon=True).start()
    loop.run(address)
    out.close()


class Fleet:
    """The processes of one run; its coordinator runs in this process. By peer: `began_s` and `ended_s` of each step (as
    Vectors has them), and in `pipes` what was `observed` (Observed)."""

    def __init__(self, options: Options, observed: bool):
        self._options = options
        self._observed = observed
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["jaxdt.runtime.loop"])
        peers = range(options.n_peers)
        self.began_s, self.ended_s = ([context.RawArray("d", options.n_steps) for _ in peers] for _ in range(2))
        self._ends = [context.Pipe(duplex=False) for _ in peers]
        self.pipes = [reader for reader, _ in self._ends]
        self._process = context.Process
        self.peers: list[Any] = []

    def run(self, timeout_s: float, report: Callable[[Report], None], beside: Sequence[Callable[[], None]]) -> ev.Stop:
        """Run the fleet to its end, with threads of these functions `beside` it, which begin when all peers have been
        started."""
        n_peers = self._options.n_peers
        config = CoordinatorConfig(
            stage_of=dict.fromkeys(range(n_peers), STAGE),
            n_stages=1,
            tokens_per_sample=SeqLengths(1),
            on_nonfinite="stop",
            **self._options.of_run,
        )
        with tempfile.TemporaryDirectory() as folder:
            machine, durable = Coordinator(config, TwoPhaseCommit(config)), FileStore(Path(folder))
            loop, address = open_loop(ev.COORDINATOR, machine, self._options.credentials, durable)
            loop.report = report
            for peer, (_, out) in enumerate(self._ends):
                moments = self.began_s[peer], self.ended_s[peer]
                coordinator = parse_address("coordinator", address)
                arguments = (peer, self._options, coordinator, *moments, out, self._observed)
                self.peers.append(self._process(target=be_peer, args=arguments, daemon=True))
                self.peers[-1].start()
                out.close()  # the process now holds the only copy, so the pipe ends with the process
            threads = [threading.Thread(target=target) for target in beside]
            timeout = threading.Timer(timeout_s, loop.post, [ev.Stop(3, "did not end")])
            for thread in (*threads, timeout):
                thread.start()
            stop = loop.run(address)
            timeout.cancel()
            for process in self.peers:
                process.join(10.0)
                process.kill()
            for thread in threads:
                thread.join()
        assert isinstance(stop, ev.Stop), "only a peer moves to another stage"
        return stop
