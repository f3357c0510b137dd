"""The invariants of a pool at every event of a simulation, besides those of a run whose replicas stay equal, which hold
for its servers (jaxdt.testing.invariants).

Checked from outside too: on messages, actions and tensors. An observer is called before an event's actions are done, so
the tensors that an event changed are checked when the next event comes.
"""

from collections import Counter

from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import AdoptedReport, EvictedReport
from jaxdt.protocol.round_id import RoundId, RoundKind
from jaxdt.run.config import RunConfig
from jaxdt.run.plan import Plan
from jaxdt.run.work import WorkKind
from jaxdt.sim.faults import Fault
from jaxdt.testing.invariants import Invariants
from jaxdt.testing.promises import BOUNDED, LEASED_TWICE, WHOLE_SUMS
from jaxdt.testing.symbolic_tensors import SymbolicTensors
from jaxdt.wiring.pool.even_transfer import part, server_of
from jaxdt.wiring.pool.task_times import LEASES_MIN

OF_SERVER = 4  # boundary tensors of a microbatch at a server: input, output, and the gradients of both
WAKINGS_MAX = 40  # of one kind that one peer waits for; 23 were seen, of links that a fault has cut
OF_WORKER = 3  # at a worker: input, gradient of the output, and what it sends


class PoolInvariants:
    """Checks the pool of one run. `invariants` are those of its servers, which know the tensors of all."""

    def __init__(self, invariants: Invariants, config: RunConfig, plan: Plan):
        self._invariants = invariants
        self._plan = plan
        self._workers = frozenset(plan.workers)
        self._n_under_way = 1 + config.sync.delay
        self._n_held_out = config.train.eval_microbatches if config.train.eval_every_steps else 0
        self._leased: dict[int, int] = {}  # server -> the number of the last lease of its process
        self._requested_rounds: dict[int, set[RoundId]] = {}  # peer -> rounds of contributions that are under way there
        self._adding: dict[int, tuple[RoundId, ...]] = {}  # server -> rounds of the contribution that it is adding
        self._to_check: int | None = None
        self._view_of: dict[int, ev.View] = {}  # peer -> the view that it has adopted last, or that has left it out
        self._wakings: Counter[tuple[int, str]] = Counter()  # (peer, tag) -> wakings that it waits for
        self._stolen: Counter[tuple[int, int]] = Counter()  # (server, step) -> microbatches taken in the present view

    def __call__(self, peer: int, event: ev.Event | Fault, actions: list[ev.Action]) -> None:
        if self._to_check is not None:
            self._check_bounded(self._to_check)
        self._to_check = None
        if isinstance(event, Fault) or peer not in self._invariants.tensors:
            return
        if isinstance(event, ev.Started):
            self._leased.pop(peer, None)
            self._requested_rounds.pop(peer, None)
            self._wakings = Counter({at: n for at, n in self._wakings.items() if at[0] != peer})
        if isinstance(event, ev.Woke):
            self._wakings[peer, event.tag] -= 1
        obeys = any(isinstance(action, AdoptedReport | EvictedReport) for action in actions)
        if obeys and isinstance(event, ev.Received) and isinstance(event.body, ev.View):
            self._view_of[peer] = event.body
            self._stolen = Counter({at: n for at, n in self._stolen.items() if at[0] != peer})
        if isinstance(event, ev.Received) and isinstance(event.body, ev.ContributionWanted):
            self._requested_rounds.setdefault(peer, set()).update(event.body.rounds)
        if isinstance(event, ev.Received) and isinstance(event.body, ev.StealOffer):
            replies = [a.body for a in actions if isinstance(a, ev.Send) and isinstance(a.body, ev.StealReply)]
            self._stolen[peer, event.body.step] += sum(reply.n_taken for reply in replies)
        if isinstance(event, ev.Ran) and event.work.kind == WorkKind.CONTRIBUTE:
            self._requested_rounds.get(peer, set()).difference_update(self._adding.pop(peer, ()))
        for action in actions:
            self._on_action(peer, action)
        self._to_check = peer

    def _on_action(self, peer: int, action: ev.Action) -> None:
        if isinstance(action, ev.Forget):
            self._requested_rounds.get(peer, set()).discard(action.round)
        if isinstance(action, ev.Run) and action.work.kind == WorkKind.CONTRIBUTE:
            self._adding[peer] = action.rounds
        if isinstance(action, ev.WakeAt):
            self._wakings[peer, action.tag] += 1
            if (n := self._wakings[peer, action.tag]) > WAKINGS_MAX:
                self._invariants.broken(BOUNDED, peer, f"waits for {n} wakings {action.tag!r}")
        if not isinstance(action, ev.Send):
            return
        if isinstance(action.body, ev.ContributionWanted):
            self._requested_rounds.setdefault(peer, set()).update(action.body.rounds)
        if isinstance(action.body, ev.Suspect) and action.body.peer == peer and peer in self._view_of[peer].by_peer:
            self._invariants.broken(WHOLE_SUMS, peer, f"says of itself: {action.body.reason}")
        if isinstance(action.body, ev.TaskLease):
            if action.body.number <= self._leased.get(peer, 0):
                self._invariants.broken(LEASED_TWICE, peer, f"grants {action.body} after lease {self._leased[peer]}")
            self._leased[peer] = action.body.number

    def _check_bounded(self, peer: int) -> None:
        """(13) for one peer."""
        tensors = self._invariants.tensors[peer]
        self._check_vectors(peer, tensors)
        boundaries = Counter(key.step for key in tensors.boundary_keys)
        residuals = Counter(key.step for key in tensors.residual_keys)
        held = boundaries.keys() | residuals.keys() | tensors.accumulators.keys()
        steps = range(tensors.version - 1, tensors.version + 2 * self._n_under_way)
        for step in sorted(held):
            n_boundaries_max, n_residuals_max = self._most(peer, step)
            problem = ""
            if step not in steps:
                problem = f"tensors of step {step}, its version is {tensors.version}"
            elif boundaries[step] > n_boundaries_max:
                problem = f"{boundaries[step]} boundary tensors of step {step}, expected at most {n_boundaries_max}"
            elif residuals[step] > n_residuals_max:
                problem = f"{residuals[step]} residuals of step {step}, expected at most {n_residuals_max}"
            if problem:
                self._invariants.broken(BOUNDED, peer, f"holds {problem}")

    def _most(self, peer: int, step: int) -> tuple[int, int]:
        """How many boundary tensors and residuals of a step a peer may hold."""
        server = server_of(self._plan, peer) if peer in self._workers else peer
        n_microbatches, stage = self._plan.n_microbatches, self._invariants.tensors[server].stage
        view = self._view_of.get(server)
        servers = view.working(stage, step) if view else ()
        is_by_routes = view is None or (view.number > 1 and step < view.n_committed + self._n_under_way)
        n_own = n_microbatches
        if server in servers and not is_by_routes:
            n_own = len(part(n_microbatches, len(servers), servers.index(server)))
            n_stolen = self._stolen[server, step]
            if n_stolen > n_own:
                self._invariants.broken(BOUNDED, peer, f"takes {n_stolen} microbatches of step {step}, owns {n_own}")
            n_own += n_stolen
        if peer in self._workers:
            return OF_WORKER * n_own, n_own
        n_residuals = n_microbatches if is_by_routes else self._plan.depth(stage) + LEASES_MIN - 1 + 1
        return OF_SERVER * n_own + 2 * self._n_held_out, n_residuals

    def _check_vectors(self, peer: int, tensors: SymbolicTensors) -> None:
        held = {round for round in tensors.rounds if round.kind == RoundKind.CONTRIBUTION}
        under_way = {round for round in self._requested_rounds.get(peer, ()) if round.number >= tensors.version - 1}
        if kept := sorted(held - under_way):
            self._invariants.broken(BOUNDED, peer, f"holds vectors of {kept}, which are over")
