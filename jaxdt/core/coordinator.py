"""The coordinator: leases, numbered views, and the two-phase commit of a step. No tensor ever reaches it.

  WAITING   members say hello; when all of the plan are here, view 1 is made durable and sent
  RUNNING   a step is committed when every member of the view is prepared for the same rounds with equal digests:
            the record is made durable first, then announced (step protocol, Sec. 5)
  ENDED     every member is done, or one was lost that the run needs: everyone is told, with the exit code and one line

No step is half applied: an update needs the record, and a record needs everyone in the view. Peers come and go between
steps, and who is lost leaves at once (jaxdt.core.roster), if the wiring can do without; else a loss ends the run with
code 3. A view names the results that survivors hold, so that nothing is averaged twice (step protocol, Sec. 4.6).

What was made durable is enough to start a coordinator again after its death (Sec. 7): members greet it anew, and say
again what they are prepared for.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jaxdt.core import plain
from jaxdt.core.events import (
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
    GroupResult,
    Header,
    Heartbeat,
    Hello,
    Interrupted,
    Join,
    Leaving,
    LinkChanged,
    MarkCheckpoint,
    Message,
    Persist,
    Persisted,
    Prepared,
    Profiled,
    Pulse,
    Received,
    Record,
    Refused,
    Report,
    Saved,
    Send,
    Started,
    Stop,
    Suspect,
    Tally,
    View,
    WakeAt,
    Welcome,
    Woke,
)
from jaxdt.core.leases import Leases
from jaxdt.core.roster import Moment, Roster, held

KEPT_RECORDS = 2
ROLLBACKS_MAX = 3


@dataclass(frozen=True)
class Terms:
    """What the coordinator of one run has to know. `stage_of` maps each peer of the plan to its stage; `job` is what a
    newcomer is told: config and plan as JSON. `waits`: a stage that has lost all its peers waits for another."""

    run: str
    fingerprint: str
    stage_of: Mapping[int, int]
    n_stages: int
    start_version: int
    start_lineage: int
    n_steps: int
    tokens_per_sample: int
    on_nonfinite: str
    heartbeat_s: float
    deadline_floor_s: float
    elastic: bool = False
    waits: bool = False
    job: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Memory:
    """What an earlier coordinator of the run made durable: its number of starts, its last view and record, and the
    version of the newest complete checkpoint."""

    reign: int
    view: View
    records: tuple[Record, ...]
    checkpoint: int


def remembered(disk: Mapping[str, Any], checkpoint: int) -> Memory | None:
    """From what was persisted under the names "reign", "view" and "record", as plain data; None if there was no view
    yet. A record of an earlier lineage does not count any more. BadInput for anything else than what was written."""
    if disk.get("view") is None:
        return None
    view = plain.read(View, disk["view"], "view")
    records = [plain.read(Record, disk["record"], "record")] if disk.get("record") else []
    reign = plain.read(int, disk.get("reign"), "reign")
    return Memory(reign, view, tuple(r for r in records if r.lineage == view.lineage), checkpoint)


class Coordinator:
    """See the module text; `memory` for one that goes on after another's death."""

    def __init__(self, terms: Terms, memory: Memory | None = None):
        self.terms = terms
        self.reign = memory.reign + 1 if memory else 1
        self.roster = Roster(terms.stage_of, terms.n_stages, self.reign)
        self.n_committed = terms.start_version
        self.profiles: dict[int, dict[str, float]] = {}
        self._leases = Leases(terms.deadline_floor_s)
        self._prepared: dict[int, dict[int, Prepared]] = {}
        self._records: list[Record] = []
        self._pending: dict[str, Message | int] = {}
        self._saved: dict[int, dict[int, float]] = {}
        self._done: dict[int, Done] = {}
        self._asked: dict[int, int] = {}
        self._checkpoint = terms.start_version
        self._n_rollbacks = 0
        self._last_commit_s = 0.0
        self._ended = False
        if memory:
            self._recall(memory)

    @property
    def view(self) -> View | None:
        return self.roster.view

    def handle(self, now_s: float, event: Event) -> list[Action]:
        if self._ended:
            return []
        match event:
            case Started():
                return [*self._start(now_s), self._tick(now_s)]
            case Woke("tick"):
                over = self._leases.over(now_s)
                return [*(self._lost(*over) if over else []), self._tick(now_s)]
            case Persisted(name):
                return self._durable(now_s, name)
            case Refused(_, reason):
                return [Report("refused", {"reason": reason})]
            case Interrupted(code, reason):
                return self._end(code, reason)
            case LinkChanged(peer, up):
                self._leases.link(peer, up, now_s)
            case Received(header, Join()):
                return self._on_join(header.src)
            case Received(header, body) if header.run == self.terms.run and header.src in self.roster.stage_of:
                return self._received(now_s, header, body)
            case Received(header, _):
                return [Report("dropped", {"src": header.src, "run": header.run})]
        return []

    def _tick(self, now_s: float) -> WakeAt:
        return WakeAt(now_s + self.terms.heartbeat_s, "tick")

    def _recall(self, memory: Memory) -> None:
        view, self._records = memory.view, list(memory.records)
        self.roster.stage_of |= {member.peer: member.stage for member in view.members}
        self.roster.addresses |= {member.peer: member.address for member in view.members}
        self.roster.processes |= {member.peer: member.process for member in view.members}
        self.roster.adopt(replace(view, reign=self.reign))
        self.n_committed = max([view.n_committed, *(record.step + 1 for record in self._records)])
        if self.n_committed > view.n_committed:
            self.roster.committed()
        self._checkpoint = memory.checkpoint

    def _start(self, now_s: float) -> list[Action]:
        """Nobody is put out before a whole lease of this reign (step protocol, Sec. 7.1)."""
        actions: list[Action] = [self._persist("reign", self.reign)]
        if self.view:
            self._last_commit_s = now_s
            for member in self.view.members:
                self._leases.arrived(member.peer, now_s)
                actions.append(Connect(member.peer, member.address))
            told = {"reign": self.reign, "view": self.view.number, "step": self.n_committed}
            actions.append(Report("again", told))
        return actions

    def _persist(self, name: str, value: Message | int) -> Persist:
        self._pending[name] = value
        return Persist(name, value if isinstance(value, int) else plain.write(value))

    def _received(self, now_s: float, header: Header, body: Message) -> list[Action]:
        src = header.src
        if isinstance(body, Hello):
            return self._hello(now_s, src, body)
        if src in self.roster.missing and src not in self._leases:
            return [*self._is_back(now_s, src), *self._received(now_s, header, body)]
        if src not in self._leases:  # not let in, or taken for lost: so that it learns of it
            return [*self._reach(src), self._send(src, self.view)] if self.view else []
        self._leases.arrived(src, now_s)
        lineage = self.view.lineage if self.view else None
        match body:
            case Heartbeat(count, status):
                pulse = self._send(src, Pulse(count, now_s))
                return [pulse, Report("heartbeat", {"peer": src, **status})]
            case Profiled(seconds, version):
                return self._profiled(src, seconds, version)
            case Prepared() if header.lineage == lineage and header.view == self.view.number:
                return self._on_prepared(src, body)
            case Saved() if header.lineage == lineage:
                return self._on_saved(body)
            case Failed(reason):
                return self._end(2, f"{self._name(src)}: {reason}")
            case Done():
                return self._on_done(src, body)
            case Leaving() if src not in self.roster.leaving:
                self.roster.leaving.add(src)
                return [Report("leaving", {"peer": src}), *self._change()]
            case Suspect(peer, reason) if self.view is None or peer in self.roster.members:
                return self._lost(peer, f"{reason} (said by peer {src})")
        return []

    # -------------------------------------------------------------------------------------------------- membership

    def _on_join(self, src: int) -> list[Action]:
        """A newcomer asks under a passing name; it gets a peer id, a stage, and what it has to run."""
        if not self.terms.elastic:
            return [self._send(src, Ended(2, "this run takes no newcomers: its wiring is fixed"))]
        if src not in self._asked:
            peer, stage = self.roster.newcomer()
            self._asked[src] = peer
        peer = self._asked[src]
        stage, terms = self.roster.stage_of[peer], self.terms
        welcome = Welcome(terms.run, peer, stage, terms.fingerprint, dict(terms.job))
        return [Report("asked", {"peer": peer, "stage": stage}), self._send(src, welcome)]

    def _hello(self, now_s: float, src: int, hello: Hello) -> list[Action]:
        expected = self.roster.stage_of[src]
        if (hello.peer, hello.stage, hello.fingerprint) != (src, expected, self.terms.fingerprint):
            reason = (
                f"peer {src}: refused, it runs stage {hello.stage} of {hello.fingerprint}, "
                f"expected stage {expected} of {self.terms.fingerprint}"
            )
            return [Report("refused", {"reason": reason}), self._send(src, Ended(2, reason))]
        anew = self.roster.hello(src, hello.address, hello.process)
        actions: list[Action] = []
        if anew:
            actions += self._lost(src, "its process was started anew")
            if self._ended:
                return actions
        if src in self.roster.missing and not anew:
            actions += self._is_back(now_s, src)
        self._leases.arrived(src, now_s)
        actions += [Connect(src, hello.address), Report("hello", {"peer": src, "stage": hello.stage})]
        passing = [asked for asked, peer in self._asked.items() if peer == src]
        actions += [Disconnect(asked) for asked in passing]
        for asked in passing:
            del self._asked[asked]
        return actions + (self._again(src) if src in self.roster.members and not anew else [])

    def _is_back(self, now_s: float, src: int) -> list[Action]:
        """The last of its stage was silent, and is not dead."""
        del self.roster.missing[src]
        self._leases.arrived(src, now_s)
        return [Report("back", {"peer": src}), *self._reach(src)]

    def _again(self, src: int) -> list[Action]:
        """What a member may have missed while we, or the way to it, were down."""
        again = [self.view, *map(Committed, self._records), CheckpointComplete(self._checkpoint)]
        return [self._send(src, body) for body in again]

    def _profiled(self, src: int, seconds: dict[str, float], version: int) -> list[Action]:
        """View 1 is made when the last member of the plan is ready to compute; who comes later is a candidate."""
        self.profiles[src] = seconds
        if src in self.terms.stage_of and "view" in self._pending and self.view is None:
            return []
        if self.view or src not in self.terms.stage_of:
            if src in self.roster.members and src not in self.roster.lost | set(self.roster.missing):
                return []
            if not self.terms.elastic:
                return self._end(3, f"{self._name(src)}: came back, which this run's wiring has no use for")
            self.roster.candidates.add(src)
            return [Report("candidate", {"peer": src}), *self._change()]
        if version != self.n_committed:
            return self._end(2, f"{self._name(src)}: has version {version}, expected {self.n_committed}")
        missing = sorted(set(self.terms.stage_of) - set(self.profiles))
        if missing:
            return [Report("waiting", {"missing": missing})]
        first = self.roster.first_view(self.reign, self.terms.start_lineage, self.n_committed)
        return [self._persist("view", first)]

    def _lost(self, peer: int, reason: str) -> list[Action]:
        """Go on without it, wait for it, or end."""
        stage, reason = self.roster.stage_of.get(peer), f"{self._name(peer)}: lost, {reason}"
        if peer in self.roster.lost or peer in self.roster.missing:
            return []
        if not self.terms.elastic or self.view is None:
            return self._end(3, reason)
        self._leases.end(peer)
        told: list[Action] = [Report("lost", {"peer": peer, "reason": reason}), Disconnect(peer)]
        if not self.roster.lose(peer, reason):
            if not self.terms.waits:
                return self._end(3, f"{reason}; it was the last of its stage")
            steps = list(range(self._checkpoint, self.n_committed))
            fields = {"stage": stage, "reason": reason, "checkpoint": self._checkpoint, "at_stake": steps}
            told.append(Report("vacant", fields))
        return told + self._change()

    def _change(self, between_steps: bool = False) -> list[Action]:
        """The next view if there is one to make, unless something is being made durable: then right after that."""
        if self._pending or self.view is None or self._ended:
            return []
        view = self.roster.next_view(self._moment(between_steps))
        if view is None:
            return []
        if view.rolled_back:
            return self._back(view)
        members = {member.peer for member in view.members}
        said = self._prepared.get(self.n_committed, {})
        view = replace(view, results=held({p: [r.round for r in one.results] for p, one in said.items()}, members))
        self._prepared.clear()  # who is prepared says so again in the new view
        return [self._persist("view", view)]

    def _moment(self, between_steps: bool = False) -> Moment:
        return Moment(between_steps, self.n_committed, tuple(self._records), self._checkpoint)

    def _back(self, view: View) -> list[Action]:
        """Begin a new lineage at the last complete checkpoint."""
        self._prepared.clear()
        self._saved.clear()
        self._done.clear()
        self._records.clear()
        steps = list(range(view.n_committed, self.n_committed))
        fields = {"step": self.n_committed, "to": view.n_committed, "lineage": view.lineage, "again": steps}
        return [Report("rollback", fields), self._persist("view", view)]

    def _reach(self, peer: int) -> list[Action]:
        """A peer whose connections were ended is reached again where it said that it listens."""
        return [Connect(peer, self.roster.addresses.get(peer, ""))]

    # ------------------------------------------------------------------------------------------------------ commit

    def _on_prepared(self, src: int, prepared: Prepared) -> list[Action]:
        admissions = self.roster.admissions
        if prepared.step != self.n_committed or prepared.admission != admissions.get(src):
            return []
        if "view" in self._pending or "record" in self._pending:  # in another view it is said again
            return []
        said = self._prepared.setdefault(prepared.step, {})
        said[src] = prepared
        if len(said) < len(admissions) or set(said) != set(admissions):
            return []
        results: dict[str, GroupResult] = {}
        for peer, one in sorted(said.items()):
            for result in one.results:
                group = result.round.group
                first = results.setdefault(group, result)
                if (first.round, first.digest) != (result.round, result.digest):  # norms may be NaN, unequal to itself
                    return self._end(3, f"step {prepared.step}: peer {peer} holds another result of group {group}")
        counts = {result.n_samples for result in results.values()}
        if len(counts) != 1:
            return self._end(3, f"step {prepared.step}: the groups counted different numbers of samples {counts}")
        rounds = tuple(result.round for _, result in sorted(results.items()))
        sq_norm = math.fsum(result.sq_norm for result in results.values())
        if not math.isfinite(sq_norm) and self.terms.on_nonfinite != "skip":
            return self._not_finite(prepared.step)
        verdict = "apply" if math.isfinite(sq_norm) else "skip"
        record = Record(prepared.step, rounds, sq_norm, counts.pop(), verdict, self.view.lineage)
        return [self._persist("record", record)]

    def _not_finite(self, step: int) -> list[Action]:
        """Stop, or begin a new lineage at the last complete checkpoint."""
        self._n_rollbacks += 1
        if self.terms.on_nonfinite == "stop" or self._n_rollbacks > ROLLBACKS_MAX:
            return self._end(4, f"step {step}: the gradient is not finite")
        return self._back(self.roster.roll_back(self._moment()))

    def _durable(self, now_s: float, name: str) -> list[Action]:
        value = self._pending.pop(name)
        if isinstance(value, View):
            if value.number == 1 or value.rolled_back:
                self._last_commit_s = now_s
            left, self.n_committed = self.roster.adopt(value), value.n_committed
            members = {member.peer: member.stage for member in value.members}
            report = Report("view", {"view": value.number, "members": members, "joining": list(value.joining)})
            told = [self._send(peer, value) for peer in sorted(left)]  # so that they go
            for peer in left:
                self._leases.end(peer)
            return [report, *self._to_all(value), *told, *self._settled(), *self._change()]
        if isinstance(value, Record):
            said = self._prepared.pop(value.step)
            self._records = [*self._records, value][-KEPT_RECORDS:]
            self.n_committed = value.step + 1
            self.roster.committed()
            step_s, self._last_commit_s = now_s - self._last_commit_s, now_s
            metrics = self._metrics(value, said.values(), step_s)
            more = self.n_committed < self.terms.n_steps
            return [*self._to_all(Committed(value)), metrics, *self._change(between_steps=more)]
        return self._change()

    def _metrics(self, record: Record, said: Iterable[Prepared], step_s: float) -> Report:
        results = {result.round.group: result for one in said for result in one.results}
        tally = sum((result.tally for result in results.values()), Tally())
        fields = {
            "step": record.step,
            "loss": tally.loss_sum / tally.n_losses if tally.n_losses else math.nan,
            "step_s": step_s,
            "tokens_per_s": record.n_samples * self.terms.tokens_per_sample / step_s if step_s > 0 else math.inf,
            "gradient_norm": math.sqrt(record.sq_norm) / record.n_samples,
            "verdict": record.verdict,
        }
        if tally.n_evals:
            fields["eval_loss"] = tally.eval_sum / tally.n_evals
        return Report("step", fields)

    # --------------------------------------------------------------------------------------------------------- end

    def _on_saved(self, saved: Saved) -> list[Action]:
        version, blocked_s = saved.version, self._saved.setdefault(saved.version, {})
        blocked_s[saved.stage] = saved.blocked_s
        if len(blocked_s) < self.terms.n_stages:
            return []
        del self._saved[version]
        self._checkpoint, self._n_rollbacks = version, 0
        report = Report("checkpoint", {"version": version, "save_s": max(blocked_s.values())})
        mark = MarkCheckpoint(version, self.view.lineage)
        return [mark, report, *self._to_all(CheckpointComplete(version)), *self._settled()]

    def _on_done(self, src: int, done: Done) -> list[Action]:
        self._done[src] = done
        actions: list[Action] = [Report("done", {"peer": src, "bytes_to": done.bytes_to, **done.totals})]
        return actions + self._settled()

    def _settled(self) -> list[Action]:
        """Over once every member is done and the last checkpoint is complete."""
        if self._checkpoint != self.terms.n_steps or not all(m.peer in self._done for m in self.view.members):
            return []
        return self._end(0, f"done: {self.terms.n_steps} steps")

    def _end(self, code: int, reason: str) -> list[Action]:
        self._ended = True
        told = [self._send(peer, Ended(code, reason)) for peer in self._leases]
        return [Report("ended", {"code": code, "reason": reason}), *told, Stop(code, reason)]

    def _to_all(self, body: Message) -> list[Action]:
        return [self._send(member.peer, body) for member in self.view.members]

    def _send(self, dst: int, body: Message) -> Send:
        header = Header(
            self.terms.run, self.view.lineage if self.view else 0, self.view.number if self.view else 0, COORDINATOR
        )
        return Send(dst, body, header=header)

    def _name(self, peer: int) -> str:
        return f"peer {peer} (stage {self.roster.stage_of.get(peer, '?')})"
