"""Token files and the batches drawn from them."""

import hashlib
import os
import tempfile
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdt.model.data import (
    CRC,
    HEADER_BYTES,
    HEADERS,
    MAGIC,
    Tokens,
    open_data,
    permuted,
    verify_checksum,
    window_of,
    write_pieces,
    write_tokens,
)
from jaxdt.run.errors import BadInput
from jaxdt.runtime.storage.store import RESEED_STRIDE

SEQ_LEN = 8
GOLDEN_FIRSTS = [[160, 168, 72], [144, 192, 40], [264, 8, 208], [152, 112, 272]]
GOLDEN_WINDOWS = [633141, 113243, 504811]
N_TRAIN, N_EVAL = 333, 100
N_WINDOWS = (N_TRAIN - 1) // SEQ_LEN


@pytest.fixture
def counted(tmp_path):
    """Train tokens 0..332 and held-out tokens 400..499: a token says where it stands."""
    train, held_out = np.arange(N_TRAIN), np.arange(400, 400 + N_EVAL)
    return write_tokens(tmp_path / "counted.tok", "bytes", 500, train, held_out)


def damaged(path: Path, at: int) -> Path:
    """The file with the bits of one byte flipped."""
    content = bytearray(path.read_bytes())
    content[at] ^= 0xFF
    path.write_bytes(content)
    return path


# Token files


def test_header_survives_reopening(counted):
    file = open_data(counted.path)
    assert (file.tokenizer, file.vocab_size) == ("bytes", 500)
    assert (file.n_train_tokens, file.n_eval_tokens) == (N_TRAIN, N_EVAL)
    stored = np.concatenate([np.arange(N_TRAIN), np.arange(400, 400 + N_EVAL)]).astype("<u2")
    assert file.checksum == hashlib.sha256(stored.tobytes()).hexdigest()
    verify_checksum(file)


def test_a_token_outside_the_vocabulary_is_not_trained_on(counted):
    """It would take the row of another token on a device, and nobody would be told."""
    for part, batch in (
        (0, lambda file: file.train_batch(0, 0, 0, 41, SEQ_LEN, 1)),
        (N_TRAIN, lambda file: file.eval_batch(0, 1, SEQ_LEN)),
    ):
        content = bytearray(counted.path.read_bytes())
        at = HEADER_BYTES + 2 * (part + 1)
        content[at : at + 2] = b"\xff\xff"
        other = counted.path.with_name(f"damaged_{part}.tok")
        other.write_bytes(content)
        with pytest.raises(
            BadInput, match=f"damaged_{part}.tok: got token 65535, expected less than the vocabulary 500"
        ):
            batch(open_data(other))


@pytest.mark.parametrize(("vocab_size", "token_bytes"), [(65536, 2), (65537, 4)])
def test_widest_token_is_kept(tmp_path, vocab_size, token_bytes):
    train = np.array([0, vocab_size - 1])
    file = write_tokens(tmp_path / "wide.tok", "bytes", vocab_size, train, train[:0])
    assert file.tokens.nbytes == 2 * token_bytes
    assert file.train_batch(0, 0, 0, 1, 1, 1).tolist() == [[0, vocab_size - 1]]


@pytest.mark.parametrize(
    ("train", "held_out", "message"),
    [([1], [], "1 train tokens"), ([1, 10], [], "train tokens 1..10"), ([1, 2], [-1], "held-out tokens -1..-1")],
)
def test_bad_tokens_are_not_written(tmp_path, train, held_out, message):
    with pytest.raises(BadInput, match=message):
        write_tokens(tmp_path / "bad.tok", "bytes", 10, np.array(train), np.array(held_out, int))
    assert list(tmp_path.iterdir()) == []


def test_failed_write_keeps_the_old_file_and_leaves_no_other(counted, monkeypatch):
    def full_disk(descriptor):
        raise OSError(28, "No space left on device")

    before = counted.path.read_bytes()
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(BadInput, match="counted.tok: cannot be written .No space left"):
        write_tokens(counted.path, "bytes", 10, np.arange(10), np.arange(10))
    assert counted.path.read_bytes() == before
    assert list(counted.path.parent.iterdir()) == [counted.path]


def test_name_that_does_not_fit_the_header_is_refused(tmp_path):
    with pytest.raises(ValueError, match="at most 16"):
        write_tokens(tmp_path / "x.tok", "a_very_long_tokenizer", 10, np.arange(10), np.arange(10))


@pytest.mark.parametrize("change_bytes", [-1, 1])
def test_other_length_than_the_header_says_is_refused(counted, change_bytes):
    size_bytes = counted.path.stat().st_size
    os.truncate(counted.path, size_bytes + change_bytes)
    with pytest.raises(BadInput, match=f"counted.tok: got {size_bytes + change_bytes} bytes, expected {size_bytes}"):
        open_data(counted.path)


def test_truncation_inside_the_header_is_refused(counted):
    os.truncate(counted.path, 50)
    with pytest.raises(BadInput, match=f"counted.tok: got 50 bytes, expected a header of {HEADER_BYTES}"):
        open_data(counted.path)


def test_wrong_magic_is_refused(counted):
    with pytest.raises(BadInput, match="counted.tok: got first bytes .*, expected a token file"):
        open_data(damaged(counted.path, 0))


def test_other_version_is_refused(counted):
    with pytest.raises(BadInput, match="token file version 253, expected one up to 2"):
        open_data(damaged(counted.path, 8))


@pytest.mark.parametrize("at", [12, 16, 24, 32, 40, 60, 100, HEADER_BYTES - 1])
def test_any_other_damage_to_the_header_is_found_at_opening(counted, at):
    with pytest.raises(BadInput, match="counted.tok: got header CRC"):
        open_data(damaged(counted.path, at))


def test_missing_file_and_folder_are_refused(tmp_path):
    for path in (tmp_path / "none.tok", tmp_path):
        with pytest.raises(BadInput, match=f"{path}: cannot be read"):
            open_data(path)


def test_flipped_token_byte_opens_but_fails_verification(counted):
    file = open_data(damaged(counted.path, HEADER_BYTES + 77))
    with pytest.raises(BadInput, match="counted.tok: tokens have SHA256"):
        verify_checksum(file)


def test_sections_say_where_documents_begin_and_hold_the_tokenizer(tmp_path):
    train = [Tokens(np.arange(5), np.array([0, 3])), Tokens(np.arange(4), np.array([0]))]
    held_out = [Tokens(np.arange(7), np.array([2, 6]))]
    options = {"end_of_text": 3, "tokenizer_json": b'{"a": 1}'}
    file = write_pieces(tmp_path / "x.tok", "hf:1", 10, train, held_out, "00" * 32, **options)
    assert [starts.tolist() for starts in file.documents] == [[0, 3, 5], [2, 6]]
    assert (file.n_documents, file.end_of_text, file.section("tokenizer")) == (5, 3, b'{"a": 1}')
    verify_checksum(file)
    start = file.sections["documents"].start
    assert start % 64 == 0
    with pytest.raises(BadInput, match="x.tok: section documents has SHA256"):
        verify_checksum(open_data(damaged(file.path, start)))


def written(path, *parts):
    """A token file of parts, each a list of pieces with the bits of their tokens, None for all ones and a number."""

    def piece(bits, n):
        counted = None if bits is None else np.array(bits, bool)
        return Tokens(np.zeros(n if bits is None else len(bits)), np.array([0]), counted)

    made = [[piece(bits, n) for bits, n in pieces] for pieces in parts]
    return write_pieces(path, "bytes", 256, *made, "00" * 32)


SOME_BITS = st.lists(st.booleans(), max_size=20).map(lambda bits: (bits, 0))
ALL_ONES = st.integers(0, 20).map(lambda n: (None, n))


@given(st.lists(st.lists(st.one_of(SOME_BITS, ALL_ONES), max_size=6), min_size=2, max_size=2))
def test_tokens_that_count_are_bits_of_the_file_unless_all_do(parts):
    expected = [bit for pieces in parts for bits, n in pieces for bit in ([True] * n if bits is None else bits)]
    with tempfile.TemporaryDirectory() as folder:
        parts[0].insert(0, (None, 2))
        file = written(f"{folder}/x.tok", *parts)
        verify_checksum(file)
        if all(expected):
            assert file.counted is None and "counted" not in file.sections
        else:
            found = np.unpackbits(file.counted, count=len(file.tokens), bitorder="little")
            assert found.tolist() == [1, 1, *expected]
            assert len(file.counted) == -(-len(file.tokens) // 8)


def test_bits_that_are_not_one_a_token_are_refused(tmp_path):
    file = written(tmp_path / "x.tok", [([1, 0] * 10, 0)], [])
    file.tokens = file.tokens[:-5]
    with pytest.raises(BadInput, match="x.tok: section counted has 3 bytes, expected 2, a bit a token"):
        _ = file.counted
    file = open_data(damaged(file.path, file.sections["counted"].start))
    with pytest.raises(BadInput, match="x.tok: section counted has SHA256"):
        verify_checksum(file)


def test_damaged_contents_are_found_at_opening(counted):
    with pytest.raises(BadInput, match="counted.tok: its contents are damaged"):
        open_data(damaged(counted.path, counted.path.stat().st_size - 1))


@pytest.mark.parametrize("contents", [
    b"[]", b"{", b'{"end_of_text": null, "n_train_documents": 1, "sections": {"documents": [1]}}',
    b'{"end_of_text": null, "n_train_documents": "1", "sections": {}}',
    b'{"end_of_text": null, "n_train_documents": 1, "sections": {"documents": [0, 99999999, ""]}}',
])  # fmt: skip
def test_contents_of_a_strangers_file_are_refused(counted, contents):
    head = counted.path.read_bytes()
    fields = list(HEADERS[2].unpack_from(head))
    fields[-3:] = fields[-3], len(contents), hashlib.sha256(contents).digest()
    header = HEADERS[2].pack(*fields)
    counted.path.write_bytes(header + CRC.pack(zlib.crc32(header)) + head[HEADER_BYTES : fields[-3]] + contents)
    with pytest.raises(BadInput, match="counted.tok: its contents are of another format"):
        open_data(counted.path)


def test_a_file_of_version_1_is_read(tmp_path):
    tokens = np.arange(12, dtype="<u2").tobytes()
    header = HEADERS[1].pack(MAGIC, 1, 2, 100, 10, 2, b"bytes", hashlib.sha256(tokens).digest(), bytes(32))
    (tmp_path / "old.tok").write_bytes(header + CRC.pack(zlib.crc32(header)) + tokens)
    file = open_data(tmp_path / "old.tok")
    verify_checksum(file)
    assert (file.tokens.tolist(), file.n_documents, file.end_of_text) == (list(range(12)), 0, None)
    assert file.train_batch(0, 0, 0, 1, 9, 1).tolist() == [list(range(10))]


# Training batches


def test_batch_is_a_pure_function_of_its_arguments(counted):
    forwards = [counted.train_batch(7, step, m, 4, SEQ_LEN, 3) for step in range(5) for m in range(3)]
    again = open_data(counted.path)
    backwards = [again.train_batch(7, step, m, 4, SEQ_LEN, 3) for step in reversed(range(5)) for m in (2, 1, 0)]
    np.testing.assert_array_equal(forwards, backwards[::-1])


def test_batch_holds_whole_windows_as_int32(counted):
    batch = counted.train_batch(7, 2, 1, 4, SEQ_LEN, 3)
    assert batch.dtype == np.int32 and batch.shape == (4, SEQ_LEN + 1)
    assert (batch[:, 0] % SEQ_LEN == 0).all()
    np.testing.assert_array_equal(batch, batch[:, :1] + np.arange(SEQ_LEN + 1))


def test_golden_batches(counted):
    """The same numbers on every machine, Python and process: a change here breaks resuming of running trainings."""
    firsts = [counted.train_batch(1, step, m, 3, SEQ_LEN, 2)[:, 0].tolist() for step in range(2) for m in range(2)]
    assert firsts == GOLDEN_FIRSTS
    assert [window_of(2022, sample, 1_000_003) for sample in (0, 1, 1_000_003)] == GOLDEN_WINDOWS


def test_epoch_visits_every_window_once_and_the_next_in_another_order(counted):
    epochs = [
        [window_of(3, sample, N_WINDOWS) for sample in range(epoch * N_WINDOWS, (epoch + 1) * N_WINDOWS)]
        for epoch in range(3)
    ]
    assert all(sorted(windows) == list(range(N_WINDOWS)) for windows in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_no_sample_repeats_across_steps_within_an_epoch(counted):
    n_steps = N_WINDOWS // (2 * 5)
    firsts = [
        first
        for step in range(n_steps)
        for m in range(2)
        for first in counted.train_batch(0, step, m, 5, SEQ_LEN, 2)[:, 0].tolist()
    ]
    assert len(firsts) == 40 and max(Counter(firsts).values()) == 1


def test_step_holds_the_same_samples_however_it_is_cut(counted):
    """Promise 1 of the design: the batch of a step does not depend on the number of microbatches."""
    coarse = [counted.train_batch(5, 3, m, 6, SEQ_LEN, 2) for m in range(2)]
    fine = [counted.train_batch(5, 3, m, 3, SEQ_LEN, 4) for m in range(4)]
    np.testing.assert_array_equal(np.concatenate(coarse), np.concatenate(fine))


def test_seeds_give_different_orders(counted):
    orders = {tuple(window_of(seed, sample, N_WINDOWS) for sample in range(N_WINDOWS)) for seed in range(20)}
    assert len(orders) == 20


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 16, 17, 97, 1000])
def test_permuted_is_a_bijection(n):
    assert sorted(permuted(index, n, b"key") for index in range(n)) == list(range(n))


def test_permutation_is_spread_evenly():
    """Where the first tenth of 4,000 indices lands: about 40 in each tenth (a fair draw strays beyond 15..65 in fewer
    than one of 10,000 tries)."""
    landed = Counter(permuted(index, 4000, b"key") // 400 for index in range(400))
    assert all(15 <= landed[tenth] <= 65 for tenth in range(10))


def test_too_few_tokens_for_one_window_are_refused(tmp_path):
    file = write_tokens(tmp_path / "short.tok", "bytes", 256, np.arange(9), np.arange(0))
    assert file.train_batch(0, 0, 0, 1, 8, 1).tolist() == [list(range(9))]
    with pytest.raises(BadInput, match="short.tok: got 9 train tokens, expected at least seq_len . 1 = 10"):
        file.train_batch(0, 0, 0, 1, 9, 1)
    with pytest.raises(BadInput, match="short.tok: got 0 held-out tokens, expected at least .* = 17"):
        file.n_eval_batches(2, 8)


@pytest.mark.parametrize(("step", "microbatch"), [(-1, 0), (0, -1), (0, 3)])
def test_microbatch_outside_the_step_is_our_bug(counted, step, microbatch):
    with pytest.raises(ValueError, match="microbatch"):
        counted.train_batch(0, step, microbatch, 1, SEQ_LEN, 3)


# Evaluation batches


def test_eval_batches_are_consecutive_held_out_windows(counted):
    n_batches = counted.n_eval_batches(3, SEQ_LEN)
    assert n_batches == 4
    batches = np.concatenate([counted.eval_batch(index, 3, SEQ_LEN) for index in range(n_batches)])
    assert batches.dtype == np.int32
    np.testing.assert_array_equal(batches, 400 + SEQ_LEN * np.arange(12)[:, None] + np.arange(SEQ_LEN + 1))


@pytest.mark.parametrize("index", [-1, 4])
def test_eval_batch_outside_the_held_out_part_is_our_bug(counted, index):
    with pytest.raises(IndexError, match="expected 0..3"):
        counted.eval_batch(index, 3, SEQ_LEN)


# The rule on the page


def test_the_page_gives_the_order_of_the_samples(counted):
    """The code of docs/data.md, run as it stands there, says where each sample begins, in all epochs."""
    page = (Path(__file__).parents[2] / "docs/data.md").read_text()
    code = page.split("```python\n", 1)[1].split("```", 1)[0]
    rule: dict = {}
    exec(code, rule)
    assert not any("jaxdt" in line for line in code.splitlines())
    for step, microbatch, size, n_microbatches, seq_len in [(0, 0, 3, 4, 8), (7, 3, 5, 4, 8), (40, 1, 2, 2, 5)]:
        batch = counted.train_batch(3, step, microbatch, size, seq_len, n_microbatches)
        first = rule["first_tokens"](3, step, microbatch, size, n_microbatches, N_TRAIN, seq_len)
        assert batch[:, 0].tolist() == first  # a token says where it stands
    assert f"{RESEED_STRIDE:,}" in page
