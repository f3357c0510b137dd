"""config + plan -> machines, by asking the tables of wirings (jaxdt.wiring.base) and syncs (jaxdt.sync.base).

Which combinations of options make sense is checked here, since only build may look at all tables.
"""

import json
import math
from dataclasses import dataclass, fields, is_dataclass, replace

from jaxdt.membership.coordinator import Coordinator
from jaxdt.membership.coordinator_config import CoordinatorConfig, DurableState
from jaxdt.membership.link_echo import LinkEcho
from jaxdt.membership.member import OUTLIVES_VIEWS, Membership, PeerIdentity
from jaxdt.membership.peer import Machine, Peer
from jaxdt.membership.rebalance_api import ByNumber
from jaxdt.membership.worker_membership import WorkerIdentity, WorkerMembership
from jaxdt.protocol import events as ev
from jaxdt.run import codec as codecs
from jaxdt.run import serialize
from jaxdt.run.config import JOIN, MASK, RunConfig, WiringConfig, check_plan
from jaxdt.run.errors import BadInput
from jaxdt.run.memory import MemoryOptions, StageMemory, most_retained
from jaxdt.run.memory import stage_memory as memory_of_layers
from jaxdt.run.peer_setup import PeerSetup
from jaxdt.run.plan import SCHEDULES, STASH, Plan, to_json
from jaxdt.run.sizes import sync_groups
from jaxdt.sync.base import Period, sync_entry
from jaxdt.sync.contributions import ContributionCollector, ContributionSender, ContributionShape
from jaxdt.sync.donor_transfer import DonorTransfer
from jaxdt.sync.part_transfer import PartTransfer
from jaxdt.sync.state_transfer import StateTransfer
from jaxdt.sync.worker_parameters import ParameterDownload
from jaxdt.wiring.base import PeerLoad, WorkerRole, wiring_entry
from jaxdt.wiring.delayed_update import DelayedUpdate
from jaxdt.wiring.load_report import LoadReporter
from jaxdt.wiring.rebalance import Algorithm2, Rebalancer

LOAD_REPORTS_A_PERIOD = 4  # of rebalancing


@dataclass(frozen=True)
class RunStart:
    """The beginning of a run: its name, the checkpoint that it resumes from, the checksum of its token file, and the
    peers that were revoked before. `last_term`: the term of the last coordinator on this disk, 0 if there was none."""

    run: str
    checkpoint: ev.Checkpoint = ev.Checkpoint()
    data_checksum: str = ""
    last_term: int = 0
    revoked: tuple[int, ...] = ()


@dataclass(frozen=True)
class WorkerPlace:
    """The stage and the server of a pool's worker. `patience_s`: how long it waits for a silent server."""

    stage: int
    server: int
    patience_s: float


def check_config(config: RunConfig) -> None:
    """BadInput for kinds that do not exist, and for options that make no sense with a kind, whatever the plan."""
    wiring = config.wiring
    entry = wiring_entry(wiring.kind)
    sync = sync_entry(config.sync.kind)
    if sync.replicas_may_differ and not entry.follows_plan:
        raise BadInput(
            f"wiring.kind: got {wiring.kind}, expected {WiringConfig.kind} with sync.kind {config.sync.kind}: no "
            "microbatch may pass replicas of pipelines that differ"
        )
    if wiring.rebalance_s and not entry.may_change_stages:
        raise BadInput(
            f"wiring.rebalance_s: got {wiring.rebalance_s}, expected 0 with wiring {wiring.kind}, whose peers have "
            "fixed stages"
        )
    if wiring.rebalance_rule != WiringConfig.rebalance_rule and not wiring.rebalance_s:
        raise BadInput(
            f"wiring.rebalance_rule: got {wiring.rebalance_rule}, expected {WiringConfig.rebalance_rule} with "
            "wiring.rebalance_s 0, with which no peer changes stages"
        )
    if wiring.join_rule != WiringConfig.join_rule and not entry.workers:
        raise BadInput(
            f"wiring.join_rule: got {wiring.join_rule}, expected {WiringConfig.join_rule} with wiring {wiring.kind}, "
            "which has no workers"
        )
    if config.data.borders == MASK and config.model.has_own_sources:
        raise BadInput(
            f"data.borders: got {MASK}, expected {JOIN} with a model of one's own, whose parts do not hear where "
            "documents begin"
        )
    _refuse_settings_of_others(config, sync.settings)


def _refuse_settings_of_others(config: RunConfig, own: str) -> None:
    """BadInput for settings of a kind of sync that is not the run's."""
    for group in fields(config.sync):
        settings = getattr(config.sync, group.name)
        if not is_dataclass(settings) or group.name == own:
            continue
        for field in fields(settings):
            found = getattr(settings, field.name)
            if found != field.default:
                raise BadInput(
                    f"sync.{group.name}.{field.name}: got {found}, which sync.kind {config.sync.kind} does not read, "
                    f"expected {field.default}"
                )


def check(config: RunConfig, plan: Plan) -> None:
    """BadInput for a plan that does not fit the model, and for options that make no sense together."""
    check_config(config)
    check_plan(config, plan)
    known = sync_entry(config.sync.kind).plan_roles | wiring_entry(config.wiring.kind).plan_roles
    if unknown := sorted(set(plan.roles.used) - known):
        raise BadInput(
            f"plan.roles: got peers with roles, expected none with wiring {config.wiring.kind} and sync "
            f"{config.sync.kind}, which do not know {', '.join(unknown)}"
        )
    for shared in config.model.facts.shared(*plan.stages[0]) if replicas_may_differ(config) else []:
        if shared.n_trained < shared.n_params:
            raise BadInput(
                f"sync.kind: got {config.sync.kind}, expected allreduce: several stages hold {shared.name}, a part of "
                "which is not trained"
            )
    entry = wiring_entry(config.wiring.kind)
    if plan.schedule == STASH and not replicas_may_differ(config):
        raise BadInput(
            f"plan.schedule: got {STASH}, expected one of {', '.join(name for name in SCHEDULES if name != STASH)} "
            f"with sync.kind {config.sync.kind}, whose replicas update together: no step's forward may run ahead of "
            "that"
        )
    for boundary, codec in enumerate(plan.codec):
        if "," in codec and not entry.follows_plan:
            raise BadInput(
                f"plan.codec[{boundary}]: got {codec!r}, a name per pipeline, expected one for all: with wiring "
                f"{config.wiring.kind} a peer sends to any of the next stage"
            )
    if problem := entry.check(config, plan) or sync_entry(config.sync.kind).check(config, plan):
        raise BadInput(problem)


def follows_plan(config: RunConfig) -> bool:
    """Whether microbatches stay in the plan's pipelines, in the order of its schedule (jaxdt.wiring.base)."""
    return wiring_entry(config.wiring.kind).follows_plan


def replicas_may_differ(config: RunConfig) -> bool:
    """Whether a replica may do more steps than others have done."""
    return sync_entry(config.sync.kind).replicas_may_differ


def period(config: RunConfig, plan: Plan) -> Period:
    """After how many steps their course repeats: up to an average, a pull, or the end of a scheduler's rule."""
    return sync_entry(config.sync.kind).period(config, plan)


def exchanges_per_step(config: RunConfig) -> float:
    """How many times a step the replicas of a stage exchange their vector, in the mean."""
    return sync_entry(config.sync.kind).exchanges_per_step(config)


def peer_load(config: RunConfig, plan: Plan, stage: int, pipeline: int) -> PeerLoad:
    """The most that a peer in a place of the plan holds in a step."""
    return wiring_entry(config.wiring.kind).peer_load(config, plan, stage, pipeline)


def memory_options(config: RunConfig, schedule: str, lo: int, hi: int) -> MemoryOptions:
    """The options that decide how much memory a peer with the layers lo..hi-1 needs, under this schedule of a plan."""
    copies = sync_entry(config.sync.kind).copies(config, lo, hi)
    moments, delay = config.optim.moments, config.sync.delay
    stashes, owes = schedule == STASH, _owes(config)
    return MemoryOptions(config.dtype, config.remat, moments, delay, copies, stashes=stashes, owes=owes)


def _owes(config: RunConfig) -> bool:
    """Whether equal replicas owe what a codec loses of each gradient (jaxdt.sync.error_feedback); others count it among
    their copies."""
    return config.sync.codec != codecs.NONE and not replicas_may_differ(config)


def stage_memory(
    config: RunConfig,
    schedule: str,
    layers: tuple[int, int],
    load: PeerLoad,
    *,
    n_vectors: int = 0,
    on_accelerator: bool = False,
) -> StageMemory:
    """What a peer with the layers lo..hi-1 and this load holds at its worst moment, under this schedule of a plan: with
    optimizer and delay, with the tensors that it retains until the commit, and with `n_vectors` for workers."""
    lo, hi = layers
    shape = config.microbatch_shape
    options = replace(memory_options(config, schedule, lo, hi), n_vectors=n_vectors)
    most = most_retained(config.model, lo, hi, shape, config.dtype, config.wiring.retain_bytes)
    retained = min(load.n_microbatches, most)
    return memory_of_layers(
        config.model, lo, hi, shape, load.n_in_flight, options, retained, on_accelerator=on_accelerator
    )


def planned_memory(config: RunConfig, plan: Plan, *, on_accelerator: bool = False) -> tuple[StageMemory, ...]:
    """What the busiest peer of each stage of a plan holds at its worst moment. Vectors that servers hold for replicas,
    and pool servers for their workers, are left out."""
    busiest = plan.shares.index(max(plan.shares))
    loads = [peer_load(config, plan, stage, busiest) for stage in range(plan.n_stages)]
    return tuple(
        stage_memory(config, plan.schedule, layers, load, on_accelerator=on_accelerator)
        for layers, load in zip(plan.stages, loads, strict=True)
    )


def worker_vectors(config: RunConfig, plan: Plan, peer: int) -> int:
    """The vectors of one number a parameter that a peer holds for workers at most: a gradient of each worker that
    computes for it, or what its kind of sync says of a server."""
    role = wiring_entry(config.wiring.kind).workers
    n_workers = sum(role.server_of(plan, worker) == peer for worker in plan.workers) if role else 0
    is_server = any(peer in row for row in plan.roles.servers)
    return n_workers + (sync_entry(config.sync.kind).server_vectors(plan) if is_server else 0)


def build_peer(config: RunConfig, plan: Plan, peer: int, start: RunStart) -> Peer:
    """The machines of one peer of the plan."""
    check(config, plan)
    return _peer(PeerSetup(config, plan, peer, plan.seat(peer)[0]), start, _fingerprint(config, plan, start))


def build_peers(config: RunConfig, plan: Plan, start: RunStart) -> dict[int, Peer]:
    """All peers of the plan, for a driver that runs them all: the plan is checked once."""
    check(config, plan)
    digest = _fingerprint(config, plan, start)
    return {peer: _peer(PeerSetup(config, plan, peer, plan.seat(peer)[0]), start, digest) for peer in plan.peers}


def build_newcomer(config: RunConfig, plan: Plan, peer: int, stage: int, start: RunStart) -> Peer:
    """The machines of a peer that joins a run, for a stage of the plan."""
    check(config, plan)
    return _peer(PeerSetup(config, plan, peer, stage), start, _fingerprint(config, plan, start))


def build_worker(config: RunConfig, plan: Plan, peer: int, start: RunStart, place: WorkerPlace | None = None) -> Peer:
    """The machines of a worker, which is no member of the run. None: in its place of the plan."""
    check(config, plan)
    if place is None:
        place = WorkerPlace(plan.seat(peer)[0], _worker_role(config).server_of(plan, peer), config.net.outage_s)
    return _worker(PeerSetup(config, plan, peer, place.stage, _fingerprint(config, plan, start)), start, place)


def build_workers(config: RunConfig, plan: Plan, start: RunStart) -> dict[int, Peer]:
    """All workers of the plan, as build_peers makes its peers."""
    return {peer: build_worker(config, plan, peer, start) for peer in plan.workers}


def _worker_role(config: RunConfig) -> WorkerRole:
    role = wiring_entry(config.wiring.kind).workers
    assert role is not None, "a run has workers only where its wiring knows the role"
    return role


def _worker(setup: PeerSetup, start: RunStart, place: WorkerPlace) -> Peer:
    config, plan, peer, stage = setup.config, setup.plan, setup.peer, setup.stage
    identity = WorkerIdentity(
        run=start.run,
        fingerprint=setup.fingerprint,
        peer=peer,
        server=place.server,
        n_steps=config.train.steps,
        heartbeat_s=config.net.heartbeat_s,
        outage_s=place.patience_s,
    )
    n_words = parameter_words(config, plan, stage)
    parameters = ParameterDownload(stage, identity.server, n_words, config.sync.slice_bytes)
    sender = ContributionSender(peer, identity.server, _contribution_shape(setup))
    wiring = _worker_role(config).build(setup, place.server)
    return Peer(WorkerMembership(identity), wiring, parameters, sender)


def parameter_words(config: RunConfig, plan: Plan, stage: int) -> int:
    """4-byte words of a stage's trained parameters, which are the first of its state."""
    return config.model.facts.stage_trained(*plan.stages[stage])


def _contribution_shape(setup: PeerSetup) -> ContributionShape:
    groups, sync = sync_groups(setup.config, setup.plan), setup.config.sync
    sizes = {group.stage: group.n_elements for group in groups if setup.stage in group.stages}
    return ContributionShape(sizes, sync.slice_bytes, sync.codec_spec)


def _for_workers(setup: PeerSetup) -> list[Machine]:
    """The further machines of a peer for which workers compute; none for other peers."""
    if not wiring_entry(setup.config.wiring.kind).workers:
        return []
    return [ContributionCollector(setup.peer, _contribution_shape(setup)), LinkEcho()]


def _peer(setup: PeerSetup, start: RunStart, digest: str) -> Peer:
    config, entry = setup.config, wiring_entry(setup.config.wiring.kind)
    setup = replace(setup, fingerprint=digest, replicas_may_differ=replicas_may_differ(config))
    identity = PeerIdentity(
        run=start.run,
        fingerprint=digest,
        peer=setup.peer,
        stage=setup.stage,
        start_version=start.checkpoint.version,
        start_generation=start.checkpoint.generation,
        n_steps=config.train.steps,
        checkpoint_every_steps=config.train.checkpoint_every_steps,
        heartbeat_s=config.net.heartbeat_s,
        deadline_floor_s=config.net.deadline_floor_s,
        outage_s=config.net.outage_s,
        outlives_views=OUTLIVES_VIEWS | sync_entry(config.sync.kind).outlives_views,
        from_workers=entry.workers.messages if entry.workers else frozenset(),
        begins_anew=sync_entry(config.sync.kind).begins_anew,
        owes=_owes(config),
    )
    sync = sync_entry(config.sync.kind).build(setup)
    slice_bytes = config.sync.slice_bytes
    state_transfer = _state_transfer(setup)
    copies_bytes_per_s = 1e9 / 8 * config.net.copies_gbps if config.net.copies_gbps else math.inf
    start_version = start.checkpoint.version
    part_transfer = PartTransfer(setup.peer, setup.stage, slice_bytes, copies_bytes_per_s, start_version)
    return Peer(Membership(identity), _wiring(setup), sync, state_transfer, part_transfer, *_for_workers(setup))


def _state_transfer(setup: PeerSetup) -> Machine:
    """The machine that gets the state for a peer that comes back; where replicas may differ it asks one donor only."""
    config, slice_bytes = setup.config, setup.config.sync.slice_bytes
    if setup.replicas_may_differ:
        return DonorTransfer(setup.plan, setup.peer, slice_bytes)
    has_workers = wiring_entry(config.wiring.kind).workers is not None
    worker_words = parameter_words(config, setup.plan, setup.stage) if has_workers else 0
    return StateTransfer(setup.peer, setup.stage, slice_bytes, worker_words)


def _wiring(setup: PeerSetup) -> Machine:
    """One wiring per step under way, and around them a meter of their queues where the config asks for one."""
    config = setup.config
    wirings = wiring_entry(config.wiring.kind).build(setup, 1 + config.sync.delay)
    wiring = wirings[0] if len(wirings) == 1 else DelayedUpdate(setup.peer, setup.stage, wirings, config.delay)
    if config.wiring.rebalance_s:
        return LoadReporter(wiring, config.wiring.rebalance_s / LOAD_REPORTS_A_PERIOD)
    return wiring


def build_coordinator(
    config: RunConfig,
    plan: Plan,
    start: RunStart,
    durable_state: DurableState | None = None,
    balance: ByNumber | None = None,
) -> Coordinator:
    """The coordinator of a run of this plan; with `durable_state`, the successor of one that died. `balance`
    decides which peers change stages, if the config does not say so."""
    check(config, plan)
    role = wiring_entry(config.wiring.kind).workers
    coordinator_config = CoordinatorConfig(
        run=start.run,
        fingerprint=_fingerprint(config, plan, start),
        stage_of={peer: plan.seat(peer)[0] for peer in plan.peers},
        n_stages=plan.n_stages,
        start_version=start.checkpoint.version,
        start_generation=start.checkpoint.generation,
        n_steps=config.train.steps,
        on_nonfinite=config.train.on_nonfinite,
        tokens_per_sample=config.seq_lengths,
        heartbeat_s=config.net.heartbeat_s,
        deadline_floor_s=config.net.deadline_floor_s,
        waits=config.wiring.on_stage_lost == "wait",
        last_term=start.last_term,
        stage_grace_s=config.wiring.stage_grace_s,
        delay_steps=config.sync.delay,
        start_parts=start.checkpoint.parts,
        start_reseeds=start.checkpoint.n_reseeds,
        n_copies=config.train.checkpoint_copies,
        revoked=start.revoked,
        join_rule=config.wiring.join_rule,
        workers=role and {worker: (plan.seat(worker)[0], role.server_of(plan, worker)) for worker in plan.workers},
        job={"config": json.dumps(serialize.write(config)), "plan": json.dumps(to_json(plan))},
    )
    if balance is None and config.wiring.rebalance_s:
        rule = Algorithm2 if config.wiring.rebalance_rule == "algorithm2" else Rebalancer
        balance = rule(config.wiring.rebalance_s, config.wiring.rebalance_moves)
    agreement = sync_entry(config.sync.kind).build_agreement(coordinator_config, config, plan)
    return Coordinator(coordinator_config, agreement, durable_state, balance)


def fingerprint(config: RunConfig, plan: Plan, data_checksum: str) -> str:
    """A text that peers compare to know that they run the same config, plan and tokens."""
    return f"config {config.fingerprint}, plan {plan.fingerprint}, tokens {data_checksum[:16]}"


def _fingerprint(config: RunConfig, plan: Plan, start: RunStart) -> str:
    return fingerprint(config, plan, start.data_checksum)
