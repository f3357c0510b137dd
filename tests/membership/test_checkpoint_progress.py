"""Which checkpoints are complete, and when a run is over."""

from jaxdt.membership.checkpoint_progress import CheckpointProgress
from jaxdt.protocol.events import Saved


def completion(*saved, checkpoint=0):
    one = CheckpointProgress(n_stages=2, n_steps=3, checkpoint=checkpoint)
    return one, [one.saved(Saved(version, stage, 0.1 * stage)) for version, stage in saved]


def test_a_checkpoint_is_complete_with_the_last_stage():
    one, told = completion((2, 1), (2, 0))
    assert told == [None, 0.1] and one.checkpoint == 2


def test_a_part_that_is_told_late_does_not_bring_an_older_checkpoint_back():
    """Its saver was cut off meanwhile."""
    one, told = completion((1, 1), (3, 0), (3, 1), (1, 0))
    assert told == [None, None, 0.1, None] and one.checkpoint == 3


def test_a_run_is_over_when_all_members_are_done_and_the_last_checkpoint_is_complete():
    one, _ = completion((3, 0), (3, 1))
    one.done(0)
    assert not one.is_over([0, 1]) and one.is_over([0])
