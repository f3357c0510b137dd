"""The token table of a pipeline's first stage, with which its last stage computes too: a tied head over several stages,
where replicas may differ.

The table belongs to the first stage. There it is averaged, pushed, pulled and saved like the other parameters, and the
last stage has none of its own. In each local step of a pipeline

    the first stage begins the step             -> its table goes to the last stage
    the last stage wants to begin the step      -> it waits for the table with which the first stage does its forward
    all backwards of the last stage are done    -> its gradient of the table goes to the first stage
    all backwards of the first stage are done   -> it waits for that gradient, and adds it to its own

So both ends compute a step with the same table, its gradient is summed within the pipeline, and it counts once in every
norm and mean. For a held-out loss the first stage gives the table of the mean.

Each is a round with one contributor (jaxdt.sync.engine). A part of a sync's machine (jaxdt.sync.local_steps).
"""

# It matches the few events that it reads and answers [] to all others.
# pyright: reportMatchNotExhaustive=false

from collections import deque
from collections.abc import Sequence

from jaxdt.protocol import events as ev
from jaxdt.protocol.participants import EachOnce, Participants
from jaxdt.protocol.round_id import RoundId, RoundKind
from jaxdt.run.sizes import SHARED_TABLE
from jaxdt.run.work import Work, WorkKind
from jaxdt.sync.engine import RoundEngine, RoundPolicy
from jaxdt.sync.exchange import Exchange, RoundSpec

NO_LOSSES = ev.Tally()


class SharedTable(RoundPolicy):
    """At one end of `pipeline`, whose members are in the order of stages. The forwards of the first stage run `n_ahead`
    steps before a step's backward."""

    KINDS = frozenset({RoundKind.GRADIENT, RoundKind.TABLE, RoundKind.HELD_OUT_TABLE})
    READS = RoundEngine.READS | {ev.Ran}

    def __init__(self, peer: int, pipeline: Sequence[int], n_elements: int, slice_bytes: int, n_ahead: int):
        self._peer = peer
        self._first, self._last = pipeline[0], pipeline[-1]
        self._stage = pipeline.index(peer)
        self._n_elements = n_elements
        self._n_ahead = n_ahead
        self._engine = RoundEngine(peer, slice_bytes, self)
        self._admission = -1  # of the pipeline, which does nothing before
        self._first_version = 0
        self._n_gradients = 0  # local steps whose gradients the last stage has given
        self._drained: int | None = None  # the step whose gradient the first stage waits for
        self._giving: deque[RoundId] = deque()  # tables that become vectors, in the order of their Work
        self._table: int | None = None  # the version that the last stage has
        self._awaited_version: int | None = None  # or waits for
        self._taking: RoundId | None = None
        self._last_held_out = -1  # version of the last mean that was closed

    @property
    def is_first(self) -> bool:
        """Whether this is the first stage, to which the table belongs."""
        return self._peer == self._first

    def start(self, version: int, view: ev.View) -> None:
        """The pipeline begins after so many local steps."""
        self._first_version = self._n_gradients = version
        self._admission = view.by_peer[self._first].admission

    def handle(self, event: ev.Event) -> ev.Actions:
        match event:
            case ev.Ran(Work(kind=kind, step=int(step))) if kind == WorkKind.GATHER:
                return self._give(self._round(RoundKind.GRADIENT, step), step)
            case ev.Ran(Work(kind=kind, step=int(step))) if kind == WorkKind.CONTRIBUTE:
                self._n_gradients = step + 1
                return self._engine.forget(self._round(RoundKind.GRADIENT, step))
            case ev.Ran(Work(kind=kind, step=int(step))) if kind == WorkKind.TABLE:
                return self._give(self._giving.popleft(), step) if self.is_first else self._on_taken()
        return self._engine.handle(event)

    def _round(self, kind: RoundKind, number: int) -> RoundId:
        return RoundId(kind, SHARED_TABLE, number, view=self._admission)

    def _run(self, kind: WorkKind, step: int, round: RoundId, scale: float = 1.0) -> ev.Action:
        return ev.Run(Work(self._stage, kind, None, self._peer, step), scale, (round,))

    def _give(self, round: RoundId, step: int) -> ev.Actions:
        """The vector is there, and sent once."""
        sent = self._engine.contribute((round, ((self._peer, step),), 1, NO_LOSSES))
        return [*sent, *self._engine.forget(round)] if round.kind == RoundKind.GRADIENT else sent

    # ---------------------------------------------------------------------------------------------- as a round policy

    def spec(self, id: RoundId) -> RoundSpec | None:
        if self._admission < 0 or id.stage != SHARED_TABLE or self._is_void(id):
            return None
        is_gradient = id.kind == RoundKind.GRADIENT
        src = self._last if is_gradient else self._first
        participants = Participants((src,), (self._first,), () if is_gradient else (self._last,))
        return RoundSpec(id, self._n_elements, participants, EachOnce((src,)))

    def _is_void(self, id: RoundId) -> bool:
        """Whether a round is over, or one of the pipeline before it was lost."""
        if id.kind == RoundKind.HELD_OUT_TABLE:
            return id.number <= self._last_held_out
        is_over = id.number < self._n_gradients
        if id.kind == RoundKind.TABLE:
            is_over = not self.is_first and self._table is not None and id.number <= self._table
        return is_over or id.view != self._admission

    def whole(self, exchange: Exchange) -> ev.Actions:
        round = exchange.id
        if round.kind == RoundKind.GRADIENT:
            return self._add_gradient()
        if self.is_first:  # all of it is sent
            return self._engine.forget(round)
        return self._take() if round.kind == RoundKind.TABLE else []

    # ------------------------------------------------------------------------------------------------------- gradients

    def on_drained(self, step: int) -> ev.Actions:
        """The gradient of a step is final. The first stage adds the other end's to it."""
        if self.is_first:
            self._drained = step
            return self._add_gradient()
        self._open(self._round(RoundKind.GRADIENT, step))
        return [self._run(WorkKind.GATHER, step, self._round(RoundKind.GRADIENT, step))]

    def _add_gradient(self) -> ev.Actions:
        step = self._drained
        exchange = None if step is None else self._engine.at(self._round(RoundKind.GRADIENT, step))
        if step is None or exchange is None or not exchange.complete:
            return []
        self._drained = None
        return [self._run(WorkKind.CONTRIBUTE, step, exchange.id)]

    def _open(self, round: RoundId) -> None:
        spec = self.spec(round)
        assert spec is not None  # rounds begin in their order, after the start
        self._engine.open(spec)

    # --------------------------------------------------------------------------------------------------------- tables

    def before_step(self, version: int) -> ev.Actions:
        """The step after `version` others is to begin: the first stage's table goes to the last stage."""
        if self.is_first:
            return self._lay_out(self._round(RoundKind.TABLE, version), version, 1.0)
        self._awaited_version = max(self._first_version, version - self._n_ahead)
        return [] if self.may_begin else self._take()

    @property
    def may_begin(self) -> bool:
        """Whether the table is here with which that step computes."""
        return self.is_first or self._table == self._awaited_version

    def give_mean(self, mean: RoundId, scale: float) -> ev.Actions:
        """The first stage begins to measure a held-out loss, with the sum of a round times `scale`."""
        table = self.of_mean(mean)
        return [] if self._is_void(table) else self._lay_out(table, table.number, scale)

    def _lay_out(self, round: RoundId, step: int, scale: float) -> ev.Actions:
        self._open(round)
        self._giving.append(round)
        return [self._run(WorkKind.TABLE, step, round, scale)]

    def _take(self) -> ev.Actions:
        """Take over the table that is wanted, once it is here."""
        version = self._awaited_version
        exchange = None if version is None else self._engine.at(self._round(RoundKind.TABLE, version))
        if exchange is None or not exchange.complete or self._taking == exchange.id:
            return []
        self._taking = exchange.id
        return [self._run(WorkKind.TABLE, exchange.id.number, exchange.id)]

    def _on_taken(self) -> ev.Actions:
        round, self._taking = self._taking, None
        assert round is not None  # one is taken over at a time
        self._table = round.number
        return self._engine.forget(round)

    # ------------------------------------------------------------------------------------------------- held-out losses

    def of_mean(self, mean: RoundId) -> RoundId:
        """The round of the table that belongs to the mean of a round. Its members are those of the first stage, so its
        attempt is not that of other stages."""
        return RoundId(RoundKind.HELD_OUT_TABLE, SHARED_TABLE, mean.number, view=mean.view, attempt=mean.attempt)

    def table_of_mean(self, version: int) -> RoundId | None:
        """The round with the table of a mean, if all of it is here."""
        exchange = self._engine.at(RoundId(RoundKind.HELD_OUT_TABLE, SHARED_TABLE, version))
        return exchange.id if exchange and exchange.complete else None

    def close_mean(self, round: RoundId) -> ev.Actions:
        """The held-out loss with the mean of a round is known."""
        if round.kind != RoundKind.HELD_OUT:
            return []
        self._last_held_out = max(self._last_held_out, round.number)
        means = [one.id for one in self._engine if one.id.kind == RoundKind.HELD_OUT_TABLE]
        return [action for id in means if id.number <= round.number for action in self._engine.forget(id)]
