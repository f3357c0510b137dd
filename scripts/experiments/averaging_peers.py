"""Peers that do nothing but average a synthetic vector, as processes of their own; for kill_averaging.py.

Microbatch m of a step is peer m's, and the least peer's once that one is gone. What a peer adds for it depends on who
adds it: so two sums of one step differ in every element if different peers made them, and a vector that is part one and
part the other equals neither.
"""

import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np

from jaxdt.membership.member import Membership, PeerIdentity
from jaxdt.membership.peer import Peer
from jaxdt.protocol.events import (
    COORDINATOR,
    Accumulated,
    Drained,
    Prepared,
    Ran,
    Ready,
    Round,
    Run,
    Send,
    Updated,
    ViewChanged,
    WroteCheckpoint,
)
from jaxdt.protocol.message import from_plain, tensor_key
from jaxdt.protocol.trace import Trace
from jaxdt.runtime.loop import Loop
from jaxdt.runtime.net import credential
from jaxdt.runtime.net.options import TransportCallbacks
from jaxdt.runtime.net.transport import Transport
from jaxdt.runtime.storage.aligned_buffer import aligned_empty
from jaxdt.runtime.storage.durable import FileStore
from jaxdt.runtime.storage.gradient_slices import Slices
from jaxdt.spec.delay import NO_DELAY
from jaxdt.spec.sizes import Group
from jaxdt.spec.work import BACKWARD, GATHER, UPDATE, Work
from jaxdt.sync.allreduce import AllReduce

GROUP = "stage0"
HEARTBEAT_S, FLOOR_S = 0.2, 20.0  # a broken connection is what tells of a death here, not silence


@dataclass(frozen=True)
class Options:
    """Of one fleet. `secret`: the credential file, or None for plaintext."""

    n_peers: int
    n_elements: int
    n_steps: int
    slice_bytes: int
    secret: str | None


def owned(peer: int, members: Sequence[int], n_peers: int) -> list[int]:
    """The microbatches of a member."""
    return [m for m in range(n_peers) if (m if m in members else min(members)) == peer]


def vector(step: int, peer: int, microbatches: Sequence[int], n_elements: int) -> np.ndarray:
    """What a peer adds to a step's sum for these microbatches."""
    drawn = [np.random.Generator(np.random.SFC64([step, m, peer])) for m in microbatches]
    return np.add.reduce([one.random(n_elements, np.float32) for one in drawn])


def whole_sum(step: int, members: Sequence[int], options: Options) -> int:
    """CRC-32 of the only right result of a step among these members: their vectors, added in their order."""
    n_elements, n_peers = options.n_elements, options.n_peers
    total = np.zeros(n_elements, np.float32)
    for peer in members:
        total += vector(step, peer, owned(peer, members, n_peers), n_elements)
    return zlib.crc32(total)


class Sharing:
    """The wiring: each step's microbatches are shared out among the members."""

    def __init__(self, peer: int, n_peers: int, n_steps: int):
        self._peer, self._n_peers, self._n_steps = peer, n_peers, n_steps
        self._view, self._step, self._n_running = None, 0, 0
        self._own: set[int] = set()

    def handle(self, now_s: float, event) -> list:
        match event:
            case ViewChanged(view):
                self._view = view
                return self._give() if view.number > 1 and view.n_committed == self._step else []
            case Updated(_, version):
                self._step = version
                self._own.clear()
                return self._give()
            case Ran(Work(kind="B", step=step, microbatch=m)):
                self._n_running -= 1
                return [Accumulated(step, 0, m, 1, None), *self._drained()]
        return []

    def _give(self) -> list:
        if self._step >= self._n_steps:
            return []
        members = self._view.stage_peers(0)
        new = set(owned(self._peer, members, self._n_peers)) - self._own
        self._own |= new
        self._n_running += len(new)
        works = [Run(Work(0, BACKWARD, m, self._peer, self._step)) for m in sorted(new)]
        return works or self._drained()

    def _drained(self) -> list:
        return [] if self._n_running else [Drained(self._step)]


class Vectors:
    """A peer's tensors. `began_s[step]` is set when the step's vector is there."""

    def __init__(self, peer: int, options: Options, began_s):
        self._peer, self._options, self._began_s = peer, options, began_s
        self._slices = Slices(peer)
        self._accumulators: dict[int, np.ndarray] = {}

    def run(self, work: Work, scale: float, rounds: Sequence[Round] = ()) -> dict[str, float]:
        step, kept = work.step, self._accumulators
        if work.kind == BACKWARD:
            new = vector(step, self._peer, [work.microbatch], self._options.n_elements)
            kept[step] = new if step not in kept else kept[step] + new  # not in place: the other is being sent
            return {"n_samples": 1.0}
        if work.kind == GATHER:
            self._slices.offer(step, GROUP, kept[step])
            self._began_s[step] = time.monotonic()
        return {"crc": float(self.crc(rounds[0]))} if work.kind == UPDATE else {}

    def crc(self, round: Round) -> int:
        """Of the whole result that is held here."""
        return zlib.crc32(self._slices.result(round))

    def take(self, body):
        return self._slices.take(tensor_key(body))

    def put(self, body, src, part) -> None:
        self._slices.put(tensor_key(body), part)

    def expect(self, body, table) -> list[np.ndarray]:
        key = tensor_key(body)
        return [aligned_empty((key.hi - key.lo,), np.dtype(np.float32))]

    def sum(self, key, members) -> tuple[int, float]:
        return self._slices.sum(key, members)

    def forget(self, round: Round) -> None:
        self._slices.forget(round)

    def free(self, step: int) -> None:
        self._slices.free(step)
        self._accumulators = {k: kept for k, kept in self._accumulators.items() if k > step}


class Watched:
    """The machine of a peer, which tells `out` of every result before anybody else hears of it, and of every update:
    ("prepared" or "applied", when, the round, CRC-32 of the vector)."""

    def __init__(self, machine: Peer, tensors: Vectors, out: Connection):
        self._machine, self._tensors, self._out = machine, tensors, out
        self._applying: dict[int, Round] = {}

    def handle(self, now_s: float, event) -> list:
        if isinstance(event, Ran) and event.work.kind == UPDATE:
            self._say("applied", self._applying.pop(event.work.step), int(event.values["crc"]))
        actions = self._machine.handle(now_s, event)
        for action in actions:
            if isinstance(action, Send) and isinstance(action.body, Prepared):
                for result in action.body.results:
                    self._say("prepared", result.round, self._tensors.crc(result.round))
            if isinstance(action, Run) and action.work.kind == UPDATE:
                self._applying[action.work.step] = action.rounds[0]
        return actions

    def _say(self, what: str, round: Round, crc: int) -> None:
        self._out.send((what, time.monotonic(), round, crc))


class NoCheckpoints:
    """Nothing is trained, nothing is saved."""

    def save(self, version: int, tensors, post) -> None:
        post(WroteCheckpoint(version))

    def mark_complete(self, version: int, generation: int) -> None:
        return None

    def wait(self) -> None:
        return None


def open_loop(me: int, machine, secret: str | None, report, durable: FileStore | None = None) -> tuple[Loop, str]:
    """A loop with its transport, and the address that it listens on."""
    loop = Loop(me, machine, Trace(lambda line: None, 0), report, NoCheckpoints(), durable)
    loaded = credential.load(secret) if secret else None
    callbacks = TransportCallbacks(loop.on_message, loop.on_link, loop.expect, read=from_plain)
    loop.transport = Transport(me, "averaging", ("127.0.0.1", 0), loaded, callbacks)
    host, port = loop.transport.start()
    return loop, f"{host}:{port}"


def be_peer(peer: int, options: Options, coordinator: tuple[str, int], began_s, out: Connection) -> None:
    """One process."""
    seat = PeerIdentity("averaging", "", peer, 0, 0, 0, options.n_steps, 0, HEARTBEAT_S, FLOOR_S, outage_s=60.0)
    group = Group(GROUP, (0,), options.n_elements)
    sync = AllReduce(peer, 0, (group,), options.n_peers, options.slice_bytes, 0.0, NO_DELAY)
    tensors = Vectors(peer, options, began_s)
    machine = Peer(Membership(seat), Sharing(peer, options.n_peers, options.n_steps), sync)
    loop, address = open_loop(peer, Watched(machine, tensors, out), options.secret, lambda report: None)
    loop.tensors = tensors
    loop.transport.connect(COORDINATOR, coordinator)
    loop.run(address, lambda: Ready({}))
    out.close()
