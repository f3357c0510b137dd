"""The coordinator knows which checkpoints are complete, on how many disks, and when a run is over."""

from jaxdt.membership.checkpoint_progress import CheckpointProgress, Holder
from jaxdt.protocol import events as ev


def progress(n_copies=1):
    return CheckpointProgress(n_stages=2, n_steps=3, checkpoint=ev.Checkpoint(), n_copies=n_copies)


def save(one, version, stage, disk="d0", digest="a", blocked_s=0.0):
    one.on_saved(ev.Saved(version, stage, blocked_s, digest, 9), disk)


def found_on(one, *disks):
    """The checkpoint that is complete if these disks are those of peers of stage 0, 1, 0, ..."""
    return one.found(0, 0, [Holder(peer, peer % 2, disk) for peer, disk in enumerate(disks)])


def complete(one, live=("d0",)):
    found = found_on(one, *live)
    return found and (found.version, one.on_complete(found))


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
    one.on_done(0)
    assert not one.is_over([0, 1]) and one.is_over([0])


def test_each_part_has_to_be_on_as_many_live_disks_as_are_wanted_or_there():
    one = progress(n_copies=2)
    save(one, 1, 0, "d0")
    save(one, 1, 1, "d1")
    assert found_on(one, "d0", "d1", "d2") is None
    save(one, 1, 0, "d1")
    save(one, 1, 1, "gone")
    assert found_on(one, "d0", "d1", "d2") is None
    save(one, 1, 1, "d0")
    found = found_on(one, "d0", "d1", "d2")
    assert found.n_copies == 2
    assert found.parts == (ev.Part(1, 0, "a", 9, ("d0", "d1")), ev.Part(1, 1, "a", 9, ("d0", "d1", "gone")))


def test_two_copies_on_disks_of_the_stage_itself_are_not_enough():
    """Peers that lived in the part's stage only hold it: all of them may be lost at once."""
    one, here = written(), holders(0, 1, 0, 1)
    save(one, 1, 0, "d2", "a")
    save(one, 1, 1, "d0", "b")
    assert one.found(0, 0, here) is None
    assert placed(one.orders(here)) == [(3, "a")]
    save(one, 1, 0, "d3", "a")
    found = one.found(0, 0, here)
    assert found
    one.on_complete(found)
    one.on_view()
    assert placed(one.orders([Holder(0, 0, "d0"), Holder(2, 0, "d2"), Holder(5, 1, "d5")])) == [(5, "a"), (2, "b")]


def test_a_run_of_one_stage_needs_no_disk_of_another():
    one = CheckpointProgress(n_stages=1, n_steps=3, checkpoint=ev.Checkpoint(), n_copies=2)
    save(one, 1, 0, "d0")
    save(one, 1, 0, "d1")
    assert one.found(0, 0, holders(0, 0, 0)).n_copies == 2


def test_where_all_see_one_disk_one_copy_is_enough():
    one = progress(n_copies=2)
    save(one, 1, 0)
    save(one, 1, 1)
    assert found_on(one, "d0", "d0").n_copies == 1


def test_two_parts_of_one_stage_are_not_two_copies():
    """A process that was thought to be dead wrote one of its own, so their digests differ."""
    one = progress(n_copies=2)
    save(one, 1, 1, "d0")
    save(one, 1, 1, "d1")
    save(one, 1, 0, "d0", "a")
    save(one, 1, 0, "d1", "b")
    assert found_on(one, "d0", "d1") is None
    save(one, 1, 0, "d0", "b")
    assert found_on(one, "d0", "d1").parts[0] == ev.Part(1, 0, "b", 9, ("d0", "d1"))


def holders(*stages, disks=None):
    """Peer p on disk p, or as `disks` says."""
    return [Holder(peer, stage, f"d{(disks or range(9))[peer]}") for peer, stage in enumerate(stages)]


def written(n_copies=2, digests="ab"):
    """Both stages have written their parts: stage 0 on disk 0, stage 1 on disk 1."""
    one = progress(n_copies)
    for stage, digest in enumerate(digests):
        save(one, 1, stage, f"d{stage}", digest)
    return one


def placed(orders):
    return [(peer, part.digest) for peer, part in orders]


def test_a_copy_goes_where_the_loss_of_its_stage_does_not_take_it_along():
    assert placed(written().orders(holders(0, 1, 0, 1))) == [(3, "a"), (2, "b")]
    assert placed(written().orders(holders(0, 1, 0, 0))) == [(1, "a"), (2, "b")]
    assert placed(written().orders(holders(0, 1))) == [(1, "a"), (0, "b")]


def test_peers_of_one_disk_copy_nothing_to_one_another():
    assert written().orders(holders(0, 1, 0, 1, disks=(0, 0, 0, 0))) == []
    one = written()
    assert placed(one.orders(holders(0, 1, 0, 1, disks=(0, 1, 0, 1)))) == [(1, "a"), (0, "b")]


def test_an_order_is_given_once_in_a_view_and_again_in_the_next():
    one, here = written(), holders(0, 1, 0, 1)
    assert one.orders(here) and not one.orders(here)
    one.on_view()
    assert placed(one.orders(here)) == [(3, "a"), (2, "b")]
    save(one, 1, 0, "d3", "a")
    one.on_view()
    assert placed(one.orders(here)) == [(2, "b")]


def test_copies_are_made_of_one_checkpoint_until_it_is_complete():
    """Newer ones may be written before the copies are through."""
    one, here = written(), holders(0, 1)
    assert placed(one.orders(here)) == [(1, "a"), (0, "b")]
    for version in (2, 3):
        save(one, version, 0, "d0", f"a{version}")
        save(one, version, 1, "d1", f"b{version}")
    assert one.orders(here) == []
    save(one, 1, 0, "d1", "a")
    save(one, 1, 1, "d0", "b")
    assert complete(one, ["d0", "d1"]) == (1, 0.0)
    assert placed(one.orders(here)) == [(1, "a3"), (0, "b3")]


def test_a_part_whose_only_disk_is_gone_is_not_waited_for():
    one = written()
    save(one, 2, 0, "d0", "a2")
    save(one, 2, 1, "d2", "b2")
    here = [Holder(0, 0, "d0"), Holder(2, 1, "d2")]
    assert placed(one.orders(here)) == [(2, "a2"), (0, "b2")]


def test_a_disk_that_cannot_take_a_copy_is_not_asked_again():
    one, here = written(), holders(0, 1, 0, 1)
    one.orders(here)
    one.on_part_missing("a", "d3")
    assert placed(one.orders(here)) == [(1, "a")]
    one.on_part_missing("a", "d1")
    one.on_part_missing("a", "d2")
    assert placed(one.orders(here)) == [(0, "b")]
    save(one, 1, 1, "d0", "b")
    assert one.found(0, 0, here).n_copies == 1  # no other disk takes one


def test_a_lost_copy_of_the_newest_checkpoint_is_made_again():
    one, here = written(), holders(0, 1, 0, 1)
    save(one, 1, 0, "d3", "a")
    save(one, 1, 1, "d2", "b")
    complete(one, ["d0", "d1", "d2", "d3"])
    assert one.orders(here) == []
    one.on_part_missing("b", "d1")
    assert placed(one.orders(here)) == [(0, "b")]
    save(one, 1, 1, "d0", "b")
    assert one.checkpoint.parts[1].disks == ("d0", "d2")
    assert one.without_holder(["d1", "d2"]) == [0] and one.without_holder(["d0"]) == []
