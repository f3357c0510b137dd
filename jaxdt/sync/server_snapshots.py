"""Snapshots of the servers' parameters for held-out losses and checkpoints, while replicas continue.

A snapshot holds the same pushes at all stages: those up to a cut, a local step of each pipeline. When the coordinator
asks for one, the server of the first stage chooses the cut: of each worker the last step that it may do before it pulls
again. No later step has begun at any stage, since all forwards of a step need that of the first stage. It tells the
other servers the cut, and answers no pull before all of them know it; so no server adds a later push before.

A server that knows the cut copies its parameters. Pushes up to the cut it then adds to its parameters and to the copy,
later ones to its parameters alone. A snapshot is complete once it includes the pushes up to the cut of every remaining
worker. A finished worker's cut is its last push. The server keeps a snapshot until the coordinator closes it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from jaxdt.protocol import events as ev
from jaxdt.protocol.participants import EachOnce, Participants
from jaxdt.protocol.reports import SnapshotReport
from jaxdt.protocol.round_id import RoundId, RoundKind, Series
from jaxdt.run.codec import EXACT, CodecSpec
from jaxdt.sync.engine import RoundEngine
from jaxdt.sync.exchange import Exchange, RoundSpec
from jaxdt.sync.known_groups import KnownGroups


@dataclass(frozen=True)
class ServedStage:
    """A stage with a server; `servers`: of all stages, `workers`: of its own by pipeline. `n_elements`: numbers of its
    parameters, which are exchanged in slices of `slice_bytes`. `n_steps`: of the run. `push_codec`: how pushes
    travel."""

    stage: int
    servers: Sequence[int]
    workers: Sequence[int]
    n_steps: int
    n_elements: int
    slice_bytes: int
    staleness: int
    wave: int
    push_codec: CodecSpec = EXACT

    @property
    def server(self) -> int:
        return self.servers[self.stage]

    @property
    def other_servers(self) -> list[tuple[int, int]]:
        """(stage, server) of the other stages."""
        return [(stage, server) for stage, server in enumerate(self.servers) if stage != self.stage]

    def spec(self, id: RoundId) -> RoundSpec:
        """A worker's change goes to the server, and the server's parameters to a worker. The server sends a snapshot
        to no peer: those that need it fetch it."""
        is_push = id.kind == RoundKind.PUSH
        src = id.peer if is_push else self.server
        receivers = (id.peer,) if id.kind == RoundKind.PULL else ()
        codec = self.push_codec if is_push else EXACT
        participants = Participants((src,), (self.server,), receivers)
        return RoundSpec(id, self.n_elements, participants, EachOnce((src,)), codec=codec)


@dataclass
class Snapshot:
    """`cut`: worker -> the last of its local steps whose push is in it; `steps`: those that are. `n_works`: Work that
    changes it and is not done. `is_settled`: no further push goes into it."""

    cut: Mapping[int, int]
    steps: dict[int, int]
    n_works: int = 1
    is_settled: bool = False


class ServerSnapshots:
    """One server's, which are rounds of its `engine`. It does no Work itself: the server's machine lays a snapshot out,
    and adds pushes to it."""

    def __init__(self, stage: ServedStage, engine: RoundEngine):
        self._served = stage
        self._engine = engine
        self._open: dict[RoundId, Snapshot] = {}
        self._closed: dict[Series, int] = {}  # the last version of which a snapshot is over
        self._steps = dict.fromkeys(stage.workers, 0)  # of all pushes that are added, or about to be
        self._untold: set[tuple[int, RoundId]] = set()  # servers that may not know a cut yet
        self._known_groups = KnownGroups()

    def begin(self, version: int) -> None:
        """The run begins after so many local steps of each worker."""
        self._steps = dict.fromkeys(self._served.workers, version)

    def __contains__(self, round: RoundId) -> bool:
        return round in self._open

    @property
    def holds_pulls(self) -> bool:
        """Whether no pull may be answered."""
        return bool(self._untold)

    # ------------------------------------------------------------------------------------------------------- the cut

    def choose(self, round: RoundId, allowed: Mapping[int, int]) -> ev.Actions:
        """The coordinator asks for a snapshot. At the first stage its cut is the last step that each worker may do now;
        other servers wait for that. Reports and what is sent; [] if there is nothing to be laid out."""
        if self._served.stage or not self._is_new(round):
            return []
        cut = tuple([allowed.get(worker, 0) for worker in self._served.workers])
        told: ev.Actions = []
        for stage, server in self._served.other_servers:
            theirs = replace(round, stage=stage)
            self._untold.add((server, theirs))
            told.append(ev.Send(server, ev.SnapshotCut(theirs, cut)))
        return [*told, *self.take(round, cut)]

    def take(self, round: RoundId, cut: tuple[int, ...]) -> ev.Actions:
        """The cut is known: the parameters are to be laid out now. [] if it was known before."""
        served = self._served
        if not self._is_new(round):
            return []
        self._engine.open(served.spec(round))
        self._open[round] = Snapshot(dict(zip(served.workers, cut, strict=True)), dict(self._steps))
        self._known_groups.on_formed(ev.GroupFormed(round, (served.server,)), was_wanted=False)
        return [SnapshotReport(served.stage, round.number, round.kind == RoundKind.CHECKPOINT, list(cut))]

    def answer_cut(self, src: int, cut: ev.SnapshotCut) -> ev.Actions:
        """The first stage's server hears that this one knows the cut."""
        return [ev.Send(src, ev.CutTaken(cut.round))]

    def on_cut_taken(self, src: int, round: RoundId) -> None:
        """Another server knows a cut."""
        self._untold.discard((src, round))

    def _is_new(self, round: RoundId) -> bool:
        return round not in self._open and round.number > self._closed.get(round.series, -1)

    # ---------------------------------------------------------------------------------------------------------- pushes

    def push(self, worker: int, step: int) -> tuple[RoundId, ...]:
        """A push is about to be added; the snapshots that it goes into."""
        self._steps[worker] = step
        taking = [round for round, one in self._open.items() if not one.is_settled and step <= one.cut[worker]]
        for round in taking:
            self._open[round].steps[worker] = step
            self._open[round].n_works += 1
        return tuple(taking)

    def settle(self, n_added: Mapping[int, int], finished: Collection[int]) -> ev.Actions:
        """n_added[worker] pushes are added, or about to be, of the workers that are left. Snapshots that have all of
        theirs are added up, slice by slice."""
        for one in self._open.values():
            one.is_settled |= all(n >= one.cut[w] or w in finished for w, n in n_added.items())
        return self._add_up()

    def on_ran(self, rounds: Collection[RoundId]) -> ev.Actions:
        """Work that changes these snapshots is done."""
        for round in rounds:
            if round in self._open:
                self._open[round].n_works -= 1
        return self._add_up()

    def _add_up(self) -> ev.Actions:
        settled = [round for round, one in self._open.items() if one.is_settled and not one.n_works]
        ready = [one.id for one in self._engine if one.id in settled and not one.is_frozen]
        server = self._served.server
        return self._engine.contribute(*[(round, ((server, round.number),), 1, ev.Tally()) for round in ready])

    def whole(self, exchange: Exchange) -> ev.Actions:
        """A snapshot is added up. The coordinator hears of it."""
        one, server = self._open[exchange.id], self._served.server
        steps = tuple([one.steps[worker] for worker in self._served.workers])
        held = ev.ResultHeld(exchange.id, exchange.result().digest, steps)
        return [ev.Send(ev.COORDINATOR, self._known_groups.on_held(held, (server,)))]

    # ---------------------------------------------------------------------------------------------- who needs them

    def close(self, round: RoundId) -> ev.Actions:
        """A snapshot is no longer needed."""
        if self._open.pop(round, None) is None:
            return []
        self._closed[round.series] = max(round.number, self._closed.get(round.series, -1))
        self._known_groups.on_over(round)
        self._engine.close(round)
        return [ev.Forget(round)]

    def answer(self, coordinator_term: int) -> ev.Actions:
        """A coordinator was started again, and asks what this server knows."""
        return self._known_groups.answer(coordinator_term, None, [])
