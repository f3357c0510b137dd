"""A peer keeps tensors for its neighbours, within its budget."""

from jaxdt.protocol import events as ev
from jaxdt.run.work import Work
from jaxdt.wiring.base import StepShape
from jaxdt.wiring.recovery import Recovery


class Kept(Recovery):
    def promise(self):
        return self.inventory(7).kept


def retention(stage, n_stages, sent_bytes, budget_bytes):
    return Kept(StepShape(5, stage, n_stages, 8, 1, (sent_bytes,), retain_bytes=budget_bytes))


def middle(budget_bytes):
    """A peer between two others: 10 bytes each way."""
    return retention(1, 3, (10, 10), budget_bytes)


def done(kept, microbatch, kinds="FB"):
    return [gone for kind in kinds for gone in kept.made(Work(1, kind, microbatch, 5, 7))]


def test_all_is_kept_within_the_budget():
    kept = middle(60)
    assert [done(kept, m) for m in range(3)] == [[], [], []]
    assert kept.promise() == (0, 1, 2)


def test_the_oldest_goes_first_and_whole():
    kept = middle(40)
    done(kept, 4)
    done(kept, 2)
    assert done(kept, 3) == [ev.Discard(ev.Key("act", 7, 2, 4)), ev.Discard(ev.Key("grad", 7, 1, 4))]
    assert kept.promise() == (2, 3)


def test_what_is_promised_stays_until_the_next_step():
    kept = middle(20)
    done(kept, 0)
    assert kept.promise() == (0,)
    assert done(kept, 1) == []
    kept.begin_step()
    assert kept.promise() == ()


def test_forwards_count_but_are_no_help_alone():
    kept = middle(25)
    done(kept, 0)
    assert done(kept, 1, "F") == [] and done(kept, 2, "F") == []
    assert done(kept, 1, "B") != []
    assert kept.promise() == (1,)


def test_the_ends_make_one_tensor_each():
    first, last = retention(0, 2, (10, 0), 10), retention(1, 2, (0, 10), 10)
    for kept in (first, last):
        assert kept.made(Work(0, "F", 0, 5, 7)) + kept.made(Work(0, "B", 0, 5, 7)) == []
        kept.made(Work(0, "F", 1, 5, 7))
        assert kept.made(Work(0, "B", 1, 5, 7)) != []


def test_without_a_budget_nothing_is_kept():
    kept = middle(0)
    assert done(kept, 0) + done(kept, 1) == []
    assert kept.promise() == ()
