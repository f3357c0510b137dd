"""The transfer of state to a replica of a pipeline that comes back, from the replica of its stage in a donor pipeline.

The first stage of the donor begins no further step, and tells the joining peers after how many steps it waits
(DonorWaits). The other stages of the donor come to the same step, and to the mean that is due after it, and can do
nothing more then. So all stages give the states of one moment, as they are, and no copy is kept. The donor continues
with the view in which the pipeline is whole again, or in which no peer joins. If the donor is lost, the view without
it names another one, and all stages start again.
"""

# A machine matches the few events that it reads and answers [] to all others.
# pyright: reportMatchNotExhaustive=false

from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import DownloadReport, RefusedReport
from jaxdt.run.plan import Plan
from jaxdt.sync.download import WORD_BYTES, Download, kept, slice_problem

NOTHING_YET = ev.Fetching(0, 0, 0)  # for the heartbeats of a peer that waits for its donor


class DonorTransfer:
    """One peer's side of it, as a joining peer and as a donor. `slice_bytes` is the size of a slice."""

    READS = frozenset(
        {
            ev.ViewChanged,
            ev.Settled,
            ev.Ready,
            ev.Installed,
            ev.NotInstalled,
            ev.Refused,
            ev.DonorWaits,
            ev.Fetch,
            ev.State,
        }
    )

    def __init__(self, plan: Plan, peer: int, slice_bytes: int):
        self._plan = plan
        self._peer = peer
        self._stage, _ = plan.seat(peer)
        self._slice_words = max(1, slice_bytes // WORD_BYTES)
        self._n_words = 0
        self._view: ev.View | None = None
        self._donor: int | None = None  # of this peer, while it joins
        self._first: int | None = None  # the member of the donor's first stage
        self._announced: int | None = None  # after so many local steps the donor waits
        self._download: Download | None = None
        self._is_installing = False  # a state that was fetched, perhaps one that is void by now
        self._has = False  # the state is here
        self._settled = -1  # local steps of the state that is here, as a donor
        self._waiting: list[tuple[int, ev.StateKey]] = []

    def handle(self, now_s: float, event: ev.Event) -> ev.Actions:
        match event:
            case ev.ViewChanged(view):
                return self._adopt(view)
            case ev.Settled(n_steps):
                return self._on_settled(n_steps)
            case ev.Ready(n_words=n_words):
                self._n_words = n_words
            case ev.Installed(version):
                return self._installed(now_s, version)
            case ev.NotInstalled(_, reason):
                self._is_installing = False
                return [RefusedReport(f"{reason}; it is fetched again"), *self._fetch(now_s)]
            case ev.Refused(peer, _) if self._download and peer is not None:
                self._download.refused(peer)
                return self._ask(now_s, self._download)
            case ev.Received(header, body) if self._view:
                return self._received(now_s, header.src, body, event)
        return []

    def _received(self, now_s: float, src: int, body: object, event: ev.Received) -> ev.Actions:
        match body:
            case ev.DonorWaits(version) if src == self._first:
                return self._begin(now_s, version)
            case ev.Fetch(key) if not key.part:
                return self._give(src, key)
            case ev.State(key) if self._download and src == self._donor and self._download.arrived(key):
                return [*kept(event), *self._go_on(now_s, self._download)]
        return []

    def _adopt(self, view: ev.View) -> ev.Actions:
        """Adopt a view. Slices of the state of another donor are void."""
        self._view = view
        self._waiting = [(src, key) for src, key in self._waiting if src in view.joining]
        if self._peer not in view.joining:
            self._donor = self._first = self._announced = self._download = None
            return []
        pipeline, before = donor_pipeline(self._plan, view), self._donor
        places = self._plan.placement
        self._donor = None if pipeline is None else places[self._stage][pipeline]
        self._first = None if pipeline is None else places[0][pipeline]
        if self._donor == before:
            return []
        self._announced, self._download, self._has = None, None, False
        return [ev.Holds(None), NOTHING_YET]

    # -------------------------------------------------------------------------------------------------- as a donor

    def _on_settled(self, n_steps: int) -> ev.Actions:
        """The state is settled, so the slices that others have asked for can be sent now."""
        self._settled = n_steps
        waiting, self._waiting = self._waiting, []
        return [action for src, key in waiting for action in self._give(src, key)]

    def _give(self, src: int, key: ev.StateKey) -> ev.Actions:
        """A slice of this peer's state, once it has seen as many steps as the joiner asks for."""
        if self._view is None or src not in self._view.joining:
            return []
        if problem := slice_problem(key, self._n_words, self._slice_words):
            return [ev.Send(dst, ev.Suspect(src, problem)) for dst in (ev.COORDINATOR, src)]
        if key.version > self._settled:
            self._waiting.append((src, key))
            return []
        n_bytes = WORD_BYTES * (key.hi - key.lo + 1)
        return [ev.Send(src, ev.State(key), n_bytes, ev.BULK)] if key.version == self._settled else []

    # ------------------------------------------------------------------------------------------- as a joining peer

    def _begin(self, now_s: float, version: int) -> ev.Actions:
        """The donor says with which state it waits; it says so again in each view."""
        if self._donor is None or self._announced == version:
            return []
        self._announced, self._download, self._has = version, None, False
        return self._fetch(now_s)

    def _fetch(self, now_s: float) -> ev.Actions:
        """The state before is installed first: `Installed` names no donor, and two donors may wait with the same
        version."""
        if self._announced is None or self._is_installing:
            return []
        self._download = Download(ev.StateKey(self._announced, 0, self._n_words), self._slice_words, now_s)
        return self._go_on(now_s, self._download)

    def _go_on(self, now_s: float, download: Download) -> ev.Actions:
        view = self._view
        if download.done and view:
            self._is_installing = True
            return [download.progress, ev.Install(download.version, view.generation, view.n_reseeds)]
        return self._ask(now_s, download)

    def _ask(self, now_s: float, download: Download) -> ev.Actions:
        donors = [] if self._donor is None else [self._donor]
        return [*download.ask(now_s, donors), download.progress]

    def _installed(self, now_s: float, version: int) -> ev.Actions:
        """The state is installed, unless a view has made its download void."""
        download, view, self._is_installing = self._download, self._view, False
        if download is None or view is None or self._donor is None:
            return self._fetch(now_s)
        self._download, self._has = None, True
        n_bytes, seconds = WORD_BYTES * download.n_words, now_s - download.began_s
        report = DownloadReport(version, n_bytes, seconds, [self._donor])
        return [report, ev.Holds(ev.StateName(view.generation, version, donor=self._donor))]


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
