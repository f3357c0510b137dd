"""All-reduce in few bytes: replicas apply the sum of rounded gradients, rounded once, and stay equal. What rounding has
lost is made up for once, whatever happens to a round."""

import functools
from collections import Counter, defaultdict
from dataclasses import replace

import jax
import ml_dtypes
import numpy as np
import optax
import pytest
from test_equivalence import KINDS, Tokens, elastic, gradient_of, train_in_pieces
from test_equivalence import functions_of as functions_of  # a fixture

from jaxdt.build import RunStart, build_coordinator, build_peers
from jaxdt.model.base import init_stage
from jaxdt.model.vectors import gradient_tree
from jaxdt.protocol import events as ev
from jaxdt.protocol.round_id import RoundId, RoundKind
from jaxdt.run import config as run_config
from jaxdt.run.codec import parse
from jaxdt.run.network import Link
from jaxdt.runtime.storage.entries import split_entries
from jaxdt.runtime.storage.gradient_slices import GradientSlices
from jaxdt.runtime.storage.owed import Debtor, read_owed, write_owed
from jaxdt.runtime.storage.store import Store, stage_functions
from jaxdt.sim.cluster import Simulation
from jaxdt.sim.faults import CRASH, Fault
from jaxdt.sim.sim_peer import Environment, SimPeer
from jaxdt.sync.error_feedback import ErrorFeedback
from jaxdt.sync.exchange import sharding, slice_elements

pytestmark = pytest.mark.xdist_group("rounded_gradients")

SEED, SIZE, N_MICROBATCHES, N_STEPS, LR = 3, 2, 5, 5, 0.3
N_SAMPLES = SIZE * N_MICROBATCHES
SLICE_BYTES, BLOCK = 4096, 256
MODEL = dict(preset="debug", n_layers=2, d_model=16, n_heads=2, d_ff=32, max_len=16, vocab_size=64)
WIRE = {"none": 4, "bf16": 2, "int8": 1 + 4 / BLOCK}  # bytes of a number


def make_config(codec, stages, head, delay=0, **train):
    return run_config.parse(
        dict(
            model=MODEL | {"tied_head": head == "tied"},
            plan=dict(stages=stages, pipelines=2, microbatches=N_MICROBATCHES),
            train=dict(steps=N_STEPS, seed=SEED, microbatch_size=SIZE) | train,
            optim=dict(name="sgd", lr=LR, momentum=0.0, clip_norm=0.05),
            sync=dict(codec=codec, slice_bytes=SLICE_BYTES, delay=delay),
            net=dict(heartbeat_s=50.0, deadline_floor_s=1000.0),
        )
    )


@functools.cache
def compiled(config, plan, stage):
    return stage_functions(config, plan, stage)


def rounded(codec, numbers_n):
    """The numbers after one rounding, in plain numpy; blocks begin with the array."""
    if codec == "bf16":
        return numbers_n.astype(ml_dtypes.bfloat16).astype(np.float32)
    out_n = np.empty_like(numbers_n)
    for lo in range(0, len(numbers_n), BLOCK):
        block = numbers_n[lo : lo + BLOCK]
        scale = np.abs(block).max() / 127
        out_n[lo : lo + BLOCK] = np.rint(block / scale) * scale
    return out_n


def plain_losses_and_vector(codec, gives_back):
    """(losses, the parameters as a vector) of plain code that rounds each pipeline's sum over its samples, and the sum
    of both slice by slice. With `gives_back` a pipeline adds to its next sum what these roundings have lost."""
    config = make_config(codec, 1, "untied")
    plan = run_config.default_plan(config)
    vector_of = lambda tree: np.asarray(compiled(config, plan, 0).gradient_vectors(tree)["stage"])  # noqa: E731
    whole, losses, owed = init_stage(config.model, 0, 2, SEED), [], [0.0, 0.0]
    for step in range(N_STEPS):
        sent, loss = [], 0.0
        for pipeline in range(2):
            own = plan.microbatches(pipeline)
            batch = np.concatenate([Tokens().train_batch(SEED, step, m, SIZE, 16, N_MICROBATCHES) for m in own])
            (_, mean), gradient = gradient_of(config.model)(whole, batch)
            contribution = vector_of(gradient) * np.float32(len(batch)) + owed[pipeline]
            sent.append(rounded(codec, contribution))
            owed[pipeline] = gives_back * (contribution - sent[-1])
            loss += float(mean) * len(batch) / N_SAMPLES
        losses.append(loss)
        total = sent[0] + sent[1]
        shards = sharding(len(total), (0, 1), slice_elements(SLICE_BYTES), parse(codec).block)
        for (lo, hi), owner in shards.owner_of.items():
            part = rounded(codec, total[lo:hi])
            owed[owner] = owed[owner] + np.pad(gives_back * (total[lo:hi] - part), (lo, len(total) - hi))
            total[lo:hi] = part
        mean_tree = gradient_tree(config.model, 0, 2, whole, {"stage": total}, 1 / N_SAMPLES)
        norm = float(optax.tree.norm(mean_tree))
        whole = jax.tree.map(lambda leaf, change, s=min(1.0, 0.05 / norm): leaf - LR * s * change, whole, mean_tree)
    return losses, vector_of(whole)


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_replicas_train_as_plain_code_that_rounds_and_gives_back_does(codec):
    """A sum in another order may round to the next number of the codec; that is far less than what is given back."""
    config = make_config(codec, 1, "untied")
    losses, _, params, _ = train_in_pieces(config, compiled)
    expected, with_feedback = plain_losses_and_vector(codec, gives_back=1)
    assert losses == pytest.approx(expected, rel=1e-4)
    functions = compiled(config, run_config.default_plan(config), 0)
    vector = np.asarray(functions.gradient_vectors(params)["stage"])
    _, without = plain_losses_and_vector(codec, gives_back=0)
    assert np.linalg.norm(vector - with_feedback) < 0.1 * np.linalg.norm(vector - without)


@pytest.mark.parametrize(("stages", "head", "delay"), [(2, "tied", 0), (1, "untied", 1)])
def test_few_bytes_and_equal_replicas(stages, head, delay, monkeypatch):
    """train_in_pieces asserts that replicas end with equal bits."""
    n_bytes, params = Counter(), {}
    sent = Simulation._post

    def counting(self, src, post):
        n_bytes[codec] += sum(n for _, body, n in post.letters if isinstance(body, ev.Shard | ev.Reduced))
        sent(self, src, post)

    monkeypatch.setattr(Simulation, "_post", counting)
    for codec in WIRE:
        losses, _, params[codec], _ = train_in_pieces(make_config(codec, stages, head, delay), compiled)
    for codec in ("bf16", "int8"):
        assert n_bytes[codec] == pytest.approx(n_bytes["none"] * WIRE[codec] / 4, rel=0.01)
        differences = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), params["none"], params[codec])
        assert 1e-7 < max(jax.tree.leaves(differences)) < 3e-3
    assert 0 < n_bytes["int8"] <= 0.27 * n_bytes["none"]


class Ledger:
    """What all processes have laid out for each round, and the sums that were applied, in fp32."""

    def __init__(self, monkeypatch):
        self.slices: dict[int, GradientSlices] = {}
        self.laid_out: dict = defaultdict(dict)  # round -> peer -> gradient
        self.sums: dict = {}
        offer, update, init = GradientSlices.offer, Store._update, GradientSlices.__init__

        def note_init(slices, peer, *options):
            init(slices, peer, *options)
            self.slices[peer] = slices

        def note_offer(slices, round, vector):
            assert round.kind == RoundKind.GRADIENT
            self.laid_out[round][slices._peer] = np.array(vector)
            offer(slices, round, vector)

        def note_update(store, scale, rounds):
            self.sums |= {round: store._slices.result(round) for round in rounds}
            return update(store, scale, rounds)

        monkeypatch.setattr(GradientSlices, "__init__", note_init)
        monkeypatch.setattr(GradientSlices, "offer", note_offer)
        monkeypatch.setattr(Store, "_update", note_update)

    def left(self, stage):
        """(the sum of all gradients that count, the same less what was applied, what all peers owe)."""
        rounds = [round for round in self.sums if round.stage == stage]
        gradients = sum(sum(self.laid_out[round].values()) for round in rounds)
        owed = [self._owed(peer, stage) for peer in self.slices]
        return gradients, gradients - sum(self.sums[round] for round in rounds), sum(owed)

    def _owed(self, peer, stage):
        """One that is lost may not have heard that a round counts to which it has contributed."""
        feedback = self.slices[peer].feedback
        feedback.commit([round for round in sorted(self.sums) if round.stage == stage])
        return sum(error for (of_stage, _), error in feedback.of_state.items() if of_stage == stage)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("at_s", [57.0, 58.5, 60.0, 61.5])
def test_all_gradients_are_applied_or_owed_once_whatever_is_lost(at_s, delay, functions_of, monkeypatch):  # noqa: F811
    """A peer of three is lost in mid-step, and what it has not contributed is redone."""
    ledger = Ledger(monkeypatch)
    config = elastic(2, 3)
    config = replace(config, sync=replace(config.sync, codec="int8", delay=delay))
    train_in_pieces(config, functions_of, faults=[Fault(at_s, CRASH, 1)])
    for stage in (-1, 0, 1):
        gradients, missing, owed = ledger.left(stage)
        assert np.abs(owed).max() > 0
        np.testing.assert_allclose(missing, owed, atol=3e-6 * np.abs(gradients).max())


def test_some_of_these_moments_are_in_mid_round(functions_of, monkeypatch):  # noqa: F811
    """Else no round above would be made again."""
    ledger = Ledger(monkeypatch)
    config = elastic(2, 3)
    config = replace(config, sync=replace(config.sync, codec="int8"))
    for at_s in (57.0, 58.5, 60.0, 61.5):
        train_in_pieces(config, functions_of, faults=[Fault(at_s, CRASH, 1)])
    assert ledger.laid_out.keys() > ledger.sums.keys()


# -------------------------------------------------------------------------------------------------------- checkpoints


def losses_from(version, config, folder, with_owed=True):
    """The losses of all steps from a version on, of a run that begins with the checkpoint of it; `folder` gets the
    checkpoints that the run writes, and what members owe with them."""
    plan = run_config.default_plan(config)
    start = RunStart("r", ev.Checkpoint(version, 0, ()))
    stores = {}

    def load_entries(version, parts, names):
        found = {}
        for stage in range(plan.n_stages):
            found |= np.load(folder / f"{version}-{stage}.npy", allow_pickle=True).item()
        return ((name, found[name]) for name in names)

    def load_owed(version, parts, debtor):
        return read_owed([folder / str(version)] if with_owed else [], debtor, "r", 0)

    def write(now_s, peer, event, actions):
        for action in actions:
            if isinstance(action, ev.WriteOwed):
                write_owed(folder / str(action.version), stores[peer].debtor, "r", action.generation, stores[peer].owed)
            if isinstance(action, ev.WriteCheckpoint):
                entries = jax.device_get(split_entries(stores[peer].state_of(action.version)))
                np.save(folder / f"{action.version}-{plan.seat(peer)[0]}.npy", entries)

    for peer in plan.peers:
        stores[peer] = Store(
            config, plan, peer, Tokens(), compiled(config, plan, plan.seat(peer)[0]), load_entries, load_owed
        )
        stores[peer].restore(ev.Restore(version, 0))
    machines = build_peers(config, plan, start)
    peers = {p: SimPeer(m, stores[p], f"h{p}", dict.fromkeys(KINDS, 1.0)) for p, m in machines.items()}
    environment = Environment(lambda src, dst: Link(0.1, 1e-4), cores={peer.host: 1 for peer in peers.values()})
    outcome = Simulation(build_coordinator(config, plan, start), peers, environment, observer=write).run()
    assert outcome.stopped[ev.COORDINATOR].code == 0, outcome.stopped[ev.COORDINATOR].reason
    return [report.loss for _, _, report in outcome.reports if report.kind == "step"]


@pytest.mark.parametrize("delay", [0, 1])
def test_a_run_that_was_stopped_has_the_losses_of_one_that_was_not(delay, tmp_path):
    config = make_config("int8", 2, "tied", delay, steps=8, checkpoint_every_steps=3)
    calm = losses_from(0, config, tmp_path)
    assert len(calm) == 8
    assert losses_from(3, config, tmp_path) == calm[3:]
    assert losses_from(6, config, tmp_path) == calm[6:]
    assert losses_from(3, config, tmp_path, with_owed=False) != calm[3:]


def test_averaging_groups_take_no_debts_of_gradients():
    """A run goes on with groups from a checkpoint of an all-reduce run, beside which stands what its members owe."""
    config = make_config("int8", 1, "untied")
    config = replace(config, sync=replace(config.sync, kind="groups", groups=run_config.GroupsConfig(match="all")))
    plan = run_config.default_plan(config)
    functions, asked = compiled(config, plan, 0), []
    begun = split_entries((functions.init(SEED), functions.init_optimizer(functions.init(SEED))))
    load_owed = lambda *which: asked.append(which) or {(0, 0): np.ones(3, np.float32)}  # noqa: E731
    store = Store(config, plan, 0, Tokens(), functions, lambda version, parts, names: begun.items(), load_owed)
    store.restore(ev.Restore(3, 0))
    assert store.owed == {} and not asked


def test_what_is_owed_is_read_by_those_who_wrote_it_alone(tmp_path, capsys):
    debtor, owed = Debtor(3, 0, 2, 2), {(0, 1): np.ones(3, np.float32), (-1, 0): np.zeros(2, np.float32)}
    write_owed(tmp_path, debtor, "r", 4, owed)
    found = read_owed([tmp_path / "elsewhere", tmp_path], debtor, "r", 4)
    assert found.keys() == owed.keys() and all(np.array_equal(found[slot], owed[slot]) for slot in owed)
    others = [
        (replace(debtor, peer=1), "r", 4),
        (replace(debtor, hi=3), "r", 4),
        (replace(debtor, n_under_way=1), "r", 4),
    ]
    for other in (*others, (debtor, "s", 4), (debtor, "r", 5)):
        assert read_owed([tmp_path], *other) == {}
    assert not capsys.readouterr().out
    path = tmp_path / "owed_3.npz"
    path.write_bytes(path.read_bytes()[:-40])
    assert read_owed([tmp_path], debtor, "r", 4) == {}
    assert capsys.readouterr().out.startswith(f"{path}: damaged (")


def test_a_contribution_makes_up_for_none_of_a_later_step():
    """A worker may send for the later of two steps first. That one may still be void when the earlier one counts."""

    def contribution(step, admission=7):
        return RoundId(RoundKind.CONTRIBUTION, 0, step, peer=4, view=admission, attempt=1)

    feedback = ErrorFeedback[str](2)
    feedback.lose(contribution(1), "of step 1")
    assert feedback.owed(contribution(0)) is None and feedback.owed(contribution(3)) == "of step 1"
    feedback.lose(contribution(0), "of step 0")
    assert feedback.owed(contribution(2)) == "of step 0" and feedback.owed(contribution(1)) == "of step 1"
    feedback.lose(contribution(2, admission=8), "of another admission")
    assert feedback.owed(contribution(2)) is None and feedback.owed(contribution(3)) is None
