"""Mixtures of token files: shares, epochs of each source, and what does not fit together."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdt.cli.run_inputs import token_file
from jaxdt.model.batches import Samples
from jaxdt.model.data import Tokens, open_data, verify_checksum, write_pieces, write_tokens
from jaxdt.model.mixture import Mixture
from jaxdt.run.config import TrainConfig
from jaxdt.run.errors import BadInput

SEQ_LEN = 4
SIZES = {"a": 41, "b": 81, "c": 25}  # train tokens; each file has tokens of its own


@pytest.fixture
def folder(tmp_path):
    for i, (name, n_tokens) in enumerate(SIZES.items()):
        numbers = 100 * i + np.arange(n_tokens)
        write_tokens(tmp_path / f"{name}.tok", "x", 300, numbers, numbers[:21])
    return tmp_path


def mixed(folder, **shares):
    sources = [{"path": f"{name}.tok", "share": share} for name, share in shares.items()]
    (folder / "mix.json").write_text(json.dumps({"sources": sources}))
    return token_file(str(folder / "mix.json"))


def drawn(data, n_steps, size=4, n_microbatches=2, seed=5):
    batches = [data.train_batch(seed, s, m, size, SEQ_LEN, n_microbatches) for s in range(n_steps) for m in range(2)]
    return np.concatenate(batches)


def test_each_source_gives_its_share_of_any_samples_in_a_row_and_every_window_once_an_epoch(folder):
    rows = drawn(mixed(folder, a=2, b=5, c=1), 10)
    source = rows[:, 0] // 100
    assert Counter(source[:80].tolist()) == {0: 20, 1: 50, 2: 10}
    for start in range(len(rows) - 8):
        counts = Counter(source[start : start + 8].tolist())
        assert abs(counts[0] - 2) <= 1 and abs(counts[1] - 5) <= 1 and abs(counts[2] - 1) <= 1
    for i, name in enumerate(SIZES):
        own = open_data(folder / f"{name}.tok")
        found = rows[source == i]
        n = own.n_train_windows(SEQ_LEN)
        for epoch in range(len(found) // n):
            assert len({int(row[0]) for row in found[epoch * n : (epoch + 1) * n]}) == n
        wanted = np.concatenate([own.train_batch(5, k, 0, 1, SEQ_LEN, 1) for k in range(len(found))])
        np.testing.assert_array_equal(found, wanted)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=5), st.integers(0, 10**9), st.integers(1, 60))
def test_sources_are_counted_without_a_gap(shares, first, n_samples):
    mixture = Mixture.__new__(Mixture)
    mixture._shares = shares
    before = mixture._counts(first)
    assert sum(before) == first
    for sample in range(first, first + n_samples):
        source, number = mixture._source_of(sample)
        assert number == before[source]
        before[source] += 1
    assert before == mixture._counts(first + n_samples)


def test_held_out_microbatches_are_mixed_too_each_of_one_source_and_no_sample_comes_twice(folder):
    data = mixed(folder, a=1, b=3)
    n_batches = data.n_eval_batches(1, SEQ_LEN)
    assert n_batches == 6 and [data.held_out_source(i) for i in range(6)] == [1, 1, 1, 0, 1, 1]
    assert data.n_eval_batches(2, SEQ_LEN) == 2  # b has five samples
    rows = np.concatenate([data.eval_batch(i, 1, SEQ_LEN) for i in range(n_batches)])
    assert (rows[:, 0] // 100).tolist() == [data.held_out_source(i) for i in range(6)]
    assert len({int(row[0]) for row in rows}) == len(rows)
    np.testing.assert_array_equal(data.eval_batch(1, 2, SEQ_LEN), open_data(folder / "b.tok").eval_batch(1, 2, SEQ_LEN))
    with pytest.raises(IndexError):
        data.eval_batch(n_batches, 1, SEQ_LEN)
    with pytest.raises(BadInput, match=r"a\.tok: got 21 held-out tokens, expected at least .+ = 201"):
        data.n_eval_batches(50, SEQ_LEN)


def test_each_source_has_the_mean_over_its_microbatches_that_come_again_behind_the_last(folder):
    data = mixed(folder, a=1, b=3, c=2)
    sources = [data.held_out_source(m % 5) for m in range(7)]
    losses = [(m, 10.0 * m) for m in range(7)]
    expected = {
        name: np.mean([loss for (_, loss), source in zip(losses, sources, strict=True) if source == i])
        for i, name in enumerate(("a.tok", "b.tok", "c.tok"))
        if i in sources
    }
    assert len(expected) > 1 and data.by_source(losses, 5) == pytest.approx(expected)
    assert list(data.by_source(losses[:1], 5)) == [("a.tok", "b.tok", "c.tok")[sources[0]]]


def test_the_weights_of_a_source_are_those_that_it_has_alone(folder):
    numbers = np.arange(41)
    for name, n_counted in (("few", 4), ("many", 2)):
        tokens = Tokens(numbers, np.zeros(1, np.int64), numbers % n_counted == 0)
        write_pieces(folder / f"{name}.tok", "x", 300, [tokens], [tokens], "00" * 32)
    train = TrainConfig(microbatch_size=2, eval_microbatches=4)
    both = Samples(mixed(folder, few=1, many=1), train, 1, "join")
    alone = Samples(open_data(folder / "few.tok"), TrainConfig(microbatch_size=2, eval_microbatches=2), 1, "join")
    found = [both.held_out(m, SEQ_LEN) for m in range(4)]
    few = [batch for m, batch in enumerate(found) if mixed(folder, few=1, many=1).held_out_source(m) == 0]
    for batch, expected in zip(few, [alone.held_out(m, SEQ_LEN) for m in range(2)], strict=True):
        np.testing.assert_array_equal(batch.tokens, expected.tokens)
        np.testing.assert_array_equal(batch.weights, expected.weights)
    assert sum(batch.weights.sum() for batch in few) == pytest.approx(4)


def test_a_mixture_has_the_checksum_of_its_files_and_shares(folder):
    one, two = mixed(folder, a=1, b=3), mixed(folder, a=2, b=3)
    assert one.checksum != two.checksum == mixed(folder, a=2, b=3).checksum
    verify_checksum(one)
    content = bytearray((folder / "b.tok").read_bytes())
    content[200] ^= 1
    (folder / "b.tok").write_bytes(content)
    with pytest.raises(BadInput, match="b.tok: tokens have SHA256"):
        verify_checksum(mixed(folder, a=1, b=3))


def test_documents_and_what_counts_are_those_of_the_file(folder):
    numbers, starts = np.arange(30), np.array([0, 7, 9])
    counted = np.arange(30) % 3 > 0
    pieces = [Tokens(numbers, starts, counted)]
    write_pieces(folder / "d.tok", "x", 300, pieces, [Tokens(numbers, starts)], "00" * 32)
    data, own = mixed(folder, a=1, d=1), open_data(folder / "d.tok")
    assert not data.counts_all and data.n_documents == 8
    (place,) = [p for p in data.train_places(0, 0, 0, 2, SEQ_LEN, 1) if p >= 62]
    np.testing.assert_array_equal(data.begins(place, SEQ_LEN), own.begins(place - 62, SEQ_LEN))
    for within in (False, True):
        found = data.counted_targets(place, SEQ_LEN, within_documents=within)
        np.testing.assert_array_equal(found, own.counted_targets(place - 62, SEQ_LEN, within_documents=within))


@pytest.mark.parametrize(
    ("sources", "line"),
    [
        ([], "mix.json: sources: got none, expected one or more"),
        ([{"path": "a.tok", "share": 0}], r"mix.json: sources\[0\].share: got 0, expected an integer >= 1"),
        (
            [{"path": "a.tok", "share": 1}, {"path": "o.tok", "share": 1}],
            "o.tok: tokenizer: got 'y', .+ with one --tokenizer",
        ),
        ([{"path": "none.tok", "share": 1}], "none.tok: cannot be read"),
        ([{"path": "a.tok", "shares": 1}], "mix.json"),
    ],
)
def test_what_does_not_fit_together_is_refused(sources, line, folder):
    write_tokens(folder / "o.tok", "y", 300, np.arange(30), np.arange(20))
    (folder / "mix.json").write_text(json.dumps({"sources": sources}))
    with pytest.raises(BadInput, match=line):
        token_file(str(folder / "mix.json"))
