"""The coordinator: leases, numbered views, and the two-phase commit of a step. No tensor ever reaches it.

Members say hello; when all of the plan are here, view 1 is made durable and sent. A step is committed when every member
of the view is prepared for the same rounds with equal digests: the record is made durable, then announced (step
protocol, Sec. 5), so no step is half applied. A view names results that survivors hold, so nothing is averaged twice
(Sec. 4.6). What is durable is enough to start a coordinator again (Sec. 7). Who comes and goes:
jaxdt.membership.roster.
"""

from dataclasses import replace

from jaxdt.membership.checkpoint_progress import CheckpointProgress
from jaxdt.membership.commit import Disagreement, Votes, agreed, metrics_of
from jaxdt.membership.coordinator_config import CoordinatorConfig, DurableState
from jaxdt.membership.leases import Leases
from jaxdt.membership.link_suspicion import LinkSuspicion
from jaxdt.membership.rebalance_api import Balance
from jaxdt.membership.roster import Roster
from jaxdt.protocol.deadline import RECONNECT_S
from jaxdt.protocol.events import (
    COORDINATOR,
    Action,
    CheckpointComplete,
    Committed,
    Connect,
    Disconnect,
    Done,
    Ended,
    Event,
    Failed,
    Header,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Interrupted,
    Join,
    Leaving,
    LinkChanged,
    Load,
    MarkCheckpoint,
    Message,
    Persist,
    Persisted,
    Prepared,
    Profiled,
    Reassign,
    Received,
    Record,
    Refused,
    Report,
    Saved,
    Send,
    Started,
    Stop,
    Suspect,
    View,
    WakeAt,
    Woke,
)
from jaxdt.spec import serialize

KEPT_RECORDS = 2
ROLLBACKS_MAX = 3
AGAIN_S = 10.0  # peers need so long to find a coordinator that was started again


class Coordinator:
    """See the module text; `memory` for one that goes on after another's death."""

    def __init__(self, terms: CoordinatorConfig, memory: DurableState | None = None, balance: Balance | None = None):
        self.terms = terms
        self.coordinator_term = memory.coordinator_term + 1 if memory else 1
        self.roster = Roster(terms.stage_of, terms.n_stages, self.coordinator_term, terms.delay_steps, balance)
        self.n_committed = terms.start_version
        self.profiles: dict[int, dict[str, float]] = {}
        self._leases, self._quarrels = Leases(terms.deadline_floor_s), LinkSuspicion(terms.heartbeat_s)
        self._votes = Votes()
        self._records: list[Record] = []
        self._pending: dict[str, Message | int] = {}
        self._completion = CheckpointProgress(terms.n_stages, terms.n_steps, terms.start_version)
        self._ended, self._n_rollbacks, self._last_commit_s, self._patient_until_s = False, 0, 0.0, 0.0
        if memory:
            self._recall(memory)

    @property
    def view(self) -> View | None:
        return self.roster.view

    def handle(self, now_s: float, event: Event) -> list[Action]:
        if self._ended:
            return []
        tick = WakeAt(now_s + self.terms.heartbeat_s, "tick")
        match event:
            case Started():
                return [*self._start(now_s), tick]
            case Woke(tag):
                return [*self._judge(now_s), *([tick] if tag == "tick" else [])]
            case Persisted(name):
                return self._durable(now_s, name)
            case Refused(_, reason):
                return [Report("refused", {"reason": reason})]
            case Interrupted(code, reason):
                return self._end(code, reason)
            case LinkChanged(peer, up):
                self._leases.link(peer, up, now_s)
                # Who has its answer or was put out may come back: nothing is kept of it.
                down = WakeAt(now_s + RECONNECT_S, "link") if peer in self._leases else Disconnect(peer)
                return [] if up else [down]
            case Received(header, Join()):
                return self._on_join(now_s, header.src)
            case Received(header, body) if header.run == self.terms.run and header.src in self.roster.stage_of:
                return self._received(now_s, header, body)
            case Received(header, Hello() as hello) if header.run == self.terms.run and self.view:
                return self._stranger(header.src, hello.address)
            case Received(header, _):
                return [Report("dropped", {"src": header.src, "run": header.run})]
        return []

    def _recall(self, memory: DurableState) -> None:
        view, self._records = replace(memory.view, coordinator_term=self.coordinator_term), list(memory.records)
        self.n_committed = max([view.n_committed, *(record.step + 1 for record in self._records)])
        self.roster.recall(view, self.n_committed > view.n_committed)
        self._completion.checkpoint = memory.checkpoint

    def _start(self, now_s: float) -> list[Action]:
        """Nobody is put out before a whole lease of this coordinator_term (step protocol, Sec. 7.1)."""
        actions: list[Action] = [self._persist("coordinator_term", self.coordinator_term)]
        if self.view:
            self._last_commit_s, self._patient_until_s = now_s, now_s + AGAIN_S
            for member in self.view.members:
                self._leases.arrived(member.peer, now_s)
                actions.append(Connect(member.peer, member.address))
            actions.append(
                Report(
                    "again",
                    {"coordinator_term": self.coordinator_term, "view": self.view.number, "step": self.n_committed},
                )
            )
        return actions

    def _persist(self, name: str, value: Message | int) -> Persist:
        self._pending[name] = value
        if isinstance(value, Record):
            value = (*self._records, value)[-KEPT_RECORDS:]
        return Persist(name, value if isinstance(value, int) else serialize.write(value))

    def _received(self, now_s: float, header: Header, body: Message) -> list[Action]:
        src = header.src
        if isinstance(body, Hello):
            return self._hello(now_s, src, body)
        if isinstance(body, Saved):  # a fact, also from one who has left meanwhile
            return self._on_saved(body) if self.view and header.generation == self.view.generation else []
        if src in self.roster.missing and src not in self._leases:
            return [*self._is_back(now_s, src), *self._received(now_s, header, body)]
        if src not in self._leases:  # not let in, or taken for lost: so that it learns of it
            return [self.roster.reach(src), self._send(src, self.view)] if self.view else []
        self._leases.arrived(src, now_s)
        generation = self.view.generation if self.view else None
        match body:
            case Heartbeat(count, status):
                self._leases.gets_on(now_s, src, status)
                return [self._send(src, HeartbeatAck(count, now_s)), Report("heartbeat", {"peer": src, **status})]
            case Profiled(seconds, version, process) if process == self.roster.processes.get(src):
                return self._profiled(src, seconds, version)
            case Load():
                self.roster.balance.report(now_s, src, body)
            case Prepared() if header.generation == generation and header.view == self.view.number:
                return self._on_prepared(src, body)
            case Failed(reason):
                return self._end(2, f"{self.roster.name(src)}: {reason}")
            case Done():
                return [Report("done", self._completion.done(src, body)), *self._settled()]
            case Leaving() if src not in self.roster.leaving:
                return [Report("leaving", self.roster.leaves(src)), *self._change()]
            case Suspect(peer, reason) if header.view >= self.roster.admissions.get(src, header.view + 1):
                return [WakeAt(self._quarrels.accuse(now_s, src, peer, reason), "quarrel")]
        return []

    def _judge(self, now_s: float) -> list[Action]:
        """Put out one whose time is over, or begin a move that is due."""
        self.roster.let_go(now_s, self._leases)
        # Nobody is judged while a view is on its way to the disk: who leaves with it still seems to stand in.
        patient, roster = now_s < self._patient_until_s or "view" in self._pending, self.roster
        over = None if patient else self._leases.over(now_s, roster) or self._quarrels.judged(now_s, roster)
        return self._lost(*over) if over else roster.move_due(now_s)

    def _on_join(self, now_s: float, src: int) -> list[Action]:
        """A newcomer asks under a passing name; it gets a peer id, a stage, and what it has to run."""
        peer, stage = self.roster.newcomer(now_s, src)
        return [Report("asked", {"peer": peer, "stage": stage}), self._send(src, self.terms.answer(peer, stage))]

    def _hello(self, now_s: float, src: int, hello: Hello) -> list[Action]:
        stage = self.roster.stage_of[src]
        if reason := self.terms.refusal(src, hello.stage if self.view else stage, hello):
            return [Report("refused", {"reason": reason}), self._send(src, Ended(2, reason))]
        anew = self.roster.hello(src, hello.address, hello.process)
        actions = self._lost(src, "its process was started anew") if anew else []
        if self._ended:
            return actions
        if src in self.roster.missing and not anew:
            actions += self._is_back(now_s, src)
        self._leases.arrived(src, now_s)
        actions += [Connect(src, hello.address), Report("hello", {"peer": src, "stage": hello.stage})]
        actions += [Disconnect(passing) for passing in self.roster.known(src)]
        if self.roster.misplaced(hello):
            return [*actions, self._send(src, Reassign(stage))]
        if src in self.roster.members:
            return actions + ([] if anew else self._again(src))
        return actions + ([self._send(src, self.view)] if self.view else [])  # it may believe that it is a member

    def _stranger(self, src: int, address: str) -> list[Action]:
        """Somebody who was let go of, or whom only an earlier coordinator knew."""
        reason = f"peer {src}: is not known any more, and may join again as a newcomer"
        return [Report("refused", {"reason": reason}), Connect(src, address), self._send(src, Ended(2, reason))]

    def _is_back(self, now_s: float, src: int) -> list[Action]:
        """The last of its stage was silent, and is not dead."""
        self.roster.missing.discard(src)
        self._leases.arrived(src, now_s)
        return [Report("back", {"peer": src}), self.roster.reach(src)]

    def _again(self, src: int) -> list[Action]:
        """What a member may have missed while we, or the way to it, were down."""
        committed, complete = map(Committed, self._records), CheckpointComplete(self._completion.checkpoint)
        return [self._send(src, body) for body in (self.view, *committed, complete)]

    def _profiled(self, src: int, seconds: dict[str, float], version: int) -> list[Action]:
        """View 1 is made when the last member of the plan is ready to compute; who comes later is a candidate."""
        if src in self.terms.stage_of:
            self.profiles[src] = seconds
            if "view" in self._pending and self.view is None:
                return []
        if self.view or src not in self.terms.stage_of:
            if src in self.roster.members and src not in self.roster.lost | self.roster.missing:
                return []
            self.roster.candidates.add(src)
            return [Report("candidate", {"peer": src}), *self._change()]
        if version != self.n_committed:
            return self._end(2, f"{self.roster.name(src)}: has version {version}, expected {self.n_committed}")
        if missing := sorted(set(self.terms.stage_of) - set(self.profiles)):
            return [Report("waiting", {"missing": missing})]
        return [
            self._persist(
                "view", self.roster.first_view(self.coordinator_term, self.terms.start_generation, self.n_committed)
            )
        ]

    def _lost(self, peer: int, reason: str) -> list[Action]:
        """Go on without it, wait for it, or end."""
        stage, reason = self.roster.stage_of.get(peer), f"{self.roster.name(peer)}: lost, {reason}"
        if peer in self.roster.lost or peer in self.roster.missing:
            return []
        if self.view is None:
            return self._end(3, reason)
        self._leases.end(peer)
        told: list[Action] = [Report("lost", {"peer": peer, "reason": reason}), Disconnect(peer)]
        if not self.roster.lose(peer, self._pending.get("view")):
            if not self.terms.waits:
                return self._end(3, f"{reason}; it was the last of its stage")
            fields = {"stage": stage, "reason": reason, **self._completion.at_stake(self.n_committed)}
            told.append(Report("vacant", fields))
        return told + self._change()

    def _change(self, between_steps: bool = False) -> list[Action]:
        """The next view if there is one to make, unless something is being made durable: then right after that."""
        if self._pending or self.view is None or self._ended:
            return []
        wanted = self.roster.reassign() if between_steps or self.roster.vacant else []
        seats: list[Action] = [self._send(peer, Reassign(stage)) for peer, stage in wanted]
        view = self.roster.next_view(between_steps, self.n_committed, self._records, self._completion.checkpoint)
        if view is None:
            return seats
        if view.rolled_back:
            return seats + self._back(view)
        members = {member.peer for member in view.members}
        view = replace(view, results=self._votes.held(members))
        self._votes.clear()  # who is prepared says so again in the new view
        return [*seats, self._persist("view", view)]

    def _back(self, view: View) -> list[Action]:
        """Begin a new generation at the last complete checkpoint."""
        self._votes.clear()
        self._completion.begin_again()
        self._records.clear()
        steps = list(range(view.n_committed, self.n_committed))
        fields = {"step": self.n_committed, "to": view.n_committed, "generation": view.generation, "again": steps}
        return [Report("rollback", fields), self._persist("view", view)]

    def _on_prepared(self, src: int, prepared: Prepared) -> list[Action]:
        if "view" in self._pending:  # in another view it is said again
            return []
        if not self.n_committed <= prepared.step <= self.n_committed + self.terms.delay_steps:
            return []
        self._votes.add(src, prepared, self.roster.admissions)
        return self._commit()

    def _commit(self) -> list[Action]:
        """Make the record of the next step once every member is prepared for it."""
        step = self.n_committed
        said = self._votes.all(step, self.roster.admissions)
        if said is None or self._pending.keys() & {"view", "records"}:
            return []
        try:
            record = agreed(step, said, self.view.generation)
        except Disagreement as problem:
            return self._end(3, f"step {step}: {problem}")
        if record.verdict == "skip" and self.terms.on_nonfinite != "skip":
            return self._not_finite(step)
        return [self._persist("records", record)]

    def _not_finite(self, step: int) -> list[Action]:
        """Stop, or begin a new generation at the last complete checkpoint."""
        self._n_rollbacks += 1
        if self.terms.on_nonfinite == "stop" or self._n_rollbacks > ROLLBACKS_MAX:
            return self._end(4, f"step {step}: the gradient is not finite")
        return self._back(self.roster.roll_back(self._completion.checkpoint))

    def _durable(self, now_s: float, name: str) -> list[Action]:
        value = self._pending.pop(name)
        if isinstance(value, View):
            if value.number == 1 or value.rolled_back:
                self._last_commit_s = now_s
            left, self.n_committed = self.roster.adopt(value), value.n_committed
            told = [self._send(peer, value) for peer in self._leases if peer not in self.roster.members]
            for peer in left - self.roster.coming:
                self._leases.end(peer)
            return [Report("view", self.roster.told()), *self._to_all(value), *told, *self._settled(), *self._change()]
        if isinstance(value, Record):
            said = self._votes.pop(value.step)
            self._records = [*self._records, value][-KEPT_RECORDS:]
            self.n_committed = value.step + 1
            self.roster.committed()
            step_s, self._last_commit_s = now_s - self._last_commit_s, now_s
            metrics = Report("step", metrics_of(value, said, step_s, self.terms.tokens_per_sample))
            more = self.n_committed < self.terms.n_steps
            return [*self._to_all(Committed(value)), metrics, *self._change(between_steps=more), *self._commit()]
        return self._change()

    def _on_saved(self, saved: Saved) -> list[Action]:
        save_s, version = self._completion.saved(saved), saved.version
        if save_s is None:
            return []
        self._n_rollbacks = 0
        mark, fields = MarkCheckpoint(version, self.view.generation), {"version": version, "save_s": save_s}
        return [mark, Report("checkpoint", fields), *self._to_all(CheckpointComplete(version)), *self._settled()]

    def _settled(self) -> list[Action]:
        """Over once every member is done and the last checkpoint is complete."""
        return self._end(0, f"done: {self.terms.n_steps} steps") if self._completion.over(self.roster.members) else []

    def _end(self, code: int, reason: str) -> list[Action]:
        self._ended, told = True, [self._send(peer, Ended(code, reason)) for peer in self._leases]
        return [Report("ended", {"code": code, "reason": reason}), *told, Stop(code, reason)]

    def _to_all(self, body: Message) -> list[Action]:
        return [self._send(member.peer, body) for member in self.view.members]

    def _send(self, dst: int, body: Message) -> Send:
        generation, number = (self.view.generation, self.view.number) if self.view else (0, 0)
        return Send(dst, body, header=Header(self.terms.run, generation, number, COORDINATOR))
