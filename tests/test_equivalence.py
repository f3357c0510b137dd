"""The central test: any cut, placement, schedule and rematerialisation trains the same model as one process does.

The runs are the machines and the store under virtual time, with peers of unequal speed and links of unequal latency, so
that results arrive in another order than they were asked for. The one process is plain code: the whole model in one
`value_and_grad` over the mean loss of the whole batch, clipped by optax, updated by optax."""

import functools
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference_models
from report_fields import report_fields

from jaxdt.build import RunStart, build_coordinator, build_newcomer, build_peer, build_worker
from jaxdt.membership.coordinator_config import load_durable_state
from jaxdt.membership.rebalance_api import ByNumber, Move
from jaxdt.model.base import init_stage
from jaxdt.protocol import events as ev
from jaxdt.run import config as run_config
from jaxdt.run import serialize
from jaxdt.run.network import Link
from jaxdt.run.optim import OptimConfig
from jaxdt.run.plan import Plan
from jaxdt.run.work import WorkKind
from jaxdt.runtime.storage.store import Store, stage_functions
from jaxdt.sim.cluster import Simulation
from jaxdt.sim.faults import CRASH, JOIN, LEAVE, PAUSE, RESTART, Fault, draw
from jaxdt.sim.sim_peer import Environment, ProcessFactory, SimPeer
from jaxdt.testing.case import RandomMoves

pytestmark = pytest.mark.xdist_group("stage_functions")

START = RunStart("r")

# Virtual seconds enough for what happens on the way.
N_STEPS = 12
# Where nothing does: a mistake in a sum, a version or a moment shows by the third step. This is three updates more than
# the warm-up has.
FEW_STEPS = 8
SEED = 3
KINDS = (WorkKind.FORWARD, WorkKind.BACKWARD, WorkKind.EVALUATE, WorkKind.GATHER, WorkKind.UPDATE)
MODEL = dict(preset="debug", n_layers=4, d_model=32, n_heads=2, d_ff=64, max_len=16, vocab_size=64)
LLAMA = MODEL | dict(family="llama", n_heads=4, n_kv_heads=2, window=8, qk_norm=True, qkv_bias=True)
LINEN = dict(
    family="configs.custom_model.own_linen:build", options='{"width": 32, "layers": 2}', max_len=4, vocab_size=64
)
# With an auxiliary loss that weighs as much as the cross-entropy.
MOE = MODEL | dict(family="moe", n_heads=4, n_kv_heads=2, n_experts=4, n_experts_per_token=2, router_aux_coef=1.0)
BATCH = 2
# The gradient of a key's bias is zero but for rounding (softmax forgets it); with a smaller eps Adam would turn that
# noise into steps of full size, different in every program.
ADAMW = OptimConfig("adamw", lr=3e-3, eps=1e-6, weight_decay=0.1, clip_norm=0.5, warmup_steps=5)
SGD = OptimConfig("sgd", lr=0.1, momentum=0.9, clip_norm=0.5)
LAYERS = {1: "4", 2: "1,3", 3: "1,2,1", 4: "1,1,1,1"}
# An odd number, so that replicas differ in their share of the samples.
N_MICROBATCHES = 5

# The last stage runs each forward in its backward: one that is alone computes the same in either schedule, and keeps
# nothing. Of the rest any two of the five options come in all their combinations.
CASES = [
    (1, 2, "1f1b", "recompute", "tied"),
    (2, 1, "gpipe", "dots", "tied"),
    (2, 2, "1f1b", "recompute", "untied"),
    (3, 1, "1f1b", "dots", "untied"),
    (3, 2, "gpipe", "recompute", "tied"),
    (4, 1, "gpipe", "recompute", "untied"),
    (4, 2, "1f1b", "dots", "tied"),
]
GRID = [pytest.param(*case, MODEL, "", id="{}x{}-{}-{}-{}".format(*case)) for case in CASES]
# Another family has the same schedules and replicas, tests/model/test_stage.py has its options and the other
# rematerialisation, and tests/sync/test_frozen.py a module of nnx: one cut is enough of each.
GRID += [
    pytest.param(2, 1, "1f1b", "recompute", None, LINEN, "1,1", id="own_linen"),
    pytest.param(3, 1, "1f1b", "recompute", "tied", LLAMA | {"n_layers": 3}, "1,1,1", id="llama"),
    pytest.param(2, 2, "1f1b", "recompute", "tied", MOE | {"n_layers": 3}, "2,1", id="moe"),
    pytest.param(
        2,
        1,
        "1f1b",
        "recompute",
        "tied",
        MODEL | dict(n_layers=3, compression="bottleneck2", compression_after=(1, 2)),
        "1,2",
        id="compressed at the cut and off it",
    ),
]


class Tokens:
    """Random text in which a token follows from the one before it more often than not, so that the loss falls."""

    counts_all = True

    def train_batch(self, seed, step, microbatch, microbatch_size, seq_len, n_microbatches):
        rng = np.random.default_rng((seed, step, microbatch))
        jumps = rng.integers(0, 64, (microbatch_size, seq_len + 1)) * (rng.random((microbatch_size, seq_len + 1)) < 0.3)
        return ((np.cumsum(jumps + 1, axis=1)) % 64).astype(np.int32)

    def n_eval_batches(self, microbatch_size, seq_len):
        return 3

    def eval_batch(self, index, microbatch_size, seq_len):
        return self.train_batch(99, 0, index, microbatch_size, seq_len, 3)


def make_config(
    stages,
    pipelines,
    schedule="1f1b",
    remat="recompute",
    head="untied",
    optim=ADAMW,
    layers=None,
    model=MODEL,
    **options,
):
    plan = dict(layers=layers or LAYERS[stages], schedule=schedule, microbatches=N_MICROBATCHES)
    train = dict(steps=N_STEPS, seed=SEED, microbatch_size=BATCH)
    return run_config.parse(
        dict(
            model=model if head is None else model | {"tied_head": head == "tied"},
            plan=plan | dict(stages=stages, pipelines=pipelines),
            train=train | options,
            optim=serialize.write(optim),
            sync=dict(slice_bytes=4096),
            net=dict(heartbeat_s=50.0, deadline_floor_s=1000.0),
            remat=remat,
        )
    )


# ----------------------------------------------------------------------------------------------------- the two sides


COMPILED = {}


@pytest.fixture(scope="session")
def functions_of():
    """Stage functions by what they depend on, compiled once for all cases. Another rematerialisation changes forward
    and backward only, another optimizer the update only, and just the ends of the model know of a tied head."""

    def of(config, plan, stage):
        ends = stage in (0, plan.n_stages - 1)
        remat = "recompute" if stage == plan.n_stages - 1 else config.remat
        model = config.model
        if not ends and hasattr(model, "tied_head"):
            model = replace(model, tied_head=False)
        key = (plan.stages[stage], model, config.optim, remat)
        if key not in COMPILED:
            made = stage_functions(config, plan, stage)
            if remat == "dots":
                base = of(replace(config, remat="recompute"), plan, stage)
                made = replace(base, forward=made.forward, backward=made.backward)
            elif config.optim != ADAMW:
                base = of(replace(config, optim=ADAMW), plan, stage)
                made = replace(base, update=made.update, init_optimizer=made.init_optimizer)
            COMPILED[key] = made
        return COMPILED[key]

    return of


@functools.cache
def loss_of(model):
    return jax.jit(partial(mean_loss, model))


@functools.cache
def gradient_of(model):
    """(params, tokens) -> ((what is minimised, the loss that is reported), gradient), each a mean over samples."""

    def objective(params, tokens_BT):
        sums = reference_models.objective(model, params, tokens_BT[:, :-1], tokens_BT[:, 1:])
        return tuple(total / tokens_BT.shape[0] for total in sums)

    return jax.jit(jax.value_and_grad(objective, has_aux=True))


@pytest.fixture(scope="session")
def one_process():
    """(config) -> (losses, gradient norms, final parameters) of the plain run, once per what it depends on."""

    def of(config):
        n_steps = config.train.steps
        long = max(N_STEPS, n_steps)
        of = (config.model, config.optim, config.seq_lengths, config.sync)
        losses, norms, versions = train_in_one_process(*of, long)
        return losses[:n_steps], norms[:n_steps], versions[n_steps]

    return of


def plain_optimizer(optim):
    """The same options, written with optax's own parts: decay on matrices, a linear warm-up, clipping first."""
    matrices = partial(jax.tree.map, lambda leaf: leaf.ndim >= 2)
    lr = lambda count: optim.lr * jnp.minimum(1.0, (jnp.float32(count) + 1.0) / max(1, optim.warmup_steps))  # noqa: E731
    clip = optax.clip_by_global_norm(optim.clip_norm)
    if optim.name == "sgd":
        return optax.chain(clip, optax.sgd(lr, momentum=optim.momentum))
    decay = dict(weight_decay=optim.weight_decay, mask=matrices)
    make = {"adamw": optax.adamw, "lamb": optax.lamb}[optim.name]
    return optax.chain(clip, make(lr, optim.b1, optim.b2, optim.eps, **decay))


def mean_loss(model, params, tokens_BT):
    return reference_models.loss_sum(model, params, tokens_BT[:, :-1], tokens_BT[:, 1:]) / tokens_BT.shape[0]


@functools.cache
def update_of(optim):
    """(the initial state of the optimizer, one update of it)."""
    rule = plain_optimizer(optim)

    @jax.jit
    def update(params, state, gradient):
        with jax.numpy_dtype_promotion("standard"):
            change, state = rule.update(gradient, state, params)
        return optax.tree.norm(gradient), optax.apply_updates(params, change), state

    return jax.jit(rule.init), update


def where_frozen(frozen, tree, other):
    """The tree, with the leaves of the other one that are not trained."""

    def chosen(keys, leaf, other_leaf):
        entry, _, path = jax.tree_util.keystr(keys, simple=True, separator="/").partition("/")
        return other_leaf if (entry, path) in frozen else leaf

    return jax.tree_util.tree_map_with_path(chosen, tree, other)


@functools.cache
def train_in_one_process(model, optim, lengths, sync, n_steps):
    """(losses, gradient norms, parameters before the first and after each of n_steps steps). With a delay, steps from
    the second on compute with the parameters of one update before (SWARM App. E)."""
    data, loss_and_gradient, (initial_state, update) = Tokens(), gradient_of(model), update_of(optim)
    frozen = model.facts.frozen
    params = init_stage(model, 0, model.facts.n_layers, SEED)
    state = initial_state(params)
    losses, norms, versions = [], [], [params]
    for step in range(n_steps):
        seq_len = lengths.at(step)
        parts = [data.train_batch(SEED, step, m, BATCH, seq_len, N_MICROBATCHES) for m in range(N_MICROBATCHES)]
        lag = sync.delay if step >= max(sync.delay_after_steps, 1) else 0
        (_, loss), gradient = loss_and_gradient(versions[step - lag], np.concatenate(parts))
        if frozen:
            gradient = where_frozen(frozen, gradient, jax.tree.map(jnp.zeros_like, gradient))
        norm, updated, state = update(params, state, gradient)
        params = where_frozen(frozen, updated, params) if frozen else updated
        versions.append(params)
        losses.append(float(loss))
        norms.append(float(norm))
    return losses, norms, versions


def train_in_pieces(
    config,
    functions_of,
    plan=None,
    faults=(),
    balance=None,
    are_equal=np.testing.assert_array_equal,
    requests=(),
    link=None,
    seconds_of=lambda peer: 1 + peer / 3,
    data=None,
):
    """(losses, gradient norms, {entry: parameters}, outcome); every replica of a stage must end with equal bits, or as
    `are_equal` asserts. `requests`: what an operator asks for, each with its time. Links are slow and unequal, unless
    `link` says otherwise."""
    plan = plan or run_config.default_plan(config)
    stores, stage_of = {}, {}

    def make_peer(peer, stage=None):
        """A process of its own each time; newcomers are told their stage."""
        here = plan if stage is None else plan.with_newcomer(peer, stage)
        stage_of[peer] = here.seat(peer)[0]
        stores[peer] = Store(config, here, peer, data or Tokens(), functions_of(config, plan, stage_of[peer]))
        is_worker = plan.is_worker(peer)
        build = build_worker if is_worker else build_peer
        newcomer = None if stage is None else build_newcomer(config, plan, peer, stage, START)
        machine = newcomer or build(config, plan, peer, START)
        seconds = dict.fromkeys(KINDS, seconds_of(peer))
        return SimPeer(machine, stores[peer], f"h{peer}", seconds, is_outside=is_worker)

    def make_coordinator(disk):
        return build_coordinator(config, plan, START, durable_state=load_durable_state(disk))

    peers = {peer: make_peer(peer) for peer in (*plan.peers, *plan.workers)}
    link = link or (lambda src, dst: Link(0.1 + (src * 7 + dst * 3) % 5, 1e-4))
    environment = Environment(link, cores={peer.host: 1 for peer in peers.values()})
    coordinator = build_coordinator(config, plan, START, balance=balance)
    processes = ProcessFactory(make_peer, make_coordinator)
    simulation = Simulation(coordinator, peers, environment, faults, processes=processes)
    for at_s, request in requests:
        event = ev.Received(ev.Header("", 0, 0, ev.OPERATOR_IDS), request)
        simulation._queue.at(at_s, simulation._handle_event, (ev.COORDINATOR, event))
    outcome = simulation.run()
    assert outcome.stopped[ev.COORDINATOR].code == 0, outcome.stopped[ev.COORDINATOR].reason
    alive = {peer for peer, stop in outcome.stopped.items() if stop.code == 0 and "left" not in stop.reason}
    assert faults or requests or alive >= {ev.COORDINATOR, *plan.peers}
    *_, last = (view["members"] for view in report_fields(outcome, "view") if "joining" in view)
    alive &= set(last)  # who is on its way to a stage when the run ends has nothing
    params = {}
    for stage in range(plan.n_stages):
        row = [peer for peer in sorted(stage_of) if peer in alive and stage_of[peer] == stage]
        replicas = [jax.device_get(stores[peer].parameter_versions.params) for peer in row]
        for other in replicas[1:]:
            jax.tree.map(are_equal, replicas[0], other)
        for name, value in replicas[0].items():
            if name in params:
                are_copies = partial(np.testing.assert_array_equal, err_msg=f"two copies of {name} drifted apart")
                jax.tree.map(are_copies, params[name], value)
            params[name] = value
    steps = rows_of(outcome)
    assert [fields["step"] for fields in steps] == list(range(config.train.steps))
    return [f["loss"] for f in steps], [f["gradient_norm"] for f in steps], params, outcome


def rows_of(outcome):
    """The rows as metrics.jsonl has them."""
    rows = []
    for _, _, report in outcome.reports:
        if report.kind == "rollback":
            del rows[report.to :]
        elif report.kind == "step" and report.step == len(rows):
            rows.append(report.fields)
    return rows


def assert_held_out_losses(config, outcome):
    """The row of a step has the loss of the whole model after that step, over the microbatches that there are in turn;
    so has the last row, whose parameters are those of the checkpoint that is kept."""
    every, n_steps = config.train.eval_every_steps, config.train.steps
    measured = {row["step"] + 1: row["eval_loss"] for row in rows_of(outcome) if "eval_loss" in row}
    due = [n for n in range(1, n_steps + 1) if every and (n % every == 0 or n == n_steps)]
    assert list(measured) == due
    options = config.model, config.optim, config.seq_lengths, config.sync
    _, _, versions = train_in_one_process(*options, max(N_STEPS, n_steps))
    batches = [Tokens().eval_batch(m % 3, BATCH, config.seq_len) for m in range(config.train.eval_microbatches)]
    expected = [float(loss_of(config.model)(versions[n], np.concatenate(batches))) for n in due]
    np.testing.assert_allclose(list(measured.values()), expected, rtol=1e-4)


def relative_l2(got, expected):
    square = lambda tree: sum(float(np.sum(np.square(leaf, dtype=np.float64))) for leaf in jax.tree.leaves(tree))  # noqa: E731
    difference = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), got, dict(expected))
    return (square(difference) / square(expected)) ** 0.5


def assert_same_training(config, functions_of, one_process, plan=None, faults=(), balance=None, **how):
    losses, norms, params, outcome = train_in_pieces(config, functions_of, plan, faults, balance, **how)
    expected_losses, expected_norms, expected_params = one_process(config)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    np.testing.assert_allclose(norms, expected_norms, rtol=1e-4)
    assert relative_l2(params, expected_params) < 1e-4
    assert_held_out_losses(config, outcome)
    return outcome


# ---------------------------------------------------------------------------------------------------------- the grid


@pytest.mark.parametrize(("stages", "pipelines", "schedule", "remat", "head", "model", "layers"), GRID)
def test_every_cut_trains_as_one_process_does(
    stages, pipelines, schedule, remat, head, model, layers, functions_of, one_process
):
    config = make_config(stages, pipelines, schedule, remat, head, layers=layers, model=model, steps=FEW_STEPS)
    assert_same_training(config, functions_of, one_process)


def test_the_reference_run_learns_and_is_clipped(one_process):
    """Without this the grid could agree on nothing."""
    for head in ("tied", "untied"):
        losses, norms, _ = one_process(make_config(1, 1, head=head))
        assert losses[-1] < 0.9 * losses[0]
        assert min(norms) > 0 and max(norms) > 2 * ADAMW.clip_norm


def test_sgd_with_momentum(functions_of, one_process):
    config = make_config(2, 2, head="tied", optim=SGD)
    assert_same_training(config, functions_of, one_process)
    assert max(one_process(config)[1]) > SGD.clip_norm


def test_a_plan_with_very_unequal_shares_and_more_in_flight(functions_of, one_process):
    """Pipelines weigh 4 to 1; peers sit anywhere; stage 0 runs as far ahead as it can."""
    plan = Plan(4, ((0, 1), (1, 4)), ((3, 0), (1, 2)), (4, 1), in_flight=(4, 2))
    assert_same_training(make_config(2, 2), functions_of, one_process, plan)


def test_held_out_losses_equal_those_of_the_whole_model(functions_of, one_process):
    """After every 5th step and the last, over 5 microbatches of the 3 that there are."""
    config = make_config(2, 2, head="tied", eval_every_steps=5, eval_microbatches=5)
    outcome = assert_same_training(config, functions_of, one_process)
    measured = [row["eval_loss"] for row in rows_of(outcome) if "eval_loss" in row]
    assert len(measured) == 3 and measured[-1] < 0.95 * measured[0]


def test_stochastic_wiring_trains_as_one_process_does(functions_of, one_process):
    """Whatever the routes: the update is the one of the whole batch. Held-out losses ride along."""
    config = make_config(3, 2, head="tied", eval_every_steps=8, eval_microbatches=5)
    wiring = run_config.WiringConfig("swarm", routers=6, window=3)
    assert_same_training(replace(config, wiring=wiring), functions_of, one_process)


UNEQUAL = {
    2: Plan(4, ((0, 3), (3, 4)), ((0, 3, 1), (2,)), (N_MICROBATCHES,)),
    3: Plan(4, ((0, 1), (1, 3), (3, 4)), ((4,), (0, 2, 5), (1, 3)), (N_MICROBATCHES,)),
}


@pytest.mark.parametrize(("stages", "routers", "head"), [(2, 1, "untied"), (3, 6, "tied")])
def test_unequal_numbers_of_replicas_train_as_one_process_does(stages, routers, head, functions_of, one_process):
    config = make_config(stages, 1, head=head, eval_every_steps=8, eval_microbatches=5)
    config = replace(config, wiring=run_config.WiringConfig("swarm", routers))
    assert_same_training(config, functions_of, one_process, UNEQUAL[stages])


def test_a_lost_replica_of_unequal_ones_changes_nothing(functions_of, one_process):
    config = elastic(3, 1)
    faults = [Fault(60.0, CRASH, 2), Fault(90.0, RESTART, 2), Fault(120.0, JOIN, 0)]
    assert_same_training(config, functions_of, one_process, UNEQUAL[3], faults=faults)


@pytest.mark.parametrize(("seed", "head"), [(0, "tied"), (1, "untied")])
def test_peers_that_are_lost_change_nothing(seed, head, functions_of, one_process):
    """Crashes and pauses at any moment, as long as each stage keeps a replica: the same losses, the same parameters."""
    config = elastic(2, 3, head)
    faults = draw(seed, run_config.default_plan(config).placement, 3, 120.0, 20.0)
    assert_same_training(config, functions_of, one_process, faults=faults)


def elastic(stages, replicas, head="tied"):
    config = make_config(stages, replicas, head=head, eval_every_steps=8, eval_microbatches=5)
    wiring, net = run_config.WiringConfig("swarm", routers=2), run_config.NetConfig(1.0, 4.0)
    return replace(config, wiring=wiring, net=net)


def test_a_newcomer_gets_the_state_and_computes(functions_of, one_process):
    outcome = assert_same_training(elastic(2, 2), functions_of, one_process, faults=[Fault(60.0, JOIN, 0)])
    (report,) = report_fields(outcome, "download")
    assert report["bytes"] > 0 and outcome.stopped[4].code == 0


def test_who_leaves_costs_nothing(functions_of, one_process):
    outcome = assert_same_training(elastic(2, 2), functions_of, one_process, faults=[Fault(60.0, LEAVE, 0)])
    assert "left" in outcome.stopped[0].reason and not report_fields(outcome, "lost")


def test_what_an_operator_asks_for_changes_no_loss(functions_of, one_process):
    """A pause with an eviction in it, a checkpoint, a replica that is drained, one more pause over a restart."""
    asked = [
        (30.0, ev.OperatorRequest("pause")),
        (50.0, ev.OperatorRequest("evict", 3)),
        (90.0, ev.OperatorRequest("resume")),
        (100.0, ev.OperatorRequest("checkpoint")),
        (120.0, ev.OperatorRequest("drain", 0)),
        (150.0, ev.OperatorRequest("pause")),
        (200.0, ev.OperatorRequest("resume")),
    ]
    faults = [Fault(160.0, CRASH, ev.COORDINATOR), Fault(170.0, RESTART, ev.COORDINATOR)]
    outcome = assert_same_training(elastic(2, 2), functions_of, one_process, faults=faults, requests=asked)
    assert [fields["command"] for fields in report_fields(outcome, "operator")] == [what.command for _, what in asked]
    committed_s = [at_s for at_s, _, report in outcome.reports if report.kind == "step" and report.step_s > 0]
    for begin_s, end_s in ((31.0, 90.0), (151.0, 200.0)):
        assert not [at_s for at_s in committed_s if begin_s < at_s < end_s]
    assert {peer: stop.code for peer, stop in outcome.stopped.items()} == dict.fromkeys(range(-1, 4), 0) | {3: 3}
    assert "left the run" in outcome.stopped[0].reason and "evicted by an operator" in outcome.stopped[3].reason
    asked_for, last = sorted({fields["version"] for fields in report_fields(outcome, "checkpoint")})
    assert 0 < asked_for < last == N_STEPS


def test_a_crashed_peer_that_is_started_again_joins(functions_of, one_process):
    faults = [Fault(60.0, CRASH, 1), Fault(90.0, RESTART, 1)]
    outcome = assert_same_training(elastic(2, 2), functions_of, one_process, faults=faults)
    assert outcome.stopped[1].code == 0 and len(report_fields(outcome, "download")) == 1


def test_who_was_paused_comes_back(functions_of, one_process):
    outcome = assert_same_training(elastic(2, 2), functions_of, one_process, faults=[Fault(60.0, PAUSE, 1, 60.0)])
    assert outcome.stopped[1].code == 0 and report_fields(outcome, "evicted")


def test_a_coordinator_that_is_started_again_goes_on(functions_of, one_process):
    faults = [Fault(60.0, CRASH, ev.COORDINATOR), Fault(80.0, RESTART, ev.COORDINATOR)]
    assert_same_training(elastic(2, 2), functions_of, one_process, faults=faults)


def test_a_stage_that_has_lost_everyone_waits_for_a_newcomer(functions_of, one_process):
    """Back to the start, the only checkpoint there is; the steps are done again, with other samples."""
    config = elastic(2, 2)
    (first, second), _ = run_config.default_plan(config).placement
    faults = [Fault(60.0, CRASH, first), Fault(70.0, CRASH, second), Fault(90.0, JOIN, 0)]
    losses, _, _, outcome = train_in_pieces(config, functions_of, faults=faults)
    (vacant,) = report_fields(outcome, "vacant")
    assert vacant["stage"] == 0 and vacant["checkpoint"] == 0
    assert report_fields(outcome, "rollback")[0]["again"] == [0]
    assert len(losses) == N_STEPS and losses[-1] < losses[0]


def test_tensors_beyond_the_budget_are_made_again(functions_of, one_process):
    """Three stages, a peer of the middle one dies late in a step; neighbours keep next to nothing."""
    config = elastic(3, 2)
    config = replace(config, wiring=replace(config.wiring, retain_bytes=0))
    middle = run_config.default_plan(config).placement[1][1]
    assert_same_training(config, functions_of, one_process, faults=[Fault(70.0, CRASH, middle)])


def drifting(victim, step, change):
    """A Store that changes the parameters of one peer by itself, once: when its share of `step` is computed."""

    class Drifting(Store):
        def __init__(self, config, plan, peer, *others):
            super().__init__(config, plan, peer, *others)
            self.is_victim = peer == victim

        def run(self, work, scale, rounds=()):
            if self.is_victim and (work.kind, work.step) == (WorkKind.GATHER, step):
                versions = self.parameter_versions
                versions.params = jax.tree.map(change, versions.params)
            return super().run(work, scale, rounds)

    return Drifting


def compared(every_steps):
    config = make_config(2, 2, head="tied")
    return replace(config, sync=replace(config.sync, check_every_steps=every_steps))


@pytest.fixture(scope="module")
def calm(functions_of):
    return train_in_pieces(compared(5), functions_of)


@pytest.mark.parametrize(("victim", "donor", "step"), [(2, 0, 10), (3, 1, 0)])
def test_a_replica_whose_parameters_went_wrong_takes_over_the_others(
    victim, donor, step, calm, functions_of, monkeypatch
):
    """By 1 %, and nothing but the comparison sees it. Afterwards the losses are those of the calm run, bit for bit."""
    monkeypatch.setitem(globals(), "Store", drifting(victim, step, lambda leaf: leaf * np.float32(1.01)))
    losses, norms, params, outcome = train_in_pieces(compared(5), functions_of)
    (repair,) = report_fields(outcome, "repair")
    assert (repair["peer"], repair["donor"], repair["version"]) == (victim, donor, step)
    assert repair["difference"] == pytest.approx(0.01, rel=0.4)
    assert (losses, norms) == calm[:2]
    jax.tree.map(np.testing.assert_array_equal, params, calm[2])


def test_without_a_comparison_nobody_notices(functions_of, monkeypatch):
    monkeypatch.setitem(globals(), "Store", drifting(2, 10, lambda leaf: leaf * np.float32(1.01)))
    calm = train_in_pieces(compared(0), functions_of, are_equal=lambda a, b: None)
    assert not report_fields(calm[3], "repair")
    with pytest.raises(AssertionError):
        train_in_pieces(compared(0), functions_of)


def test_replicas_that_differ_by_an_ulp_are_told_once_and_go_on(functions_of, one_process, monkeypatch):
    """Here one replica is off by an ulp from step 1 on, and stays so."""
    one_ulp = lambda leaf: jnp.nextafter(leaf, jnp.float32(np.inf))  # noqa: E731
    monkeypatch.setitem(globals(), "Store", drifting(2, 1, one_ulp))
    nearly = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4)
    losses, _, _, outcome = train_in_pieces(compared(5), functions_of, are_equal=nearly)
    (told,) = report_fields(outcome, "unequal_bits")
    assert (told["peer"], told["reference"], told["version"]) == (2, 0, 5) and told["difference"] < 1e-6
    assert not report_fields(outcome, "repair")
    np.testing.assert_allclose(losses, one_process(compared(5))[0], rtol=1e-5)


class Evening(ByNumber):
    """Peers move by number alone: links are slow here, and no work waits."""

    def moves(self, now_s, stages, at_work):
        src, dst = (pick(range(len(stages)), key=lambda s: len(stages[s])) for pick in (max, min))
        may = sorted(set(stages[src]) & set(at_work)) if len(stages[src]) > len(stages[dst]) + 1 else []
        return [Move(peer, src, dst) for peer in may[:1]]


def test_a_stage_that_has_lost_two_of_three_gets_a_peer_of_the_other(functions_of, one_process):
    config = elastic(2, 3)
    faults = [Fault(60.0, CRASH, peer) for peer in run_config.default_plan(config).placement[1][1:]]
    outcome = assert_same_training(config, functions_of, one_process, faults=faults, balance=Evening())
    (move,) = report_fields(outcome, "move")
    last = [fields for fields in report_fields(outcome, "view") if "joining" in fields][-1]
    assert (move["stage"], move["to_stage"]) == (0, 1) and sorted(last["members"].values()) == [0, 0, 1, 1]
    assert len(report_fields(outcome, "download")) == 1 and outcome.stopped[move["peer"]].code == 0


@pytest.mark.parametrize("seed", range(2))
def test_peers_that_change_stages_at_random_change_nothing(seed, functions_of, one_process):
    """Some are lost besides, and one joins."""
    config = elastic(3, 3)
    faults = draw(seed, run_config.default_plan(config).placement, 2, 200.0, 20.0, (CRASH, PAUSE))
    balance = RandomMoves(seed, every_s=60.0)
    how = dict(faults=[*faults, Fault(100.0, JOIN, 0)], balance=balance)
    outcome = assert_same_training(config, functions_of, one_process, **how)
    assert len(report_fields(outcome, "moving")) > 3
