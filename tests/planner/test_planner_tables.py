"""The planner prints words that say what they mean."""

import numpy as np
import pytest

from planner.api.search_run import progress_of
from planner.report.result import Progress
from planner.report.tables import ProgressLine, effort, labels_of
from planner.search.incumbent import Budget, Incumbent


def test_a_plan_that_no_search_had_to_find_is_not_one_of_zero():
    found = {"solver": "auto", "seed": 0, "evaluations": 0, "proved": True}
    assert effort(found, 3.46) == "auto, seed 0: found by the proof alone in 3.5 s"
    assert effort(found | {"proved": False}, 29.5) == "auto, seed 0: from layouts without search in 29.5 s"
    assert effort(found | {"evaluations": 1200}, 3.46) == "auto, seed 0: 1,200 plans tried in 3.5 s"


def test_rows_of_one_name_are_told_apart():
    assert labels_of(["evolve", "block", "evolve", "evolve"]) == ["evolve", "block", "evolve, no. 2", "evolve, no. 3"]


def progress(objective, best_s, **more):
    fields = dict(elapsed_s=1.0, best_s=best_s, shape=(4, 2), bound_s=0.0, gap=None, evaluations=9)
    return Progress(objective, **fields | dict(evaluations_per_s=7.0) | more)


@pytest.mark.parametrize(
    ("shown", "line"),
    [
        (progress("comm_cost", 3.0, gap=float("inf")), "best cost 3.000 s for 4 x 2  7 plans/s"),
        (
            progress("comm_cost", 3.0, bound_s=2.0, gap=0.5),
            "best cost 3.000 s for 4 x 2, at most 50.00% above the best possible (bound 2.000 s)  7 plans/s",
        ),
        (progress("step_time", 0.5, shape=None), "best step 0.500 s (estimated)  7 plans/s"),
        (
            progress("step_time", 0.5, starts=progress("comm_cost", 3.0)),
            "best step 0.500 s (estimated) for 4 x 2; looks for starts by Eq. 1-4: best cost 3.000 s for 4 x 2"
            "  7 plans/s",
        ),
        (
            progress("cost_per_step", None, starts=progress("comm_cost", 3.0)),
            "no price yet; looks for starts by Eq. 1-4: best cost 3.000 s for 4 x 2  7 plans/s",
        ),
    ],
)
def test_a_line_of_progress_says_what_is_minimised(shown, line, capsys):
    ProgressLine(quiet_s=0.0).show(shown)
    assert capsys.readouterr().err == f"   1.0 s  {line}\n"


def test_a_search_inside_another_one_is_shown_beside_it_and_not_in_its_place():
    outer, inner = Incumbent(Budget(None), missing_s=1e6), Incumbent(Budget(None))
    outer.inner = inner
    assert progress_of(outer, "step_time").best_s is None
    outer.offer(np.zeros((2, 2), int), 0.5)
    inner.offer(np.zeros((4, 1), int), 3.0)
    inner.raise_bound(2.0)
    shown = progress_of(outer, "step_time")
    assert (shown.objective, shown.best_s, shown.shape, shown.gap) == ("step_time", 0.5, (2, 2), None)
    assert shown.starts is not None
    assert (shown.starts.objective, shown.starts.best_s, shown.starts.shape) == ("comm_cost", 3.0, (4, 1))
    assert shown.starts.gap == 0.5
