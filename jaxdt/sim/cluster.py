"""The simulator driver: it runs the machines of the runtime under a virtual clock.

Time is a queue of callbacks; links and hosts are models. Each peer has a `Tensors` object: `NoTensors` for timing
alone, or the runtime's store for real arithmetic under virtual time. Equal inputs give equal traces, byte for byte.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxdt.membership.peer import DrivenMachine
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import SCHEMAS, HeartbeatReport, Report
from jaxdt.run.work import MESSAGE, ON_A_CORE, TIMED_AS, Work
from jaxdt.sim.active_faults import ActiveFaults
from jaxdt.sim.delivery import Delivery, DeliveryOptions
from jaxdt.sim.disks import Disks
from jaxdt.sim.event_queue import EventQueue
from jaxdt.sim.faults import (
    COMMAND_OF,
    CRASH_SEEN_S,
    DEAD_LINK_S,
    ENDS,
    FAIL,
    HOLD,
    JOIN,
    LEAVE,
    PAUSE,
    PERTURB,
    POWER_OFF,
    STALE,
    STARTS,
    TAKEOVER,
    Fault,
)
from jaxdt.sim.hosts import make_host
from jaxdt.sim.link_table import OWN_EXCHANGE, LinkTable
from jaxdt.sim.sim_peer import CRASHED, Environment, Outcome, ProcessFactory, Recorder, SimPeer
from jaxdt.sim.stale_coordinator import StaleCoordinator
from jaxdt.sim.tensors import Perturbed

Observer = Callable[[float, int, ev.Event | Fault, list[ev.Action]], None]
ActionHandler = Callable[[int, Any], None]
Computation = ev.Run | ev.Restore | ev.Install | ev.DigestState  # for a compute thread

CRASH_STOP = ev.Stop(CRASHED, "crashed")
EVENTS_PER_LOOK = 1024  # after which a simulation looks whether its time is up, some ten milliseconds
ASKED_AGAIN_S = 1.0  # an operator without an answer asks again
CLAIM_IDS = 2 * ev.TEMPORARY_IDS  # from here on: temporary ids of processes that ask whether they may be a peer
PRIORITY_OF_FREE = {"transfer": ev.URGENT, "sync": ev.BULK}  # names of Environment.free


class TimeIsUp(Exception):
    """The caller of a simulation does not wait for its end."""


class Simulation:
    """Runs peers and their coordinator until all have stopped or a time limit is reached.

    `observer(now_s, peer, event, actions)` is called with the actions that an event makes a machine return, before any
    of them is done, and with each fault when it begins (without actions). `processes` makes the processes that begin
    later: faults that start one, and views that move a peer to another stage, need it."""

    def __init__(
        self,
        coordinator: DrivenMachine,
        peers: Mapping[int, SimPeer],
        environment: Environment,
        faults: Sequence[Fault] = (),
        trace: Recorder | None = None,
        observer: Observer | None = None,
        processes: ProcessFactory | None = None,
    ):
        self.outcome = Outcome()
        self._processes = processes
        self._disk: dict[str, Any] = {}  # what the coordinator made durable, by name
        self._disk_before_views: dict[str, Any] = {}  # the same, without the last views
        self.disks = Disks()
        self._stale_coordinator: StaleCoordinator | None = None
        self._n_starts: Counter[int] = Counter()
        self._claims: dict[int, int] = {}  # temporary id of a process that asks -> the peer that it was started as
        self._stage_of: dict[int, int] = {}  # stages of the processes that began later
        self._peer_of_temporary_id: dict[int, int] = {}
        self._machines: dict[int, DrivenMachine] = {ev.COORDINATOR: coordinator}
        self._machines.update({peer_id: peer.machine for peer_id, peer in peers.items()})
        self._peers = dict(peers)
        self._persist_s = environment.persist_s
        self._trace = trace
        self._observer = observer
        self._n_holds = 0
        self._accepted: set[int] = set()  # operators whose last request was accepted
        self._paused: dict[int, list[ev.Event]] = {}
        # What each compute thread does, and then what waits.
        self._compute: defaultdict[int, deque[Computation]] = defaultdict(deque)
        self._queue = EventQueue()
        host_of = {peer_id: peer.host for peer_id, peer in peers.items()}
        self._links = LinkTable(environment.link, self._queue.at, host_of, environment.link_options)
        self._active_faults = ActiveFaults(self._queue.at, self._handle_event, self._links) if faults else None
        self._message_s = max(peer.seconds.get(MESSAGE, 0.0) for peer in peers.values())
        self._hosts = self._make_hosts(environment.cores)
        self._n_sending: Counter[int] = Counter()  # boundary tensors of a peer on their way, where sends block
        self._held_up: set[int] = set()  # peers whose compute thread waits for them
        self._delivery = self._make_delivery(environment)
        self._action_handlers = self._make_action_handlers()
        for fault in faults:
            self._queue.at(fault.at_s, self._begin_fault, (fault,))

    def _make_hosts(self, cores: Mapping[str, float]) -> dict:
        n_peers_on = Counter(peer.host for peer in self._peers.values())
        n_at_once = 2 if self._message_s > 0 else 1  # a peer computes, and handles a message
        return {name: make_host(n, n_at_once * n_peers_on[name], self._queue.at) for name, n in cores.items()}

    def _make_delivery(self, environment: Environment) -> Delivery:
        blocks = environment.link_options.blocking_sends and "transfer" not in environment.free
        options = DeliveryOptions(
            trace=self._trace,
            free_priorities={PRIORITY_OF_FREE[name] for name in environment.free},
            has_own_exchange=environment.link_options.exchange == OWN_EXCHANGE,
            on_sent=self._sent_boundary if blocks else None,
            active_faults=self._active_faults,
            handle_message=self._handle_message if self._message_s > 0 else None,
        )
        return Delivery(self._queue.at, self._links, self._peers, self.outcome, self._handle_event, options)

    def _make_action_handlers(self) -> dict[type, ActionHandler]:
        return {
            ev.Connect: self._connect,
            ev.Disconnect: self._disconnect,
            ev.Meet: self._meet,
            ev.MarkCheckpoint: lambda peer, mark: None,
            ev.Revoke: lambda peer, revoke: None,  # the simulated coordinator drops what a revoked peer says
            ev.Send: self._send,
            ev.Post: self._post,
            ev.StoreTensor: lambda peer, store: self._peers[peer].tensors.put(store.body, store.src, store.tensor),
            ev.HandleAgain: lambda peer, again: self._handle_event(peer, again.event),
            **dict.fromkeys((ev.Run, ev.Restore, ev.Install, ev.DigestState), self._hand_to_compute_thread),
            ev.Offer: lambda peer, offer: self._peers[peer].tensors.offer(offer.round, offer.step),
            ev.Sum: self._sum,
            ev.Free: lambda peer, free: self._peers[peer].tensors.free(free.step, free.rounds),
            ev.Discard: lambda peer, discard: self._peers[peer].tensors.discard(discard.key),
            ev.Forget: lambda peer, forget: self._peers[peer].tensors.forget(forget.round),
            ev.Reopen: lambda peer, reopen: self._peers[peer].tensors.reopen(reopen.round),
            ev.WakeAt: self._wake_at,
            ev.Persist: self._persist,
            ev.WriteCheckpoint: self._write_checkpoint,
            ev.WriteOwed: lambda peer, action: None,  # a simulated disk has no content
            ev.FindPart: lambda peer, find: self._answer(peer, self.disks.find(self._peers[peer].disk, find)),
            ev.KeepPart: lambda peer, keep: self._answer(peer, self.disks.keep(peer, self._peers[peer].disk, keep)),
            **dict.fromkeys(SCHEMAS.values(), self._report),
            ev.MoveTo: self._move_to,
            ev.Stop: lambda peer, stop: self.outcome.stopped.__setitem__(peer, stop),
        }

    def run(self, until_s: float = float("inf"), is_over: Callable[[], bool] | None = None) -> Outcome:
        """The outcome. Raises RuntimeError if nothing is left to happen although a machine still runs, and TimeIsUp
        once is_over(), which is asked now and then, says so."""
        for peer in self._machines:
            self._handle_event(peer, ev.Started(disk=self._peers[peer].disk if peer in self._peers else ""))
        for peer in self._peers:
            self._send_ready(peer)
        n_events = 0
        while len(self.outcome.stopped) < len(self._machines):
            if not self._queue:
                raise RuntimeError(f"simulation: nothing left to happen at {self.outcome.now_s} s")
            now_s = self._queue.next_s()
            if now_s > until_s:
                break
            self.outcome.now_s = now_s
            self._queue.run_next()
            n_events += 1
            if is_over and n_events % EVENTS_PER_LOOK == 0 and is_over():
                raise TimeIsUp
        return self.outcome

    def release(self) -> None:
        """Drop everything but the outcome: without cycles, reference counts free a million objects at once."""
        del self._delivery
        self._action_handlers.clear()
        self._queue.clear()

    def _send_ready(self, peer: int) -> None:
        sim_peer = self._peers[peer]
        self._handle_event(peer, ev.Ready(dict(sim_peer.seconds), sim_peer.tensors.n_words))

    # --------------------------------------------------------------------------------------------------------- faults

    def _begin_fault(self, fault: Fault) -> None:
        if fault.kind in STARTS:
            self._start_process(fault)
            return
        peer = self._peer_of_temporary_id.get(fault.peer, fault.peer)
        now_s = self.outcome.now_s
        if peer >= ev.TEMPORARY_IDS or peer in self.outcome.stopped:
            return
        fault = replace(fault, peer=peer)
        if self._observer:
            self._observer(now_s, peer, fault, [])
        if fault.kind == PAUSE:
            self._paused.setdefault(peer, [])
            self._queue.at(fault.until_s, self._resume, (peer, fault.seconds))
            return
        if fault.kind == PERTURB:
            tensors = self._peers[peer].tensors
            assert isinstance(tensors, Perturbed), "a simulation that has this fault has tensors to perturb"
            tensors.perturb(fault.factor)
            return
        if fault.kind == LEAVE:
            self._handle_event(peer, ev.Leave())
            return
        if fault.kind == TAKEOVER:
            self._take_over(fault)
            return
        if fault.kind in COMMAND_OF:
            self._operate(fault)
            return
        if fault.kind == STALE:
            stale = self._stale_coordinator
            if stale and stale.machine is not self._machines[ev.COORDINATOR]:
                stale.go_on(now_s, fault.until_s)
            return
        assert self._active_faults is not None  # it is there as soon as there are faults
        self._active_faults.begin(now_s, fault)
        if fault.kind in ENDS:
            self._end_process(fault)

    def _end_process(self, fault: Fault) -> None:
        peer = fault.peer
        if fault.kind == FAIL:
            self._handle_event(peer, ev.Interrupted(2, "disk: full"))
        if peer == ev.COORDINATOR:
            machine, now_s = self._machines[peer], self.outcome.now_s
            self._stale_coordinator = StaleCoordinator(machine, now_s, self._queue.at, self._delivery.post)
        self.outcome.stopped[peer] = CRASH_STOP
        self._paused.pop(peer, None)
        host_answers = fault.kind != POWER_OFF
        seen_s = self.outcome.now_s + (CRASH_SEEN_S if host_answers else DEAD_LINK_S)
        for other in self._machines:
            if other == ev.COORDINATOR and peer in self._peers and self._peers[peer].is_outside:
                continue
            self._queue.at(seen_s, self._see_end, (other, self._machines[peer], peer, host_answers))

    def _see_end(self, other: int, machine: Any, peer: int, host_answers: bool) -> None:
        """The last connection to a process breaks, unless there are some to its successor by then."""
        if self._machines[peer] is machine:
            self._handle_event(other, ev.LinkChanged(peer, False, "crashed", host_answers))

    def _start_process(self, fault: Fault) -> None:
        """A newcomer asks the coordinator for a stage, or the process of a peer or of the coordinator starts again."""
        peer = fault.peer
        if ev.COORDINATOR in self.outcome.stopped and peer != ev.COORDINATOR:
            return
        if self._observer:
            self._observer(self.outcome.now_s, peer, fault, [])
        if fault.kind == JOIN:
            self._handle_event(ev.COORDINATOR, ev.Received(ev.Header("", 0, 0, ev.TEMPORARY_IDS + peer), ev.Join()))
        elif peer == ev.COORDINATOR:
            self._restart_coordinator()
        elif self._peers[peer].is_outside:
            self._restart_peer(peer)
        elif self.outcome.stopped.get(peer, CRASH_STOP) == CRASH_STOP:
            temporary_id = CLAIM_IDS + len(self._claims)
            self._claims[temporary_id] = peer
            self._handle_event(
                ev.COORDINATOR, ev.Received(ev.Header("", 0, 0, temporary_id), ev.Join(peer, fault.kind))
            )

    def _restart_coordinator(self) -> None:
        if self.outcome.stopped.get(ev.COORDINATOR) != CRASH_STOP:
            return
        self._revive(ev.COORDINATOR)
        assert self._processes is not None and self._processes.make_coordinator is not None
        self._machines[ev.COORDINATOR] = self._processes.make_coordinator(dict(self._disk))
        self._handle_event(ev.COORDINATOR, ev.Started())
        for peer in self._peers:
            self._handle_event(peer, ev.LinkChanged(ev.COORDINATOR, True, "started again"))

    def _take_over(self, fault: Fault) -> None:
        """A second coordinator begins on another host, with an older copy of the first one's disk."""
        now_s, first = self.outcome.now_s, self._machines[ev.COORDINATOR]
        self._disk = dict(self._disk_before_views)
        for peer in self._peers:
            self._handle_event(peer, ev.LinkChanged(ev.COORDINATOR, False, "taken over"))
        self.outcome.stopped[ev.COORDINATOR] = CRASH_STOP
        self._paused.pop(ev.COORDINATOR, None)
        self._stale_coordinator = StaleCoordinator(first, now_s, self._queue.at, self._delivery.post)
        self._restart_coordinator()
        self._stale_coordinator.go_on(now_s, fault.until_s)

    def _operate(self, fault: Fault) -> None:
        """An operator asks for something. One who has paused the run resumes it later."""
        self._ask(ev.OPERATOR_IDS, COMMAND_OF[fault.kind], None if fault.peer == ev.COORDINATOR else fault.peer)
        if fault.kind == HOLD:
            self._n_holds += 1
            self._queue.at(fault.until_s, self._resume_run, (ev.OPERATOR_IDS + self._n_holds,))

    def _resume_run(self, operator: int) -> None:
        """An operator asks until the answer has come: a coordinator may end before what was asked of it is durable."""
        if operator in self._accepted or self.outcome.stopped.get(ev.COORDINATOR, CRASH_STOP) != CRASH_STOP:
            return
        self._ask(operator, "resume")
        self._queue.at(self.outcome.now_s + ASKED_AGAIN_S, self._resume_run, (operator,))

    def _ask(self, operator: int, command: str, peer: int | None = None) -> None:
        request = ev.OperatorRequest(command, peer)
        self._handle_event(ev.COORDINATOR, ev.Received(ev.Header("", 0, 0, operator), request))

    def _restart_peer(self, peer: int) -> None:
        """A process may be this peer, since the one before it has ended or is taken for lost."""
        if self.outcome.stopped.get(peer, CRASH_STOP) != CRASH_STOP:
            return
        self._revive(peer)
        self._paused.pop(peer, None)
        self._start_peer(peer, self._stage_of.get(peer))
        if not self._peers[peer].is_outside:
            self._handle_event(ev.COORDINATOR, ev.LinkChanged(peer, True, "started again"))

    def _revive(self, peer: int) -> None:
        self.outcome.stopped.pop(peer, None)
        assert self._active_faults is not None  # it is there as soon as there are faults
        self._active_faults.revive(peer)

    def _start_peer(self, peer: int, stage: int | None) -> None:
        assert self._processes is not None
        sim_peer = self._processes.make_peer(peer, stage)
        self._peers[peer] = sim_peer
        self._machines[peer] = sim_peer.machine
        self._links.set_host(peer, sim_peer.host)
        if sim_peer.host not in self._hosts:
            self._hosts[sim_peer.host] = make_host(1, 1, self._queue.at)
        self._held_up.discard(peer)
        self._compute.pop(peer, None)  # what an earlier process has begun does not hold up this one
        self._n_starts[peer] += 1
        self.disks.ended(peer)
        self._handle_event(peer, ev.Started(process=self._n_starts[peer], disk=sim_peer.disk))
        self._send_ready(peer)

    def _resume(self, peer: int, paused_s: float) -> None:
        """A peer reads the messages that have arrived before it looks at timers that have expired. For the coordinator
        it is the other way round, the worst case: its messages are still in the sockets."""
        if peer not in self._paused:
            return  # its process has ended meanwhile
        timers_first = peer == ev.COORDINATOR
        events = self._paused.pop(peer)
        self._handle_event(peer, ev.Paused(paused_s))
        for event in sorted(events, key=lambda event: (type(event) is ev.Woke) != timers_first):
            self._handle_event(peer, event)

    # --------------------------------------------------------------------------------------------------------- events

    def _handle_event(self, peer: int, event: ev.Event) -> None:
        if peer in self._paused:
            self._paused[peer].append(event)
        elif peer not in self.outcome.stopped:
            if type(event) is ev.Received and type(event.body) is ev.State and event.body.key.part:
                self.disks.arrived(peer, event.body.key)
            actions = self._machines[peer].handle(self.outcome.now_s, event)
            if self._observer:
                self._observer(self.outcome.now_s, peer, event, actions)
            for action in actions:
                self._action_handlers[type(action)](peer, action)

    def _handle_own_event(self, peer: int, machine: DrivenMachine, event: ev.Event) -> None:
        """Handle an event that a process has caused itself, unless another process has taken its place."""
        if machine is self._machines[peer]:
            self._handle_event(peer, event)

    def _wake(self, peer: int, machine: DrivenMachine, woke: ev.Woke) -> None:
        """As in the runtime, a peer hears what its device does before its timer."""
        computation = next(iter(self._compute.get(peer, ())), None)
        if isinstance(computation, ev.Run):
            self._handle_own_event(peer, machine, ev.Status({}, {}, computation.work))
        self._handle_own_event(peer, machine, woke)

    def _handle_message(self, peer: int, callback: Callable[..., None], args: tuple) -> None:
        """Spend the time that handling a message takes at one end of its link, then call callback(*args)."""
        if peer in self._peers:
            sim_peer = self._peers[peer]
            host = self._hosts[sim_peer.host]
            host.start(self.outcome.now_s, peer, sim_peer.seconds.get(MESSAGE, 0.0), callback, args)
        else:  # the coordinator, which never computes
            self._queue.at(self.outcome.now_s + self._message_s, callback, args)

    # -------------------------------------------------------------------------------------------------------- actions

    def _connect(self, peer: int, connect: ev.Connect | ev.Member) -> None:
        if self._active_faults:
            now_s, other = self.outcome.now_s, connect.peer
            self._active_faults.on_connect(now_s, peer, other)
            if other in self.outcome.stopped:
                self._queue.at(now_s + CRASH_SEEN_S, self._refuse, (peer, other))

    def _refuse(self, peer: int, other: int) -> None:
        """The host of a process that has ended answers those who dial it, unless the host is off or cannot be reached
        either."""
        assert self._active_faults is not None  # processes end before the others only by faults
        if other in self.outcome.stopped and self._active_faults.answers(other, peer):
            self._handle_event(peer, ev.LinkChanged(other, False, "refused", gone=True))

    def _meet(self, peer: int, meet: ev.Meet) -> None:
        for member in meet.members:
            if member.peer != peer:
                self._connect(peer, member)

    def _disconnect(self, peer: int, disconnect: ev.Disconnect) -> None:
        if self._active_faults and disconnect.peer in self._machines:
            self._active_faults.on_disconnect(self.outcome.now_s, peer, disconnect.peer)

    def _send(self, src: int, send: ev.Send) -> None:
        dst, body = send.dst, send.body
        if dst < ev.TEMPORARY_IDS:
            self._delivery.post(src, ((dst, body, send.n_bytes),), send.priority, send.header)
        elif isinstance(body, ev.OperatorAnswer):
            self._accepted |= {dst} if body.accepted else set()
        elif isinstance(body, ev.Welcome) and dst in self._claims:
            self._restart_peer(self._claims[dst])
        elif isinstance(body, ev.Welcome):
            self._stage_of[body.peer] = body.stage
            self._peer_of_temporary_id[dst] = body.peer
            self._start_peer(body.peer, body.stage)

    def _post(self, src: int, post: ev.Post) -> None:
        self._delivery.post(src, post.letters, post.priority, post.header)

    def _hand_to_compute_thread(self, peer: int, computation: Computation) -> None:
        """The compute thread of a peer does one thing after another."""
        computations = self._compute[peer]
        computations.append(computation)
        if len(computations) == 1:
            self._compute_first(self._peers[peer], peer)

    def _compute_first(self, sim_peer: SimPeer, peer: int, was_busy: bool = False) -> None:
        """The compute thread comes to the first thing that is to be done, or is busy for a while before."""
        if sim_peer is not self._peers[peer] or peer in self.outcome.stopped:
            return
        if sim_peer.busy_s and not was_busy and (busy_s := sim_peer.busy_s()):
            self._queue.at(self.outcome.now_s + busy_s, self._compute_first, (sim_peer, peer, True))
            return
        tensors = sim_peer.tensors
        match self._compute[peer][0]:
            case ev.Run() as run:
                self._run(sim_peer, peer, run)
                return
            case ev.Restore(version) as restore:
                tensors.restore(restore)
                event = ev.Restored(version)
            case ev.Install() as install:
                event = tensors.install(install)
            case ev.DigestState(version, generation):
                event = ev.Digested(version, generation, *tensors.digest())
        self._queue.at(self.outcome.now_s, self._computed, (sim_peer, peer, event))

    def _computed(self, sim_peer: SimPeer, peer: int, event: ev.Event) -> None:
        """The compute thread is done with something. As in the runtime, it comes to the next thing at once, before the
        machine hears of it."""
        if sim_peer is not self._peers[peer]:
            return
        computations = self._compute[peer]
        computations.popleft()
        if computations:
            self._compute_first(sim_peer, peer)
        self._handle_event(peer, event)

    def _sent_boundary(self, peer: int, has_arrived: bool) -> None:
        """A boundary tensor leaves a peer whose sends block, or has arrived; then the peer continues."""
        self._n_sending[peer] += -1 if has_arrived else 1
        if not self._n_sending[peer] and peer in self._held_up:
            self._held_up.discard(peer)
            self._compute_first(self._peers[peer], peer, was_busy=True)

    def _run(self, sim_peer: SimPeer, peer: int, run: ev.Run) -> None:
        if self._n_sending[peer]:
            self._held_up.add(peer)
            return
        work, now_s = run.work, self.outcome.now_s
        values = sim_peer.tensors.run(work, run.scale, run.rounds)
        timed = TIMED_AS.get(work.kind, work.kind)
        seconds = sim_peer.seconds[timed]
        on_a_core_s = sim_peer.seconds.get(timed + ON_A_CORE, seconds)
        if self._active_faults:
            factor = self._active_faults.slow_factor(peer)
            seconds, on_a_core_s = factor * seconds, factor * on_a_core_s
        stall_s = sim_peer.stalls.before_s(work) if sim_peer.stalls else 0.0
        finished, args = self._finish_work, (sim_peer, peer, work, now_s, values)
        if on_a_core_s < seconds:
            finished, args = self._sleep_until, (now_s + stall_s + seconds, finished, args)
        arguments = (now_s + stall_s, peer, on_a_core_s, finished, args)
        if stall_s:  # the peer sleeps, and needs no core
            self._queue.at(now_s + stall_s, self._hosts[sim_peer.host].start, arguments)
        else:
            self._hosts[sim_peer.host].start(*arguments)

    def _sleep_until(self, until_s: float, finished: Callable[..., None], args: tuple) -> None:
        """A device that is emulated has computed, and sleeps for the rest of the Work."""
        if self.outcome.now_s < until_s:
            self._queue.at(until_s, finished, args)
        else:
            finished(*args)

    def _finish_work(self, sim_peer: SimPeer, peer: int, work: Work, start_s: float, values: dict[str, float]) -> None:
        seconds = self.outcome.now_s - start_s
        if self._trace:
            self._trace.run(peer, start_s, seconds, work)
        self._computed(sim_peer, peer, ev.Ran(work, start_s, seconds, values))

    def _sum(self, peer: int, action: ev.Sum) -> None:
        digest, sq_norm = self._peers[peer].tensors.sum(action.key, action.members)
        self._handle_event(peer, ev.Summed(action.key, digest, sq_norm))

    def _wake_at(self, peer: int, wake: ev.WakeAt) -> None:
        self._queue.at(wake.at_s, self._wake, (peer, self._machines[peer], ev.Woke(wake.tag)))

    def _persist(self, peer: int, persist: ev.Persist) -> None:
        """The value is durable some time before the machine hears of it, so that a process may end in between."""
        process = (peer, persist, self._machines[peer])
        self._queue.at(self.outcome.now_s + self._persist_s / 2, self._make_durable, process)
        self._queue.at(self.outcome.now_s + self._persist_s, self._persisted, process)

    def _make_durable(self, peer: int, persist: ev.Persist, machine: DrivenMachine) -> None:
        if machine is self._machines[peer] and peer not in self.outcome.stopped:
            self._disk[persist.name] = persist.value
            if persist.name != "view" or persist.value["rolled_back"] or "view" not in self._disk_before_views:
                self._disk_before_views = dict(self._disk)

    def _persisted(self, peer: int, persist: ev.Persist, machine: DrivenMachine) -> None:
        if machine is self._machines[peer] and peer not in self.outcome.stopped:
            self._handle_event(peer, ev.Persisted(persist.name))

    def _write_checkpoint(self, peer: int, write: ev.WriteCheckpoint) -> None:
        self._peers[peer].tensors.write_checkpoint(write.version)
        self._handle_event(peer, self.disks.write(peer, self._peers[peer].disk, write))

    def _answer(self, peer: int, event: ev.Event) -> None:
        """Hand a process the answer of its disk, after what it does now."""
        self._queue.at(self.outcome.now_s, self._handle_own_event, (peer, self._machines[peer], event))

    def _report(self, peer: int, report: Report) -> None:
        if not isinstance(report, HeartbeatReport):
            self.outcome.reports.append((self.outcome.now_s, peer, report))
            if self._trace:
                self._trace.report(peer, self.outcome.now_s, report)

    def _move_to(self, peer: int, move: ev.MoveTo) -> None:
        """The process begins another machine for another stage."""
        self._stage_of[peer] = move.stage
        self._start_peer(peer, move.stage)
