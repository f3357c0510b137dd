"""The transfer of state to a replica of a pipeline that comes back, from the replica of its stage in a donor pipeline.

The first stage of the donor begins no further step, and tells the joining peers after how many steps it waits
(DonorWaits). The other stages of the donor come to the same step, and to the mean that is due after it, and can do
nothing more then. So all stages give the states of one moment, as they are, and no copy is kept. The donor continues
with the view in which the pipeline is whole again, or in which no peer joins. If the donor is lost, the view without
it names another one, and all stages start again.
"""

# A machine matches the few events that it reads and answers [] to all others.
# pyright: reportMatchNotExhaustive=false

from collections.abc import Sequence

from jaxdt.protocol import events as ev
from jaxdt.run.plan import Plan
from jaxdt.sync.transfer import Download, MayGive, TransferEngine, TransferPolicy

NOTHING_YET = ev.Fetching(0, 0, 0)  # for the heartbeats of a peer that waits for its donor


class DonorTransfer(TransferPolicy):
    """One peer's side of it, as a joining peer and as a donor."""

    READS = TransferEngine.READS | {ev.ViewChanged, ev.Settled, ev.Ready, ev.DonorWaits}

    def __init__(self, plan: Plan, peer: int, slice_bytes: int):
        self._plan = plan
        self._peer = peer
        self._stage, _ = plan.seat(peer)
        self._transfer = TransferEngine(slice_bytes, self)
        self._n_words = 0
        self._view: ev.View | None = None
        self._donor: int | None = None  # of this peer, while it joins
        self._first: int | None = None  # the member of the donor's first stage
        self._announced: int | None = None  # after so many local steps the donor waits
        self._settled = -1  # local steps of the state that is here, as a donor

    def handle(self, now_s: float, event: ev.Event) -> ev.Actions:
        match event:
            case ev.ViewChanged(view):
                return self._adopt(view)
            case ev.Settled(n_steps):
                self._settled = n_steps
                return self._transfer.give_waiting()
            case ev.Ready(n_words=n_words):
                self._n_words = n_words
            case ev.Received(header, ev.DonorWaits(version)) if self._view and header.src == self._first:
                return self._begin(now_s, self._view, version)
            case _:
                return self._transfer.handle(now_s, event)
        return []

    def _adopt(self, view: ev.View) -> ev.Actions:
        """Adopt a view. Slices of the state of another donor are void."""
        is_joining = self._peer in view.joining
        pipeline = donor_pipeline(self._plan, view) if is_joining else None
        donor_before, places = self._donor, self._plan.placement
        self._view = view
        self._donor = None if pipeline is None else places[self._stage][pipeline]
        self._first = None if pipeline is None else places[0][pipeline]
        if self._donor == donor_before:
            return []
        self._announced = None
        self._transfer.drop()
        return [ev.Holds(None), NOTHING_YET] if is_joining else []

    def _begin(self, now_s: float, view: ev.View, version: int) -> ev.Actions:
        """The donor says with which state it waits; it says so again in each view."""
        if self._announced == version:
            return []
        self._announced = version
        install = ev.Install(version, view.generation, view.n_reseeds)
        return self._transfer.want(now_s, ev.StateKey(version, 0, self._n_words), install)

    # ---------------------------------------------------------------------------------------------------- the policy

    def donors(self, whole: ev.StateKey) -> Sequence[int]:
        return [] if self._donor is None else [self._donor]

    def on_installed(self, now_s: float, download: Download) -> ev.Actions:
        assert self._view is not None  # in which this peer joins
        state = ev.StateName(self._view.generation, download.whole.version, donor=self._donor)
        return [download.report(now_s, self.donors(download.whole)), ev.Holds(state)]

    def may_give(self, src: int, key: ev.StateKey) -> MayGive | str:
        """A donor gives the state once it has seen as many steps as the joining peer asks for."""
        if self._view is None or src not in self._view.joining or key.part:
            return MayGive.NEVER
        if problem := self._transfer.problem(key, self._n_words):
            return problem
        if key.version > self._settled:
            return MayGive.LATER
        return MayGive.NOW if key.version == self._settled else MayGive.NEVER


def joining_pipeline(plan: Plan, view: ev.View) -> int | None:
    """The pipeline of a view whose members lack their states; there is one at most. It follows from the view, as the
    donor does, so all members agree."""
    return plan.seat(view.joining[0])[1] if view.joining else None


def donor_pipeline(plan: Plan, view: ev.View) -> int | None:
    """The one that gives them: the least that is whole. None where no peer joins."""
    if not view.joining:
        return None
    states = view.by_peer.keys() - set(view.joining)
    whole = [p for p in range(plan.n_pipelines) if all(row[p] in states for row in plan.placement)]
    return min(whole, default=None)
