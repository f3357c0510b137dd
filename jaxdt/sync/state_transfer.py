"""The transfer of a stage's state where all replicas are equal: parameters and optimizer state of one version.

- A newcomer asks all other members of its stage that hold the state. They keep a version until the step that begins
  with it is committed, and that step waits for the newcomer: so all slices are of the same version.
- A replica whose state has to be repaired asks one donor alone: other replicas may be wrong too.
- A pool's worker asks its server for each version's parameters, which are the first words of the state. It gets them
  until the version's update begins. A later request is not answered: the worker will hear of the next version.
"""

# A machine matches the few events that it reads and answers [] to all others.
# pyright: reportMatchNotExhaustive=false

from collections.abc import Sequence

from jaxdt.protocol import events as ev
from jaxdt.sync.transfer import Download, MayGive, TransferEngine, TransferPolicy


class StateTransfer(TransferPolicy):
    """One peer's side of it. `worker_words`: words of the parameters, where workers of a pool may ask for them."""

    READS = TransferEngine.READS | {
        *(ev.ViewChanged, ev.Evicted, ev.Updated, ev.Holds, ev.Ready, ev.Committed, ev.Repairing)
    }

    def __init__(self, peer: int, stage: int, slice_bytes: int, worker_words: int = 0):
        self._peer = peer
        self._stage = stage
        self._worker_words = worker_words
        self._transfer = TransferEngine(slice_bytes, self)
        self._n_words = 0
        self._view: ev.View | None = None
        self._n_committed = 0  # steps whose update has begun here, or is about to
        self._has = (-1, -1)  # generation and version of the state that is here
        self._repair: ev.Repairing | None = None

    def handle(self, now_s: float, event: ev.Event) -> ev.Actions:
        match event:
            case ev.ViewChanged(view):
                return self._adopt(now_s, view)
            case ev.Evicted():
                self._view = self._repair = None
                self._transfer.forget()
            case ev.Ready(n_words=n_words):
                self._n_words = n_words
            case ev.Updated(_, version):
                return self._on_updated(version)
            case ev.Holds(ev.StateName() as state):
                self._has = (state.generation, state.version)
            case ev.Received(_, ev.Committed(record)):
                # With delayed updates the update of the step before may still run; this one begins at once after it.
                self._n_committed = max(self._n_committed, record.step + 1)
            case ev.Repairing(version) if self._view:
                self._repair = event
                return self._fetch(now_s, self._view, version)
            case _:
                return self._transfer.handle(now_s, event)
        return []

    def _adopt(self, now_s: float, view: ev.View) -> ev.Actions:
        is_first_view, self._view = self._view is None, view
        begins = is_first_view or view.rolled_back
        self._n_committed = view.n_committed if begins else max(self._n_committed, view.n_committed)
        if view.rolled_back:
            self._repair = None
            self._transfer.forget()
        elif self._repair:
            # The donor may be gone, or wrong in the new view. The state that is here is whole, so the peer continues
            # with it and will be told again if it has to be repaired.
            version, self._repair = self._repair.version, None
            self._transfer.drop()
            return [ev.Joined(version)]
        elif not is_first_view:
            return self._transfer.ask(now_s)
        elif self._peer not in view.joining:
            self._has = (view.generation, view.n_committed)
        elif self._has == (view.generation, view.n_committed):
            return [ev.Fetching(1, 0, 1), ev.Joined(view.n_committed)]
        else:
            return self._fetch(now_s, view, view.n_committed)
        return []

    def _fetch(self, now_s: float, view: ev.View, version: int) -> ev.Actions:
        install = ev.Install(version, view.generation, view.n_reseeds)
        return self._transfer.want(now_s, ev.StateKey(version, 0, self._n_words), install)

    def _on_updated(self, version: int) -> ev.Actions:
        """A version is here; what was asked of it can be given now."""
        if self._view is None:
            return []
        self._has = (self._view.generation, version)
        self._n_committed = max(self._n_committed, version)
        return self._transfer.give_waiting()

    # ---------------------------------------------------------------------------------------------------- the policy

    def donors(self, whole: ev.StateKey) -> Sequence[int]:
        if self._repair:
            return [self._repair.donor]
        view = self._view
        return [peer for peer in view.stage_peers(self._stage) if peer not in view.joining] if view else []

    def on_installed(self, now_s: float, download: Download) -> ev.Actions:
        report, version = download.report(now_s, self.donors(download.whole)), download.whole.version
        self._repair = None
        return [report, ev.Joined(version), *self._on_updated(version)]

    def may_give(self, src: int, key: ev.StateKey) -> MayGive | str:
        view = self._view
        if view is None or key.part:
            return MayGive.NEVER
        asked = (view.generation, key.version)
        is_here = asked == self._has and key.version >= self._n_committed
        if src not in view.by_peer and 0 <= key.lo < key.hi <= self._worker_words:
            return MayGive.NOW if is_here else MayGive.NEVER
        if src not in view.stage_peers(self._stage):
            return MayGive.NEVER
        if problem := self._transfer.problem(key, self._n_words):
            return problem
        if key.version > self._n_committed:
            return f"asks for the state of {key.version} steps, committed are {self._n_committed}"
        return MayGive.NOW if is_here else MayGive.LATER if asked > self._has else MayGive.NEVER
