"""What the planner prints, in words that say what they mean."""

from types import SimpleNamespace

from planner.report.tables import ProgressLine, effort, labels_of


def test_a_plan_that_no_search_had_to_find_is_not_one_of_zero():
    found = {"solver": "auto", "seed": 0, "evaluations": 0}
    assert effort(found, 3.46) == "auto, seed 0: found by the proof alone in 3.5 s"
    assert effort(found | {"evaluations": 1200}, 3.46) == "auto, seed 0: 1,200 plans tried in 3.5 s"


def test_rows_of_one_name_are_told_apart():
    assert labels_of(["evolve", "block", "evolve", "evolve"]) == ["evolve", "block", "evolve, no. 2", "evolve, no. 3"]


def test_a_search_without_a_bound_shows_none(capsys):
    line = ProgressLine(quiet_s=0.0)
    for gap in (float("inf"), None, 0.5):
        fields = dict(best_s=3.0, elapsed_s=1.0 + (gap == 0.5), unit="s", bound_s=2.0, evaluations_per_s=7.0, gap=gap)
        line.last_s = 0.0
        line.show(SimpleNamespace(**fields))
    first, second, third = capsys.readouterr().err.splitlines()
    assert first == second == "   1.0 s  best 3.000 s  7 plans/s"
    assert third == "   2.0 s  best 3.000 s  bound 2.000 s  gap  50.00%  7 plans/s"
