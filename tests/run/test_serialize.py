import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdt.run import serialize
from jaxdt.run.errors import BadInput


@dataclass(frozen=True)
class Inner:
    n: int
    name: str = "x"


@dataclass(frozen=True)
class Outer:
    inner: Inner
    pairs: tuple[tuple[int, float], ...]
    seconds: dict[str, float] = field(default_factory=dict)
    maybe: int | None = None
    flag: bool = False
    pair: tuple[int, str] = (0, "")
    anything: Any = None


WHOLE = Outer(Inner(1, "a"), ((1, 0.5), (2, 1.5)), {"F": 1.0}, 7, True, (3, "b"), {"k": [1]})


@given(
    st.builds(
        Outer,
        inner=st.builds(Inner, st.integers(), st.text()),
        pairs=st.lists(st.tuples(st.integers(), st.floats(allow_nan=False, allow_infinity=False))).map(tuple),
        seconds=st.dictionaries(st.text(), st.floats(allow_nan=False, allow_infinity=False)),
        maybe=st.none() | st.integers(),
        flag=st.booleans(),
        pair=st.tuples(st.integers(), st.text()),
        anything=st.none() | st.text() | st.lists(st.integers()),
    )
)
def test_what_was_written_reads_back_also_through_json(value):
    assert serialize.read(Outer, serialize.write(value), "v") == value
    assert serialize.read(Outer, json.loads(json.dumps(serialize.write(value))), "v") == value


def test_write_leaves_only_plain_data():
    assert serialize.write(WHOLE) == {
        "inner": {"n": 1, "name": "a"},
        "pairs": [[1, 0.5], [2, 1.5]],
        "seconds": {"F": 1.0},
        "maybe": 7,
        "flag": True,
        "pair": [3, "b"],
        "anything": {"k": [1]},
    }


def test_an_integer_is_a_good_float_and_defaults_fill_in():
    assert serialize.read(Outer, {"inner": {"n": 1}, "pairs": [[1, 2]]}, "v") == Outer(Inner(1), ((1, 2.0),))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inner": 5}, "v.inner: got 5, expected an object with the fields of Inner"),
        ({"inner": {"n": "1"}}, "v.inner.n: got '1', expected int"),
        ({"inner": {"n": True}}, "v.inner.n: got True, expected int"),
        ({"inner": {"n": 1.0}}, "v.inner.n: got 1.0, expected int"),
        ({"inner": {"n": None}}, "v.inner.n: got None, expected int"),
        ({"inner": {}}, "v.inner.n: missing"),
        ({"inner": {"n": 1, "nmae": "a"}}, 'v.inner.nmae: unknown field (did you mean "name"?); known: n, name'),
        ({"inner": {"n": 1, 3: "a"}}, "v.inner.3: unknown field; known: n, name"),
        ({"pairs": "12"}, "v.pairs: got '12', expected a list"),
        ({"pairs": [[1, 2.0], [1]]}, "v.pairs[1]: got 1 items, expected 2"),
        ({"pairs": [[1, "2"]]}, "v.pairs[0][1]: got '2', expected float"),
        ({"pairs": [[1, True]]}, "v.pairs[0][1]: got True, expected float"),
        ({"seconds": []}, "v.seconds: got [], expected an object"),
        ({"seconds": {"F": None}}, "v.seconds.F: got None, expected float"),
        ({"maybe": "7"}, "v.maybe: got '7', expected int"),
        ({"flag": 1}, "v.flag: got 1, expected bool"),
        ({"pair": [1, "a", 2]}, "v.pair: got 3 items, expected 2"),
    ],
)
def test_bad_data_names_its_field_in_one_line(change, message):
    with pytest.raises(BadInput) as caught:
        serialize.read(Outer, serialize.write(WHOLE) | change, "v")
    assert str(caught.value) == message


def test_long_data_is_cut_in_the_message():
    with pytest.raises(BadInput) as caught:
        serialize.read(Inner, {"n": "y" * 1000}, "v")
    assert len(str(caught.value)) < 100
