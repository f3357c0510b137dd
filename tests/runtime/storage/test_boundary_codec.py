"""Codecs inside the engine: the same training as one process that quantises at the same boundaries, and bytes that are
as counted, in the simulator and on sockets."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
import test_equivalence as equivalence
from test_equivalence import functions_of, one_process  # noqa: F401
from transport_nodes import message_bytes, run_credential, start  # noqa: F401

from jaxdt.codec import base as codec
from jaxdt.model.base import apply_stage, init_stage
from jaxdt.model.batches import Batch
from jaxdt.model.stage import sum_sample_losses
from jaxdt.protocol import events as ev
from jaxdt.run import config as run_config
from jaxdt.run.codec import parse, wire_bytes
from jaxdt.run.errors import BadInput
from jaxdt.run.sizes import boundary_bytes
from jaxdt.run.work import Work, WorkKind
from jaxdt.runtime.storage.boundary_codec import BoundaryCodec
from jaxdt.runtime.storage.store import Store, stage_functions

pytestmark = pytest.mark.xdist_group("stage_functions")

ACT = ev.Key("act", 0, 1, 0)
N_STEPS = 6


def config_of(name, **options):
    config = equivalence.make_config(2, 1, steps=N_STEPS)
    return replace(config, codec=name, **options)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def quantised(name, x):
    """x as the receiver has it; the gradient is quantised the same way."""
    return codec.decode(parse(name), codec.encode(parse(name), x), x.shape, x.dtype)


quantised.defvjp(lambda name, x: (quantised(name, x), None), lambda name, _, g: (quantised(name, g),))


def loss_sum(config, plan, params, tokens_BT):
    x = tokens_BT[:, :-1]
    for lo, hi in plan.stages:
        x = apply_stage(config.model, lo, hi, np.float32, params, x)
        if hi < plan.n_layers:
            x = quantised(config.codec, x)
    return sum_sample_losses(x, Batch(tokens_BT))


def in_one_process(config, plan):
    """(losses, final parameters) of plain training, microbatch by microbatch, quantised at the boundaries of a plan."""
    n, batch_size = equivalence.N_MICROBATCHES, equivalence.BATCH
    params = init_stage(config.model, 0, config.model.n_layers, config.train.seed)
    initial_state, update = equivalence.update_of(config.optim)
    state, gradient_of, losses = initial_state(params), jax.jit(jax.value_and_grad(partial(loss_sum, config, plan))), []
    for step in range(N_STEPS):
        batch = partial(equivalence.Tokens().train_batch, config.train.seed, step)
        parts = [gradient_of(params, batch(m, batch_size, config.seq_len, n)) for m in range(n)]
        losses.append(sum(float(loss) for loss, _ in parts) / (n * batch_size))
        mean = jax.tree.map(lambda *leaves: sum(leaves) / (n * batch_size), *(gradient for _, gradient in parts))
        _, params, state = update(params, state, mean)
    return losses, params


def test_stages_train_as_one_process_that_quantises_at_the_same_boundaries(functions_of, one_process):  # noqa: F811
    """Sums in another order may flip a code here and there; training without the codec is much further away."""
    config = config_of("int8:64")
    plan = run_config.default_plan(config)
    losses, _, params, _ = equivalence.train_in_pieces(config, functions_of, plan)
    expected_losses, expected = in_one_process(config, plan)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    off, off_without = (equivalence.relative_l2(params, other) for other in (expected, one_process(config)[2]))
    assert off < 0.05 * off_without


# ------------------------------------------------------------------------------------------------------------ bytes


class Weighed(Store):
    """Compares every boundary tensor that leaves with what the wiring was told."""

    def tensor_to_send(self, body):
        tensor = super().tensor_to_send(body)
        if isinstance(body, ev.Boundary):
            forward = body.key.kind != "grad"
            boundary = body.key.stage - 1
            pipeline = self._plan.seat(self.peer)[1]
            expected = boundary_bytes(self._config, self._plan, boundary, pipeline, forward)
            assert np.asarray(tensor).nbytes == expected
            self.weighed[body.key.kind] = self.weighed.get(body.key.kind, 0) + 1
        return tensor


def test_what_leaves_a_peer_is_as_many_bytes_as_its_link_was_told(functions_of, monkeypatch):  # noqa: F811
    """Each direction of each pipeline has a codec of its own here."""
    weighed = {}

    def store(config, plan, peer, data, functions):
        made = Weighed(config, plan, peer, data, functions)
        made.peer, made.weighed = peer, weighed
        return made

    config = equivalence.make_config(2, 2, layers="1,3", steps=1, eval_every_steps=1, eval_microbatches=2)
    plan = replace(run_config.default_plan(config), codec=("int8/bf16,none/int8-dynamic",))
    monkeypatch.setattr(equivalence, "Store", store)
    equivalence.train_in_pieces(config, functions_of, plan)
    assert weighed == {"act": equivalence.N_MICROBATCHES, "grad": equivalence.N_MICROBATCHES, "eval": 2}


@pytest.mark.parametrize("name", ["none", "bf16", "int8", "int8-dynamic:100"])
def test_payload_on_a_socket_is_as_many_bytes_as_counted(name, functions_of, start):  # noqa: F811
    """From one peer's boundary codec over loopback into another's: the payload and the frame around it, to the byte."""
    config = config_of(name)
    plan = run_config.default_plan(config)
    ends = [BoundaryCodec(config, plan, peer, functions_of(config, plan, peer)) for peer in (0, 1)]
    x = np.random.default_rng(0).standard_normal((equivalence.BATCH, 16, 32), np.float32)
    wire = ends[0].encode(ACT, jax.numpy.asarray(x))
    a, b = start(0), start(1)
    a.connect(b)
    a.transport.send(1, {"n": 1}, [wire])
    (leaf,) = b.next()[2]
    counted = boundary_bytes(config, plan, 0, 0, forward=True)
    assert counted == wire_bytes(parse(name), x.size, 4) == leaf.nbytes
    frame_bytes = len(message_bytes(1, {"n": 1}, [leaf])) - counted
    assert b.stat(0, "bytes_in") == counted + frame_bytes
    assert (leaf.dtype, leaf.shape) == ends[1].wire_leaf(ACT)
    np.testing.assert_allclose(ends[1].decode(ACT, leaf), x, atol=0.05)


def test_a_tensor_in_another_codec_is_refused(functions_of):  # noqa: F811
    config = config_of("int8")
    plan = run_config.default_plan(config)
    store = Store(config, plan, 1, equivalence.Tokens(), functions_of(config, plan, 1))
    n = equivalence.BATCH * 16 * 32
    (buffer,) = store.expect(ev.Boundary(ACT), [(np.dtype(np.uint8), (n + 4 * n // 256,))])
    assert buffer.nbytes == boundary_bytes(config, plan, 0, 0, forward=True)
    with pytest.raises(BadInput, match="Boundary .*got tensors .*float32.*, expected .*uint8"):
        store.expect(ev.Boundary(ACT), [(np.dtype(np.float32), (equivalence.BATCH, 16, 32))])
    with pytest.raises(BadInput, match="boundary tensor: got kind 'grad', expected one of act, eval"):
        store.expect(ev.Boundary(ev.Key("grad", 0, 2, 0)), [])


# ------------------------------------------------------------------------------------------------------------- other


class Unfinished:
    """A wire array that is being encoded for ever."""

    def __init__(self, tensor):
        self.tensor = tensor

    def block_until_ready(self):
        raise AssertionError("waited for")


@pytest.mark.parametrize(
    ("peer", "work", "sent"),
    [
        (0, Work(0, WorkKind.FORWARD, 0, 0, 0), ACT),
        (0, Work(0, WorkKind.EVALUATE, 0, 0, 0), ev.Key("eval", 0, 1, 0)),
        (1, Work(1, WorkKind.BACKWARD, 0, 1, 0), ev.Key("grad", 0, 1, 0)),
    ],
)
def test_a_work_is_over_while_its_result_is_being_encoded(peer, work, sent, functions_of, monkeypatch):  # noqa: F811
    config = config_of("int8")
    plan = run_config.default_plan(config)
    store = Store(config, plan, peer, equivalence.Tokens(), functions_of(config, plan, peer))
    if peer:
        dtype, shape = store.boundary_codec.wire_leaf(ACT)
        store.put(ev.Boundary(ACT), 0, np.zeros(shape, dtype))
    monkeypatch.setattr(store.boundary_codec, "encode", lambda key, tensor: Unfinished(tensor))
    store.run(work, 1.0)
    wire = store.tensor_to_send(ev.Boundary(sent))
    assert isinstance(wire, Unfinished)
    assert wire.tensor.is_ready()


def test_a_worker_may_do_a_task_again_until_its_step_has_ended(functions_of):  # noqa: F811
    """Its lease ran out, and came again with the same input before the first Work had begun."""
    config = config_of("int8")
    plan = run_config.default_plan(config).with_worker(7, 1)
    store = Store(config, plan, 7, equivalence.Tokens(), functions_of(config, plan, 1))
    dtype, shape = store.boundary_codec.wire_leaf(ACT)
    store.put(ev.Boundary(ACT), 0, np.zeros(shape, dtype))
    work = Work(1, WorkKind.BACKWARD, 0, 7, 0)
    assert store.run(work, 1.0) == store.run(work, 1.0)
    store.free(0, ())
    assert not store._boundaries


@pytest.mark.parametrize("kind", [WorkKind.FORWARD, WorkKind.BACKWARD])
def test_a_worker_whose_step_ends_before_its_work_begins_computes_nothing(kind, functions_of):  # noqa: F811
    """It was paused, and hears of its lease and of the next version at once, before the parameters of that are here.
    A tensor that is not here for another reason is an error."""
    config = equivalence.make_config(3, 1, steps=N_STEPS)
    plan = run_config.default_plan(config).with_worker(7, 1)
    store = Store(config, plan, 7, equivalence.Tokens(), functions_of(config, plan, 1))
    work = Work(1, kind, 0, 7, 0)
    with pytest.raises(KeyError):
        store.run(work, 1.0)
    store.free(0, ())
    assert store.run(work, 1.0) == {}


def test_what_a_worker_sends_for_its_server_has_the_shape_of_what_the_server_sends(functions_of):  # noqa: F811
    config = config_of("int8")
    plan = run_config.default_plan(config)
    store = Store(config, plan, 0, equivalence.Tokens(), functions_of(config, plan, 0))
    dtype, shape = BoundaryCodec(config, plan, 1, functions_of(config, plan, 1)).wire_leaf(ACT)
    (buffer,) = store.expect(ev.TaskOutput(ACT, 1, 1, 2, None, 0.0, 0.0), [(dtype, shape)])
    assert (buffer.dtype, buffer.shape) == (dtype, tuple(shape))
    with pytest.raises(BadInput, match="boundary tensor: got kind 'grad', expected one of eval, act"):
        store.expect(ev.TaskOutput(ev.Key("grad", 0, 0, 0), 1, 1, 2, None, 0.0, 0.0), [(dtype, shape)])


def test_error_feedback_changes_what_is_sent_and_starts_anew_with_a_restore(functions_of):  # noqa: F811
    config = config_of("int8", error_feedback=True)
    plan = run_config.default_plan(config)
    boundary_codec = BoundaryCodec(config, plan, 0, functions_of(config, plan, 0))
    x = np.random.default_rng(0).standard_normal((equivalence.BATCH, 16, 32), np.float32)
    sent = [np.asarray(boundary_codec.encode(ACT, x)) for _ in range(2)]
    held_out = [np.asarray(boundary_codec.encode(ev.Key("eval", 0, 1, 0), x)) for _ in range(2)]
    assert np.any(sent[0] != sent[1])
    np.testing.assert_array_equal(held_out[0], held_out[1])
    boundary_codec.reset_error_feedback()
    np.testing.assert_array_equal(np.asarray(boundary_codec.encode(ACT, x)), sent[0])


def test_a_peer_with_several_devices_encodes_the_same_bytes(functions_of):  # noqa: F811
    config = config_of("int8:96")
    plan = run_config.default_plan(config)
    one, two = functions_of(config, plan, 0), stage_functions(config, plan, 0, 2)
    params = one.init(0)
    batch = Batch(equivalence.Tokens().train_batch(0, 0, 0, equivalence.BATCH, 16, 1))
    y, _ = two.forward(two.place(params), None, batch)
    assert len(y.sharding.device_set) == 2
    wires = [np.asarray(BoundaryCodec(config, plan, 0, made).encode(ACT, y)) for made in (one, two)]
    wires.append(np.asarray(codec.encode(parse("int8:96"), np.asarray(y))))
    np.testing.assert_array_equal(wires[0], wires[2])
    np.testing.assert_array_equal(wires[1], wires[2])
