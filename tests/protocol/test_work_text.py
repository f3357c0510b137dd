import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdt.run.work import Work, WorkKind, parse_work

COUNT = st.none() | st.integers(0, 10**6)


@pytest.mark.parametrize(
    ("work", "text"),
    [
        (Work(2, WorkKind.FORWARD, 7, 13), "2F7@p13"),
        (Work(2, WorkKind.FORWARD, 7), "2F7"),
        (Work(0, WorkKind.BACKWARD, 0, 0, 0), "0:0B0@p0"),
        (Work(11, WorkKind.EVALUATE, 3, 4, 25), "25:11E3@p4"),
        (Work(1, WorkKind.GATHER, None, 6, 2), "2:1G@p6"),
        (Work(1, WorkKind.UPDATE), "1U"),
    ],
)
def test_text_form(work, text):
    assert str(work) == text
    assert parse_work(text) == work


@given(st.builds(Work, st.integers(0, 99), st.sampled_from("FBEGU"), COUNT, COUNT, COUNT))
def test_parse_reads_what_str_printed(work):
    assert parse_work(str(work)) == work


@pytest.mark.parametrize("text", ["", "F7", "2X7", "2F7@13", "2F7p13", "2F-7", "2F7 @p13", "2f7", "a:2F7", "2F7 2B7"])
def test_other_text_is_refused(text):
    with pytest.raises(ValueError, match="expected for example 2F7, 2F7@p13 or 4:2F7@p13"):
        parse_work(text)
