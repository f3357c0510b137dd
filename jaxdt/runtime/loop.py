"""The runtime's driver: one machine under the real clock. Events come in through a queue, and actions are carried out.

Communication and computation never wait for each other (DT-FM Sec. 3.5): the transport's threads receive and send, one
thread computes, and this loop passes only keys between them. Back pressure: no new Work starts while more than
QUEUE_BYTES_MAX wait on a link to a member. Receiving never stops, so queues always drain. A queue to a pool's
worker stops no Work: what its server has leased to it bounds the queue.
"""

import heapq
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import numpy as np

from jaxdt.membership.peer import DrivenMachine
from jaxdt.protocol import events as ev
from jaxdt.protocol.message import from_plain, tensor_key, to_plain
from jaxdt.protocol.reports import HeartbeatReport, Report, UsageReport, WriteFailedReport
from jaxdt.protocol.trace import Trace
from jaxdt.run.errors import BadInput, ThreadDied
from jaxdt.run.exit_codes import ExitCode
from jaxdt.run.work import REPLACES_STATE, Work, WorkKind
from jaxdt.runtime.net.address import Address, parse_address
from jaxdt.runtime.net.frame import PackedHead
from jaxdt.runtime.net.handshake import name_of
from jaxdt.runtime.net.transport import Transport
from jaxdt.runtime.storage.checkpointer import Checkpointer
from jaxdt.runtime.storage.durable import FileStore, refusal
from jaxdt.runtime.storage.words import WORD, aligned_empty, check_slice
from jaxdt.sim.tensors import Tensors

Computation = ev.Run | ev.Restore | ev.Install | ev.DigestState | ev.Free  # for the compute thread

PROCESS = secrets.randbelow(1 << 31)  # tells this process from others of the same peer
CONGESTED_S = 0.002
FLUSH_S = 1.0
PAUSED_S = 0.2  # a machine is told of longer pauses
QUEUE_BYTES_MAX = 64 << 20


class LoopTensors(Tensors, Protocol):
    """The tensors of a peer that receives over sockets, such as a Store."""

    def expect(self, body: ev.Message, table: list[tuple[np.dtype, tuple[int, ...]]]) -> list[np.ndarray]:
        """Buffers for the tensors that a message announces; BadInput if they are not those that it must carry."""
        ...

    def drop_results(self, step: int) -> None:
        """Drop what Work of steps that are over has left, since it ran when they were freed."""
        ...


def may_be_last(event: ev.Event) -> bool:
    """Whether a member may have done its part of the run with this event: what it then says has its last counters."""
    return isinstance(event, ev.WroteCheckpoint) or (isinstance(event, ev.Ran) and event.work.kind in REPLACES_STATE)


class Loop:
    """Drives `machine` until it stops. `report` is called with every report of the machine, on the loop's thread.

    `open_transport` is called before `run`, and `process` is set before it where this machine is to count as another
    process of the peer. A peer has `tensors` as soon as its compute thread has made them, and that thread takes the
    loop's `work` (jaxdt.runtime.process.compute). A coordinator has a `durable` store, and no compute thread.

    `run_dir` stands in errors of the system that name no file."""

    def __init__(
        self,
        peer: int,
        machine: DrivenMachine,
        trace: Trace = Trace(lambda line: None),
        report: Callable[[Report], None] = lambda report: None,
        checkpointer: Checkpointer | None = None,
        durable: FileStore | None = None,
        *,
        run_dir: Path = Path("run_dir"),
    ):
        self._peer = peer
        self._machine = machine
        self.trace = trace
        self.report = report
        self._checkpointer = checkpointer
        self._durable = durable
        self._run_dir = str(run_dir)
        self._events: SimpleQueue[ev.Event | ev.Stop | Report | BaseException] = SimpleQueue()
        self._wakes: list[tuple[float, int, str]] = []
        self._ready: deque[Computation] = deque()
        self._stop: ev.Stop | ev.MoveTo | None = None
        self._has_last_message = False  # the machine has sent one together with its Stop
        self._busy_s = 0.0
        self._busy_since_s = 0.0
        self.busy_s_max = 0.0  # the longest time in which this loop never had to wait for an event
        self._last_step = 0
        self._experts: dict[str, float] = {}  # their figures, of the last Ran that had them
        self._packed: tuple[ev.Header, ev.Message, PackedHead] | None = None  # the last message that was sent
        self._awake_s = 0.0  # when this loop was last seen to run
        self.process = PROCESS
        self._members: tuple[int, ...] = ()  # of the view; none outside of it, as at a pool's worker
        self._fetching: dict[ev.StateKey, int] = {}  # each requested slice of a state -> the peer that sends it
        self.work: SimpleQueue[Computation | None] = SimpleQueue()  # None ends that thread
        self._durable_writes: SimpleQueue[tuple[str, Any] | None] = SimpleQueue()  # None ends the thread that writes
        self._tensors: LoopTensors | None = None
        self.running: Work | None = None  # what the compute thread does at this moment
        self.transport: Transport

    def open_transport(self, run: str, **options: Any) -> Address | None:
        """Give this loop a transport that has started. Returns the address that it is bound to, if it listens.
        `options`: those of a Transport."""
        self.transport = Transport(
            self._peer,
            run,
            on_message=self.on_message,
            on_link=self.on_link,
            expect=self.expect,
            on_death=self.on_death,
            read=from_plain,
            **options,
        )
        return self.transport.start()

    @property
    def tensors(self) -> LoopTensors:
        """The tensors of the peer, for Work, actions and messages that come only where there are some."""
        assert self._tensors is not None, "a coordinator has no tensors, nor has a peer that is not prepared"
        return self._tensors

    @tensors.setter
    def tensors(self, tensors: LoopTensors) -> None:
        self._tensors = tensors

    # ----------------------------------------------------------------------------------- called from other threads

    def post(self, event: ev.Event | ev.Stop | Report | BaseException) -> None:
        """Queue an event, a Stop, a report, or an exception that must end the process."""
        self._events.put(event)

    def on_message(self, src: int, event: ev.Received, leaves: Sequence[np.ndarray]) -> None:
        """Receive a whole message. Its tensor stays with the event, and is stored if the machine accepts the message.
        BadInput tells the transport that the sender is wrong: the message is dropped and counted."""
        if event.header.src != src:
            raise BadInput(f"message.head.src: got {event.header.src}, expected {src}, whose connection it is")
        if isinstance(event.body, ev.Join) and event.body.peer not in (None, src % ev.PEER_IDS):
            raise BadInput(f"message.Join.peer: got {event.body.peer}, expected {src % ev.PEER_IDS}, who asks")
        if tensor_key(event.body) and len(leaves) != 1:
            raise BadInput(f"message.{type(event.body).__name__}: got {len(leaves)} tensors, expected 1")
        if isinstance(event.body, ev.State) and event.body.key.part:
            self._put_slice(event.body.key, leaves[0])  # it was asked for, and what it belongs to has a digest
        elif tensor_key(event.body):
            if isinstance(event.body, ev.State):
                check_slice(leaves[0], event.body)
            event = ev.Received(event.header, event.body, leaves[0])
        self._events.put(event)

    def _put_slice(self, key: ev.StateKey, words: np.ndarray) -> None:
        """A slice of a part of a checkpoint. A disk that refuses it fails this copy alone."""
        self._fetching.pop(key, None)
        try:
            self._parts.put_slice(key, words)
        except OSError as error:
            self._events.put(ev.LostPart(key.part, refusal(error, self._run_dir)))

    def expect(self, src: int, event: ev.Received, table: list) -> list[np.ndarray]:
        """Buffers for the tensors of a message that has been announced; BadInput for a message that must not come."""
        if self._tensors is None:
            raise BadInput(f"message.{type(event.body).__name__}: brings a tensor, and this process holds none")
        if isinstance(event.body, ev.State) and self._fetching.get(event.body.key) != src:
            raise BadInput(f"message.State: {event.body.key} was not asked of {name_of(src)}")
        if isinstance(event.body, ev.State) and event.body.key.part:
            wanted = [(WORD, (event.body.key.hi - event.body.key.lo + 1,))]
            if [(dtype, tuple(shape)) for dtype, shape in table] != wanted:
                raise BadInput(f"message.State {event.body.key}: got tensors {table}, expected {wanted}")
            return [aligned_empty(shape, dtype) for dtype, shape in wanted]
        return self._tensors.expect(event.body, table)

    def on_link(self, peer: int | None, state: str, reason: str) -> None:
        """The transport reports that a link is up, down or refused, that there is no way to a peer, or that the peer's
        process is gone."""
        if state == "refused":
            self._events.put(ev.Refused(peer, reason))
        else:
            assert peer is not None, "only a refused connection may come from an unknown peer"
            link = ev.LinkChanged(peer, state == "up", reason, state == "gone")
            self._events.put(ev.NoWay(peer, reason) if state == "no way" else link)

    def on_death(self, thread: str, error: Exception) -> None:
        """A thread of the transport has died. A process without it would look alive and be of no use."""
        self._events.put(ThreadDied(f"thread {thread} has died: {error!r}"))

    # ------------------------------------------------------------------------------------------------------ the loop

    def run(self, address: str) -> ev.Stop | ev.MoveTo:
        """Start the machine and go on until it stops, or until another machine must take its place. `address` is where
        others reach this process.

        When this returns or raises, the transport is closed and the compute thread has been asked to end. BadInput, an
        error of the system, or ThreadDied at a peer is raised after the other processes have been told of it."""
        flush_s = FLUSH_S if self._durable else 0.0  # the coordinator's last messages tell the peers how the run ended
        self._busy_since_s = time.monotonic()
        writer = threading.Thread(target=self._write_durably, name="durable", daemon=True)
        writer.start()
        try:
            self._awake_s = time.monotonic()
            # A coordinator holds no parts of checkpoints.
            disk = self._checkpointer.disk if self._checkpointer and not self._durable else ""
            self._handle(ev.Started(address, self.process, disk))
            while self._stop is None:
                self._turn()
            if self._has_last_message:
                flush_s = FLUSH_S
        except (BadInput, OSError, MemoryError) as error:
            flush_s = FLUSH_S
            self._announce_failure(str(error) if isinstance(error, BadInput) else refusal(error, self._run_dir))
            raise
        except ThreadDied as error:
            if self._durable is None:  # peers wait for a coordinator, which may be started again
                flush_s = FLUSH_S
                self._announce_failure(str(error))
            raise
        finally:
            self.work.put(None)
            self._durable_writes.put(None)
            self.transport.close(flush_s)
            writer.join()
            self._end_deletions()
        return self._stop

    def _end_deletions(self) -> None:
        if self._checkpointer and not isinstance(self._stop, ev.MoveTo):  # with which the process goes on
            self._checkpointer.end()

    def _write_durably(self) -> None:
        """Make values durable, one after another, on a thread: a busy disk may take seconds, in which the loop has to
        answer heartbeats."""
        while (write := self._durable_writes.get()) is not None:
            assert self._durable is not None, "only a coordinator persists, and it has a durable store"
            name, value = write
            try:
                self._durable.put(name, value)
            except Exception as error:
                self.post(error)
            else:
                self.post(ev.Persisted(name))

    def _announce_failure(self, reason: str) -> None:
        """Send the messages by which other processes learn why this one cannot go on; drop all other actions."""
        for action in self._machine.handle(time.monotonic(), ev.Interrupted(ExitCode.BAD_INPUT, reason)):
            if isinstance(action, ev.Send | ev.Post):
                self._perform(action)

    def _turn(self) -> None:
        """Wait for one event, or for the next wake-up."""
        self._start_ready_work()
        wait_s = self._wakes[0][0] - time.monotonic() if self._wakes else 1.0
        if self._ready:
            wait_s = min(wait_s, CONGESTED_S)
        wait_s = max(0.0, wait_s)
        if is_idle := self._events.empty():
            self.busy_s_max = max(self.busy_s_max, time.monotonic() - self._busy_since_s)
        try:
            event = self._events.get(timeout=wait_s)
        except Empty:
            event = None
        if is_idle:
            self._busy_since_s = time.monotonic()
        self._notice_pause(wait_s)
        if event is None:
            while self._wakes and self._wakes[0][0] <= time.monotonic():
                tag = heapq.heappop(self._wakes)[2]
                if self._tensors:
                    self._handle(self._status())
                self._handle(ev.Woke(tag))
            return
        if isinstance(event, BaseException):
            raise event
        if isinstance(event, ev.Stop | Report):
            self._perform(event)
        else:
            self._record(event)
            if self._tensors and may_be_last(event):
                self._handle(self._status())
            self._handle(event)

    def _notice_pause(self, wait_s: float) -> None:
        """Tell the machine, before anything else, if more time has passed than this loop has waited: the process was
        stopped, or its own work took so long."""
        now_s = time.monotonic()
        paused_s = now_s - self._awake_s - wait_s
        self._awake_s = now_s
        if paused_s > PAUSED_S:
            self._handle(ev.Paused(paused_s))

    def _record(self, event: ev.Event) -> None:
        """Count a Ran, and write Work and received tensors to the trace."""
        if isinstance(event, ev.Ran):
            self._busy_s += event.seconds
            assert event.work.step is not None, "all Work that runs belongs to a step"
            self._last_step = event.work.step
            self._experts |= {name: event.values[name] for name in ev.EXPERTS if name in event.values}
            if event.work.kind in (WorkKind.UPDATE, WorkKind.LOCAL_STEP):
                usage = UsageReport(event.work.step, time.process_time())
                self.trace.report(self._peer, time.monotonic(), usage)
                self.report(usage)
            self.trace.run(self._peer, event.started_s, event.seconds, event.work)
        elif isinstance(event, ev.Received) and (key := tensor_key(event.body)):
            self.trace.recv(self._peer, time.monotonic(), event.header.src, key)

    def _handle(self, event: ev.Event) -> None:
        actions = self._machine.handle(time.monotonic(), event)
        for action in actions:
            self._perform(action)
        if isinstance(self._stop, ev.Stop):
            self._has_last_message = any(isinstance(action, ev.Send) for action in actions)

    def _perform(self, action: ev.Action) -> None:
        match action:
            case ev.Send(dst, body, n_bytes, priority, header):
                self._send(((dst, body, n_bytes),), priority, header)
            case ev.Post(letters, priority, header):
                self._send(letters, priority, header)
            case ev.StoreTensor(src, body, tensor):
                self.tensors.put(body, src, tensor)
            case ev.HandleAgain(event):
                self._handle(event)
            case ev.Run() | ev.DigestState():
                self._hand_over(action)
            case ev.Offer(round, step):
                self.tensors.offer(round, step)
            case ev.Sum(key, members):
                self._handle(ev.Summed(key, *self.tensors.sum(key, members)))
            case ev.Free(step, rounds):
                self.tensors.free(step, rounds)
                self._hand_over(action)  # Work that was requested before may run by now, or will
            case ev.Discard(key):
                self.tensors.discard(key)
            case ev.Forget(round):
                self.tensors.forget(round)
            case ev.Reopen(round):
                self.tensors.reopen(round)
            case ev.Connect(peer, address):
                self._connect(peer, address)
            case ev.Meet(members):
                self._members = tuple(member.peer for member in members)
                for member in members:
                    if member.peer != self._peer:
                        self._connect(member.peer, member.address, member.process)
            case ev.Disconnect(peer):
                self.transport.drop(peer)
            case ev.Revoke(peers):
                self.transport.revoke(peers)
            case ev.WakeAt(at_s, tag):
                heapq.heappush(self._wakes, (at_s, len(self._wakes), tag))
            case ev.Persist(name, value):
                self._durable_writes.put((name, value))
            case ev.WriteCheckpoint():
                self._parts.save(action, self.tensors, self.post)
            case ev.WriteOwed():
                self._parts.save_owed(action, self.tensors, self.post)
            case ev.FindPart():
                self._parts.find(action, self.post)
            case ev.KeepPart(part):
                self._parts.keep(part, self.post)
            case ev.Restore() | ev.Install():
                self._fetching = {key: peer for key, peer in self._fetching.items() if key.part}
                self._hand_over(action)
            case ev.MarkCheckpoint(checkpoint):
                self._mark_complete(checkpoint)
            case Report():
                if not isinstance(action, HeartbeatReport):
                    self.trace.report(self._peer, time.monotonic(), action)
                self.report(action)
            case ev.Stop() | ev.MoveTo():
                self._stop = action

    def _mark_complete(self, checkpoint: ev.Checkpoint) -> None:
        """A disk that refuses costs this host the checkpoint, and not the run."""
        try:
            self._parts.mark_complete(checkpoint, self.post)
        except OSError as error:
            self._perform(
                WriteFailedReport(f"checkpoint of {checkpoint.version} steps: {refusal(error, self._run_dir)}")
            )

    @property
    def _parts(self) -> Checkpointer:
        """The keeper of this process's parts of checkpoints."""
        assert self._checkpointer is not None, "a run that writes checkpoints gives every loop a checkpointer"
        return self._checkpointer

    def _send(self, letters: Iterable[tuple[int, ev.Message, int]], priority: int, header: ev.Header | None) -> None:
        assert header is not None, "a machine's messages have headers when they reach the driver"
        for dst, body, n_bytes in letters:
            if isinstance(body, ev.Fetch):
                self._fetching[body.key] = dst
            key = tensor_key(body)
            try:
                leaves = [self._tensor_to_send(body)] if key else []
            except BadInput as error:
                assert isinstance(key, ev.StateKey), "only a part of a checkpoint may be gone from the disk"
                self._handle(ev.LostPart(key.part, str(error)))
                continue
            if key:
                self.trace.send(self._peer, time.monotonic(), dst, key, n_bytes)
            self.transport.send(dst, self._pack(header, body), leaves, priority=priority)

    def _pack(self, header: ev.Header, body: ev.Message) -> PackedHead:
        """The bytes of a message. One that goes to many, such as a view, is encoded once."""
        if self._packed is None or self._packed[1] is not body or self._packed[0] != header:
            self._packed = (header, body, self.transport.pack(to_plain(header, body)))
        return self._packed[2]

    def _tensor_to_send(self, body: ev.Message) -> Any:
        """The tensor to send with a message; BadInput for a part of a checkpoint that cannot be read any more."""
        if isinstance(body, ev.State) and body.key.part:
            return self._parts.read_slice(body.key)
        return self.tensors.tensor_to_send(body)

    def _connect(self, peer: int, address: str, process: int | None = None) -> None:
        try:
            self.transport.connect(peer, parse_address(name_of(peer), address) if address else None, process)
        except BadInput as error:  # the peer gave a bad address; that is no reason to end this process
            self._handle(ev.Refused(peer, str(error)))

    def _hand_over(self, action: Computation) -> None:
        """The compute thread gets all in the order in which the machine asks for it."""
        self._ready.append(action)
        self._start_ready_work()

    def _start_ready_work(self) -> None:
        """Start the Work that is ready, and what is to be done after it, unless a link is congested."""
        while self._ready and self._queued_bytes_max() <= QUEUE_BYTES_MAX:
            self.work.put(self._ready.popleft())

    def _queued_bytes_max(self) -> int:
        """Payload that waits for one of those who wait for this peer."""
        if not self._members:
            return self.transport.queued_bytes()
        return max(self.transport.queued_bytes(member) for member in self._members)

    def _status(self) -> ev.Status:
        stats = self.transport.stats()
        peers = {str(peer): stat for peer, stat in stats.items() if peer >= 0}
        bytes_to = {peer: stat.get("bytes_out", 0) for peer, stat in peers.items()}
        bytes_from = {peer: stat.get("bytes_in", 0) for peer, stat in peers.items()}
        values = {
            "step": float(self._last_step),
            "busy_s": self._busy_s,
            ev.CPU_S: time.process_time(),
            "bytes_out": float(sum(stat.get("bytes_out", 0) for stat in stats.values())),
            "bytes_in": float(sum(stat.get("bytes_in", 0) for stat in stats.values())),
            **self._experts,
        }
        return ev.Status(values, bytes_to, self.running, bytes_from)
