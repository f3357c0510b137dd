"""Measures what a message costs the processors at both ends: two loops of one process pass a tensor to and fro."""

import tempfile
import threading
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import cast

import numpy as np

from jaxdt.protocol import events as ev
from jaxdt.run.errors import BadInput
from jaxdt.runtime.identity import authority
from jaxdt.runtime.identity.credential import load
from jaxdt.runtime.loop import Loop, LoopTensors
from jaxdt.runtime.net.address import Address
from jaxdt.runtime.net.shaper import LinkShape
from jaxdt.runtime.storage.words import aligned_empty

N_BYTES = 1 << 18  # the tensor's size; waking up threads costs more than copying these
LINK = LinkShape(latency_s=1e-3, bandwidth_gbps=1.0)  # slow enough that threads sleep between messages, as in a run
N_EXCHANGES = 4
N_ENDS = 4 * N_EXCHANGES  # two messages an exchange, each with two ends
PATIENCE_S = 30.0


class MessageCostProbe:
    """`begin` starts N_EXCHANGES exchanges, in each of which a tensor goes to the other end and back; `wait` waits for
    the last. Use as a context. With `encrypted` the two ends have credentials of their own, which no other
    process accepts."""

    def __init__(self, encrypted: bool):
        self._finished: SimpleQueue[None] = SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:
            made = [self._make_loop(end, Path(folder) if encrypted else None) for end in (0, 1)]
        self._loops, self._addresses = zip(*made, strict=True)
        self._threads = [threading.Thread(target=loop.run, args=("",), daemon=True) for loop in self._loops]

    def __enter__(self) -> "MessageCostProbe":
        self._loops[0].transport.connect(1, self._addresses[1])
        self._loops[1].transport.connect(0, self._addresses[0])
        for thread in self._threads:
            thread.start()
        self.begin()  # the first messages make the connections
        self.wait()
        return self

    def __exit__(self, *exception) -> None:
        for loop in self._loops:
            loop.post(ev.Stop(0, ""))
        for thread in self._threads:
            thread.join()

    def begin(self) -> None:
        self._loops[0].post(ev.Woke("begin"))

    def wait(self) -> None:
        try:
            self._finished.get(timeout=PATIENCE_S)
        except Empty:
            raise BadInput(f"127.0.0.1: a message to this process itself is lost for {PATIENCE_S:.0f} s") from None

    def _make_loop(self, end: int, credentials: Path | None) -> tuple[Loop, Address | None]:
        credential = None
        if credentials is not None:
            authority.create_missing(credentials, [end])
            credential = load(authority.peer_file(credentials, end))
        loop = Loop(end, _EndMachine(end, self._finished))
        loop.tensors = cast(LoopTensors, _OneTensor())  # its machine only sends and receives
        listen = ("127.0.0.1", 0)
        address = loop.open_transport("message cost", listen=listen, credential=credential, shape=lambda dst: LINK)
        return loop, address


class _EndMachine:
    """The machine of one end. When end 0 wakes, it makes N_EXCHANGES exchanges and then puts None into `finished`. End
    1 answers each message."""

    def __init__(self, end: int, finished: SimpleQueue[None]):
        self._finished = finished
        header = ev.Header("message cost", 0, 0, end)
        self._send = ev.Send(1 - end, ev.Boundary(ev.Key("act", 0, end, 0)), N_BYTES, ev.URGENT, header)
        self._answers = end == 1
        self._n_left = 0

    def handle(self, now_s: float, event: ev.Event) -> list[ev.Action]:
        if isinstance(event, ev.Woke):
            self._n_left = N_EXCHANGES
        elif not isinstance(event, ev.Received):
            return []
        elif not self._answers:
            self._n_left -= 1
        if self._answers or self._n_left:
            return [self._send]
        self._finished.put(None)
        return []


class _OneTensor:
    """Stands in for a Store."""

    def __init__(self):
        self._tensor = np.zeros(N_BYTES, np.uint8)

    def tensor_to_send(self, body: ev.Message) -> np.ndarray:
        return self._tensor

    def expect(self, body: ev.Message, table: list) -> list[np.ndarray]:
        return [aligned_empty((N_BYTES,), np.dtype(np.uint8))]
