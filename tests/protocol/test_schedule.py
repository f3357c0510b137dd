import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdt.protocol.schedule import dry_run, gpipe, grid, needs, one_f_one_b, parse, stage_order, text
from jaxdt.run.plan import Plan
from jaxdt.run.work import Work, WorkKind

GPIPE = {
    0: "0F0 0F1 0F2 0B0 0B1 0B2",
    1: "1F0 1F1 1F2 1B0 1B1 1B2",
}
ONE_F_ONE_B = {
    0: "0F0 0F1 0F2 0B0 0F3 0B1 0F4 0B2 0B3 0B4",
    1: "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1F4 1B3 1B4",
    2: "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4",
}


def pipeline(n_stages, n_microbatches, schedule="1f1b", in_flight=None):
    """{stage: order} of the only pipeline."""
    stages = tuple((s, s + 1) for s in range(n_stages))
    placement = tuple((s,) for s in range(n_stages))
    plan = Plan(n_stages, stages, placement, (n_microbatches,), schedule, in_flight)
    return {stage: stage_order(plan, stage, 0) for stage in range(n_stages)}


def in_flight_max(order):
    held, most = 0, 0
    for work in order:
        held += 1 if work.kind == WorkKind.FORWARD else -1
        assert held >= 0
        most = max(most, held)
    return most


@pytest.mark.parametrize(("schedule", "golden", "n"), [("gpipe", GPIPE, 3), ("1f1b", ONE_F_ONE_B, 5)])
def test_golden_orders(schedule, golden, n):
    assert {stage: text(order) for stage, order in pipeline(len(golden), n, schedule).items()} == golden


def test_fewer_microbatches_than_stages():
    assert text(one_f_one_b(0, range(2), depth=4)) == "0F0 0F1 0B0 0B1"
    assert text(pipeline(3, 1)[0]) == "0F0 0B0"


def test_a_pipeline_computes_its_own_microbatches():
    plan = Plan(2, ((0, 1), (1, 2)), ((0, 2), (1, 3)), (2, 3))
    assert text(stage_order(plan, 1, 1)) == "1F2 1B2 1F3 1B3 1F4 1B4"
    assert text(stage_order(plan, 0, 0)) == "0F0 0F1 0B0 0B1"


def test_a_deeper_order_fills_more_before_the_first_backward():
    assert text(one_f_one_b(1, range(4), depth=3)) == "1F0 1F1 1F2 1B0 1F3 1B1 1B2 1B3"
    assert one_f_one_b(0, range(3), depth=3) == gpipe(0, range(3))


SHAPES = st.tuples(st.integers(1, 6), st.integers(1, 9), st.sampled_from(["gpipe", "1f1b"]))


@given(SHAPES, st.data())
def test_every_order_reads_back_runs_and_stays_within_its_depth(shape, data):
    n_stages, n_microbatches, schedule = shape
    depths = sorted(data.draw(st.lists(st.integers(1, 9), min_size=n_stages, max_size=n_stages)), reverse=True)
    in_flight = data.draw(st.sampled_from([None, tuple(depths)]))
    orders = pipeline(n_stages, n_microbatches, schedule, in_flight)
    run = dry_run(orders)
    assert not run.deadlock
    done = [work for tick in run.ticks for work in tick.values()]
    assert len(done) == len(set(done)) == 2 * n_stages * n_microbatches
    before = set()
    for tick in run.ticks:
        assert all(needs(work, n_stages) <= before for work in tick.values())
        before |= set(tick.values())
    for stage, order in orders.items():
        assert parse(text(order)) == order
        assert [work for work in done if work.stage == stage] == list(order)
        if schedule == "1f1b":
            depth = in_flight[stage] if in_flight else n_stages - stage
            assert in_flight_max(order) == min(depth, n_microbatches)
        else:
            assert in_flight_max(order) == n_microbatches


def test_what_work_needs():
    assert needs(Work(0, WorkKind.FORWARD, 5), 3) == set()
    assert needs(Work(1, WorkKind.FORWARD, 5), 3) == {Work(0, WorkKind.FORWARD, 5)}
    assert needs(Work(1, WorkKind.BACKWARD, 5), 3) == {Work(1, WorkKind.FORWARD, 5), Work(2, WorkKind.BACKWARD, 5)}
    assert needs(Work(2, WorkKind.BACKWARD, 5), 3) == {Work(2, WorkKind.FORWARD, 5)}


def test_a_deadlock_names_what_each_stage_waits_for():
    """Stage 1 wants its second forward first, and stage 0 waits for the backward before it computes that."""
    run = dry_run({0: parse("0F0 0B0 0F1 0B1"), 1: parse("1F1 1F0 1B0 1B1")})
    assert run.deadlock == "0B0 waits for 1B0; 1F1 waits for 0F1"
    assert grid(run) == "stage 0   0F0   0B0 waits for 1B0\nstage 1     .   1F1 waits for 0F1"


def test_a_backward_before_its_own_forward_deadlocks():
    assert dry_run({0: parse("0B0 0F0")}).deadlock == "0B0 waits for 0F0"


def test_the_grid_has_a_row_per_stage_and_a_column_per_tick():
    rows = grid(dry_run(pipeline(2, 2))).splitlines()
    assert rows == ["stage 0   0F0 0F1   . 0B0   . 0B1", "stage 1     . 1F0 1B0 1F1 1B1   ."]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ({0: "0F0 0F1 0B0"}, r"stage 0: B of \[0\], expected each of \[0, 1\] once"),
        ({0: "0F0 0F0 0B0"}, r"stage 0: F of \[0, 0\], expected each of \[0\] once"),
        ({0: "0F0 0B0", 1: "1F0 1F1 1B0 1B1"}, r"stage 0: F of \[0\], expected each of \[0, 1\] once"),
        ({0: "1F0 1B0"}, "stage 0: its order holds Work of another stage"),
        ({0: "0F0 0U 0B0"}, "stage 0: got 0U, expected forwards and backwards such as 0F0"),
        ({0: "0F 0B0"}, "stage 0: got 0F, expected forwards and backwards such as 0F0"),
        ({0: "0F0@p3 0B0"}, "stage 0: got 0F0@p3, expected forwards and backwards such as 0F0"),
    ],
)
def test_an_incomplete_order_is_refused(lines, message):
    with pytest.raises(ValueError, match=message):
        dry_run({stage: parse(line) for stage, line in lines.items()})
