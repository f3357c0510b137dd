"""The row of a step has the held-out loss of the parameters after it, however late that loss is known."""

import pytest

from jaxdt.membership.held_out_rows import HeldOutRows
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import StepReport
from jaxdt.run.config import TrainConfig
from jaxdt.run.delay import NO_DELAY, Delay

TRAIN = TrainConfig(steps=5, eval_every_steps=2, eval_microbatches=2)


def row(step):
    return StepReport(step, 1.0, 1.0, 1.0, 1.0, "apply")


def measured(version, *microbatches):
    return ev.HeldOutMeasured(version, tuple((m, 2, 2.0 * version + 4 * m) for m in microbatches))


def told(reports):
    return [(report.step, report.eval_loss) for report in reports]


def test_a_row_waits_for_all_microbatches_and_those_after_it_wait_too():
    rows = HeldOutRows(TRAIN, Delay(1))
    assert told(rows.add(row(0), 1)) == [(0, None)]
    assert told(rows.add(row(1), 2)) == []
    assert rows.has_unreported(2) and not rows.has_unreported(1)
    assert told(rows.on_measured(measured(2, 1), 2)) == []
    assert told(rows.add(row(2), 3)) == []
    assert told(rows.on_measured(measured(2, 1), 3)) == []  # a member says it again in another view
    assert told(rows.on_measured(measured(2, 0, 1), 3)) == [(1, 3.0), (2, None)]  # (4 + 8) / 4
    assert not rows.has_unreported(5)


@pytest.mark.parametrize(("delay", "n_committed"), [(NO_DELAY, 3), (Delay(1), 4)])
def test_a_row_whose_loss_is_lost_waits_until_the_step_that_measures_it_is_committed(delay, n_committed):
    """As after a restart of the coordinator, which the members need not tell again what an earlier one has told."""
    rows = HeldOutRows(TRAIN, delay)
    rows.add(row(1), 2)
    reports = [report for step in range(2, n_committed) for report in rows.add(row(step), step + 1)]
    assert (1, None) in told(reports)


def test_the_last_row_waits_without_a_further_step():
    rows = HeldOutRows(TRAIN)
    assert told(rows.add(row(4), 5)) == [] and rows.has_unreported(5)
    [report] = rows.on_measured(measured(5, 1, 0), 5)
    assert (report.step, report.eval_loss, report.eval_losses) == (4, 6.0, ((0, 5.0), (1, 7.0)))


def test_a_row_before_a_rollback_gets_the_loss_that_is_measured_again():
    rows = HeldOutRows(TRAIN, Delay(1))
    rows.add(row(1), 2)
    rows.on_measured(measured(2, 0), 2)
    rows.add(row(2), 3)
    rows.roll_back(2)
    assert told(rows.on_measured(ev.HeldOutMeasured(2, ((0, 1, 8.0), (1, 1, 6.0))), 2)) == [(1, 7.0)]
