"""Which indices go from which peer of a stage to which of the next: all small cases."""

import itertools
from typing import NamedTuple

import pytest

from jaxdt.wiring.pool.even_transfer import part, part_of

CASES = list(itertools.product(range(1, 40), range(1, 9), range(1, 9)))


class Transfer(NamedTuple):
    """Indices lo..hi-1 go from part `sender` of the senders' cut to part `receiver` of the receivers'."""

    sender: int
    receiver: int
    lo: int
    hi: int


def transfers(length, n_senders, n_receivers):
    """Runs of indices with the same sender and receiver."""
    pairs = [(part_of(length, n_senders, i), part_of(length, n_receivers, i)) for i in range(length)]
    runs = [list(run) for _, run in itertools.groupby(range(length), key=pairs.__getitem__)]
    return [Transfer(*pairs[run[0]], run[0], run[-1] + 1) for run in runs]


def test_the_example_of_the_paper():
    """The first sender gives two thirds of its own to the first receiver, and so on."""
    assert transfers(6, 2, 3) == [
        Transfer(0, 0, 0, 2),
        Transfer(0, 1, 2, 3),
        Transfer(1, 1, 3, 4),
        Transfer(1, 2, 4, 6),
    ]


def test_every_index_goes_once_from_its_sender_to_its_receiver():
    for length, n_senders, n_receivers in CASES:
        found = transfers(length, n_senders, n_receivers)
        assert [i for one in found for i in range(one.lo, one.hi)] == list(range(length))
        assert len(found) <= n_senders + n_receivers - 1
        for one in found:
            assert {one.lo, one.hi - 1} <= set(part(length, n_senders, one.sender))
            assert {one.lo, one.hi - 1} <= set(part(length, n_receivers, one.receiver))


def test_the_way_back_is_the_same_way():
    for length, n_senders, n_receivers in CASES:
        back = [Transfer(one.receiver, one.sender, one.lo, one.hi) for one in transfers(length, n_receivers, n_senders)]
        assert back == transfers(length, n_senders, n_receivers)


@pytest.mark.parametrize("n_parts", [(1, 3, 2, 5), (4, 4), (7, 1, 8)])
def test_an_index_keeps_its_number_over_many_stages(n_parts):
    """What leaves a stage is in the hands of the peer to whom the part of the index belongs, all along."""
    length = 24
    holder = {i: part_of(length, n_parts[0], i) for i in range(length)}
    for before, after in itertools.pairwise(n_parts):
        for one in transfers(length, before, after):
            for i in range(one.lo, one.hi):
                assert holder[i] == one.sender
                holder[i] = one.receiver
    assert all(i in part(length, n_parts[-1], holder[i]) for i in holder)
