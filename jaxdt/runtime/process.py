"""A machine of a run in this process: its loop and transport, the thread that computes, and requests to stop it."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from jaxdt.membership.peer import DrivenMachine
from jaxdt.membership.worker_membership import NO_SERVER
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import OutageReport, Report, StillReadyReport, UnreachedReport, WriteFailedReport
from jaxdt.protocol.trace import Trace
from jaxdt.run.errors import BadInput
from jaxdt.run.exit_codes import ExitCode
from jaxdt.run.work import REPLACES_STATE, TIMED_AS
from jaxdt.runtime.coordinator_folder import end_of_run
from jaxdt.runtime.loop import Loop
from jaxdt.runtime.net.address import Address, advertised, default_listen, format_address, parse_address
from jaxdt.runtime.net.options import Issue
from jaxdt.runtime.net.shaper import LinkShape
from jaxdt.runtime.run_job import RunJob
from jaxdt.runtime.storage.checkpointer import Checkpointer
from jaxdt.runtime.storage.durable import LateFile
from jaxdt.sim.predict import device_links
from jaxdt.sim.stragglers.stalls import PeerStalls

TRACE_STEPS = 30
NO_MEMORY = "RESOURCE_EXHAUSTED"  # begins the text of XLA's error


@dataclass(frozen=True)
class OwnAddress:
    """Where a process listens, and where others reach it.

    listen: "host:port"; '' for a process that cannot be dialed.
    advertise: "host:port" at which others reach it, if it is not `listen`: a name, or a port that a router forwards.
    """

    listen: str
    advertise: str = ""

    def __post_init__(self):
        if self.advertise and not self.listen:
            raise BadInput(f"advertise: got {self.advertise}, expected none for a peer that does not listen")

    @classmethod
    def of_peer(cls, coordinator: Address, listen: str | None, advertise: str = "") -> "OwnAddress":
        """The address of a peer of this coordinator's run; `listen` None chooses it. BadInput, before the peer asks for
        a place in the run, if the run's other hosts cannot dial it."""
        own = cls(default_listen(coordinator) if listen is None else listen, advertise)
        if own.listen:
            address = parse_address("listen", own.listen)
            advertised(address, address, own.advertise, coordinator)
        return own


def run_machine(
    job: RunJob,
    own_id: int,
    machine: DrivenMachine,
    *,
    dials: tuple[int, Address],
    own: OwnAddress = OwnAddress(""),
    report: Callable[[Report], None],
    stop_requests: "StopRequests",
    process: int | None = None,
    trace: Path | None = None,
    trace_appends: bool = False,
    stage: int | None = None,
    prepare: Callable[[Loop], ev.Ready] | None = None,
    checkpointer: Checkpointer | None = None,
) -> ev.Stop | ev.MoveTo:
    """Run a machine of a peer, a pool's worker or a claimant until it stops, or until another has to take its place.

    dials: the id and the address of the process that it speaks with first.
    process: the number by which others tell this machine from earlier ones of the same id, by default that of this
        process.
    prepare: makes the tensors of `stage`, on the compute thread; None for a machine that computes nothing."""
    loop = Loop(own_id, machine, checkpointer=checkpointer, run_dir=job.run_dir)
    if process is not None:
        loop.process = process
    loop.report = ending_with_the_run(job, report, loop.post)
    with trace_into(loop, trace, TRACE_STEPS, appends=trace_appends) if trace else contextlib.nullcontext():
        peer, address = dials
        own_address = start_transport(job, loop, own_id, own, towards=address)
        loop.transport.connect(peer, address)
        stop_requests.deliver_to(loop)
        thread = None
        if prepare and stage is not None:
            arguments = (loop, lambda: prepare(loop), checkpointer, job.work_s_min(stage), job.stalls_of(own_id))
            thread = threading.Thread(target=compute, args=arguments, name="compute", daemon=True)
            thread.start()
        end = loop.run(own_address)
        if thread and (isinstance(end, ev.MoveTo) or end.code == NO_SERVER):
            thread.join()  # only then is there room for the arrays of the machine that follows
        return end


def ending_with_the_run(
    job: RunJob, report: Callable[[Report], None], post: Callable[[ev.Stop], None]
) -> Callable[[Report], None]:
    """Passes reports on to `report`. Posts a Stop in place of a report that the machine waits, if the run is over.

    The coordinator tells the end of a run to all that are connected. A process that loads jax, compiles or is paused at
    that moment hears nothing, and would look for the coordinator for hours, in a folder that no later run may use. So
    each time that it says that it waits, it looks into the coordinator's folder, where that is on its disk."""

    def report_or_end(said: Report) -> None:
        if isinstance(said, StillReadyReport | UnreachedReport | OutageReport) and (end := end_of_run(job)):
            post(end)
        else:
            report(said)

    return report_or_end


def trace_into(loop: Loop, path: Path, n_steps: float, **options: bool) -> contextlib.AbstractContextManager[LateFile]:
    """Inside this context the loop writes its trace to a file. `options`: of LateFile."""
    file = LateFile(path, lambda reason: loop.post(WriteFailedReport(reason)), **options)
    loop.trace = Trace(file.write, n_steps)
    return contextlib.closing(file)


def start_transport(
    job: RunJob,
    loop: Loop,
    peer: int,
    own: OwnAddress,
    towards: Address | None = None,
    coordinator_term: int | None = None,
    issue: Issue | None = None,
) -> str:
    """Give the loop a transport that has started. Returns the address at which others reach this process; '' for a
    process that cannot be dialed. `towards` is an address that leads to the others: that of the coordinator, None for
    the coordinator itself, whose term is given and whose answer to tokens is `issue`."""
    listen = parse_address("listen", own.listen) if own.listen else None
    incarnation = loop.process if coordinator_term is None else coordinator_term
    link = device_links(job.network)

    def shape(dst: int) -> LinkShape | None:
        if job.network is None or max(peer, dst) >= job.network.n_devices:
            return None  # the network does not know a peer that joins later
        emulated = link(peer, dst)
        is_free = emulated.latency_s == 0 and emulated.bandwidth_gbps == float("inf")
        return None if is_free else LinkShape(emulated.latency_s, emulated.bandwidth_gbps)

    bound = loop.open_transport(
        job.connection_name,
        listen=listen,
        credential=job.load_credential(),
        allow_plaintext=job.allow_plaintext,
        shape=shape,
        incarnation=incarnation,
        issue=issue,
    )
    if listen is None or bound is None:
        return ""
    return format_address(advertised(listen, bound, own.advertise, towards))


def compute(
    loop: Loop,
    prepare: Callable[[], ev.Event],
    checkpointer: Checkpointer | None = None,
    work_s_min: Mapping[str, float] = MappingProxyType({}),
    stalls: PeerStalls | None = None,
) -> None:
    """Run this as a thread. `prepare` makes the loop's tensors and returns the event that tells the machine so. After
    that, this takes actions from the loop's `work` until None comes, and posts one event for each but for a Free.

    A Work that replaces the state waits until the checkpointer has copied it. A Work of a kind takes at least
    work_s_min[kind], which emulates a slower device, and `stalls` makes some Work begin late, which emulates a
    straggler. An exception is posted too, and ends the process: one of XLA for want of memory as a MemoryError."""
    try:
        loop.post(prepare())
        while (action := loop.work.get()) is not None:
            started_s = time.monotonic()
            if isinstance(action, ev.Restore):
                loop.tensors.restore(action)
                loop.post(ev.Restored(action.version))
            elif isinstance(action, ev.Install):
                loop.post(loop.tensors.install(action))
            elif isinstance(action, ev.Free):
                loop.tensors.drop_results(action.step)
            elif isinstance(action, ev.DigestState):
                loop.post(ev.Digested(action.version, action.generation, *loop.tensors.digest()))
            else:
                kind = action.work.kind
                if kind in REPLACES_STATE and checkpointer:
                    checkpointer.wait()
                loop.running = action.work
                stall_s = stalls.before_s(action.work) if stalls else 0.0
                if stalls:
                    time.sleep(stall_s)
                values = loop.tensors.run(action.work, action.scale, action.rounds)
                if seconds_min := work_s_min.get(TIMED_AS.get(kind, kind)):
                    time.sleep(max(0.0, started_s + stall_s + seconds_min - time.monotonic()))
                loop.running = None
                loop.post(ev.Ran(action.work, started_s, time.monotonic() - started_s, values))
    except BaseException as error:
        loop.post(MemoryError(str(error)) if str(error).startswith(NO_MEMORY) else error)


class StopRequests:
    """Turns requests to stop into events for the loop that runs at the moment.

    The first signal becomes the event `on_interrupt` if it is SIGINT, and `on_terminate` if it is SIGTERM; each further
    signal becomes Interrupted.

    With `stop_with_parent`, standard input is watched too. The launcher may write a line "CODE REASON" to it, which
    ends this process with that exit code and reason. The end of standard input means that the launcher was killed,
    and becomes Interrupted."""

    def __init__(self, on_interrupt: ev.Event, on_terminate: ev.Event, stop_with_parent: bool):
        self._loop: Loop | None = None
        self._end: Callable[[ev.Event], None] | None = None
        self._requests: list[ev.Event] = []
        self._first = {signal.SIGINT: on_interrupt, signal.SIGTERM: on_terminate}
        for number in self._first:
            signal.signal(number, lambda number, _: self._on_signal(number))
        if stop_with_parent:
            threading.Thread(target=self._watch_parent, name="parent", daemon=True).start()

    @property
    def first(self) -> ev.Event | None:
        """The first request, if there was one, for a process that has no loop at the moment."""
        return self._requests[0] if self._requests else None

    def deliver_to(self, loop: Loop) -> None:
        """Deliver requests to this loop from now on. It also gets all earlier requests: the loop before it may have
        ended without handling them."""
        self._loop, self._end = loop, None
        for event in self._requests:
            loop.post(event)

    def end_by(self, end: Callable[[ev.Event], None]) -> None:
        """Until there is a loop again, call `end` with each request; and now with the first one, if there was one."""
        self._loop, self._end = None, end
        if self.first:
            end(self.first)

    def _on_signal(self, number: int) -> None:
        event = self._first.get(signal.Signals(number), ev.Interrupted())
        self._first.clear()
        self._add(event)

    def _add(self, event: ev.Event) -> None:
        self._requests.append(event)
        if self._loop:
            self._loop.post(event)
        elif self._end:
            self._end(event)

    def _watch_parent(self) -> None:
        received = b""
        # os.read, not the buffered reader: a thread that blocks inside the reader breaks the interpreter's exit.
        while chunk := os.read(sys.stdin.fileno(), 4096):
            received += chunk
            if b"\n" in received:
                code, _, reason = received.decode().strip().partition(" ")
                self._add(ev.Interrupted(int(code), reason))
                return
        self._add(ev.Interrupted())


def requested_stop(request: ev.Event, left: str) -> ev.Stop:
    """The end of a process that takes no part at the moment, when it is asked to end. `left`: the reason if it may
    leave."""
    if isinstance(request, ev.Interrupted):
        return ev.Stop(request.code, request.reason)
    return ev.Stop(ExitCode.DONE, left)
