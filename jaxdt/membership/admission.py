"""Who may be a peer of the run, and where: the coordinator's answers to processes that ask under a temporary id.

- A newcomer gets a peer id and the stage that needs a peer most. Where replicas may differ it gets the id and the place
  of a peer that was lost.
- A process that claims a peer's id waits until it is known whether another process has it.
- A pool's worker gets a server (see WorkerPlaces).

A process that is started with a peer's id does not know whether another process has that id already: its flag file may
have been started twice, or its earlier process may have died. So it first asks, under a temporary id. It is refused if
the process that has the id is heard again, and admitted once that process is lost, which a broken connection shows
soon. So a second process never disturbs a living one: of two, the one that answers keeps its place.

It changes no view. The coordinator fills in the headers of its messages.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxdt.membership.run_state import RunState
from jaxdt.membership.worker_places import WorkerPlaces
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import JoinRequestReport, RefusedReport, WorkerPlacedReport
from jaxdt.run.errors import BadInput
from jaxdt.run.exit_codes import ExitCode

GRANTED_S = 20.0  # an admitted process loads jax and says hello within it
HEARD_HEARTBEATS = 2.0  # what arrives later than so many heartbeats after a question was said after the question


@dataclass(frozen=True)
class Claim:
    """A process that waits for its answer. `where`: what people are told of it. `is_new`: it does not know the run."""

    temporary_id: int
    peer: int
    where: str
    since_s: float
    is_new: bool


class Admission:
    """Time comes in as an argument. `workers`: the places of a pool's workers, None without a pool."""

    def __init__(self, run: RunState):
        config = run.config
        self._claims: dict[int, Claim] = {}  # by temporary id
        self.workers = None if config.workers is None else WorkerPlaces(config.workers, config.join_rule)
        self._config = config
        self._roster = run.roster
        self._agreement = run.agreement
        self._operations = run.operations

    def on_join(self, now_s: float, src: int, join: ev.Join) -> list[ev.Action]:
        """A process asks, under a temporary id."""
        if join.is_worker:
            return self._on_worker(now_s, src, join)
        if join.peer is not None and (join.peer in self._roster.peers or not join.is_new):
            return self._on_claim(now_s, src, join)
        return self._on_newcomer(now_s, src, join)

    def _on_newcomer(self, now_s: float, src: int, join: ev.Join) -> list[ev.Action]:
        """It gets a peer id, a stage, and what it has to run. Where it could only wait for the end it is refused."""
        try:
            ids = self.newcomer_ids()
            if ids is not None and join.peer is not None:
                raise BadInput(f"its credential is of peer {join.peer}, expected one of a lost peer, by a new token")
        except BadInput as refusal:
            return [RefusedReport(f"a newcomer: {refusal}"), ev.Send(src, ev.Ended(2, str(refusal)))]
        if ids is not None:
            return self._on_claim(now_s, src, replace(join, peer=ids[0], is_new=True))
        peer, stage = self._roster.newcomer(now_s, src, join.peer)
        self._roster.peers[peer].granted_until_s = now_s + GRANTED_S
        return [JoinRequestReport(peer, stage), ev.Send(src, self._welcome(peer, stage))]

    def _welcome(self, peer: int, stage: int) -> ev.Welcome:
        return self._config.answer(peer, stage, self._agreement.n_committed)

    def newcomer_ids(self) -> Sequence[int] | None:
        """Ids of lost peers of the plan, of which a newcomer gets one and the place; None where it gets an id of its
        own. BadInput if there is none to get. Any thread may ask."""
        if not self._agreement.REPLICAS_MAY_DIFFER:
            return None
        where = "replicas may differ in this run, so a newcomer takes the place of a peer that was lost"
        if self._agreement.NO_RETURN:
            raise BadInput(f"{where}, and nobody does here: {self._agreement.NO_RETURN}")
        planned = self._config.stage_of
        ids = [peer for peer in planned if not self._is_taken(peer)]
        if self._roster.view is None or not ids:
            raise BadInput(f"{where}, and none of the {len(planned)} peers of the plan is lost")
        return ids

    def _is_taken(self, peer: int) -> bool:
        """Whether a process has the id of a peer of the plan, or is about to have it, or none may."""
        known = self._roster.peers[peer]
        is_here = peer in self._roster.admissions or known.lease is not None
        return is_here or known.granted_until_s is not None or self._operations.is_revoked(peer)

    def _on_worker(self, now_s: float, src: int, join: ev.Join) -> list[ev.Action]:
        """A pool's worker asks for whom it computes, and what it has to run. It may have to measure its links first."""
        certified, roster = join.peer, self._roster
        if self.workers is None:
            return [ev.Send(src, ev.Ended(2, "asks to be a worker, and the wiring of this run has none"))]
        if certified in roster.peers:
            name = roster.name(certified)
            return [ev.Send(src, ev.Ended(2, f"{name}: is a member of the run, expected a worker's id"))]
        worker = roster.ids.new_id() if certified is None else certified
        gbps = None if join.gbps is None else dict(join.gbps)
        to_measure = self.workers.to_measure(worker, roster.servers, gbps)
        addresses = tuple((server, roster.peers[server].address or "") for server in to_measure)
        if any(address for _, address in addresses):
            return [ev.Send(src, replace(self._welcome(worker, 0), servers=addresses))]
        stage, server = self.workers.place(worker, roster.servers, gbps)
        answer = self._welcome(worker, stage)
        if server is None:
            return [ev.Send(src, answer)]
        self.workers.on_asked(now_s, worker)
        answer = replace(answer, server=server, server_address=roster.peers[server].address or "")
        return [WorkerPlacedReport(worker, stage, server), ev.Send(src, answer)]

    def _on_claim(self, now_s: float, src: int, join: ev.Join) -> list[ev.Action]:
        """A process asks whether it may be a peer that has an id already. A repeated question is one."""
        if join.peer is None or join.peer not in self._roster.peers:
            return [ev.Send(src, ev.Ended(ExitCode.FORGOTTEN, unknown(join.peer)))]
        self._claims.setdefault(src, Claim(src, join.peer, join.where, now_s, join.is_new))
        return self.settle_claims(now_s)

    def withdraw_claim(self, temporary_id: int) -> None:
        """The connection of a process that asked is gone."""
        self._claims.pop(temporary_id, None)

    def _answered(self, now_s: float) -> list[tuple[Claim, bool]]:
        """The claims that can be answered now, and whether each is granted."""
        for known in self._roster.peers.values():
            if known.granted_until_s is not None and known.granted_until_s <= now_s:
                known.granted_until_s = None
        answered: list[tuple[Claim, bool]] = []
        for claim in sorted(self._claims.values(), key=lambda claim: (claim.since_s, claim.temporary_id)):
            if self._roster.has_lease(claim.peer):
                asked_s = claim.since_s + HEARD_HEARTBEATS * self._config.heartbeat_s
                if self._roster.heard_s(claim.peer, now_s) >= asked_s:
                    answered.append((claim, False))
            elif self._roster.peers[claim.peer].granted_until_s is None:
                self._roster.peers[claim.peer].granted_until_s = now_s + GRANTED_S
                answered.append((claim, True))
        for claim, _ in answered:
            del self._claims[claim.temporary_id]
        return answered

    def settle_claims(self, now_s: float) -> list[ev.Action]:
        """Answer the claims that can be answered now."""
        actions: list[ev.Action] = []
        for claim, is_granted in self._answered(now_s):
            known = self._roster.peers[claim.peer]
            if is_granted:
                answer = ev.Welcome(self._config.run, claim.peer, known.stage, "", {})
                if claim.is_new:
                    answer = self._welcome(claim.peer, known.stage)
                    actions.append(JoinRequestReport(claim.peer, known.stage))
                actions.append(ev.Send(claim.temporary_id, answer))
                continue
            runs_at = known.address or "an address that cannot be dialed"
            reason = (
                f"{self._roster.name(claim.peer)}: runs at {runs_at} and answers; a second one, {claim.where}, is "
                "refused: another peer needs a token of its own"
            )
            actions += [RefusedReport(reason), ev.Send(claim.temporary_id, ev.Ended(2, reason))]
        return actions


def unknown(peer: int | None) -> str:
    """The answer to a peer that the roster has forgotten, or that only an earlier coordinator knew."""
    return f"peer {peer}: is not known any more, and may join again as a newcomer"
