import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdt.run.errors import BadInput
from jaxdt.run.plan import Plan, PlanRoles, check_stages, even_shares, load, parse, ranges, to_json

# 3 stages of 5 layers, 2 pipelines.
PLAN = Plan(5, ((0, 2), (2, 3), (3, 5)), ((0, 3), (1, 4), (2, 5)), (3, 2))
DATA = to_json(PLAN)


def test_seats_and_microbatches():
    assert (PLAN.n_stages, PLAN.n_pipelines, PLAN.n_microbatches) == (3, 2, 5)
    assert PLAN.peers == [0, 3, 1, 4, 2, 5]
    assert PLAN.seat(4) == (1, 1)
    assert (list(PLAN.microbatches(0)), list(PLAN.microbatches(1))) == ([0, 1, 2], [3, 4])
    with pytest.raises(BadInput, match="peer: got 6, expected one of the plan's peers"):
        PLAN.seat(6)


def test_stages_of_unequal_numbers_of_replicas_have_no_pipelines():
    plan = replace(PLAN, placement=((0,), (1, 3, 4), (2, 5)), shares=(7,))
    assert (plan.is_even, plan.n_pipelines, plan.n_microbatches, plan.n_replicas) == (False, 1, 7, (1, 3, 2))
    assert plan.shape == "3 stages of 1, 3, 2 replicas" and PLAN.shape == "3 stages x 2 pipelines"
    assert [plan.seat(peer) for peer in plan.peers] == [(0, 0), (1, 0), (1, 0), (1, 0), (2, 0), (2, 0)]
    assert {plan.pipeline_of(m) for m in range(7)} == {0}
    assert plan.hop(0) == [(0, 1, 0), (0, 3, 0), (0, 4, 0)] and PLAN.hop(0) == [(0, 1, 0), (3, 4, 1)]
    assert len(plan.codec_of_links) == 2 * (3 + 6)
    assert parse(json.dumps(to_json(plan)), "p.json") == plan
    with pytest.raises(BadInput, match=r"plan.codec\[0\]: got 2 names in 'int8,none', expected 1"):
        replace(plan, codec=("int8,none", "none"))


ROLES = PlanRoles(((0, 6), (1,), (2,)), ((0,), (1,), (2,)), ((6,), (1,), ()), ((7, 8), (9,), ()))


def test_roles_are_kept_and_count_for_the_fingerprint():
    plan = replace(PLAN, roles=ROLES)
    assert parse(json.dumps(to_json(plan)), "p.json") == plan
    assert plan.fingerprint != PLAN.fingerprint
    assert "roles" not in to_json(PLAN)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"servers": ((0,),)}, "plan.roles.servers: got 1 rows, expected 3"),
        ({"servers": ((0, 0), (1,), (2,))}, "plan.roles.servers: expected every device index once"),
        ({"front": ((7,), (1,), (2,))}, r"plan.roles.front\[0\]: got 7, expected servers of the stage"),
        ({"workers": ((3,), (), ())}, "plan.roles.workers: got 3, which is a server or a replica too"),
        ({"workers": ((6,), (), ())}, "plan.roles.workers: got 6, which is a server or a replica too"),
    ],
)
def test_roles_that_do_not_fit_are_refused(changed, problem):
    with pytest.raises(BadInput, match=problem):
        replace(PLAN, roles=replace(ROLES, **changed))


def test_depth_falls_by_one_per_stage_unless_the_plan_says_otherwise():
    assert [PLAN.depth(stage) for stage in range(3)] == [3, 2, 1]
    assert [replace(PLAN, in_flight=(5, 5, 2)).depth(stage) for stage in range(3)] == [5, 5, 2]


def test_even_shares_and_ranges():
    assert even_shares(7, 3) == (3, 2, 2)
    assert even_shares(6, 3) == (2, 2, 2)
    assert ranges((3, 2, 3)) == ((0, 3), (3, 5), (5, 8))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8).map(tuple))
def test_ranges_of_any_sizes_cover_all_layers(sizes):
    check_stages(ranges(sizes), sum(sizes))


@given(st.integers(1, 50), st.integers(1, 9))
def test_even_shares_differ_by_one_at_most(total, parts):
    shares = even_shares(total, parts)
    assert (sum(shares), len(shares)) == (total, parts)
    assert max(shares) - min(shares) <= 1 and list(shares) == sorted(shares, reverse=True)


def test_json_round_trip_keeps_what_the_solver_found(tmp_path):
    found = {"bound_s": 1.5, "luck": {"dice": 6}}
    plan = replace(PLAN, in_flight=(4, 2, 1), codec=("none", "none"), devices=("a", "b"), found=found)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(to_json(plan)))
    assert load(path) == plan
    assert json.loads(path.read_text())["microbatches"] == 5
    assert json.loads(path.read_text())["bound_s"] == 1.5
    assert json.loads(path.read_text())["found"] == {"luck": {"dice": 6}}


def test_the_fingerprint_is_of_what_runs():
    assert len(PLAN.fingerprint) == 16
    assert replace(PLAN, found={"cost_s": 1.5}).fingerprint == PLAN.fingerprint
    others = [replace(PLAN, shares=(2, 3)), replace(PLAN, schedule="gpipe"), replace(PLAN, in_flight=(3, 2, 1))]
    assert len({plan.fingerprint for plan in [PLAN, *others]}) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, 'p.json: format: expected "jaxdt-plan-1"'),
        ({"stages": [[0, 2], [3, 5]]}, r"plan.stages\[1\]: got layers 3..4, expected a non-empty range from 2"),
        ({"stages": [[0, 2], [2, 2], [2, 5]]}, r"plan.stages\[1\]: got layers 2..1, expected a non-empty range"),
        ({"stages": [[0, 2], [1, 3], [3, 5]]}, r"plan.stages\[1\]: got layers 1..2, expected a non-empty range from 2"),
        ({"stages": [[0, 2], [2, 3], [3, 4]]}, "plan.stages: cover 4 layers, expected 5, each exactly once"),
        ({"stages": [[0, 2], [2, 3], [3, 6]]}, "plan.stages: cover 6 layers, expected 5"),
        ({"stages": [[0, 2], [2, "3"], [3, 5]]}, r"p.json: plan.stages\[1\]\[1\]: got '3', expected int"),
        ({"placement": [[0, 3], [1, 4]]}, "plan.placement: expected 3 rows of at least one device"),
        ({"placement": [[0, 3], [1, 4], []]}, "plan.placement: expected 3 rows of at least one device"),
        (
            {"placement": [[0, 3], [1, 4], [2]]},
            r"plan.shares: got \[3, 2\], expected one integer >= 1",
        ),
        ({"placement": [[0, 3], [1, 4], [2, 3]]}, "plan.placement: expected every device index once"),
        ({"placement": [[0, 3], [1, 4], [2, -1]]}, "plan.placement: expected every device index once and none neg"),
        ({"placement": [[], [], []]}, "plan.placement: expected 3 rows of at least one device"),
        ({"shares": [3, 2, 1], "microbatches": 6}, r"plan.shares: got \[3, 2, 1\], expected 2 integers >= 1"),
        ({"shares": [5, 0]}, r"plan.shares: got \[5, 0\], expected 2 integers >= 1"),
        ({"microbatches": 6}, "p.json: microbatches: got 6, expected the sum of shares 5"),
        ({"schedule": "2f2b"}, "plan.schedule: got '2f2b', expected one of 1f1b, gpipe"),
        ({"in_flight": [3, 2]}, r"plan.in_flight: got \[3, 2\], expected 3 integers >= 1, one per stage"),
        ({"in_flight": [3, 2, 0]}, "plan.in_flight: got .* expected 3 integers >= 1"),
        ({"in_flight": [2, 3, 1]}, "plan.in_flight: stage 0 has 2, expected at least the 3 of stage 1"),
        ({"shedule": "gpipe"}, r'p.json: shedule: unknown field \(did you mean "schedule"\?\)'),
        ({"in_fligth": [9, 9, 9]}, r'p.json: in_fligth: unknown field \(did you mean "in_flight"\?\)'),
        ({"bounds_s": 1.5}, r'p.json: bounds_s: unknown field \(did you mean "bound_s"\?\)'),
        ({"zzz": 1}, "p.json: zzz: unknown field; a solver's own go under 'found'"),
        ({"found": [1]}, r"p.json: found: got \[1\], expected an object"),
        ({"codec": ["none"]}, "plan.codec: got 1 names, expected 2, one per boundary"),
    ],
)
def test_a_bad_plan_says_why_in_one_line(change, message):
    with pytest.raises(BadInput, match=message) as caught:
        parse(json.dumps(DATA | change), "p.json")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["n_layers", "stages", "placement", "shares"])
def test_a_missing_field_is_named(name):
    data = {key: value for key, value in DATA.items() if key != name}
    with pytest.raises(BadInput, match=f"p.json: plan.{name}: missing"):
        parse(json.dumps(data), "p.json")


def test_a_file_that_is_no_plan(tmp_path):
    with pytest.raises(BadInput, match="p.json: not JSON"):
        parse("{", "p.json")
    with pytest.raises(BadInput, match="p.json: format"):
        parse("[]", "p.json")
    with pytest.raises(BadInput, match="none.json: cannot be read"):
        load(tmp_path / "none.json")
