import dataclasses
import enum
import types
import typing

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdt.protocol import events as ev
from jaxdt.protocol.message import from_plain, tensor_key, to_plain
from jaxdt.protocol.round_id import RoundId, RoundKind
from jaxdt.run.errors import BadInput

HEADER = ev.Header("run", 0, 3, 7)
SLICE = ev.SliceKey(RoundId(RoundKind.GRADIENT, 1, 4, view=1), 0, 100, 2)
INT64 = st.integers(-(2**63), 2**63 - 1)
PLAIN_DATA = st.recursive(
    st.none() | st.booleans() | INT64 | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)


def values_of(kind) -> st.SearchStrategy:
    """Any value of one of the vocabulary's types."""
    args = typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return st.builds(kind, **{f.name: values_of(hints[f.name]) for f in dataclasses.fields(kind)})
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return st.one_of([values_of(arg) for arg in args])
    if typing.get_origin(kind) is tuple and args[1:] == (Ellipsis,):
        return st.lists(values_of(args[0]), max_size=3).map(tuple)
    if typing.get_origin(kind) is tuple:
        return st.tuples(*[values_of(arg) for arg in args])
    if typing.get_origin(kind) is dict:
        return st.dictionaries(st.text(max_size=5), values_of(args[1]), max_size=3)
    if isinstance(kind, enum.EnumMeta):
        return st.sampled_from(kind)
    return {
        bool: st.booleans(),
        int: INT64,
        float: st.floats(allow_nan=False),
        str: st.text(max_size=8),
        types.NoneType: st.none(),
    }[kind]


def over_the_wire(header, body):
    return from_plain(msgpack.unpackb(msgpack.packb(to_plain(header, body))))


def example_of(kind):
    return to_plain(HEADER, EXAMPLES[kind])


EXAMPLES = {
    "Boundary": ev.Boundary(ev.Key("act", 1, 2, 3)),
    "Hello": ev.Hello(0, 0, "f", "host:1"),
    "Shard": ev.Shard(SLICE, ((1, 0), (1, 1)), 4),
    "Reduced": ev.Reduced(
        ev.SliceKey(RoundId(RoundKind.GRADIENT, 1, 4, view=1), 0, 100), ((2,), (((1, 0),),)), 4, 5, 6.5
    ),
}


@pytest.mark.parametrize(("part", "named"), [("head", "head"), ("body", "Committed"), ("record", "Committed.record")])
def test_a_field_that_is_not_known_is_refused(part, named):
    message = to_plain(ev.Header("r", 0, 0, 1), ev.Committed(ev.Record(3, (), 1.0, 4, "apply")))
    (message["body"]["record"] if part == "record" else message[part])["hint"] = 1
    with pytest.raises(BadInput, match=rf"^message.{named}.hint: unknown field"):
        from_plain(message)


@pytest.mark.parametrize("kind", ev.Message.kinds)
@settings(max_examples=10)
@given(data=st.data())
def test_every_message_survives_the_wire(kind, data):
    header, body = data.draw(values_of(ev.Header)), data.draw(values_of(ev.Message.kinds[kind]))
    assert over_the_wire(header, body) == ev.Received(header, body)


def test_what_is_declared_counts():
    """Once, as it is: a dataclass with slots is made twice."""
    assert ev.Message.kinds["Hello"] is ev.Hello and ev.Message.kinds["View"] is ev.View
    assert ev.Event.kinds["Updated"] is ev.Updated and issubclass(ev.Updated, ev.InternalEvent)
    assert ev.Action.kinds["Send"] is ev.Send and not ev.Event.kinds.keys() & {"Event", "InternalEvent"}
    assert not ev.Message.kinds.keys() & (ev.Event.kinds.keys() | ev.Action.kinds.keys())


@pytest.mark.parametrize("frame", [None, 3, [], "x", {}, {"head": {}}, example_of("Hello") | {"more": 1}])
def test_a_frame_of_another_shape_is_refused(frame):
    with pytest.raises(BadInput, match="expected an object with head, kind and body"):
        from_plain(frame)


@pytest.mark.parametrize("kind", ["hello", "Run", "", 5, None, "x" * 1000])
def test_an_unknown_kind_is_refused(kind):
    with pytest.raises(BadInput, match="message.kind: got .{0,50} expected one of View, Hello"):
        from_plain(example_of("Hello") | {"kind": kind})


@pytest.mark.parametrize(
    ("part", "field", "value", "message"),
    [
        ("body", "peer", "0", "message.Hello.peer: got '0', expected int"),
        ("body", "stage", 1.0, "message.Hello.stage: got 1.0, expected int"),
        ("body", "peer", True, "message.Hello.peer: got True, expected int"),
        ("body", "address", None, "message.Hello.address: got None, expected str"),
        ("body", "address", b"host", "message.Hello.address: got b'host', expected str"),
        ("head", "src", None, "message.head.src: got None, expected int"),
        ("head", "run", 1, "message.head.run: got 1, expected str"),
    ],
)
def test_a_wrong_type_is_refused(part, field, value, message):
    frame = example_of("Hello")
    frame[part] = frame[part] | {field: value}
    with pytest.raises(BadInput) as caught:
        from_plain(frame)
    assert str(caught.value).startswith(message)


OPTIONAL = {"route", "regenerate", "tally", "blocked_s", "process", "coordinator_term", "disk", "digest", "n_words"}


@pytest.mark.parametrize("kind", EXAMPLES)
def test_a_missing_field_is_refused(kind):
    for part in ("head", "body"):
        for name in example_of(kind)[part]:
            if name in OPTIONAL:
                continue
            frame = example_of(kind)
            del frame[part][name]
            with pytest.raises(BadInput, match=rf"message\.\w+\.{name}: missing"):
                from_plain(frame)


def test_a_nested_error_names_the_way_to_it():
    frame = example_of("Reduced")
    frame["body"]["cover"] = [[2], [[[1, "0"]]]]
    with pytest.raises(BadInput) as caught:
        from_plain(frame)
    assert str(caught.value) == "message.Reduced.cover[1][0][0][1]: got '0', expected int"


@given(PLAIN_DATA)
def test_nothing_but_bad_input_comes_of_junk(data):
    check_junk(data)


@given(st.sampled_from(sorted(ev.Message.kinds)), st.data())
def test_nothing_but_bad_input_comes_of_junk_in_a_good_frame(kind, data):
    names = [field.name for field in dataclasses.fields(ev.Message.kinds[kind])]
    head = {name: data.draw(PLAIN_DATA) for name in ("run", "generation", "view", "src")}
    body = {name: data.draw(PLAIN_DATA) for name in names}
    check_junk({"head": head, "kind": kind, "body": body})
    check_junk({"head": to_plain(HEADER, EXAMPLES["Hello"])["head"], "kind": kind, "body": body})


def check_junk(data):
    """Either it is a message after all, which then reads back from what it writes, or it is refused in one line."""
    try:
        event = from_plain(data)
    except BadInput as error:
        assert "\n" not in str(error)
        return
    again = from_plain(to_plain(event.header, event.body))
    assert repr(again) == repr(event)


def test_tensor_keys():
    assert tensor_key(EXAMPLES["Boundary"]) == ev.Key("act", 1, 2, 3)
    assert tensor_key(EXAMPLES["Shard"]) == SLICE
    assert tensor_key(EXAMPLES["Reduced"]).src is None
    assert tensor_key(EXAMPLES["Hello"]) is None
