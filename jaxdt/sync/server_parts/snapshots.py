"""Parameters that servers keep aside for held-out losses and checkpoints, while workers go on.

A snapshot holds the same pushes at all stages: those up to a cut, a local step of each pipeline. When the coordinator
asks for one, the server of the first stage chooses the cut: of each worker the last step that it may do before it pulls
again. No later step has begun at any stage, since all forwards of a step need that of the first stage. It tells the
other servers the cut, and answers no pull before all of them know it; so no server adds a later push before.

A server that knows the cut copies its parameters. Pushes up to the cut it then adds to its parameters and to the copy,
later ones to its parameters alone. The snapshot is whole when it has those of all workers that are left, of one that
has finished its last. It is kept until the coordinator says that nobody needs it any more.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from jaxdt.protocol import events as ev
from jaxdt.protocol.participants import EachOnce, Participants
from jaxdt.protocol.reports import SnapshotReport
from jaxdt.protocol.round_id import RoundId, RoundKind, Series
from jaxdt.sync.exchange import Exchange, RoundSpec
from jaxdt.sync.known_groups import KnownGroups


@dataclass(frozen=True)
class SnapshotPlace:
    """A server's place: `servers` of all stages, `workers` of its own by pipeline. `n_elements`: numbers of its
    parameters, `slice_elements` of a slice."""

    stage: int
    servers: Sequence[int]
    workers: Sequence[int]
    n_elements: int
    slice_elements: int

    @property
    def peer(self) -> int:
        return self.servers[self.stage]

    @property
    def others(self) -> list[tuple[int, int]]:
        """(stage, server) of the other stages."""
        return [(stage, server) for stage, server in enumerate(self.servers) if stage != self.stage]

    def spec(self, round: RoundId) -> RoundSpec:
        """The parameters come from the server, and are added up by it alone; who needs them fetches them."""
        alone = (self.peer,)
        return RoundSpec(round, self.n_elements, Participants(alone, alone, alone), EachOnce(alone))


@dataclass
class Snapshot:
    """`cut`: worker -> the last of its local steps whose push is in it; `steps`: those that are. `n_works`: Work that
    changes it and is not done. `is_settled`: no further push goes into it."""

    exchange: Exchange
    cut: Mapping[int, int]
    steps: dict[int, int]
    n_works: int = 1
    is_settled: bool = False


class ServerSnapshots:
    """One server's. It does no Work itself: the server's machine lays a snapshot out, and adds pushes to it."""

    def __init__(self, place: SnapshotPlace):
        self._place = place
        self._open: dict[RoundId, Snapshot] = {}
        self._closed: dict[Series, int] = {}  # the last version of which a snapshot is over
        self._steps = dict.fromkeys(place.workers, 0)  # of all pushes that are added, or about to be
        self._untold: set[tuple[int, RoundId]] = set()  # servers that may not know a cut yet
        self._known = KnownGroups()

    def begin(self, version: int) -> None:
        """The run begins after so many local steps of each worker."""
        self._steps = dict.fromkeys(self._place.workers, version)

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
        if self._place.stage or not self._is_new(round):
            return []
        cut = tuple([allowed.get(worker, 0) for worker in self._place.workers])
        told: ev.Actions = []
        for stage, server in self._place.others:
            theirs = replace(round, stage=stage)
            self._untold.add((server, theirs))
            told.append(ev.Send(server, ev.SnapshotCut(theirs, cut)))
        return [*told, *self.take(round, cut)]

    def take(self, round: RoundId, cut: tuple[int, ...]) -> ev.Actions:
        """The cut is known: the parameters are to be laid out now. [] if it was known before."""
        place = self._place
        if not self._is_new(round):
            return []
        exchange = Exchange(place.peer, place.spec(round), place.slice_elements)
        self._open[round] = Snapshot(exchange, dict(zip(place.workers, cut, strict=True)), dict(self._steps))
        self._known.formed(ev.GroupFormed(round, (place.peer,)), was_wanted=False)
        return [SnapshotReport(place.stage, round.number, round.kind == RoundKind.CHECKPOINT, list(cut))]

    def answer_cut(self, src: int, cut: ev.SnapshotCut) -> ev.Actions:
        """The first stage's server hears that this one knows the cut."""
        return [ev.Send(src, ev.CutTaken(cut.round))]

    def taken(self, src: int, round: RoundId) -> None:
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

    def ran(self, rounds: Collection[RoundId]) -> ev.Actions:
        """Work that changes these snapshots is done."""
        for round in rounds:
            if round in self._open:
                self._open[round].n_works -= 1
        return self._add_up()

    def _add_up(self) -> ev.Actions:
        actions: ev.Actions = []
        for round, one in self._open.items():
            if one.is_settled and not one.n_works and not one.exchange.is_frozen:
                one.exchange.freeze(((self._place.peer, round.number),), 1, ev.Tally())  # there is nobody to send it to
                sums = [one.exchange.add_up(bounds) for bounds in one.exchange.addable]
                suspect = self._place.peer
                actions += [ev.Send(ev.COORDINATOR, ev.Suspect(suspect, s)) if isinstance(s, str) else s for s in sums]
        return actions

    def summed(self, key: ev.SliceKey, digest: int, sq_norm: float) -> ev.Actions:
        """A slice is added up. The coordinator hears when all are."""
        one = self._open[key.round]
        given_out = one.exchange.give_out(key, digest, sq_norm)
        if given_out is None or not one.exchange.hold(given_out[1]):
            return []
        steps = tuple([one.steps[worker] for worker in self._place.workers])
        held = ev.ResultHeld(key.round, one.exchange.result().digest, steps)
        return [ev.Send(ev.COORDINATOR, self._known.held(held, (self._place.peer,)))]

    # ---------------------------------------------------------------------------------------------- who needs them

    def give(self, src: int, round: RoundId) -> ev.Actions:
        """A worker fetches a snapshot that is whole."""
        one = self._open.get(round)
        return list(one.exchange.given_to(src)) if one and one.exchange.complete else []

    def close(self, round: RoundId) -> ev.Actions:
        """Nobody needs it any more."""
        if self._open.pop(round, None) is None:
            return []
        self._closed[round.series] = max(round.number, self._closed.get(round.series, -1))
        self._known.over(round)
        return [ev.Forget(round)]

    def answer(self) -> ev.Actions:
        """A coordinator was started again, and asks what this server knows."""
        said = self._known.said_again()
        return [ev.Send(ev.COORDINATOR, ev.ReplicaState(self._known.all, None, len(said))), *said]
