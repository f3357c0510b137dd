"""Which checkpoints are complete, on how many disks, and when a run is over."""

from jaxdt.membership.checkpoint_progress import CheckpointProgress
from jaxdt.protocol.events import Checkpoint, Part, Saved


def progress(n_copies=1):
    return CheckpointProgress(n_stages=2, n_steps=3, checkpoint=Checkpoint(), n_copies=n_copies)


def save(one, version, stage, disk="d0", digest="a", blocked_s=0.0):
    one.saved(Saved(version, stage, blocked_s, digest, 9), disk)


def complete(one, live=("d0",)):
    found = one.found(0, live)
    return found and (found.version, one.complete(found))


def test_a_checkpoint_is_complete_with_the_last_stage():
    one = progress()
    save(one, 2, 1, blocked_s=0.1)
    assert complete(one) is None
    save(one, 2, 0)
    assert complete(one) == (2, 0.1) and one.checkpoint.version == 2


def test_a_part_that_is_told_late_does_not_bring_an_older_checkpoint_back():
    """Its saver was cut off meanwhile."""
    one = progress()
    save(one, 1, 1)
    save(one, 3, 0)
    save(one, 3, 1)
    assert complete(one) == (3, 0.0)
    save(one, 1, 0)
    assert complete(one) is None and one.checkpoint.version == 3


def test_a_run_is_over_when_all_members_are_done_and_the_last_checkpoint_is_complete():
    one = progress()
    save(one, 3, 0)
    save(one, 3, 1)
    complete(one)
    one.done(0)
    assert not one.is_over([0, 1]) and one.is_over([0])


def test_each_part_has_to_be_on_as_many_live_disks_as_are_wanted_or_there():
    one = progress(n_copies=2)
    save(one, 1, 0, "d0")
    save(one, 1, 1, "d1")
    assert one.found(0, ["d0", "d1", "d2"]) is None
    save(one, 1, 0, "d2")
    save(one, 1, 1, "gone")
    assert one.found(0, ["d0", "d1", "d2"]) is None
    save(one, 1, 1, "d0")
    found = one.found(0, ["d0", "d1", "d2"])
    assert found.n_copies == 2
    assert found.parts == (Part(1, 0, "a", 9, ("d0", "d2")), Part(1, 1, "a", 9, ("d0", "d1", "gone")))


def test_where_all_see_one_disk_one_copy_is_enough():
    one = progress(n_copies=2)
    save(one, 1, 0)
    save(one, 1, 1)
    assert one.found(0, ["d0"]).n_copies == 1


def test_two_parts_of_one_stage_are_not_two_copies():
    """A process that was thought to be dead wrote one of its own, so their digests differ."""
    one = progress(n_copies=2)
    save(one, 1, 1, "d0")
    save(one, 1, 1, "d1")
    save(one, 1, 0, "d0", "a")
    save(one, 1, 0, "d1", "b")
    assert one.found(0, ["d0", "d1"]) is None
    save(one, 1, 0, "d0", "b")
    assert one.found(0, ["d0", "d1"]).parts[0] == Part(1, 0, "b", 9, ("d0", "d1"))
