"""The coordinator: numbered views, and what is made durable. No tensor ever reaches it.

Peers say hello; when all peers of the plan are ready, view 1 is made durable and sent. From then on the agreement
(jaxdt.membership.agreement) decides which steps are committed, and the roster (jaxdt.membership.roster) decides who is
a member. Views, records of steps and the coordinator's term are made durable before anybody hears of them (step
protocol, Sec. 5), one view or record at a time; so a coordinator that is started again continues from the last of them
(Sec. 7). A view names the results that its members hold, so nothing is averaged twice (Sec. 4.6).
"""

# A machine matches the few events that it reads and answers [] to all others.
# pyright: reportMatchNotExhaustive=false

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxdt.membership.admission import Admission, unknown
from jaxdt.membership.agreement import TIMER, Agreement, CountedRows, EndRun, RepairReplicas, RollBack
from jaxdt.membership.coordinator_config import CoordinatorConfig, DurableState, OperatorState
from jaxdt.membership.evictions import Evictions
from jaxdt.membership.operations import Progress
from jaxdt.membership.rebalance_api import ByNumber
from jaxdt.membership.reminder import Reminder
from jaxdt.membership.roster import Standing
from jaxdt.membership.run_state import CHECKPOINT, OPERATOR, ROWS, STEPS, TERM, VIEW, RunState
from jaxdt.protocol import events as ev
from jaxdt.protocol.address import why_undialable
from jaxdt.protocol.deadline import RECONNECT_S
from jaxdt.protocol.reports import (
    CandidateReport,
    CheckpointReport,
    ConnectedReport,
    DoneReport,
    DroppedReport,
    HeartbeatReport,
    NoHolderReport,
    OperatorReport,
    PartMissingReport,
    PausedReport,
    RefusedReport,
    RestartedReport,
    RollbackReport,
    SteppedDownReport,
    StepReport,
    StillWaitingReport,
    ViewReport,
    WaitingReport,
    WorkerGoneReport,
    WorkerHereReport,
)
from jaxdt.run.exit_codes import ExitCode

RESTART_GRACE_S = 10.0  # peers need so long to find a coordinator that was started again
UNKNOWN_VIEW = "it follows a view of a coordinator that was superseded, and is admitted again"


Handler = Callable[[float, ev.Header, Any], list[ev.Action]]


class Coordinator:
    """See the module text. `durable_state`: what an earlier coordinator of this run left behind; `balance` says which
    stage needs a peer (None: the one with the fewest)."""

    def __init__(
        self,
        config: CoordinatorConfig,
        agreement: Agreement,
        durable_state: DurableState | None = None,
        balance: ByNumber | None = None,
    ):
        self._run = run = RunState(config, agreement, durable_state, balance)
        self.config = config
        self.coordinator_term = run.coordinator_term
        self.roster = run.roster
        self.profiles: dict[int, dict[str, float]] = {}  # of the peers of the plan, and so are the devices
        self.devices: dict[int, str] = {}
        self._agreement = agreement
        self._checkpoints = run.checkpoints
        self._operations = run.operations
        self._being_persisted = run.being_persisted
        self._admission = Admission(run)
        self._evictions = Evictions(run, self._change_view)
        self._reminder = Reminder()
        self._last_refusal = ""  # while the run waits: perhaps of the peer that it waits for
        self._without_holder: list[int] = []  # stages to whose part the run cannot go back now, as reported
        self._answer_once_durable: ev.Send | None = None  # to an operator
        self._early_events: list[ev.Event] = []  # those that came before the term was durable
        self._address = ""  # at which the peers reach this coordinator
        self._set_tables()
        if durable_state:
            self._restore(durable_state)

    @property
    def view(self) -> ev.View | None:
        return self.roster.view

    @property
    def n_committed(self) -> int:
        return self._agreement.n_committed

    def newcomer_ids(self) -> Sequence[int] | None:
        """See Admission. Any thread may ask."""
        return self._admission.newcomer_ids()

    def handle(self, now_s: float, event: ev.Event) -> list[ev.Action]:
        if self._run.has_ended:
            return []
        if TERM in self._being_persisted and event != ev.Persisted(TERM):
            self._early_events.append(event)
            return []
        return [self._with_header(action) for action in self._handle(now_s, event)]

    def _with_header(self, action: ev.Action) -> ev.Action:
        if not isinstance(action, ev.Send) or action.header is not None:
            return action
        generation, number = (self.view.generation, self.view.number) if self.view else (0, 0)
        header = ev.Header(self.config.run, generation, number, ev.COORDINATOR, self.coordinator_term)
        return replace(action, header=header)

    def _handle(self, now_s: float, event: ev.Event) -> list[ev.Action]:
        match event:
            case ev.Started(address):
                self._address = address
                return [self._run.persist(TERM, self.coordinator_term)]
            case ev.Woke(tag) if tag.startswith(TIMER):
                return [*self._agreement.on_woke(now_s, tag), *self._decide()]
            case ev.Woke(tag):
                judged = [*self._evictions.judge(now_s), *self._admission.settle_claims(now_s)]
                return [*judged, *([*self._remind(now_s), self._next_tick(now_s)] if tag == "tick" else [])]
            case ev.Persisted(name):
                return self._when_durable[name](now_s, self._being_persisted.pop(name))
            case ev.Refused(_, reason):
                self._last_refusal = reason
                return [RefusedReport(reason)]
            case ev.Interrupted(code, reason):
                return self._run.end(code, reason)
            case ev.StopRequested():
                return self._on_stop()
            case ev.Paused(seconds):
                return self._on_pause(now_s, seconds)
            case ev.Terminated():
                return self._step_down(ExitCode.TERMINATED, "terminated; the run waits for a coordinator")
            case ev.LinkChanged(peer, up, _, gone):
                return self._on_link(now_s, peer, up, gone)
            case ev.Received(header, body):
                return self._received(now_s, header, body)
        return []

    def _remind(self, now_s: float) -> list[ev.Action]:
        """Say again for whom the run waits."""
        if self._run.has_ended:
            return []
        missing = [] if self.view else sorted(set(self.config.stage_of) - set(self.profiles))
        stages = self.roster.deserted if self.view else []
        if not missing and not stages:
            self._reminder.ends()
            self._last_refusal = ""
            return []
        if (waited_s := self._reminder.due(now_s)) is None:
            return []
        absent = [peer for peer in missing if not self.roster.has_lease(peer)]
        return [StillWaitingReport(missing, absent, stages, self._last_refusal, waited_s)]

    def _next_tick(self, now_s: float) -> ev.WakeAt:
        return ev.WakeAt(now_s + self.config.heartbeat_s, "tick")

    def _on_pause(self, now_s: float, paused_s: float) -> list[ev.Action]:
        """This process did not run, and what the peers said meanwhile is still on its way through its sockets. So
        no peer is judged before a whole lease is over, in which the peers are heard again."""
        if paused_s <= self.config.heartbeat_s:
            return []
        patience_s = self.config.deadline_floor_s
        self._evictions.patient_until_s = max(self._evictions.patient_until_s, now_s + patience_s)
        self._agreement.on_pause(self._evictions.patient_until_s)
        return [PausedReport(round(paused_s, 1), patience_s)]

    def _on_link(self, now_s: float, peer: int, up: bool, gone: bool) -> list[ev.Action]:
        self.roster.on_link(now_s, peer, up, gone)
        if up:
            return []
        if self.roster.has_lease(peer):
            return [ev.WakeAt(now_s + RECONNECT_S, "link")]
        if self._evictions.dials(peer):
            return self._evictions.on_dead(now_s, peer) if gone else []
        # A process without a lease has asked, was answered, or was evicted, and may come back: nothing is kept of its
        # connection.
        self._admission.withdraw_claim(peer)
        return [ev.Disconnect(peer)]

    # ------------------------------------------------------------------------------------------------- durable state

    def _restore(self, durable_state: DurableState) -> None:
        view = replace(durable_state.view, coordinator_term=self.coordinator_term)
        self._agreement.restore(view, durable_state.steps, durable_state.rows)
        self.roster.recall(view, any(step.record.step >= view.n_committed for step in durable_state.steps))
        if durable_state.checkpoint:
            self._checkpoints.on_complete(durable_state.checkpoint)
            self._agreement.on_checkpoint(durable_state.checkpoint.version)
        if promised := self._operations.restore(self._checkpoints.checkpoint.version):
            self._agreement.promise_checkpoint(promised)

    def _begin_term(self, now_s: float, coordinator_term: int) -> list[ev.Action]:
        """The term is durable, so no later coordinator will have the same: this one may speak. It evicts no peer before
        a whole lease of this term is over (step protocol, Sec. 7.1)."""
        actions: list[ev.Action] = [self._next_tick(now_s)]
        if self._operations.state.revoked:
            actions.append(ev.Revoke(self._operations.state.revoked))
        if self.view:
            actions += self._agreement.start(now_s)
            self._evictions.patient_until_s = now_s + RESTART_GRACE_S
            for member in self.view.members:
                self.roster.on_message(member.peer, now_s)
                actions.append(ev.Connect(member.peer, member.address))
            members = [member.peer for member in self.view.members]
            actions.append(RestartedReport(self.coordinator_term, self.view.number, self.n_committed, members))
            actions += self._decide()
        early, self._early_events = self._early_events, []
        return actions + [action for event in early for action in self.handle(now_s, event)]

    # ------------------------------------------------------------------------------------------------------ messages

    def _received(self, now_s: float, header: ev.Header, body: ev.Message) -> list[ev.Action]:
        src = header.src
        if self._operations.is_revoked(src):
            return [DroppedReport(src, run=header.run)]
        if isinstance(body, ev.OperatorRequest) and src >= ev.OPERATOR_IDS:
            return self._on_request(now_s, src, body)
        if isinstance(body, ev.Join):
            return self._admission.on_join(now_s, src, body)
        if header.run != self.config.run:
            return [DroppedReport(src, run=header.run)]
        if header.view and self.view is None:
            return self._state_lost(src, header)
        if header.coordinator_term > self.coordinator_term:
            return self._superseded(src, header.coordinator_term)
        if src in self.roster.peers:
            return self._from_peer(now_s, header, body)
        if isinstance(body, ev.Hello) and self.view:
            reason = unknown(src)
            stop = ev.Send(src, ev.Ended(ExitCode.FORGOTTEN, reason))
            return [RefusedReport(reason), ev.Connect(src, body.address), stop]
        return [DroppedReport(src, run=header.run)]

    def _from_peer(self, now_s: float, header: ev.Header, body: ev.Message) -> list[ev.Action]:
        src = header.src
        known = self.roster.peers[src]
        if known.refusal and isinstance(body, ev.Hello) and body.process != known.refusal[0]:
            known.refusal = None  # another process, perhaps with another address
        if known.refusal:
            return [self.roster.reach(src), ev.Send(src, known.refusal[1])]
        is_superseded = self._is_superseded(header)
        if is_superseded and not known.is_given_up and not isinstance(body, ev.Failed):
            lost = self._evictions.lose(now_s, src, UNKNOWN_VIEW, is_dead=False)
            return [*lost, *([] if self._run.has_ended else self._from_peer(now_s, header, body))]
        if handler := self._of_known_peers.get(type(body)):
            return handler(now_s, header, body)
        if self._is_missing(src) and known.lease is None and not is_superseded:
            returned = self._evictions.on_returned(now_s, src)
            return [*returned, *([] if self._run.has_ended else self._from_peer(now_s, header, body))]
        if known.lease is None:  # a peer that was never admitted, or was evicted: the view tells it so
            return [self.roster.reach(src), ev.Send(src, self.view)] if self.view else []
        self.roster.on_message(src, now_s)
        if type(body) in self._agreement.READS:
            return self._on_agreement(now_s, header, body)
        early, late = self._of_leased_peers.get(type(body), (None, None))
        handler = late if self.view else early
        return handler(now_s, header, body) if handler else []

    def _is_superseded(self, header: ev.Header) -> bool:
        """Whether a member is in a view that this coordinator does not know, since a superseded coordinator made it.
        The member's work in that view does not fit the work of the others."""
        admission = self.roster.admissions.get(header.src)
        if self.view is None or admission is None:
            return False
        return header.view >= admission and not self.view.continues(header.view)

    def _note(self, peer: int) -> str:
        """A note for the owner of a peer, who sees only the log of that peer: why the run or the peer waits; '' if it
        does not."""
        if self._operations.state.paused:
            return "the run is paused by an operator, until fleet.py resume"
        if stages := self._evictions.waiting_stages:
            what = f"stage {stages[0]} has" if len(stages) == 1 else f"stages {', '.join(map(str, stages))} have"
            return f"the run stands still: {what} no peer that is there"
        if self.roster.peers[peer].is_leaving and self.roster.is_last_of_stage(peer):
            return "stays until another joins, as the last of its stage; fleet.py stop ends the run with a checkpoint"
        return ""

    def _on_heartbeat(self, now_s: float, header: ev.Header, beat: ev.Heartbeat) -> list[ev.Action]:
        src, workers = header.src, beat.workers
        self.roster.on_heartbeat(now_s, src, beat.status)
        if self._admission.workers and ev.WORKERS in beat.status:
            self._admission.workers.on_workers(now_s, src, int(beat.status[ev.WORKERS]), workers)
        worker_cpu_s = {status.worker: status.cpu_s for status in workers} or None
        report = HeartbeatReport(src, beat.status, beat.bytes_to, beat.bytes_from or None, worker_cpu_s)
        return [ev.Send(src, ev.HeartbeatAck(beat.count, now_s, self._note(src))), report]

    def _on_worker_here(self, now_s: float, header: ev.Header, here: ev.WorkerHere) -> list[ev.Action]:
        places = self._admission.workers
        return [WorkerHereReport(here.worker, header.src, places.on_here(here.worker))] if places else []

    def _on_worker_gone(self, now_s: float, header: ev.Header, gone: ev.WorkerGone) -> list[ev.Action]:
        if not self._admission.workers:
            return []
        self._admission.workers.on_gone(gone.worker)
        return [WorkerGoneReport(gone.worker, header.src, gone.reason, gone.n_redone)]

    def _on_load(self, now_s: float, header: ev.Header, load: ev.Load) -> list[ev.Action]:
        self.roster.balance.report(now_s, header.src, load)
        return []

    def _on_done(self, now_s: float, header: ev.Header, done: ev.Done) -> list[ev.Action]:
        self._checkpoints.on_done(header.src)
        report = DoneReport(header.src, done.bytes_to, done.totals, done.bytes_from or None)
        return [report, *self._end_if_over()]

    def _on_agreement(self, now_s: float, header: ev.Header, body: ev.Message) -> list[ev.Action]:
        """A message for the agreement. After a restart, when the last member has answered, and when a checkpoint has
        waited for a row that is reported now, more may follow than the next step."""
        if not self._counts(header):
            return []
        was_asking = self._agreement.is_asking
        actions = self._agreement.hear(now_s, header.src, body, self.roster.admissions)
        has_answers = was_asking and not self._agreement.is_asking
        if has_answers or any(isinstance(action, StepReport) for action in actions):
            return [*actions, *self._continue()]
        return [*actions, *self._decide()]

    def _counts(self, header: ev.Header) -> bool:
        """Whether the agreement hears a message. Members send a message of an earlier view again, and one that came
        while a view was being made durable, unless it counts in all views since their admission."""
        view = self.view
        if view is None or header.generation != view.generation:
            return False
        if self._agreement.REPLICAS_MAY_DIFFER:
            return header.view >= self.roster.admissions.get(header.src, header.view + 1)
        return header.view == view.number and VIEW not in self._being_persisted

    def _on_hello(self, now_s: float, header: ev.Header, hello: ev.Hello) -> list[ev.Action]:
        src = header.src
        stage = self.roster.peers[src].stage
        if reason := self.config.refusal(src, hello.stage if self.view else stage, hello):
            return [RefusedReport(reason), ev.Send(src, ev.Ended(2, reason))]
        if problem := why_undialable(hello.address, self._address):
            reason = f"{self.roster.name(src)}: {problem}; expected --listen=HOST:PORT that the other hosts can dial"
            return [RefusedReport(reason), ev.Connect(src, hello.address), ev.Send(src, ev.Ended(2, reason))]
        is_new_process = self.roster.on_hello(src, hello)
        actions = self._evictions.lose(now_s, src, "its process was restarted", is_dead=True) if is_new_process else []
        if self._run.has_ended:
            return actions
        if self._is_missing(src) and not is_new_process and not self._is_superseded(header):
            actions += self._evictions.on_returned(now_s, src)
        self.roster.on_message(src, now_s)
        actions.append(ev.Connect(src, hello.address))
        if self._operations.state.revoked:
            actions.append(ev.Send(src, ev.Revoked(self._operations.state.revoked)))
        actions += [ev.Disconnect(temporary_id) for temporary_id in self.roster.ids.take_temporary_ids(src)]
        if hello.stage != stage:
            self.roster.forget_process(src)
            return [*actions, ev.Send(src, ev.Reassign(stage))]
        actions.append(ConnectedReport(src, hello.stage))
        if src in self.roster.members:
            return actions + ([] if is_new_process else self._send_missed(src))
        return actions + ([ev.Send(src, self.view)] if self.view else [])  # it may believe that it is a member

    def _is_missing(self, peer: int) -> bool:
        return self.roster.peers[peer].standing is Standing.MISSING

    def _send_missed(self, src: int) -> list[ev.Action]:
        """Send a member what it may have missed while this coordinator, or the link to it, was down."""
        complete = ev.CheckpointComplete(self._checkpoints.checkpoint)
        missed: list[ev.Message] = [self.roster.current_view, *self._agreement.missed_messages(), complete]
        return [ev.Send(src, body) for body in missed]

    def _on_profiled(self, now_s: float, header: ev.Header, profiled: ev.Profiled) -> list[ev.Action]:
        """View 1 is made when the last peer of the plan is ready to compute; a peer that comes later is a candidate."""
        src = header.src
        if profiled.process != self.roster.peers[src].process:
            return []
        is_planned = src in self.config.stage_of
        if is_planned:
            self.profiles[src] = profiled.seconds
            self.devices[src] = profiled.device
            if VIEW in self._being_persisted and self.view is None:
                return []
        if self.view or not is_planned:
            is_member = self.roster.peers[src].is_present
            if is_member and not self.roster.peers[src].is_joining:
                return []
            self.roster.on_ready(src, profiled.state)
            report = CandidateReport(src, profiled.device, bool(self._agreement.NO_RETURN))
            return [*([] if is_member else [report]), *self._change_view()]
        if profiled.version != self.n_committed:
            reason = f"has version {profiled.version}, expected {self.n_committed}"
            return self._run.end(2, f"{self.roster.name(src)}: {reason}")
        if missing := sorted(set(self.config.stage_of) - set(self.profiles)):
            return [WaitingReport(missing)]
        view = self.roster.first_view(self.coordinator_term, self.config.start)
        return [self._run.persist(VIEW, view)]

    # ------------------------------------------------------------------------------------------------------ operators

    def _on_request(self, now_s: float, src: int, request: ev.OperatorRequest) -> list[ev.Action]:
        progress = self._progress
        reason = self._agreement.refusal(request.command) or self._operations.refusal(request, self.roster, progress)
        if not reason and OPERATOR in self._being_persisted:
            reason = f"{request.command}: an earlier request is being written, ask again"
        if reason:
            return [RefusedReport(reason), ev.Send(src, ev.OperatorAnswer(False, reason))]
        before = self._operations.state
        self._operations.silences = self.roster.silences(now_s)
        if self._admission.workers:
            self._operations.workers = self._admission.workers.rows(now_s, self.roster.servers)
            self._operations.workers_coming = self._admission.workers.coming(now_s)
        text = self._operations.accept(request, self.roster, progress)
        if request.command in ("checkpoint", "stop"):
            self._promise_checkpoint()
        answer = ev.Send(src, ev.OperatorAnswer(True, text))
        done: list[ev.Action] = []
        if request.command != "status":
            done.append(OperatorReport(request.command, text, request.peer))
        if self._operations.state != before:
            self._answer_once_durable = answer
            return [*done, self._run.persist(OPERATOR, self._operations.state)]
        if request.peer is not None:
            done += self._remove(now_s, request.peer, request.command)
        return [answer, *done, *self._decide()]

    @property
    def _progress(self) -> Progress:
        return Progress(self.n_committed, self.config.n_steps, self._checkpoints.checkpoint.version)

    def _on_stop(self) -> list[ev.Action]:
        """A person ends the run here: with a checkpoint if there are steps without one."""
        progress = self._progress
        may_stop = not self._agreement.refusal("stop")
        if self.view is None or progress.n_committed == progress.checkpoint or not may_stop:
            return self._run.end(ExitCode.INTERRUPTED, "interrupted")
        if reason := self._operations.refusal(ev.OperatorRequest("stop"), self.roster, progress):
            return [OperatorReport("stop", reason)]
        before = self._operations.state
        text = self._operations.stop(ExitCode.INTERRUPTED, "interrupted", progress)
        self._promise_checkpoint()
        actions: list[ev.Action] = [OperatorReport("stop", f"{text}; interrupt it again to end it at once")]
        if self._operations.state != before and OPERATOR not in self._being_persisted:
            return [*actions, self._run.persist(OPERATOR, self._operations.state)]
        return [*actions, *self._decide()]

    def _promise_checkpoint(self) -> None:
        version = self._agreement.promise_checkpoint()
        if version is not None:
            self._operations.on_promised(version)

    def _remove(self, now_s: float, peer: int, command: str) -> list[ev.Action]:
        if command == "drain":
            return [ev.Send(peer, ev.Drain())]
        return self._evictions.lose(now_s, peer, "evicted by an operator", is_dead=True)

    def _on_operator_durable(self, now_s: float, state: OperatorState) -> list[ev.Action]:
        """A pause begins or ends, or a peer is revoked. The others hear of it before it is evicted. The operator is
        answered only now: else a coordinator that is started again might have forgotten it."""
        actions: list[ev.Action] = [ev.Revoke(state.revoked)]
        if self._answer_once_durable:
            actions.append(self._answer_once_durable)
        self._answer_once_durable = None
        if self.view:
            actions += self._run.to_all(ev.Revoked(state.revoked))
        for peer in state.revoked:
            if self.roster.has_lease(peer) or peer in self.roster.members:
                actions += self._evictions.lose(now_s, peer, "revoked by an operator", is_dead=True)
        return [*actions, *self._continue()]

    # --------------------------------------------------------------------------------------------------------- views

    def _change_view(self, between_steps: bool = False) -> list[ev.Action]:
        """The next view if there is one to make, unless something is being made durable: then right after that."""
        if self._being_persisted or self.view is None or self._run.has_ended:
            return []
        if (lost := self._evictions.lost_stage) is not None:
            return self._run.end(3, f"{self._evictions.how_lost(lost)}; it was the last of its stage")
        wanted = self.roster.redirect_newcomers() if between_steps or self.roster.vacant else []
        actions: list[ev.Action] = [ev.Send(peer, ev.Reassign(stage)) for peer, stage in wanted]
        checkpoint = self._checkpoints.checkpoint if self._may_roll_back(actions) else None
        returning = self._agreement.returning_members(
            self.roster.returning(self.n_committed), self.roster.joining_states
        )
        view = self.roster.next_view(between_steps, self.n_committed, self._agreement.records, checkpoint, returning)
        if view is None:
            return actions
        if view.rolled_back:
            return actions + self._roll_back(view)
        # A member that is admitted again has given up the results that it held.
        staying = {m.peer for m in view.members if m.admission == self.roster.admissions.get(m.peer)}
        view = replace(view, results=self._agreement.results_held(staying))
        return [*actions, self._run.persist(VIEW, view)]

    def _may_roll_back(self, actions: list[ev.Action]) -> bool:
        """Whether the peers that are there hold the whole checkpoint together. If not, a lost stage waits for a disk
        with its part, too; a report of that is added to `actions`."""
        disks = self.roster.live_disks | {self.roster.peers[peer].disk for peer in self.roster.candidates}
        is_lost = bool(self.roster.lost_stages(self.n_committed, self._agreement.records))
        without = self._checkpoints.without_holder(disks) if is_lost else []
        if without and without != self._without_holder:
            actions.append(NoHolderReport(self._checkpoints.checkpoint.version, without))
        self._without_holder = without
        return not without

    def _roll_back(self, view: ev.View) -> list[ev.Action]:
        self._agreement.roll_back()
        self._operations.on_rolled_back()
        self._checkpoints.roll_back()
        again = list(range(view.n_committed, self.n_committed))
        report = RollbackReport(self.n_committed, view.n_committed, view.generation, again)
        return [report, self._run.persist(VIEW, view)]

    def _on_view_durable(self, now_s: float, view: ev.View) -> list[ev.Action]:
        """A view is durable: tell its members, and those who are not among them."""
        left = self.roster.adopt(view, now_s)
        self._evictions.on_view(view)
        said = self._agreement.on_view(now_s, view)
        if view.rolled_back:
            self._checkpoints.roll_back()
        outsiders = [ev.Send(peer, view) for peer, _ in self.roster.leases if peer not in self.roster.members]
        for peer in left - self.roster.coming:
            self.roster.peers[peer].lease = None
        members = {member.peer: member.stage for member in view.members}
        report = ViewReport(view.number, members, list(view.joining))
        self._checkpoints.on_view()
        return [report, *self._run.to_all(view), *outsiders, *said, *self._continue()]

    # --------------------------------------------------------------------------------------- steps and checkpoints

    def _decide(self) -> list[ev.Action]:
        """Carry out what the members have agreed on, unless a view or a record is being made durable."""
        tells_rows = self._agreement.REPLICAS_MAY_DIFFER and self._agreement.has_unreported_rows(self.config.n_steps)
        is_held = self._operations.holds_steps and not tells_rows
        if self.view is None or is_held or self._being_persisted.keys() & {VIEW, STEPS, ROWS, CHECKPOINT}:
            return []
        match self._agreement.decide(self.roster.admissions, self.view.generation):
            case ev.Record() as record:
                return [self._run.persist(STEPS, self._operations.record(record))]
            case CountedRows() as rows:
                return [self._run.persist(ROWS, rows)]
            case EndRun(code, reason):
                return self._run.end(code, reason)
            case RepairReplicas(repairs, reports):
                return [*reports, *(ev.Send(peer, repair) for peer, repair in repairs.items())]
            case RollBack():
                return self._other_samples()
        return []

    def _other_samples(self) -> list[ev.Action]:
        """Go back since a gradient was not finite, and draw other samples from there on."""
        checkpoint = self._checkpoints.checkpoint
        if without := self._checkpoints.without_holder(self.roster.live_disks):
            reason = f"no host that is here holds the checkpoint of {checkpoint.version} steps of stages {without}"
            return self._run.end(4, f"step {self.n_committed}: the gradient is not finite, and {reason}")
        view = self.roster.roll_back(checkpoint)
        return self._roll_back(replace(view, n_reseeds=view.n_reseeds + 1))

    def _on_step_durable(self, now_s: float, record: ev.Record) -> list[ev.Action]:
        announcement, reports = self._agreement.on_durable(now_s, record)
        self._operations.on_committed(record)
        self.roster.on_committed(self.n_committed)
        self._evictions.on_committed()
        has_more = self.n_committed < self.config.n_steps
        return [*self._run.to_all(announcement), *reports, *self._continue(between_steps=has_more)]

    def _on_rows_durable(self, now_s: float, rows: CountedRows) -> list[ev.Action]:
        announcement, reports = self._agreement.on_durable(now_s, rows)
        return [*self._run.to_all(announcement), *reports, *self._continue()]

    def _continue(self, between_steps: bool = False) -> list[ev.Action]:
        """What follows from where the run stands now: its end, or the next view, step or checkpoint."""
        if self.view is None:
            return []
        actions = [*self._end_if_over(), *self._change_view(between_steps)]
        return [*actions, *self._decide(), *self._complete_checkpoint()]

    def _on_saved(self, now_s: float, header: ev.Header, saved: ev.Saved) -> list[ev.Action]:
        """A part of a checkpoint is durable: a fact, also if a peer says so that has left meanwhile."""
        src = header.src
        if saved.stage == self.roster.peers[src].stage:  # not a copy of another stage's part
            self.roster.peers[src].n_saves_failed = 0
        if self.view is None or header.generation != self.view.generation or self._is_superseded(header):
            return []
        self._checkpoints.on_saved(saved, self.roster.peers[src].disk)
        return self._complete_checkpoint()

    def _on_part_missing(self, now_s: float, header: ev.Header, missing: ev.PartMissing) -> list[ev.Action]:
        self._checkpoints.on_part_missing(missing.digest, self.roster.peers[header.src].disk)
        report = PartMissingReport(header.src, missing.digest, missing.reason)
        return [report, *self._complete_checkpoint()]

    def _complete_checkpoint(self) -> list[ev.Action]:
        """Make durable that a checkpoint is complete, if one is. While a view is on its way, the disks of its members
        do not count yet, and with a rollback no part of before does. After the checkpoint of a stop there is none."""
        if self._run.has_ended or self._being_persisted.keys() & {VIEW, CHECKPOINT} or self._agreement.is_asking:
            return []
        if self._operations.ending(self._progress):
            return []
        view, holders = self.roster.current_view, self.roster.holders
        found = self._checkpoints.found(view.generation, view.n_reseeds, holders)
        if found and self._agreement.has_unreported_rows(found.version):
            return []
        if found:
            return [self._run.persist(CHECKPOINT, replace(found, mean_of=self._agreement.mean_of(found.version)))]
        return [ev.Send(peer, ev.CopyPart(part)) for peer, part in self._checkpoints.orders(holders)]

    def _on_checkpoint_durable(self, now_s: float, checkpoint: ev.Checkpoint) -> list[ev.Action]:
        save_s = self._checkpoints.on_complete(checkpoint)
        orders = self._agreement.on_checkpoint(checkpoint.version)
        report = CheckpointReport(checkpoint.version, save_s, checkpoint.n_copies)
        told = [ev.MarkCheckpoint(checkpoint), report, *self._run.to_all(ev.CheckpointComplete(checkpoint))]
        return [*told, *orders, *self._continue()]

    def _end_if_over(self) -> list[ev.Action]:
        """The run is over once every member is done and the last checkpoint is complete, or that of a stop. Steps that
        are done after a stop's checkpoint are not awaited: the run continues from the checkpoint."""
        ending, progress = self._operations.ending(self._progress), self._progress
        n_rows = progress.checkpoint if ending else progress.n_steps
        if self._agreement.has_unreported_rows(n_rows) or self._agreement.is_asking:
            return []
        if ending:
            return self._run.end(*ending)
        if not self._checkpoints.is_over(self.roster.members):
            return []
        return self._run.end(0, f"done: {progress.n_steps} steps")

    def _superseded(self, src: int, coordinator_term: int) -> list[ev.Action]:
        """Another coordinator has taken this one for dead. The peers obey the other one, so this one only ends."""
        reason = f"{self.roster.name(src)} obeys a coordinator of term {coordinator_term}, this one has term "
        return self._step_down(ExitCode.SUPERSEDED, f"{reason}{self.coordinator_term}; that one has taken over the run")

    def _state_lost(self, src: int, header: ev.Header) -> list[ev.Action]:
        """The run continues elsewhere than on this disk: what was committed is not known here."""
        where = f"{self.roster.name(src)} is in view {header.view} of term {header.coordinator_term}"
        mend = "restore the folder coordinator/ of run_dir, or stop all peers and start again from a checkpoint"
        return self._step_down(2, f"{where}, and this disk holds no state of the run; {mend}")

    def _step_down(self, code: int, reason: str) -> list[ev.Action]:
        """End this coordinator, and not the run: the peers are told nothing, as if this process had been killed."""
        self._run.has_ended = True
        reason = f"coordinator: {reason}"
        return [SteppedDownReport(reason), ev.Stop(code, reason)]

    # ------------------------------------------------------------------------------------------------------- the tables

    def _set_tables(self) -> None:
        """What follows on which message, and on which value once it is durable."""
        evictions = self._evictions
        # The answers to what a peer says that the roster knows, in the run or not.
        self._of_known_peers: Mapping[type, Handler] = {
            ev.Hello: self._on_hello,
            ev.Failed: evictions.on_failed,
            ev.Saved: self._on_saved,
        }
        # The answers to the other messages, of peers with a lease: before the first view, and after it. What the
        # agreement reads goes there. A message without an answer in its column is ignored.
        self._of_leased_peers: Mapping[type, tuple[Handler | None, Handler | None]] = {
            ev.Heartbeat: (self._on_heartbeat, self._on_heartbeat),
            ev.Profiled: (self._on_profiled, self._on_profiled),
            ev.Leaving: (evictions.on_leaving_early, evictions.on_leaving),
            ev.Load: (self._on_load, self._on_load),
            ev.WorkerHere: (self._on_worker_here, self._on_worker_here),
            ev.WorkerGone: (self._on_worker_gone, self._on_worker_gone),
            ev.SaveFailed: (None, evictions.on_save_failed),
            ev.PartMissing: (None, self._on_part_missing),
            ev.Overdue: (None, evictions.on_overdue),
            ev.Done: (None, self._on_done),
            ev.Suspect: (None, evictions.on_suspect),
            ev.CannotReach: (None, evictions.on_cannot_reach),
        }
        self._when_durable: Mapping[str, Callable[[float, Any], list[ev.Action]]] = {
            TERM: self._begin_term,
            VIEW: self._on_view_durable,
            STEPS: self._on_step_durable,
            ROWS: self._on_rows_durable,
            CHECKPOINT: self._on_checkpoint_durable,
            OPERATOR: self._on_operator_durable,
        }
