"""The transfer of each version's parameters to a pool's worker: from its server, without optimizer state.

A worker draws version 0 of the first generation itself, as all peers do. jaxdt.sync.state_transfer has the server's
side.
"""

# A machine matches the few events that it reads and answers [] to all others.
# pyright: reportMatchNotExhaustive=false

from collections.abc import Sequence

from jaxdt.protocol import events as ev
from jaxdt.sync.transfer import Download, TransferEngine, TransferPolicy

FIRST_VERSION = (0, 0)  # of the first generation


class ParameterDownload(TransferPolicy):
    """A worker's side: it answers Admitted with Updated, once the `n_words` of the parameters are here. Work that was
    under way before is dropped then, unless this is the next version under the same admission: with delayed updates
    Work of later steps continues."""

    READS = frozenset({ev.Admitted, ev.Restored, ev.State, ev.Refused, ev.Installed, ev.NotInstalled})

    def __init__(self, stage: int, server: int, n_words: int, slice_bytes: int):
        self._stage = stage
        self._server = server
        self._n_words = n_words
        self._transfer = TransferEngine(slice_bytes, self)
        self._has: tuple[int, int] | None = FIRST_VERSION  # generation and version; None while that changes
        self._served: tuple[int, int] | None = None  # admission and version for which Updated was said last
        self._admitted: ev.Admitted | None = None

    def handle(self, now_s: float, event: ev.Event) -> ev.Actions:
        match event:
            case ev.Admitted(version=version):
                free = [ev.Free(version - 1)] if version else []
                return [*free, *self._fetch(now_s, event)]
            case ev.Restored():
                return self._transfer.on_installed(now_s)
            case _:
                return self._transfer.handle(now_s, event)

    def _fetch(self, now_s: float, admitted: ev.Admitted) -> ev.Actions:
        """Fetch the version. If it is here, nothing is fetched, and only what Work has left behind goes."""
        self._admitted, version = admitted, admitted.version
        state = (version, admitted.generation, admitted.n_reseeds)
        if self._has == (admitted.generation, version):
            return self._transfer.want(now_s, ev.StateKey(version, 0, 0), ev.Restore(*state, in_place=True))
        self._has = None
        is_next = self._served == (admitted.admission, version - 1)
        return self._transfer.want(
            now_s, ev.StateKey(version, 0, self._n_words), ev.Install(*state, beside_work=is_next)
        )

    # ---------------------------------------------------------------------------------------------------- the policy

    def donors(self, whole: ev.StateKey) -> Sequence[int]:
        return (self._server,)

    def on_installed(self, now_s: float, download: Download) -> ev.Actions:
        admitted = self._admitted
        assert admitted is not None  # only what is wanted is fetched
        self._has = (admitted.generation, admitted.version)
        self._served = (admitted.admission, admitted.version)
        return [ev.Updated(self._stage, admitted.version)]
