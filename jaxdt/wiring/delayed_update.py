"""Two steps under way at a time, for delayed parameter updates: each has a wiring of its own, and they share a device.

While a step is averaged the next one computes, and so it goes on in turns: one wiring does the even steps, the other
the odd ones, and neither knows of the other. Of two Works that could run, the one of the older step does.
"""

from collections.abc import Sequence
from dataclasses import replace

from jaxdt.protocol.events import (
    Action,
    Boundary,
    Committed,
    Event,
    Evicted,
    Grant,
    Inventory,
    Progress,
    Ran,
    Received,
    Resend,
    Run,
    Updated,
    View,
    ViewChanged,
)
from jaxdt.spec.delay import Delay
from jaxdt.wiring.fixed import FixedWiring
from jaxdt.wiring.swarm import COMPUTING, SwarmWiring

Wiring = FixedWiring | SwarmWiring


class DelayedUpdate:
    """`wirings`: two of one peer. A step begins when the version is there that it computes with, unless the peer takes
    no part in it; it may yet have to, when others are lost."""

    READS = frozenset({ViewChanged, Evicted, Updated, Grant, Resend, Inventory, Progress, Boundary, Committed, Ran})

    def __init__(self, peer: int, stage: int, wirings: Sequence[Wiring], delay: Delay):
        self._peer, self._stage, self._wirings, self._delay = peer, stage, tuple(wirings), delay
        self._view: View | None = None
        self._version: int | None = None
        self._n_committed = 0
        self._begun: set[int] = set()
        self._waiting: dict[int, Run] = {}  # step -> the Work that its wiring wants done
        self._running = False

    def handle(self, now_s: float, event: Event) -> list[Action | Event]:
        match event:
            case ViewChanged(view):
                told = self._adopt(now_s, view)
            case Evicted():
                self._give_up()
                self._view = None
                told = [answer for wiring in self._wirings for answer in wiring.handle(now_s, event)]
            case Updated(_, version):
                self._version, self._n_committed = version, max(self._n_committed, version)
                self._let_go_of_what_is_over()  # first: a wiring that waits for it would not begin with what it is told
                told = self._open(now_s)
            case Received(_, Committed(record)):
                self._n_committed = record.step + 1  # its update may begin at once: nothing of it computes any more
                self._let_go_of_what_is_over()
                return []
            case Received(_, body):
                told = self._of(_step_of(body)).handle(now_s, event)
            case Ran(work) if work.kind in COMPUTING:
                self._running = False
                told = self._of(work.step).handle(now_s, event)
            case _:
                return []
        return self._in_turn(told)

    @property
    def queue(self) -> tuple[int, bool]:
        """How much Work waits here, and whether some runs."""
        n_known = sum(waiting + runs for waiting, runs in (wiring.queue for wiring in self._wirings))
        return n_known - self._running, self._running

    def _of(self, step: int) -> Wiring:
        return self._wirings[step % len(self._wirings)]

    def _adopt(self, now_s: float, view: View) -> list[Action | Event]:
        """Each wiring is shown the view as one in which its own step is the next to be committed."""
        if view.rolled_back:
            self._give_up()
        self._n_committed = view.n_committed
        self._let_go_of_what_is_over()
        told = []
        for step in range(view.n_committed, view.n_committed + len(self._wirings)):
            results = tuple((round, holders) for round, holders in view.results if round.step == step)
            own = replace(view, n_committed=step, results=results)
            told += self._of(step).handle(now_s, ViewChanged(own))
        self._view = view
        return told + self._open(now_s)

    def _open(self, now_s: float) -> list[Action | Event]:
        """Begin what can begin."""
        if self._view is None or self._version is None:
            return []
        steps, told = self._delay.open(self._version), []
        self._begun &= set(steps)
        for step in steps:
            if step not in self._begun and self._peer in self._view.working(self._stage, step):
                self._begun.add(step)
                told += self._of(step).handle(now_s, Updated(self._stage, step))
        return told

    def _give_up(self) -> None:
        """Nothing that waits is done any more, and steps begin anew."""
        self._version = None
        self._begun.clear()
        for step in self._waiting:
            self._of(step).let_go()
        self._waiting.clear()

    def _let_go_of_what_is_over(self) -> None:
        for step in [step for step in self._waiting if step < self._n_committed]:
            del self._waiting[step]
            self._of(step).let_go()

    def _in_turn(self, told: list[Action | Event]) -> list[Action | Event]:
        """One Work at a time, and none of a step that is over: that is for nobody."""
        others = []
        for answer in told:
            if isinstance(answer, Run):
                self._waiting[answer.work.step] = answer
            else:
                others.append(answer)
        self._let_go_of_what_is_over()
        if self._running or not self._waiting:
            return others
        self._running = True
        return [*others, self._waiting.pop(min(self._waiting))]


def _step_of(body: Grant | Resend | Inventory | Progress | Boundary) -> int:
    return body.key.step if isinstance(body, Resend | Boundary) else body.step
