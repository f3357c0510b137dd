"""A wiring decides which peer gets a microbatch next. Here: its interface, and the table of the wirings that exist.

A wiring is a state machine of one peer. It decides which Work the peer does and where its results go, tells the sync
what is in the peer's accumulator, and has lost Work done again after a view in mid-step. A new wiring is one file and
one entry of WIRINGS.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from jaxdt.protocol import events as ev
from jaxdt.run.config import RunConfig, is_evaluated
from jaxdt.run.delay import NO_DELAY, Delay
from jaxdt.run.errors import BadInput, nearest
from jaxdt.run.peer_setup import PeerSetup
from jaxdt.run.plan import Plan
from jaxdt.run.sizes import boundary_bytes, boundary_bytes_of_pipelines
from jaxdt.run.work import WorkKind

COMPUTING = (
    WorkKind.FORWARD,
    WorkKind.BACKWARD,
    WorkKind.REGENERATE,
    WorkKind.EVALUATE,
)  # kinds of Work that a wiring asks for

# Name of a kind -> the module that holds its `ENTRY`, imported when the kind is used.
WIRINGS: dict[str, str] = {
    "fixed": "jaxdt.wiring.fixed",
    "pool": "jaxdt.wiring.pool.entry",
    "swarm": "jaxdt.wiring.swarm",
}


class Wiring(Protocol):
    """One peer's side.

    It is told: ViewChanged and Evicted by the membership, messages of other peers' wirings, and Ran for each Work that
    it asked for. The sync says when a step may begin: with Updated (a version of the parameters is there, so the step
    of that number may begin), or where replicas may differ with Stepped (so the next one of the pipeline may).
    It answers with Run (one Work at a time), messages, Discard, and to the sync: Accumulated and Evaluated for what it
    has measured, and Drained once nothing more of a step will come to this peer."""

    READS: frozenset[type]

    def handle(self, now_s: float, event: ev.Event) -> ev.Actions: ...

    def cancel_run(self) -> None:
        """The Work that it has asked for last will not be done."""
        ...

    @property
    def queue(self) -> tuple[int, bool]:
        """The amount of Work that waits here, and whether some runs."""
        ...


@dataclass(frozen=True)
class PeerLoad:
    """The most that one peer holds in a step: microbatches between their forward and backward, and all microbatches."""

    n_in_flight: int
    n_microbatches: int


@dataclass(frozen=True)
class WorkerRole:
    """Workers, which are in no view: each computes for one server. `build`: the wiring of a worker of this
    server; `server_of`: the server of a worker of the plan; `messages`: what workers may send to their servers."""

    build: Callable[[PeerSetup, int], Wiring]
    server_of: Callable[[Plan, int], int]
    messages: frozenset[type]


@dataclass(frozen=True)
class WiringEntry:
    """The answers of a kind of wiring to the rest of jaxdt.

    build              a peer's wirings, one for each of so many steps that are under way at a time, or one for all
    check              '' if config and plan make sense with it, else a line that names the field and the reason
    peer_load          the load of a peer in a place (stage, pipeline) of the plan
    follows_plan       whether a microbatch stays in its plan's pipeline, in the order of the plan's schedule; so each
                       pipeline may have codecs of its own, and steps of its own where the sync lets replicas differ.
                       Else a peer sends to any of the next stage, and all microbatches take one codec at a boundary
    may_change_stages  whether peers may move to other stages while the run continues
    plan_roles         the fields of plan.roles that the wiring uses
    workers            how peers outside of the views compute for members; None if they cannot
    """

    build: Callable[[PeerSetup, int], Sequence[Wiring]]
    peer_load: Callable[[RunConfig, Plan, int, int], PeerLoad]
    follows_plan: bool
    may_change_stages: bool
    check: Callable[[RunConfig, Plan], str] = lambda config, plan: ""
    plan_roles: frozenset[str] = frozenset()
    workers: WorkerRole | None = None


def wiring_entry(kind: str) -> WiringEntry:
    """The entry of a kind; BadInput for one that does not exist."""
    if kind == "independent":  # config files and runs of before
        raise BadInput(
            "wiring.kind: got independent, expected fixed, which does the same where sync.kind is groups or server; a "
            "run that had it is resumed with --config.wiring.kind=fixed"
        )
    if kind not in WIRINGS:
        raise BadInput(f"wiring.kind: got {kind!r}, expected one of {', '.join(WIRINGS)}{nearest(kind, WIRINGS)}")
    return importlib.import_module(WIRINGS[kind]).ENTRY


def view_of_step(view: ev.View, step: int) -> ev.View:
    """The view as a wiring sees it that does every other step: as one in which its own step is the next to be
    committed."""
    results = tuple((round, holders) for round, holders in view.results if round.number == step)
    return replace(view, n_committed=step, results=results)


@dataclass(frozen=True)
class StepShape:
    """The facts about a step that a peer's wiring needs. `sent_bytes`: for the microbatches of each pipeline, payload
    of an activation that the stage sends and of a gradient. Held-out microbatches are measured with the parameters
    after every `eval_every_steps` steps (0: never) and after the last, at the start of the first step that computes
    with them: of the last parameters, of a step that does nothing else. `retain_bytes` bounds the boundary tensors that
    are kept of one step: none where replicas may differ, since a pipeline that has lost a peer is given up as a whole.
    `received_bytes`: for pipeline 0, payload of an activation that enters the stage and of the
    gradient of an activation that leaves it."""

    peer: int
    stage: int
    n_stages: int
    n_microbatches: int
    n_steps: int
    sent_bytes: tuple[tuple[int, int], ...]
    eval_every_steps: int = 0
    eval_microbatches: int = 0
    retain_bytes: int = 0
    received_bytes: tuple[int, int] = (0, 0)
    delay: Delay = NO_DELAY

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.n_stages - 1

    @property
    def sent_bytes_max(self) -> tuple[int, int]:
        """The largest activation payload over all pipelines, and the largest gradient payload."""
        return max(activation for activation, _ in self.sent_bytes), max(gradient for _, gradient in self.sent_bytes)

    def n_held_out(self, step: int) -> int:
        """Held-out microbatches of a step."""
        version = self.delay.version_of(step)
        is_due = is_evaluated(version, self.eval_every_steps, self.n_steps)
        return self.eval_microbatches if is_due and step == self.delay.computed_with(version) else 0

    def n_trained(self, step: int) -> int:
        """Microbatches of a step."""
        return self.n_microbatches if step < self.n_steps else 0

    def has_work(self, step: int) -> bool:
        return step < self.n_steps or self.n_held_out(step) > 0

    def drained(self, step: int) -> ev.Actions:
        """The sync is told that a step is computed, if that is a step with an update."""
        return [ev.Drained(step)] if step < self.n_steps else []


def step_shape(setup: PeerSetup) -> StepShape:
    """The shape of all steps of a run, at one of its peers."""
    config, plan, stage = setup.config, setup.plan, setup.stage
    first, last = stage == 0, stage == plan.n_stages - 1
    none = [0] * plan.n_pipelines
    activations = none if last else boundary_bytes_of_pipelines(config, plan, stage, forward=True)
    gradients = none if first else boundary_bytes_of_pipelines(config, plan, stage - 1, forward=False)
    return StepShape(
        peer=setup.peer,
        stage=stage,
        n_stages=plan.n_stages,
        n_microbatches=plan.n_microbatches,
        n_steps=config.train.steps,
        sent_bytes=tuple(zip(activations, gradients, strict=True)),
        eval_every_steps=config.train.eval_every_steps,
        eval_microbatches=config.train.eval_microbatches,
        # Each step under way has its share.
        retain_bytes=0 if setup.replicas_may_differ else config.wiring.retain_bytes // (1 + config.sync.delay),
        received_bytes=(
            0 if first else boundary_bytes(config, plan, stage - 1, 0, forward=True),
            0 if last else boundary_bytes(config, plan, stage, 0, forward=False),
        ),
        delay=config.delay,
    )
