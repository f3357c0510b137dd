"""The coordinator: leases, numbered views, and the two-phase commit of a step. No tensor ever reaches it.

  WAITING   members say hello; when all of the plan are here, view 1 is made durable and sent
  RUNNING   a step is committed when every member of the view is prepared for the same rounds with equal digests:
            the record is made durable first, then announced (step protocol, Sec. 5)
  ENDED     every member is done, or one was lost: everyone is told, with the exit code and one line

Membership is the plan: who is lost ends the run with code 3, and no step is half applied, because an update needs the
record and a record needs everyone.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxdt.core import plain
from jaxdt.core.deadline import Deadline
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
    Saved,
    Send,
    Started,
    Stop,
    Suspect,
    View,
    WakeAt,
    Woke,
)

KEPT_RECORDS = 2
RECONNECT_S = 1.5
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
    reign: int = 1


class Coordinator:
    """See the module text."""

    def __init__(self, terms: Terms):
        self.terms = terms
        self.view: View | None = None
        self.n_committed = terms.start_version
        self.profiles: dict[int, dict[str, float]] = {}
        self._addresses: dict[int, str] = {}
        self._leases: dict[int, Deadline] = {}
        self._down_since_s: dict[int, float] = {}
        self._prepared: dict[int, dict[int, Prepared]] = {}
        self._records: list[Record] = []
        self._pending: dict[str, Message] = {}
        self._saved: dict[int, dict[int, float]] = {}
        self._done: dict[int, Done] = {}
        self._checkpoint = terms.start_version
        self._n_rollbacks = 0
        self._last_commit_s = 0.0
        self._ended = False

    def handle(self, now_s: float, event: Event) -> list[Action]:
        if self._ended:
            return []
        match event:
            case Started() | Woke("tick"):
                return self._check_leases(now_s) + [WakeAt(now_s + self.terms.heartbeat_s, "tick")]
            case Persisted(name):
                return self._durable(now_s, name)
            case Refused(_, reason):
                return [Report("refused", {"reason": reason})]
            case Interrupted(code, reason):
                return self._end(code, reason)
            case LinkChanged(peer, up):
                if up or peer not in self._leases:
                    self._down_since_s.pop(peer, None)
                else:
                    self._down_since_s.setdefault(peer, now_s)
            case Received(header, body) if header.run == self.terms.run and header.src in self.terms.stage_of:
                return self._received(now_s, header, body)
            case Received(header, _):
                return [Report("dropped", {"src": header.src, "run": header.run})]
        return []

    def _received(self, now_s: float, header: Header, body: Message) -> list[Action]:
        src = header.src
        if isinstance(body, Hello):
            return self._hello(now_s, src, body)
        if src not in self._leases:  # not let in, or not yet
            return []
        self._leases[src].arrived(now_s)
        lineage = self.view.lineage if self.view else None
        match body:
            case Heartbeat(count, status):
                pulse = self._send(src, Pulse(count, now_s))
                return [pulse, Report("heartbeat", {"peer": src, **status})]
            case Profiled(seconds, version):
                return self._profiled(src, seconds, version)
            case Prepared() if header.lineage == lineage:
                return self._on_prepared(src, body)
            case Saved() if header.lineage == lineage:
                return self._on_saved(body)
            case Failed(reason):
                return self._end(2, f"{self._name(src)}: {reason}")
            case Done():
                return self._on_done(src, body)
            case Suspect(peer, reason):
                return self._end(3, f"{self._name(peer)}: lost, {reason} (said by peer {src})")
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
        self._leases.setdefault(src, Deadline(self.terms.deadline_floor_s)).arrived(now_s)
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

    def _check_leases(self, now_s: float) -> list[Action]:
        for peer, since_s in sorted(self._down_since_s.items()):
            if now_s - since_s > RECONNECT_S:
                return self._end(3, f"{self._name(peer)}: lost, its connection broke and did not come back")
        for peer, lease in sorted(self._leases.items()):
            if lease.passed(now_s):
                return self._end(3, f"{self._name(peer)}: lost, silent for {lease.silence_s(now_s):.1f} s")
        return []

    # ------------------------------------------------------------------------------------------------------ commit

    def _on_prepared(self, src: int, prepared: Prepared) -> list[Action]:
        if prepared.step != self.n_committed:
            return []
        said = self._prepared.setdefault(prepared.step, {})
        said[src] = prepared
        if set(said) != {member.peer for member in self.view.members} or "record" in self._pending:
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
        back = replace(
            self.view,
            number=self.view.number + 1,
            lineage=self.view.lineage + 1,
            n_committed=self._checkpoint,
            rolled_back=True,
        )
        self._pending["view"] = back
        lost = {"step": step, "to": self._checkpoint, "lineage": back.lineage}
        return [Report("rollback", lost), Persist("view", plain.write(back))]

    def _durable(self, now_s: float, name: str) -> list[Action]:
        value = self._pending.pop(name)
        if isinstance(value, View):
            self.view, self.n_committed = value, value.n_committed
            self._last_commit_s = now_s
            members = {member.peer: member.stage for member in value.members}
            return [Report("view", {"view": value.number, "members": members}), *self._to_all(value)]
        said = self._prepared.pop(value.step)
        self._records = [*self._records, value][-KEPT_RECORDS:]
        self.n_committed = value.step + 1
        step_s, self._last_commit_s = now_s - self._last_commit_s, now_s
        return [*self._to_all(Committed(value)), self._metrics(value, said.values(), step_s)]

    def _metrics(self, record: Record, said, step_s: float) -> Report:
        n_losses = sum(one.n_losses for one in said)
        fields = {
            "step": record.step,
            "loss": math.fsum(one.loss_sum for one in said) / n_losses if n_losses else math.nan,
            "step_s": step_s,
            "tokens_per_s": record.n_samples * self.terms.tokens_per_sample / step_s if step_s > 0 else math.inf,
            "gradient_norm": math.sqrt(record.sq_norm) / record.n_samples,
            "verdict": record.verdict,
        }
        n_evals = sum(one.n_evals for one in said)
        if n_evals:
            fields["eval_loss"] = math.fsum(one.eval_sum for one in said) / n_evals
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
        return [MarkCheckpoint(version, self.view.lineage), report, *self._to_all(CheckpointComplete(version))]

    def _on_done(self, src: int, done: Done) -> list[Action]:
        self._done[src] = done
        actions: list[Action] = [Report("done", {"peer": src, "bytes_to": done.bytes_to, **done.totals})]
        if set(self._done) == set(self.terms.stage_of):
            actions += self._end(0, f"done: {done.version} steps")
        return actions

    def _end(self, code: int, reason: str) -> list[Action]:
        self._ended = True
        told = [self._send(peer, Ended(code, reason)) for peer in sorted(self._leases)]
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
