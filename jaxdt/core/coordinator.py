"""The coordinator: leases, numbered views, and the two-phase commit of a step. No tensor ever reaches it.

  WAITING   members say hello; when all of the plan are here, view 1 is made durable and sent
  RUNNING   a step is committed when every member of the view is prepared for the same rounds with equal digests:
            the record is made durable first, then announced (step protocol, Sec. 5)
  ENDED     every member is done, or one was lost that the run needs: everyone is told, with the exit code and one line

No step is half applied: an update needs the record, and a record needs everyone in the view. Who is lost leaves the
view if the wiring can do without and its stage has another member; else the run ends with code 3. A view names the
results that survivors hold, so that nothing is averaged twice (step protocol, Sec. 4.6).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from jaxdt.core import plain
from jaxdt.core.events import (
    COORDINATOR,
    Action,
    CheckpointComplete,
    Committed,
    Connect,
    Done,
    Ended,
    Event,
    Failed,
    GroupResult,
    Header,
    Heartbeat,
    Hello,
    Interrupted,
    LinkChanged,
    MarkCheckpoint,
    Member,
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
    Round,
    Saved,
    Send,
    Started,
    Stop,
    Suspect,
    Tally,
    View,
    WakeAt,
    Woke,
)
from jaxdt.core.leases import Leases

KEPT_RECORDS = 2
ROLLBACKS_MAX = 3


@dataclass(frozen=True)
class Terms:
    """What the coordinator of one run has to know. `stage_of` maps each peer of the plan to its stage."""

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
    reign: int = 1


class Coordinator:
    """See the module text."""

    def __init__(self, terms: Terms):
        self.terms = terms
        self.view: View | None = None
        self.n_committed = terms.start_version
        self.profiles: dict[int, dict[str, float]] = {}
        self._addresses: dict[int, str] = {}
        self._leases = Leases(terms.deadline_floor_s)
        self._prepared: dict[int, dict[int, Prepared]] = {}
        self._records: list[Record] = []
        self._pending: dict[str, Message] = {}
        self._saved: dict[int, dict[int, float]] = {}
        self._done: dict[int, Done] = {}
        self._leaving: dict[int, str] = {}
        self._gone: set[int] = set()
        self._checkpoint = terms.start_version
        self._n_rollbacks = 0
        self._last_commit_s = 0.0
        self._ended = False

    def handle(self, now_s: float, event: Event) -> list[Action]:
        if self._ended:
            return []
        match event:
            case Started() | Woke("tick"):
                over = self._leases.over(now_s)
                tick = WakeAt(now_s + self.terms.heartbeat_s, "tick")
                return [*(self._lost(*over) if over else []), tick]
            case Persisted(name):
                return self._durable(now_s, name)
            case Refused(_, reason):
                return [Report("refused", {"reason": reason})]
            case Interrupted(code, reason):
                return self._end(code, reason)
            case LinkChanged(peer, up):
                self._leases.link(peer, up, now_s)
            case Received(header, body) if header.run == self.terms.run and header.src in self.terms.stage_of:
                return self._received(now_s, header, body)
            case Received(header, _):
                return [Report("dropped", {"src": header.src, "run": header.run})]
        return []

    def _received(self, now_s: float, header: Header, body: Message) -> list[Action]:
        src = header.src
        if src in self._gone:
            return [self._send(src, self.view)]  # so that it learns of it
        if isinstance(body, Hello):
            return self._hello(now_s, src, body)
        if src not in self._leases:  # not let in, or not yet
            return []
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
            case Suspect(peer, reason):
                return self._lost(peer, f"{reason} (said by peer {src})")
        return []

    # -------------------------------------------------------------------------------------------------- membership

    def _hello(self, now_s: float, src: int, hello: Hello) -> list[Action]:
        expected = self.terms.stage_of[src]
        if (hello.peer, hello.stage, hello.fingerprint) != (src, expected, self.terms.fingerprint):
            reason = (
                f"peer {src}: refused, it runs stage {hello.stage} of {hello.fingerprint}, "
                f"expected stage {expected} of {self.terms.fingerprint}"
            )
            return [Report("refused", {"reason": reason}), self._send(src, Ended(2, reason))]
        self._addresses[src] = hello.address
        self._leases.arrived(src, now_s)
        return [Connect(src, hello.address), Report("hello", {"peer": src, "stage": hello.stage})]

    def _profiled(self, src: int, seconds: dict[str, float], version: int) -> list[Action]:
        """View 1 is made when the last member of the plan is ready to compute."""
        if version != self.n_committed:
            return self._end(2, f"{self._name(src)}: has version {version}, expected {self.n_committed}")
        self.profiles[src] = seconds
        missing = sorted(set(self.terms.stage_of) - set(self.profiles))
        if missing or self.view or "view" in self._pending:
            return [Report("waiting", {"missing": missing})]
        members = tuple(
            Member(peer, stage, 1, self._addresses.get(peer, "")) for peer, stage in sorted(self.terms.stage_of.items())
        )
        view = View(
            1, self.terms.reign, self.terms.start_lineage, members, (1,) * self.terms.n_stages, self.n_committed
        )
        self._pending["view"] = view
        return [Persist("view", plain.write(view))]

    def _lost(self, peer: int, reason: str) -> list[Action]:
        """Go on without it, or end."""
        reason = f"{self._name(peer)}: lost, {reason}"
        stage = self.terms.stage_of.get(peer)
        others = set(self.view.stage_peers(stage)) - {peer, *self._leaving} if self.view else set()
        if not self.terms.elastic or not others:
            return self._end(3, reason)
        if peer not in self._leases:
            return []
        self._leases.end(peer)
        self._leaving[peer] = reason
        return [Report("lost", {"peer": peer, "reason": reason}), *self._leave()]

    def _leave(self) -> list[Action]:
        """A view without those who are lost, unless something is being made durable: then right after that."""
        if self._pending or not self._leaving:
            return []
        number = self.view.number + 1
        changed = {self.terms.stage_of[peer] for peer in self._leaving}
        members = tuple(member for member in self.view.members if member.peer not in self._leaving)
        view = replace(
            self.view,
            number=number,
            members=members,
            stage_views=tuple(number if s in changed else v for s, v in enumerate(self.view.stage_views)),
            n_committed=self.n_committed,
            records=tuple(self._records),
            rolled_back=False,
            results=self._held({member.peer for member in members}),
        )
        self._gone |= set(self._leaving)
        self._leaving.clear()
        self._prepared.clear()  # who is prepared says so again in the new view
        self._pending["view"] = view
        return [Persist("view", plain.write(view))]

    def _held(self, members: set[int]) -> tuple[tuple[Round, tuple[int, ...]], ...]:
        """Rounds of the step under way, and the members that hold their whole result."""
        holders: dict[Round, list[int]] = {}
        for peer, prepared in sorted(self._prepared.get(self.n_committed, {}).items()):
            if peer in members:
                for result in prepared.results:
                    holders.setdefault(result.round, []).append(peer)
        return tuple((round, tuple(peers)) for round, peers in sorted(holders.items()))

    # ------------------------------------------------------------------------------------------------------ commit

    def _on_prepared(self, src: int, prepared: Prepared) -> list[Action]:
        if prepared.step != self.n_committed:
            return []
        said = self._prepared.setdefault(prepared.step, {})
        said[src] = prepared
        members = self.view.members
        if len(said) < len(members) or set(said) != {m.peer for m in members} or "record" in self._pending:
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
        record = Record(prepared.step, rounds, sq_norm, counts.pop(), verdict)
        self._pending["record"] = record
        return [Persist("record", plain.write(record))]

    def _not_finite(self, step: int) -> list[Action]:
        """Stop, or begin a new lineage at the last complete checkpoint."""
        self._n_rollbacks += 1
        if self.terms.on_nonfinite == "stop" or self._n_rollbacks > ROLLBACKS_MAX:
            return self._end(4, f"step {step}: the gradient is not finite")
        self._prepared.clear()
        self._saved.clear()
        self._records.clear()
        back = replace(
            self.view,
            number=self.view.number + 1,
            lineage=self.view.lineage + 1,
            n_committed=self._checkpoint,
            rolled_back=True,
            records=(),
            results=(),
        )
        self._pending["view"] = back
        lost = {"step": step, "to": self._checkpoint, "lineage": back.lineage}
        return [Report("rollback", lost), Persist("view", plain.write(back))]

    def _durable(self, now_s: float, name: str) -> list[Action]:
        value = self._pending.pop(name)
        if isinstance(value, View):
            if value.number == 1 or value.rolled_back:
                self._last_commit_s = now_s
            self.view, self.n_committed = value, value.n_committed
            members = {member.peer: member.stage for member in value.members}
            report = Report("view", {"view": value.number, "members": members})
            return [report, *self._to_all(value), *self._settled(), *self._leave()]
        said = self._prepared.pop(value.step)
        self._records = [*self._records, value][-KEPT_RECORDS:]
        self.n_committed = value.step + 1
        step_s, self._last_commit_s = now_s - self._last_commit_s, now_s
        return [*self._to_all(Committed(value)), self._metrics(value, said.values(), step_s), *self._leave()]

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
        return f"peer {peer} (stage {self.terms.stage_of.get(peer, '?')})"
