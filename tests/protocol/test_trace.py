import json

import pytest

from jaxdt.protocol import events as ev
from jaxdt.protocol import trace
from jaxdt.protocol.reports import StepReport
from jaxdt.protocol.round_id import RoundId, RoundKind
from jaxdt.run.errors import BadInput
from jaxdt.run.work import Work


def step_report(step, step_s):
    return StepReport(step, 2.5, step_s, 10.0, 1.0, "apply")


ACT = ev.Key("act", 1, 2, 5)
SHARD = ev.SliceKey(RoundId(RoundKind.GRADIENT, 1, 3, view=1), 10, 20, 4)


VIEW_FIELDS = {"view": 1, "members": {"0": 0}, "joining": []}
VIEW = {"what": "report", "t": 1.0, "peer": -1, "kind": "view", "fields": VIEW_FIELDS}


def two_peers(n_steps=float("inf")):
    """The trace of two peers that compute 3 s and 1 s of the 4 s of step 0; peer 1 then begins step 1."""
    lines = []
    out = trace.Trace(lines.append, n_steps)
    out.run(0, 0.0, 1.0, Work(0, "F", 0, 0, 0))
    out.send(0, 1.0, 1, ev.Key("act", 0, 1, 0), 100)
    out.recv(1, 1.5, 0, ev.Key("act", 0, 1, 0))
    out.run(1, 1.5, 1.0, Work(1, "B", 0, 1, 0))
    out.send(1, 2.5, 0, ev.Key("grad", 0, 1, 0), 100)
    out.send(1, 2.5, 0, ev.Key("grad", 0, 1, 1), 7)
    out.run(0, 2.0, 2.0, Work(0, "B", 0, 0, 0))
    out.report(ev.COORDINATOR, 4.0, step_report(0, 4.0))
    out.run(1, 4.0, 0.0, Work(1, "U", None, 1, 1))
    return lines


def test_a_record_is_one_line_of_json_with_times_to_the_microsecond():
    lines = []
    trace.Trace(lines.append).run(3, 1.23456789, 0.1 + 0.2, Work(2, "F", 7, 13, 4))
    assert lines == ['{"peer": 3, "s": 0.3, "t": 1.234568, "what": "run", "work": "4:2F7@p13"}\n']


def test_all_kinds_of_records():
    records = [json.loads(line) for line in two_peers()]
    assert records[1] == {"what": "send", "peer": 0, "to": 1, "t": 1.0, "tensor": "0:act1.0", "bytes": 100}
    assert records[2] == {"what": "recv", "peer": 1, "from": 0, "t": 1.5, "tensor": "0:act1.0"}
    assert records[7] == {
        "what": "report",
        "peer": ev.COORDINATOR,
        "t": 4.0,
        "kind": "step",
        "fields": {
            "step": 0,
            "loss": 2.5,
            "step_s": 4.0,
            "tokens_per_s": 10.0,
            "gradient_norm": 1.0,
            "verdict": "apply",
        },
    }


def test_tensor_names():
    assert trace.tensor_name(ACT) == "1:act2.5"
    assert trace.tensor_name(SHARD) == "3:stage1[10:20]p4"
    assert trace.tensor_name(ev.SliceKey(SHARD.round, 10, 20)) == "3:stage1[10:20]sum"
    assert (trace.step_of(ACT), trace.step_of(SHARD)) == (1, 3)


@pytest.mark.parametrize("first", [0, 96])
def test_a_bounded_trace_keeps_the_reports_of_all_steps(first):
    """Its steps count from that of the first Work, however long that took to come."""
    lines = []
    out = trace.Trace(lines.append, n_steps=1)
    for step in (first, first + 1):
        out.run(0, step, 1.0, Work(0, "F", 0, 0, step))
        out.send(0, step, 1, ev.Key("act", step, 1, 0), 1)
        out.recv(1, step, 0, ev.Key("act", step, 1, 0))
        out.report(ev.COORDINATOR, step, step_report(step, 1.0))
    assert [json.loads(line)["what"] for line in lines] == ["run", "send", "recv", "report", "report"]


def test_read_sorts_by_time_and_keeps_the_order_of_equal_times():
    records = trace.read(two_peers())
    assert [r["t"] for r in records] == sorted(r["t"] for r in records)
    assert [r["what"] for r in records if r["t"] == 2.5] == ["send", "send"]


@pytest.mark.parametrize(
    "line",
    ["", "7", "[]", "{}", '{"what": "run"}', '{"what": ["run"], "t": 1}', '{"what": "recv", "t": "x", "peer": 1}',
     '{"what": "send", "t": 1.0, "peer": 0, "to": 1, "tensor": 5, "bytes": 1}', '{"what": "run", "t": 1.0',
     '{"what": "run", "t": 1.0, "peer": 0, "s": 1.0, "work": "0X0"}',
     *(json.dumps(VIEW | {"fields": fields}) for fields in (
        {}, VIEW_FIELDS | {"members": 7}, VIEW_FIELDS | {"members": {"a": 1}}, VIEW_FIELDS | {"members": {"0": None}},
        VIEW_FIELDS | {"joining": 5}, VIEW_FIELDS | {"joining": ["x"]}, VIEW_FIELDS | {"view": "1"})),
     ],
)  # fmt: skip
def test_a_line_that_is_no_record_is_named(line):
    with pytest.raises(BadInput, match="peer_0.jsonl: line 2: got .* expected a record of a trace"):
        trace.read([two_peers()[0], line, two_peers()[1]], "peer_0.jsonl")


@pytest.mark.parametrize("fields", [{}, {"more": 7}, {"members": {}}])
def test_a_report_may_say_more_than_its_kind_does(fields):
    lines = [json.dumps(VIEW | {"fields": VIEW_FIELDS | fields}), json.dumps(VIEW | {"kind": "of_later"})]
    assert len(trace.read([*lines, *two_peers()])) == 2 + len(two_peers())


def test_a_last_line_that_a_crash_cut_off_is_left_out():
    lines = two_peers()
    assert trace.read([*lines, lines[0][:30]]) == trace.read(lines)


def test_bytes_per_link():
    records = trace.read(two_peers())
    assert trace.bytes_per_link(records) == {(0, 1): 100, (1, 0): 107}


def test_grid_has_a_row_per_peer_in_the_order_of_its_work():
    assert trace.grid(trace.read(two_peers()), 0) == "p0        0F0 0B0\np1        1B0"
    assert trace.grid(trace.read(two_peers()), 1) == "p1        1U"
    assert trace.grid([], 0) == ""
