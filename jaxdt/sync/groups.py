"""Replicas that average in groups: SDPipe, AD-PSGD, P-Reduce, local SGD, DiLoCo and streaming DiLoCo, by parameters.

Every few local steps a replica (jaxdt.sync.replica) wants a group for one of its fragments. The coordinator's part
(jaxdt.sync.group_scheduler) forms groups by a matching rule.
"""

from dataclasses import replace

from jaxdt.membership.agreement import Agreement
from jaxdt.membership.coordinator_config import CoordinatorConfig
from jaxdt.protocol import events as ev
from jaxdt.run.codec import FLOAT32_BYTES, INT8, NONE
from jaxdt.run.config import GroupsConfig, RunConfig
from jaxdt.run.memory import ReplicaCopies
from jaxdt.run.peer_setup import PeerSetup
from jaxdt.run.plan import STASH, Plan
from jaxdt.run.sizes import exchanged_elements, moving_table_bytes, replica_elements, replica_moments
from jaxdt.sync.base import Period, SyncEntry
from jaxdt.sync.group_scheduler import GroupScheduler
from jaxdt.sync.held_out import HeldOutWork, held_out_place
from jaxdt.sync.local_steps import OF_OWN_STEPS, PipelinePlace
from jaxdt.sync.matching.base import matcher_entry
from jaxdt.sync.replica import IndependentReplica, ReplicaOptions, replica_options, replica_place


class Groups(IndependentReplica):
    """One peer's side. `settings`: after which local steps which fragment averages, None for never."""

    def __init__(
        self,
        plan: Plan,
        place: PipelinePlace,
        options: ReplicaOptions,
        held_out: HeldOutWork,
        settings: GroupsConfig | None,
    ):
        super().__init__(plan, place, options, held_out)
        self._settings = settings

    def _after_step(self, version: int) -> ev.Actions:
        fragment = self._settings.fragment_due(version) if self._settings else None
        return self._begin() if fragment is None else self._ask_for_group(version, fragment)


# ------------------------------------------------------------------------------------------------------ table entry


def _build(setup: PeerSetup) -> Groups:
    config, plan, stage = setup.config, setup.plan, setup.stage
    groups, (lo, hi) = config.sync.groups, plan.stages[stage]
    options = replace(
        replica_options(setup),
        fragment_elements=tuple(exchanged_elements(config, lo, hi, fragment) for fragment in range(groups.fragments)),
        codec=config.sync.codec_spec,
        weights={peer: groups.weight(plan.shares[p]) for p, peer in enumerate(plan.placement[stage])},
        lag_steps=groups.lag_steps,
        has_outer=groups.outer != "none",
    )
    settings = groups if matcher_entry(groups.match).averages else None
    return Groups(plan, replica_place(setup), options, HeldOutWork(held_out_place(setup)), settings)


def _build_agreement(config: CoordinatorConfig, run: RunConfig, plan: Plan) -> Agreement:
    return GroupScheduler(config, run, plan)


def _copies(config: RunConfig, lo: int, hi: int) -> ReplicaCopies:
    """Anchor and outer momentum, with a lag the frozen vector and the mean that waits, what a codec has lost of each
    fragment, before and after its exchange, and a shared table on its way.
    The exchange that takes most is that of the whole state: the own vector, its slices, the joined sum and the mean."""
    groups, n_params = config.sync.groups, replica_elements(config, lo, hi)
    n_outer = 2 if groups.outer != "none" else 0
    fragments = [exchanged_elements(config, lo, hi, fragment) for fragment in range(groups.fragments)]
    pending = max(fragments)
    n_owed = sum(fragments) + pending if config.sync.codec != NONE and groups.feeds_back else 0
    n_state = (1 + n_outer) * n_params + replica_moments(config, lo, hi)
    n_kept = n_outer * n_params + (2 * pending if groups.lag_steps else 0) + n_owed
    n_on_host = n_kept - n_outer * n_params + 3 * n_state  # all but anchor, momentum and the new state
    table = moving_table_bytes(config, lo, hi)
    return ReplicaCopies(FLOAT32_BYTES * n_kept + table, 4 * FLOAT32_BYTES * n_state, FLOAT32_BYTES * n_on_host + table)


def _period(config: RunConfig, plan: Plan) -> Period:
    """Local steps up to the average, as often as the rule takes to repeat. What a lag or a window carries over from one
    period to the next is there from the second one on."""
    groups = config.sync.groups
    entry = matcher_entry(groups.match)
    if not entry.averages:
        return Period()
    n_averages = entry.period(groups, plan.n_pipelines)
    n_steps = groups.every_steps * n_averages
    return Period(n_steps, 1 + n_steps if groups.lag_steps or n_averages > 1 else 1)


def _exchanges_per_step(config: RunConfig) -> float:
    groups = config.sync.groups
    return 1 / groups.every_steps if matcher_entry(groups.match).averages else 0.0


def _check(config: RunConfig, plan: Plan) -> str:
    groups = config.sync.groups
    if config.sync.delay:
        return f"sync.delay: got {config.sync.delay}, expected 0 with sync.kind {config.sync.kind}"
    if config.train.on_nonfinite == "rollback":
        return "train.on_nonfinite: got rollback, expected stop or skip with sync.kind groups"
    if groups.outer != "none" and groups.match != "all":
        return (
            f"sync.groups.outer: got {groups.outer}, expected none with sync.groups.match {groups.match}: the outer "
            "optimizer's state would differ between replicas"
        )
    if config.sync.codec == INT8 and not groups.feeds_back:
        return (
            f"sync.codec: got {INT8}, expected bf16 or none with sync.groups.average_moments, or with "
            "sync.groups.mix_frac and no outer optimizer: what is lost there is not made up for later"
        )
    if problem := _fragments_problem(config, plan):
        return problem
    if plan.n_pipelines == 1:
        return ""
    return matcher_entry(groups.match).check(config, plan)


def _fragments_problem(config: RunConfig, plan: Plan) -> str:
    groups = config.sync.groups
    for name, neutral in (("fragments", 1), ("lag_steps", 0)):
        if getattr(groups, name) != neutral and groups.match != "all":
            return (
                f"sync.groups.{name}: got {getattr(groups, name)}, expected {neutral} with sync.groups.match "
                f"{groups.match}, whose rule counts on replicas that wait with all of their parameters"
            )
    fewest = min(config.model.facts.n_runs(lo, hi) for lo, hi in plan.stages)
    if groups.fragments > fewest:
        return (
            f"sync.groups.fragments: got {groups.fragments}, expected at most {fewest}, the blocks of the stage that "
            "has fewest: a fragment is whole blocks"
        )
    if not all(exchanged_elements(config, lo, hi, f) for lo, hi in plan.stages for f in range(groups.fragments)):
        return f"sync.groups.fragments: got {groups.fragments}, expected fewer: one of them has nothing that is trained"
    if groups.lag_steps and plan.schedule == STASH:
        return (
            f"sync.groups.lag_steps: got {groups.lag_steps}, expected 0 with plan.schedule {STASH}, whose forwards run "
            "ahead of local steps"
        )
    return ""


ENTRY = SyncEntry(
    _build,
    _build_agreement,
    _check,
    replicas_may_differ=True,
    outlives_views=OF_OWN_STEPS | {ev.DonorWaits},
    settings="groups",
    copies=_copies,
    period=_period,
    exchanges_per_step=_exchanges_per_step,
    begins_anew=True,
)
