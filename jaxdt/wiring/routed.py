"""A routed step: each microbatch travels along a route that its owning router chooses, and lost Work is done again.

A router is a peer that also begins its share of the microbatches, as many at a time as its in-flight limit allows. It
chooses the whole route when a microbatch begins and sends the route along, so no hop waits for a choice. Boundary
tensors go from peer to peer, and the backward goes back along the route. Each peer keeps a queue of the Work whose
input has arrived: a backward goes before a forward, then the oldest goes first, so a device stays busy while others or
the network are slow. The replicas of a stage tell one another which microbatches they counted, and a stage's step is
over when all are counted.

Work may take far longer than its like while the peer's machine continues as ever. Then the router has another replica
do the forwards too that are stuck at this peer. Both send their results to the same peer of the next stage, which uses
the one that comes first and sends the gradient back along the route of that one. So no gradient is computed twice, and
one place decides. A forward stays where it is if the next stage does not need its result, and so does a backward: other
peers do them only in a view without their peer.

A view in mid-step makes all routes void, since messages of old views are dropped. Then Recovery says what has to be
done again. A peer that joins computes from the next step on.
"""

# A machine matches the few events that it reads and answers [] to all others.
# pyright: reportMatchNotExhaustive=false

import heapq

from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import LateResultReport, ReroutedReport
from jaxdt.protocol.round_id import NO_PEER
from jaxdt.run.work import Work, WorkKind
from jaxdt.wiring.base import COMPUTING, StepShape
from jaxdt.wiring.compute_slot import ComputeSlot, ServiceTime
from jaxdt.wiring.dispatcher import Dispatcher, RoutePolicy
from jaxdt.wiring.recovery import Counted, Recovery, task_kind, whole_step

WORK_OF: dict[str, WorkKind] = {"act": WorkKind.FORWARD, "grad": WorkKind.BACKWARD, "eval": WorkKind.EVALUATE}
NO_STEP = -1
MESSAGES = (ev.Grant, ev.Resend, ev.Reroute, ev.Inventory, ev.Progress, ev.Boundary)


class RoutedWiring:
    """One peer's side. A wiring that does some steps by itself shares its `recovery` and `slot` with this one."""

    READS = frozenset({ev.ViewChanged, ev.Evicted, ev.Updated, ev.Ran, ev.WorkOverdue, ev.Committed, *MESSAGES})

    def __init__(
        self,
        shape: StepShape,
        routes: RoutePolicy,
        recovery: Recovery,
        slot: ComputeSlot,
        service_time: ServiceTime,
    ):
        self._shape = shape
        self._peer = shape.peer
        self._stage = shape.stage
        self._is_last = shape.is_last_stage
        self._routes = routes
        self._dispatcher = Dispatcher(routes)
        self._recovery = recovery
        self._slot = slot
        self._service_time = service_time
        self._gap_s = 0.0
        self._view: ev.View | None = None
        self._members: tuple[int, ...] = ()  # those that compute in the step under way
        self._replicas: tuple[int, ...] = ()
        self._step = NO_STEP
        self._is_committed = False
        self._n_queued = 0
        self._ready: list[tuple[bool, int, Work]] = []  # a heap
        self._of_later_steps: list[ev.Grant | ev.Boundary] = []
        self._inputs: dict[Counted, ev.Grant | ev.Boundary] = {}  # which carry the routes
        self._forwarded: set[int] = set()
        self._rerouted: set[int] = set()  # microbatches whose forward may have come first at another replica
        self._early_gradients: set[int] = set()  # whose forward is made again, and not done yet
        self._counted: dict[int, set[Counted]] = {}  # step -> what the replicas of this stage have counted

    def handle(self, now_s: float, event: ev.Event) -> ev.Actions:
        match event:
            case ev.ViewChanged(view):
                return self._adopt(now_s, view)
            case ev.Evicted():
                self._slot.void()
                self._forget()
                self._view = None
            case ev.Updated(_, version) if self._view:
                return self._begin(now_s, version)
            case ev.Received(header, body) if self._view:
                return self._on_received(now_s, header.src, body)
            case ev.Ran(work, started_s, seconds, values) if work.kind in COMPUTING:
                counts = self._slot.free()
                self._gap_s = self._service_time.gap_s(started_s + seconds)
                finished = self._on_finished(now_s, work, values) if counts else []
                return finished + self._next() + self._tell_inventory(now_s)
            case ev.WorkOverdue() if self._view:
                return self._on_overdue(now_s)
        return []

    @property
    def queue(self) -> tuple[int, bool]:
        return len(self._ready), self._slot.is_busy

    def cancel_run(self) -> None:
        self._slot.free()

    @property
    def _current_view(self) -> ev.View:
        """The view that this peer is a member of; steps and inventories are only looked at while there is one."""
        assert self._view is not None
        return self._view

    def _on_received(self, now_s: float, src: int, body: ev.Message) -> ev.Actions:
        match body:
            case ev.Grant() | ev.Boundary():
                return self._accept(body) + self._next()
            case ev.Resend(key, route, regenerate) if self._recovery.keeps_output(key.microbatch):
                return [self._send(ev.Boundary(key, route, regenerate))]
            case ev.Reroute():
                return self._reroute(now_s, src, body)
            case ev.Inventory():
                return self._on_inventory(now_s, src, body)
            case ev.Progress():
                return self._on_progress(now_s, src, body)
            case ev.Committed(record) if record.step == self._step:
                self._is_committed = True
        return []

    def freed(self, now_s: float) -> ev.Actions:
        """The wiring that owns this one has done a Work of its own, and the slot is free."""
        return self._next() + self._tell_inventory(now_s)

    # -------------------------------------------------------------------------------------------------------- steps

    def void_routes(self, view: ev.View) -> None:
        """A view: all routes that are under way are void."""
        self._view = view
        self._members = tuple(member.peer for member in view.members if member.first_step <= view.n_committed)
        self._replicas = view.stage_peers(self._stage)
        self._routes.adopt(view, self._members)
        self._dispatcher.begin([])
        self._of_later_steps.clear()
        self._counted.clear()
        self._clear_work()

    def _clear_work(self) -> None:
        self._ready.clear()
        self._inputs.clear()
        self._forwarded.clear()
        self._rerouted.clear()
        self._early_gradients.clear()

    def _adopt(self, now_s: float, view: ev.View) -> ev.Actions:
        self.void_routes(view)
        computes = self._peer in self._members
        if view.rolled_back or not computes:
            self._forget()
        if view.number > 1 and computes:  # also of a rollback: no peer sends before all have dropped what was under way
            self._recovery.start(view, self._members)
        return self._tell_inventory(now_s)

    def _forget(self) -> None:
        """Forget the step: nothing is under way here until the next one begins."""
        self._step = NO_STEP
        self._recovery.forget()
        self._ready.clear()

    def _begin(self, now_s: float, step: int) -> ev.Actions:
        if self._peer not in self._current_view.working(self._stage, step):
            return []
        self._enter(step)
        if not self._shape.has_work(step):
            return []
        of_this_step, self._of_later_steps = self._of_later_steps, []
        actions = [action for given in of_this_step for action in self._accept(given)]
        if self._recovery.is_active:
            return actions + self._tell_inventory(now_s)
        self._routes.begin_step(self._current_view)
        tasks = whole_step(self._shape.n_stages, self._shape.n_trained(step), self._shape.n_held_out(step))
        self._dispatcher.begin([task for task in tasks if self._owns(task.kind, task.microbatch)])
        return actions + self._begin_tasks(now_s) + self._next() + self._drain_if_over()

    def enter_without_tasks(self, step: int) -> None:
        """The wiring that owns this one does the step by itself, unless a view in mid-step asks for recovery."""
        self._enter(step)
        self._dispatcher.begin([])

    def _enter(self, step: int) -> None:
        """A step begins; nothing is left of the one before."""
        self._step = step
        self._is_committed = False
        self._clear_work()
        self._recovery.begin_step()
        self._counted = {of: counted for of, counted in self._counted.items() if of >= step}
        if self._current_view.n_committed < step:
            self._recovery.stop()

    def _owns(self, kind: str, microbatch: int) -> bool:
        return self._routes.owning_router(kind, microbatch) == self._peer

    # --------------------------------------------------------------------------------------------------------- work

    def _accept(self, given: ev.Grant | ev.Boundary) -> ev.Actions:
        """Queue the Work that a grant or a boundary tensor makes possible; of a later step, keep it. A tensor of a step
        that is over is let go: it was made again here, or on the way here, for a neighbour that is through."""
        names = given if isinstance(given, ev.Grant) else given.key
        if isinstance(given, ev.Boundary) and names.step < self._step:
            return [ev.Discard(given.key)]
        if names.step > self._step:
            self._of_later_steps.append(given)
        if names.step != self._step:
            return []
        kind, m = given.kind if isinstance(given, ev.Grant) else WORK_OF[given.key.kind], names.microbatch
        if kind == WorkKind.BACKWARD:
            self._rerouted.discard(m)
            if m not in self._forwarded:
                self._early_gradients.add(m)
                return []
        elif (kind, m) in self._inputs:
            return self._late(self._inputs[kind, m], given)
        else:
            self._inputs[kind, m] = given
        if kind == WorkKind.FORWARD and self._is_last:
            kind = WorkKind.BACKWARD  # which computes forward, loss and backward in one
        self._enqueue(kind, m)
        return []

    def _late(self, first: ev.Grant | ev.Boundary, second: ev.Grant | ev.Boundary) -> ev.Actions:
        """Two peers have made the input of a Work. The first is used, and its route."""
        before = self._stage - 1
        if before < 0 or first.route[before] == second.route[before]:
            return []
        m = (second if isinstance(second, ev.Grant) else second.key).microbatch
        return [LateResultReport(self._step, before, m, second.route[before])]

    def _enqueue(self, kind: WorkKind, m: int) -> None:
        if kind == WorkKind.BACKWARD and self._stage in self._inputs[WorkKind.FORWARD, m].regenerate:
            kind = WorkKind.REGENERATE
        self._n_queued += 1
        work = Work(self._stage, kind, m, self._peer, self._step)
        heapq.heappush(self._ready, (kind in (WorkKind.FORWARD, WorkKind.EVALUATE), self._n_queued, work))

    def _next(self) -> ev.Actions:
        """Begin a Work if one can begin. A committed step needs no more Work: its update may run, which deletes the
        step's tensors."""
        while self._ready and not self._slot.is_busy and not self._is_committed:
            work = heapq.heappop(self._ready)[2]
            if not self._is_needless(work):
                return [self._slot.start(work)]
        return []

    def _is_needless(self, work: Work) -> bool:
        """Whether this is a forward that was done elsewhere too, where its backward is counted by now."""
        m = work.microbatch
        counted = self._counted.get(self._step, ())
        if work.kind != WorkKind.FORWARD or m not in self._rerouted or (WorkKind.BACKWARD, m) not in counted:
            return False
        return (
            self._stage not in self._inputs[WorkKind.FORWARD, m].regenerate
        )  # that is counted, and yet has to be done

    def _on_finished(self, now_s: float, work: Work, values: dict[str, float]) -> ev.Actions:
        step = self._step
        if work.step != step:
            return []  # of a generation that was rolled back
        kind, (_, m) = work.kind, work.place
        n_samples = int(values.get("n_samples", 0))
        loss_sum = values.get("loss_sum")
        actions: ev.Actions = [*self._recovery.made(work)]
        if kind == WorkKind.BACKWARD:
            actions.append(ev.Accumulated(step, self._stage, m, n_samples, loss_sum))
        if kind == WorkKind.EVALUATE and self._is_last:
            assert loss_sum is not None  # the last stage measures it
            actions.append(ev.Evaluated(step, m, n_samples, loss_sum))
        if self._counts(kind):
            self._recovery.count(kind, m)
        given = self._inputs.get((task_kind(kind), m))
        if given is None:
            return actions  # of a view that is over; the inventory names it if it counts
        if kind == WorkKind.FORWARD:
            self._forwarded.add(m)
            if m in self._early_gradients:
                self._enqueue(WorkKind.BACKWARD, m)
        return actions + self._pass_on(kind, m, given) + self._tell_progress(now_s, kind, m)

    def _pass_on(self, kind: WorkKind, m: int, given: ev.Grant | ev.Boundary) -> ev.Actions:
        """Send the result of a Work to the next peer of the route, if there is one."""
        stage = self._stage
        if kind in (WorkKind.BACKWARD, WorkKind.REGENERATE):
            key = ev.Key("grad", self._step, stage, m)
            to = stage - 1
        else:
            key = ev.Key("act" if kind == WorkKind.FORWARD else "eval", self._step, stage + 1, m)
            to = stage + 1
        if not 0 <= to < self._shape.n_stages or given.route[to] == NO_PEER:
            return []
        return [self._send(ev.Boundary(key, given.route, given.regenerate))]

    def _send(self, boundary: ev.Boundary) -> ev.Send:
        key = boundary.key
        is_gradient = key.kind == "grad"
        pipeline = self._routes.pipeline_of(
            WorkKind.EVALUATE if key.kind == "eval" else WorkKind.FORWARD, key.microbatch
        )
        dst = boundary.route[key.stage - is_gradient]
        return ev.Send(dst, boundary, self._shape.sent_bytes[pipeline][is_gradient])

    # ----------------------------------------------------------------------------------------------------- progress

    def _counts(self, kind: WorkKind) -> bool:
        """Whether the replicas of a stage wait for such a Work before the step is over there."""
        return kind == WorkKind.BACKWARD or (kind == WorkKind.EVALUATE and self._is_last)

    def _tell_progress(self, now_s: float, kind: WorkKind, m: int) -> ev.Actions:
        progress = ev.Progress(self._step, kind, self._stage, m, self._gap_s)
        receivers = {self._routes.owning_router(task_kind(kind), m)}
        if self._counts(kind):
            receivers.update(self._replicas)
        own = self._on_progress(now_s, self._peer, progress)
        return [ev.Send(peer, progress) for peer in sorted(receivers - {self._peer})] + own

    def _on_progress(self, now_s: float, src: int, progress: ev.Progress) -> ev.Actions:
        step, kind, m = progress.step, progress.kind, progress.microbatch
        actions: ev.Actions = []
        if step == self._step and self._owns(task_kind(kind), m):
            self._dispatcher.progress(now_s, src, progress)
            actions += self._begin_tasks(now_s)
        if progress.stage == self._stage and self._counts(kind):
            self._counted.setdefault(step, set()).add((kind, m))
            actions += self._drain_if_over() if step == self._step else []
        return actions

    def _drain_if_over(self) -> ev.Actions:
        """The stage's step is over when every microbatch is counted at one of its replicas."""
        replicas = set(self._replicas) & set(self._members)
        if self._recovery.is_active and not self._recovery.has_inventories_of(replicas):
            return []
        return self._shape.drained(self._step) if self._n_uncounted == 0 else []

    @property
    def _n_uncounted(self) -> int:
        """The number of microbatches of the step that are still to be counted at this stage, as far as is known
        here."""
        n_expected = self._shape.n_trained(self._step) + (self._shape.n_held_out(self._step) if self._is_last else 0)
        return n_expected - len(self._counted.get(self._step, ()))

    def _begin_tasks(self, now_s: float) -> ev.Actions:
        """Begin tasks: at the first stage with a grant, at others with the tensors that their neighbours keep."""
        actions: ev.Actions = []
        for task, route in self._dispatcher.next(now_s):
            m, regenerate = task.microbatch, task.regenerate
            if task.lo == 0:
                actions += self._post(route[0], ev.Grant(self._step, task.kind, m, route, regenerate))
            else:
                key = ev.Key("act", self._step, task.lo, m)
                actions += self._post(self._recovery.keepers(m)[task.lo - 1], ev.Resend(key, route, regenerate))
            if task.hi < self._shape.n_stages - 1:
                key = ev.Key("grad", self._step, task.hi + 1, m)
                actions += self._post(self._recovery.keepers(m)[task.hi + 1], ev.Resend(key, route, regenerate))
        return actions

    def _post(self, dst: int, body: ev.Grant | ev.Resend) -> ev.Actions:
        """Send a message to another peer, or deliver it to this one at once."""
        return [ev.Send(dst, body)] if dst != self._peer else self._on_received(0.0, self._peer, body)

    # ------------------------------------------------------------------------------------------------ overdue Work

    def _on_overdue(self, now_s: float) -> ev.Actions:
        """This peer's device is stuck. Have others do the forwards that wait here, and say if the rest of the stage's
        step can only be done here."""
        actions: ev.Actions = []
        for (kind, m), given in list(self._inputs.items()):
            is_waiting = kind == WorkKind.FORWARD and m not in self._forwarded and m not in self._rerouted
            if is_waiting and not self._is_last and given.route[self._stage + 1] != NO_PEER:
                self._rerouted.add(m)
                reroute = ev.Reroute(self._step, self._stage, m, given.route)
                router = self._routes.owning_router(WorkKind.FORWARD, m)
                sends: ev.Actions = [ev.Send(router, reroute)]
                actions += self._reroute(now_s, self._peer, reroute) if router == self._peer else sends
        return actions + ([ev.StepBlocked()] if self._blocks_step() else [])

    def _blocks_step(self) -> bool:
        """Whether all that is still to be counted at this stage is here, or others wait for this peer's inventory."""
        if self._recovery.owes_inventory:
            return True
        counted = self._counted.get(self._step, ())
        kinds = (WorkKind.FORWARD, WorkKind.EVALUATE) if self._is_last else (WorkKind.FORWARD,)
        here = [
            (kind, m)
            for kind, m in self._inputs
            if kind in kinds
            and m not in self._rerouted
            and (WorkKind.EVALUATE if kind == WorkKind.EVALUATE else WorkKind.BACKWARD, m) not in counted
        ]
        return 0 < self._n_uncounted <= len(here)

    def _reroute(self, now_s: float, src: int, reroute: ev.Reroute) -> ev.Actions:
        """Send the input of a forward that is stuck at a peer to another replica, too."""
        step, stage, m = reroute.step, reroute.stage, reroute.microbatch
        found = self._dispatcher.reroute(now_s, m, stage, src) if step == self._step else None
        if found is None:
            return []
        task, other = found
        route = (*reroute.route[:stage], other, *reroute.route[stage + 1 :])  # to the same peer of the next stage
        report = ReroutedReport(step, stage, m, src, other)
        if stage == 0:
            return [report, *self._post(route[0], ev.Grant(step, WorkKind.FORWARD, m, route, task.regenerate))]
        keeper = route[stage - 1] if stage > task.lo else self._recovery.keepers(m)[stage - 1]
        return [report, *self._post(keeper, ev.Resend(ev.Key("act", step, stage, m), route, task.regenerate))]

    # ------------------------------------------------------------------------------------- after a view in mid-step

    def _tell_inventory(self, now_s: float) -> ev.Actions:
        """Tell the inventory once this peer is in the view's step and no Work runs that might still be counted."""
        if not self._recovery.owes_inventory or self._slot.is_busy:
            return []
        if self._step != self._current_view.n_committed or not self._shape.has_work(self._step):
            return []
        inventory = self._recovery.inventory(self._step)
        sends = [ev.Send(peer, inventory) for peer in self._members if peer != self._peer]
        return sends + self._on_inventory(now_s, self._peer, inventory)

    def _on_inventory(self, now_s: float, src: int, inventory: ev.Inventory) -> ev.Actions:
        if not self._recovery.is_active or inventory.step != self._current_view.n_committed:
            return []
        self._recovery.add(src, inventory)
        if src in self._replicas:
            self._counted.setdefault(inventory.step, set()).update(inventory.counted)
        if self._step != inventory.step:
            return []
        actions: ev.Actions = []
        if self._recovery.is_complete:
            of_step = inventory.step
            tasks = self._recovery.missing_tasks(self._shape.n_trained(of_step), self._shape.n_held_out(of_step))
            self._dispatcher.begin([task for task in tasks if self._owns(task.kind, task.microbatch)])
            actions += self._begin_tasks(now_s)
        return actions + self._next() + self._drain_if_over()
