"""Attacks and faults of the other side beyond single frames: no peer crashes, one bad connection harms no other, and a
tensor is only received into memory that this peer has sized itself."""

import contextlib
import ssl
import threading

import numpy as np
import pytest
import test_equivalence as equivalence
import transport_nodes
from hypothesis import given, settings
from hypothesis import strategies as st
from transport_nodes import MB, Wiretap, drained, raw_connection

from jaxdt.protocol import events as ev
from jaxdt.protocol.round_id import RoundId, RoundKind
from jaxdt.run import config as configs
from jaxdt.run.errors import BadInput
from jaxdt.run.sizes import SHARED_TABLE
from jaxdt.runtime.net import frame
from jaxdt.runtime.net.options import TransportLimits
from jaxdt.runtime.storage.store import Store, stage_functions

start, cred, run_credential = transport_nodes.start, transport_nodes.cred, transport_nodes.run_credential  # fixtures

GREETING = frame.pack(frame.GREETING, b"\x80")


def test_a_client_without_a_certificate_is_refused(start, run_credential):
    a, b = start(0, run_credential), start(1, run_credential)
    a.connect(b)
    a.transport.send(1, {"n": 1})
    b.next()
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
    with raw_connection(b) as sock, contextlib.suppress(OSError), bare.wrap_socket(sock) as secure:
        secure.sendall(GREETING)
        drained(secure)
    assert "has shown no credential" in b.link(None, "refused")
    a.transport.send(1, {"n": 2})
    assert b.next()[1] == {"n": 2}
    assert a.reconnects(1) == 0


def test_a_greeting_that_drips_in_does_not_hold_a_place(start, cred):
    """Every byte advances the greeting, so only the deadline of the whole greeting can end it."""
    b = start(1, cred, limits=TransportLimits(handshake_s=0.4, n_greeting_max=1))
    slow = (b"\x16\x03\x01\x02\x00" if cred else GREETING[:5]) + bytes(10_000)
    done = threading.Event()
    with raw_connection(b) as sock:

        def drip():
            with contextlib.suppress(OSError):
                for i in range(len(slow)):
                    sock.sendall(slow[i : i + 1])
                    if done.wait(0.01):
                        break

        thread = threading.Thread(target=drip)
        thread.start()
        b.link(None, "refused")
        done.set()
        thread.join()
    a = start(0, cred)
    a.connect(b)
    a.transport.send(1, {"in": True})
    assert b.next()[1] == {"in": True}


def flipped(src, dst, back):
    """Forwards with one bit changed at 2 MB."""
    at_byte = 2 * MB
    while data := bytearray(src.recv(1 << 16)):
        if 0 <= at_byte < len(data):
            data[at_byte] ^= 1
        at_byte -= len(data)
        dst.sendall(data)


def test_a_bit_that_flips_on_the_way_breaks_the_connection_and_not_the_message(start, run_credential):
    a, b = start(0, run_credential), start(1, run_credential)
    payload = np.random.default_rng(0).integers(0, 255, 4 * MB, np.uint8)
    with contextlib.closing(Wiretap(b.address, flipped)) as tap:
        a.transport.connect(1, tap.address)
        a.transport.send(1, {"n": 1}, [payload])
        _, head, (got,) = b.next()
        assert head == {"n": 1} and np.array_equal(got, payload)
        assert a.reconnects(1) >= 1 and b.stat(0, "messages_in") == 1
        for node in (a, b):
            node.transport.close(0.0)


# ------------------------------------------------------------------------------------------ tensors that do not belong


@pytest.fixture(scope="module")
def store():
    """A peer's tensors: stage 1 of 2."""
    config = equivalence.make_config(2, 1)
    plan = configs.default_plan(config)
    return Store(config, plan, 1, equivalence.Tokens(), stage_functions(config, plan, 1))


numbers = st.integers(-(2**63), 2**64 - 1) | st.integers(-2, 30_000)
stages = st.sampled_from([SHARED_TABLE, 0, 1, 2]) | numbers
rounds = st.builds(RoundId, st.sampled_from(RoundKind), stages, numbers, numbers, numbers, numbers, numbers)
slices = st.builds(ev.SliceKey, rounds, numbers, numbers, st.none() | numbers)
keys = st.builds(ev.Key, st.sampled_from(["act", "grad", "eval", ""]), numbers, numbers, numbers)


@settings(max_examples=300)
@given(slices | keys, st.booleans())
def test_only_what_is_held_here_is_received(store, key, is_sum):
    """Whatever key and table the sender chooses, the buffer is no larger than this peer's own sizes allow."""
    if isinstance(key, ev.Key):
        body, table = ev.Boundary(key), [(np.dtype(np.float32), (equivalence.BATCH, 16, 32))]
    else:
        body = ev.Reduced(key, (), 0, 0, 0.0) if is_sum else ev.Shard(key, (), 0)
        table = [(np.dtype(np.float32), (key.hi - key.lo,))]
    try:
        (buffer,) = store.expect(body, table)
    except BadInput as error:
        assert "\n" not in str(error)
    else:
        assert buffer.size <= max(*store.functions.group_sizes.values(), equivalence.BATCH * 16 * 32)


@pytest.mark.parametrize(
    ("dtype", "shape"), [(np.float32, (9,)), (np.float64, (10,)), (np.float32, (10, 1)), (np.int8, (40,))]
)
def test_a_slice_of_another_shape_is_refused(store, dtype, shape):
    key = ev.SliceKey(RoundId(RoundKind.GRADIENT, 1, 0, view=0), 10, 20, 0)
    (buffer,) = store.expect(ev.Shard(key, (), 0), [(np.dtype(np.float32), (10,))])
    assert buffer.shape == (10,)
    with pytest.raises(BadInput, match="Shard .*got tensors .*expected"):
        store.expect(ev.Shard(key, (), 0), [(np.dtype(dtype), shape)])
    with pytest.raises(BadInput, match="Shard .*got tensors .*expected"):
        store.expect(ev.Shard(key, (), 0), [])
