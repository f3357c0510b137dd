"""config + plan -> machines: names every wiring and sync that a run can choose."""

from jaxdt.core.config import RunConfig, check_plan
from jaxdt.core.coordinator import Coordinator, Terms
from jaxdt.core.membership import Membership, Seat
from jaxdt.core.peer import Peer
from jaxdt.core.plan import Plan
from jaxdt.core.sizes import boundary_bytes, sync_groups
from jaxdt.sync.allreduce import AllReduce
from jaxdt.wiring.fixed import FixedWiring


def build_peer(config: RunConfig, plan: Plan, peer: int, run: str, start_version: int = 0) -> Peer:
    """The machines of one peer of the plan, which begins with `start_version` updates seen."""
    check_plan(config, plan)
    stage, pipeline = plan.seat(peer)
    seat = Seat(
        run=run,
        fingerprint=fingerprint(config, plan),
        peer=peer,
        stage=stage,
        start_version=start_version,
        n_steps=config.train.steps,
        saves=pipeline == 0,
        checkpoint_every_steps=config.train.checkpoint_every_steps,
        heartbeat_s=config.net.heartbeat_s,
        deadline_floor_s=config.net.deadline_floor_s,
    )
    return Peer(Membership(seat), _wiring(config, plan, peer), _sync(config, plan, peer, stage))


def build_coordinator(
    config: RunConfig, plan: Plan, run: str, start_version: int = 0, start_lineage: int = 0
) -> Coordinator:
    """The coordinator of a run of this plan."""
    check_plan(config, plan)
    terms = Terms(
        run=run,
        fingerprint=fingerprint(config, plan),
        stage_of={peer: stage for stage, row in enumerate(plan.placement) for peer in row},
        n_stages=plan.n_stages,
        start_version=start_version,
        start_lineage=start_lineage,
        n_steps=config.train.steps,
        on_nonfinite=config.train.on_nonfinite,
        tokens_per_sample=config.model.seq_len,
        heartbeat_s=config.net.heartbeat_s,
        deadline_floor_s=config.net.deadline_floor_s,
    )
    return Coordinator(terms)


def fingerprint(config: RunConfig, plan: Plan) -> str:
    """What peers compare to know that they run the same thing."""
    return f"{config.fingerprint}-{plan.fingerprint}"


def _wiring(config: RunConfig, plan: Plan, peer: int) -> FixedWiring:
    n_boundaries = plan.n_stages - 1
    evals = (config.train.eval_every_steps, config.train.eval_microbatches)
    return FixedWiring(plan, peer, config.train.steps, (boundary_bytes(config),) * n_boundaries, evals)


def _sync(config: RunConfig, plan: Plan, peer: int, stage: int) -> AllReduce:
    groups = tuple(group for group in sync_groups(config, plan) if stage in group.stages)
    return AllReduce(peer, stage, groups, plan.n_microbatches, config.sync.slice_bytes, config.optim.clip_norm)
