"""Two loops of one process that pass a tensor to and fro: what a message costs the processor, at its ends."""

import threading
from queue import Empty, SimpleQueue

import numpy as np

from jaxdt.protocol.events import URGENT, Action, Boundary, Event, Header, Key, Message, Received, Send, Stop, Woke
from jaxdt.protocol.message import from_plain
from jaxdt.protocol.trace import Trace
from jaxdt.runtime.loop import Loop
from jaxdt.runtime.net.credential import Credential
from jaxdt.runtime.net.options import TransportCallbacks, TransportSettings
from jaxdt.runtime.net.shaper import LinkShape
from jaxdt.runtime.net.transport import Transport
from jaxdt.runtime.storage.aligned_buffer import aligned_empty
from jaxdt.spec.errors import BadInput

N_BYTES = 1 << 18  # of the tensor; threads that wake up cost more than these
A_WHILE = LinkShape(latency_s=1e-3, bandwidth_gbps=1.0)  # on the way, so that threads sleep as in a run
N_EXCHANGES = 4
N_ENDS = 4 * N_EXCHANGES  # there and back
PATIENCE_S = 30.0


class MessageCostProbe:
    """`begin()` sends a tensor to the other end and back, N_EXCHANGES times; `wait()` until that is done. Use as a
    context."""

    def __init__(self, credential: Credential | None):
        self._back: SimpleQueue[None] = SimpleQueue()
        self._loops = [self._loop(me, credential) for me in (0, 1)]
        self._threads = [threading.Thread(target=loop.run, args=("",), daemon=True) for loop in self._loops]

    def __enter__(self) -> "MessageCostProbe":
        here, there = (loop.transport.start() for loop in self._loops)
        self._loops[0].transport.connect(1, there)
        self._loops[1].transport.connect(0, here)
        for thread in self._threads:
            thread.start()
        self.begin()  # which connects
        self.wait()
        return self

    def __exit__(self, *_) -> None:
        for loop in self._loops:
            loop.post(Stop(0, ""))
        for thread in self._threads:
            thread.join()

    def begin(self) -> None:
        self._loops[0].post(Woke("begin"))

    def wait(self) -> None:
        try:
            self._back.get(timeout=PATIENCE_S)
        except Empty:
            raise BadInput(f"127.0.0.1: a message to this process itself is lost for {PATIENCE_S:.0f} s") from None

    def _loop(self, me: int, credential: Credential | None) -> Loop:
        loop = Loop(me, _End(me, self._back), Trace(lambda line: None), lambda report: None, None)
        loop.tensors = _OneTensor()
        callbacks = TransportCallbacks(loop.on_message, loop.on_link, loop.expect, read=from_plain)
        settings = TransportSettings(shape=lambda dst: A_WHILE)
        loop.transport = Transport(me, "echo", ("127.0.0.1", 0), credential, callbacks, settings)
        return loop


class _End:
    """The machine of an end: 0 sends when it wakes, N_EXCHANGES times, and tells `back`; 1 answers."""

    def __init__(self, me: int, back: SimpleQueue[None]):
        self._back = back
        self._send = Send(1 - me, Boundary(Key("act", 0, me, 0)), N_BYTES, URGENT, Header("echo", 0, 0, me))
        self._answers, self._n_left = me == 1, 0

    def handle(self, now_s: float, event: Event) -> list[Action]:
        if isinstance(event, Woke):
            self._n_left = N_EXCHANGES
        elif not isinstance(event, Received):
            return []
        elif not self._answers:
            self._n_left -= 1
        if self._answers or self._n_left:
            return [self._send]
        self._back.put(None)
        return []


class _OneTensor:
    """In the place of a Store."""

    def __init__(self):
        self._tensor = np.zeros(N_BYTES, np.uint8)

    def take(self, body: Message) -> np.ndarray:
        return self._tensor

    def put(self, body: Message, src: int, tensor: np.ndarray) -> None:
        self._tensor = tensor

    def expect(self, body: Message, table: list) -> list[np.ndarray]:
        return [aligned_empty((N_BYTES,), np.dtype(np.uint8))]
