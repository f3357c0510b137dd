"""The transfer of each version's parameters to a pool's worker: from its server, in slices, without optimizer state.

The server gives a version away until its update begins; a slice that is asked for later is not given, since the worker
will hear of the next version and ask for that. A worker draws version 0 of the first generation itself, as all peers
do.
"""

# A machine matches the few events that it reads and answers [] to all others.
# pyright: reportMatchNotExhaustive=false

from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import RefusedReport
from jaxdt.sync.download import WORD_BYTES, Download, kept

FIRST_VERSION = (0, 0)  # of the first generation


class ParameterDonor:
    """A server's side. The first `n_words` words of its state are the parameters."""

    READS = frozenset({ev.ViewChanged, ev.Evicted, ev.Updated, ev.Committed, ev.Fetch})

    def __init__(self, n_words: int):
        self._n_words = n_words
        self._view: ev.View | None = None
        self._version: int | None = None  # of the parameters that are here
        self._n_committed = 0  # steps whose update has begun here, or is about to

    def handle(self, now_s: float, event: ev.Event) -> ev.Actions:
        match event:
            case ev.ViewChanged(view):
                if view.rolled_back or self._view is None:
                    self._version, self._n_committed = None, view.n_committed
                self._view = view
                self._expect_updates([record.step for record in view.records])
            case ev.Evicted():
                self._view = self._version = None
            case ev.Updated(_, version):
                self._version = version
            case ev.Received(_, ev.Committed(record)):
                self._expect_updates([record.step])
            case ev.Received(header, ev.Fetch(key)) if self._view and header.src not in self._view.by_peer:
                return self._give(header.src, key)
        return []

    def _expect_updates(self, steps: list[int]) -> None:
        """The updates of these steps are about to begin. With delayed updates one may be known before the update of the
        step before has ended, and then begins at once."""
        self._n_committed = max([self._n_committed, *(step + 1 for step in steps)])

    def _give(self, worker: int, key: ev.StateKey) -> ev.Actions:
        is_here = key.version == self._version and key.version >= self._n_committed
        fits = not key.part and 0 <= key.lo < key.hi <= self._n_words
        return [ev.Send(worker, ev.State(key), WORD_BYTES * (key.hi - key.lo + 1), ev.BULK)] if is_here and fits else []


class ParameterDownload:
    """A worker's side: it answers Admitted with Updated, once the parameters are here. Work that was under way before
    is dropped then, unless this is the next version under the same admission: with delayed updates Work of later steps
    continues."""

    READS = frozenset({ev.Admitted, ev.State, ev.Installed, ev.NotInstalled, ev.Restored, ev.Refused})

    def __init__(self, stage: int, server: int, n_words: int, slice_words: int):
        self._stage = stage
        self._server = server
        self._n_words = n_words
        self._slice_words = slice_words
        self._here: tuple[int, int] | None = FIRST_VERSION  # generation and version
        self._served: tuple[int, int] | None = None  # admission and version for which Updated was said last
        self._wanted: ev.Admitted | None = None
        self._n_changing = 0  # changes of the state that are to come; the last one is what is wanted
        self._download: Download | None = None

    def handle(self, now_s: float, event: ev.Event) -> ev.Actions:
        match event:
            case ev.Admitted():
                return self._admitted(now_s, event)
            case ev.Received(_, ev.State(key)) if self._download and self._download.arrived(key):
                return [*kept(event), *self._go_on(now_s, self._download)]
            case ev.Refused(peer, _) if self._download and peer == self._server:
                self._download.refused(self._server)
                return self._go_on(now_s, self._download)
            case ev.Installed() | ev.Restored():
                self._n_changing -= 1
                return self._changed()
            case ev.NotInstalled(_, reason):
                self._n_changing -= 1
                return [RefusedReport(f"{reason}; it is fetched again"), *self._fetch_again(now_s)]
        return []

    @property
    def _is_settled(self) -> bool:
        """Whether nothing is to come of what is wanted."""
        return not self._n_changing and self._download is None

    def _changed(self) -> ev.Actions:
        """The state is another one. Unless more is to come: it is what is wanted, and nothing is left of before."""
        wanted = self._wanted
        if wanted is None or not self._is_settled:
            return []
        self._wanted = None
        self._here = (wanted.generation, wanted.version)
        self._served = (wanted.admission, wanted.version)
        return [ev.Updated(self._stage, wanted.version)]

    def _admitted(self, now_s: float, admitted: ev.Admitted) -> ev.Actions:
        self._wanted = admitted
        self._download = None
        version, generation, n_reseeds = admitted.version, admitted.generation, admitted.n_reseeds
        free = [ev.Free(version - 1)] if version else []
        if self._here == (generation, version):
            self._n_changing += 1
            return [*free, ev.Restore(version, generation, n_reseeds, in_place=True)]
        self._here = None
        return [*free, *self._fetch(now_s, version)]

    def _fetch(self, now_s: float, version: int) -> ev.Actions:
        self._download = Download(ev.StateKey(version, 0, self._n_words), self._slice_words, now_s)
        return self._go_on(now_s, self._download)

    def _fetch_again(self, now_s: float) -> ev.Actions:
        """Fetch what is wanted once more, if it was that which could not be installed."""
        return self._fetch(now_s, self._wanted.version) if self._wanted and self._is_settled else []

    def _go_on(self, now_s: float, download: Download) -> ev.Actions:
        if not download.done:
            return [*download.ask(now_s, (self._server,))]
        assert self._wanted is not None  # there is a download only of what is wanted
        self._download = None
        self._n_changing += 1
        wanted = self._wanted
        is_next = self._served == (wanted.admission, wanted.version - 1)
        return [ev.Install(download.version, wanted.generation, wanted.n_reseeds, beside_work=is_next)]
