"""Messages between simulated machines: over their link, with the tensor that they name, into the other's hands."""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

from jaxdt.protocol.events import Header, Message, Received
from jaxdt.protocol.message import WITH_TENSOR
from jaxdt.protocol.trace import Trace
from jaxdt.sim.active_faults import ActiveFaults
from jaxdt.sim.link_table import LinkTable
from jaxdt.sim.links import At, SimulatedLink
from jaxdt.sim.sim_peer import Outcome, SimPeer
from jaxdt.sim.tensors import NoTensors


class Delivery:
    """`tell(peer, event)` hands an event to a machine, unless it has stopped, as `outcome` says. Tensors of the
    priorities in `free` arrive at once; all else is handled at both ends, `handle(peer, then, args)`, if that is
    given."""

    def __init__(
        self,
        at: At,
        lines: LinkTable,
        seats: Mapping[int, SimPeer],
        outcome: Outcome,
        tell: Callable[[int, Received], None],
        trace: Trace | None,
        free: Collection[int],
        disturbance: ActiveFaults | None,
        handle: Callable[..., None] | None,
    ):
        self._at, self._lines, self._seats, self._outcome, self._tell = at, lines, seats, outcome, tell
        self._trace, self._free, self._disturbance, self._handle = trace, free, disturbance, handle
        # Whether anybody wants to know of tensors.
        self._looks = trace or free or not all(isinstance(seat.tensors, NoTensors) for seat in seats.values())

    def post(self, src: int, letters: Iterable[tuple[int, Message, int]], priority: int, header: Header) -> None:
        """As in Post."""
        now_s, event, lines = self._outcome.now_s, None, self._lines.of(src)
        for dst, body, n_bytes in letters:
            if event is None or event.body is not body:
                event = Received(header, body)
            arrive, args, at_once = self._tell, (dst, event), False
            if self._looks and type(body) in WITH_TENSOR:
                arrive, args = self._bring, (dst, event, self._seats[src].tensors.take(body))
                at_once = priority in self._free
                if self._trace:
                    self._trace.send(src, now_s, dst, body.key, n_bytes)
            if self._disturbance:
                arrive, args = self._disturbed, (src, dst, body, partial(arrive, *args))
            if at_once:
                self._at(now_s, arrive, args)
                continue
            line = lines.get(dst) or self._lines.line(src, dst)
            if self._handle:
                self._handle(src, self._carry, (line, n_bytes, priority, self._handle, (dst, arrive, args)))
            else:
                line.carry(now_s, n_bytes, priority, arrive, args)

    def _carry(self, line: SimulatedLink, n_bytes: int, priority: int, arrive: Callable[..., None], args: tuple):
        line.carry(self._outcome.now_s, n_bytes, priority, arrive, args)

    def _bring(self, dst: int, event: Received, tensor: Any) -> None:
        """A message with a tensor arrives."""
        if dst in self._outcome.stopped:
            return
        src, body = event.header.src, event.body
        self._seats[dst].tensors.put(body, src, tensor)
        if self._trace:
            self._trace.recv(dst, self._outcome.now_s, src, body.key)
        self._tell(dst, event)

    def _disturbed(self, src: int, dst: int, body: Message, deliver: Callable[[], None]) -> None:
        self._disturbance.arrive(self._outcome.now_s, src, dst, body, deliver)
