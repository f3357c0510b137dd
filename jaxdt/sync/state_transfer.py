"""The transfer of a stage's state to a newcomer: parameters and optimizer state of one version, from all that hold it.

The state is one vector of 4-byte words, cut into slices. The newcomer asks the other members of its stage for slices, a
few at a time from each (jaxdt.sync.download). The holders keep a version until the step that begins with it is
committed, and that step waits for the newcomer: so all slices are of the same version. A replica whose state has to be
repaired gets it in the same way, from one donor alone: other replicas may be wrong too.
"""

# A machine matches the few events that it reads and answers [] to all others.
# pyright: reportMatchNotExhaustive=false

from collections.abc import Sequence

from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import DownloadReport, RefusedReport
from jaxdt.sync.download import WORD_BYTES, Download, kept, slice_problem


class StateTransfer:
    """One peer's side of it, as a newcomer and as a donor. `slice_bytes` is the size of a slice."""

    READS = frozenset(
        {
            ev.ViewChanged,
            ev.Evicted,
            ev.Updated,
            ev.Holds,
            ev.Ready,
            ev.Installed,
            ev.NotInstalled,
            ev.Refused,
            ev.Fetch,
            ev.State,
            ev.Committed,
        }
        | {ev.Repairing}
    )

    def __init__(self, peer: int, stage: int, slice_bytes: int):
        self._peer = peer
        self._stage = stage
        self._slice_words = max(1, slice_bytes // WORD_BYTES)
        self._n_words = 0
        self._view: ev.View | None = None
        self._has = (-1, -1)  # generation and version of the state that is here
        self._is_updating = False
        self._download: Download | None = None
        self._n_installing = 0  # fetched states; the last one is that of the download, if that is done
        self._donor: int | None = None  # for a repair: the only peer that is asked
        self._waiting: list[tuple[int, ev.StateKey]] = []

    def handle(self, now_s: float, event: ev.Event) -> ev.Actions:
        match event:
            case ev.ViewChanged(view):
                return self._adopt(now_s, view)
            case ev.Evicted(view):
                self._expect_updates(view.records)
                self._view = None
                self._download = self._donor = None
                self._waiting.clear()
            case ev.Ready(n_words=n_words):
                self._n_words = n_words
            case ev.Updated(_, version):
                return self._updated(version)
            case ev.Holds(ev.StateName() as state):
                self._has = (state.generation, state.version)
                self._is_updating = False
            case ev.Installed(version):
                return self._installed(now_s, version)
            case ev.NotInstalled(version, reason):
                return [RefusedReport(f"{reason}; it is fetched again"), *self._fetch_again(now_s, version)]
            case ev.Refused(peer, _) if self._download and peer is not None:
                self._download.refused(peer)
                return self._ask(now_s, self._download)
            case ev.Repairing(version, donor):
                self._download = Download(ev.StateKey(version, 0, self._n_words), self._slice_words, now_s)
                self._donor = donor
                return self._go_on(now_s, self._download)
            case ev.Received(header, body) if self._view:
                return self._received(now_s, header.src, body, event)
        return []

    def _received(self, now_s: float, src: int, body: object, event: ev.Received) -> ev.Actions:
        match body:
            case ev.Fetch(key) if not key.part:
                return self._give(src, key)
            case ev.State(key) if self._download and self._download.arrived(key):
                return [*kept(event), *self._go_on(now_s, self._download)]
            case ev.Committed(record):
                self._expect_updates((record,))
        return []

    @property
    def _current_view(self) -> ev.View:
        """The view that this peer is a member of; it gives and fetches only while there is one."""
        assert self._view is not None
        return self._view

    def _expect_updates(self, records: Sequence[ev.Record]) -> None:
        """An update of what is here is about to begin."""
        self._is_updating |= any((record.generation, record.step) == self._has for record in records)

    def _adopt(self, now_s: float, view: ev.View) -> ev.Actions:
        is_first_view = self._view is None
        self._view = view
        self._expect_updates(view.records)
        if view.rolled_back:
            self._download = self._donor = None
            self._is_updating = False
            self._waiting.clear()
            return []
        if self._download and self._donor is not None:
            return self._give_up_repair(self._download)
        if self._peer not in view.joining:
            if is_first_view:
                self._has = (view.generation, view.n_committed)
            return []
        if is_first_view:
            if self._has == (view.generation, view.n_committed):
                return [ev.Fetching(1, 0, 1), ev.Joined(view.n_committed)]
            self._download = Download(ev.StateKey(view.n_committed, 0, self._n_words), self._slice_words, now_s)
        elif self._download and self._download.done:
            return []  # it is being installed: one Install for each state that is whole
        return self._go_on(now_s, self._download) if self._download else []

    def _give_up_repair(self, download: Download) -> ev.Actions:
        """The donor may be gone, or wrong in the new view. The state that is here is whole, so the peer continues with
        it and will be told again if it has to be repaired."""
        self._download = self._donor = None
        return [ev.Joined(download.version)]

    def _updated(self, version: int) -> ev.Actions:
        """A version is here; what was asked of it can be given now."""
        if self._view is None:
            return []
        self._has = (self._view.generation, version)
        self._is_updating = False
        waiting, self._waiting = self._waiting, []
        return [send for src, key in waiting for send in self._give(src, key)]

    # -------------------------------------------------------------------------------------------------- as a donor

    def _donors(self) -> list[int]:
        """Whom this peer may ask for its stage's state."""
        if self._donor is not None:
            return [self._donor]
        view = self._current_view
        return [peer for peer in view.stage_peers(self._stage) if peer not in view.joining]

    def _give(self, src: int, key: ev.StateKey) -> ev.Actions:
        """A slice of this peer's state for another replica, if it is of the version asked for, or once it is. A peer
        that asks for what no replica of this stage would is refused: the step waits for it, and would wait for ever."""
        if src not in self._current_view.stage_peers(self._stage):
            return []
        if problem := self._problem(key):
            return [
                RefusedReport(f"peer {src}: {problem}"),
                *(ev.Send(dst, ev.Suspect(src, problem)) for dst in (ev.COORDINATOR, src)),
            ]
        if key.version > self._has[1] or self._is_updating:
            self._waiting.append((src, key))
            return []
        n_bytes = WORD_BYTES * (key.hi - key.lo + 1)
        return [ev.Send(src, ev.State(key), n_bytes, ev.BULK)] if key.version == self._has[1] else []

    def _problem(self, key: ev.StateKey) -> str:
        """'' if the key is a slice of this stage's state."""
        if problem := slice_problem(key, self._n_words, self._slice_words):
            return problem
        n_committed = max(self._current_view.n_committed, self._has[1])
        if key.version > n_committed:
            return f"asks for the state of {key.version} steps, committed are {n_committed}"
        return ""

    # ----------------------------------------------------------------------------------------------- as a newcomer

    def _go_on(self, now_s: float, download: Download) -> ev.Actions:
        if download.done:
            view = self._current_view
            self._n_installing += 1
            return [download.progress, ev.Install(download.version, view.generation, view.n_reseeds)]
        return self._ask(now_s, download)

    def _ask(self, now_s: float, download: Download) -> ev.Actions:
        return [*download.ask(now_s, self._donors()), download.progress]

    def _installed(self, now_s: float, version: int) -> ev.Actions:
        """The state is installed, unless a view has made its download void."""
        if not (download := self._answered(version)):
            return []
        self._download = None
        n_bytes, seconds = WORD_BYTES * download.n_words, now_s - download.began_s
        report = DownloadReport(version, n_bytes, seconds, self._donors())
        self._donor = None
        return [report, ev.Joined(version), *self._updated(version)]

    def _fetch_again(self, now_s: float, version: int) -> ev.Actions:
        """The state could not be installed: fetch it once more, unless a view has made its download void."""
        if not (download := self._answered(version)):
            return []
        self._download = Download(download.whole, self._slice_words, download.began_s)
        return self._go_on(now_s, self._download)

    def _answered(self, version: int) -> Download | None:
        """The download whose Install has been answered; None if that was an earlier one's."""
        self._n_installing -= 1
        download = self._download
        is_its = download and download.version == version and download.done and not self._n_installing
        return download if is_its else None
