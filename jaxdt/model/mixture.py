"""Several token files as one: a file of JSON says which, and how many of the samples come from each.

    {"sources": [{"path": "wiki.tok", "share": 3}, {"path": "code.tok", "share": 1}]}

Paths are relative to that file. Of any samples in a row each source gives its share, rounded down or up: which source
gives a sample, and its how-manieth that is, follows from the sample's number alone. So a batch is as pure a function of
its numbers as that of one token file, and each source has epochs of its own. Held-out microbatches are mixed in the
same way, each of one source, so that each source has a held-out loss."""

import hashlib
import itertools
import statistics
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxdt.model.data import TokenFile, open_data, window_of
from jaxdt.run import serialize
from jaxdt.run.errors import BadInput, require_at_least, unreadable, why

SUFFIX = ".json"  # of the file that says what is mixed


@dataclass(frozen=True)
class Source:
    """A token file, and its part of the samples: `share` by the sum of all shares."""

    path: str
    share: int


@dataclass(frozen=True)
class Recipe:
    """The content of the file."""

    sources: tuple[Source, ...]


class Mixture(TokenFile):
    """Open token files of one tokenizer. A place is the number of a token in all files one after another."""

    def __init__(self, path: Path, files: list[TokenFile], sources: Sequence[Source]):
        self.path = path
        self.files = files
        self._names = [source.path for source in sources]
        self._shares = shares = [source.share for source in sources]
        first = files[0]
        self.vocab_size, self.tokenizer, self.end_of_text = first.vocab_size, first.tokenizer, first.end_of_text
        self.n_train_tokens = sum(file.n_train_tokens for file in files)
        self.n_eval_tokens = sum(file.n_eval_tokens for file in files)
        self.sections = first.sections
        lines = [f"{share} {file.checksum}\n" for file, share in zip(files, shares, strict=True)]
        self.checksum = hashlib.sha256("".join(lines).encode()).hexdigest()
        sizes = [file.n_train_tokens + file.n_eval_tokens for file in files]
        self._starts = list(itertools.accumulate(sizes, initial=0))[:-1]

    def section(self, name: str) -> bytes:
        return self.files[0].section(name)

    @property
    def n_documents(self) -> int:
        """Those of all files together; 0 if one of them does not say where they begin."""
        numbers = [file.n_documents for file in self.files]
        return sum(numbers) if all(numbers) else 0

    @property
    def counts_all(self) -> bool:
        return all(file.counts_all for file in self.files)

    def n_train_windows(self, seq_len: int) -> int:
        return sum(file.n_train_windows(seq_len) for file in self.files)

    def train_places(
        self, seed: int, step: int, microbatch: int, microbatch_size: int, seq_len: int, n_microbatches: int
    ) -> list[int]:
        if not 0 <= microbatch < n_microbatches or step < 0:
            raise ValueError(f"got step {step}, microbatch {microbatch} of {n_microbatches}")
        first = (step * n_microbatches + microbatch) * microbatch_size
        places: list[int] = []
        for source, number in map(self._source_of, range(first, first + microbatch_size)):
            n_windows = self.files[source].n_train_windows(seq_len)
            places.append(self._starts[source] + window_of(seed, number, n_windows) * seq_len)
        return places

    def n_eval_batches(self, microbatch_size: int, seq_len: int) -> int:
        """Full batches, each of one source, in which no held-out window comes twice."""
        limits = [file.n_eval_batches(microbatch_size, seq_len) for file in self.files]

        def fits(n_batches: int) -> bool:
            return all(n <= most for n, most in zip(self._counts(n_batches), limits, strict=True))

        low, high = 1, sum(limits) + 1  # any source has one
        while low < high - 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def held_out_source(self, index: int) -> int:
        return self._source_of(index)[0]

    def by_source(self, losses: Iterable[tuple[int, float]], n_batches: int) -> dict[str, float]:
        found: dict[str, list[float]] = {}
        for microbatch, loss in losses:
            found.setdefault(self._names[self.held_out_source(microbatch % n_batches)], []).append(loss)
        return {name: statistics.fmean(found[name]) for name in self._names if name in found}

    def eval_places(self, index: int, microbatch_size: int, seq_len: int) -> list[int]:
        n_batches = self.n_eval_batches(microbatch_size, seq_len)
        if not 0 <= index < n_batches:
            raise IndexError(f"{self.path}: got evaluation batch {index}, expected 0..{n_batches - 1}")
        source, number = self._source_of(index)
        return [
            self._starts[source] + place for place in self.files[source].eval_places(number, microbatch_size, seq_len)
        ]

    def begins(self, place: int, seq_len: int) -> np.ndarray:
        file, own = self._at(place)
        return file.begins(own, seq_len)

    def counted_targets(self, place: int, seq_len: int, *, within_documents: bool) -> np.ndarray:
        file, own = self._at(place)
        return file.counted_targets(own, seq_len, within_documents=within_documents)

    def _samples(self, places: Iterable[int], seq_len: int) -> np.ndarray:
        found = (self._at(place) for place in places)
        return np.concatenate([file._samples([own], seq_len) for file, own in found])

    def _at(self, place: int) -> tuple[TokenFile, int]:
        """The file of a place, and the place there."""
        source = bisect_right(self._starts, place) - 1
        return self.files[source], place - self._starts[source]

    def _source_of(self, sample: int) -> tuple[int, int]:
        """The source of a sample, and how many samples it gave before. The first source gives the samples at which its
        share reaches the next whole number; of the others the second one does, and so on."""
        total = sum(self._shares)
        for source, share in enumerate(self._shares[:-1]):
            n_before = sample * share // total
            if (sample + 1) * share // total > n_before:
                return source, n_before
            sample, total = sample - n_before, total - share
        return len(self._shares) - 1, sample

    def _counts(self, n_samples: int) -> list[int]:
        """How many of the first samples each source gives."""
        total, counts = sum(self._shares), list[int]()
        for share in self._shares:
            counts.append(n_samples * share // total)
            n_samples, total = n_samples - counts[-1], total - share
        return counts


def open_mixture(path: str | Path) -> Mixture:
    """BadInput for a file that is none, or files that do not fit together."""
    path = Path(path)
    try:
        content = serialize.parse_json(path.read_bytes(), keys_once=True)
    except OSError as error:
        raise unreadable(path, error) from None
    except ValueError as error:
        raise BadInput(f"{path}: cannot be read ({why(error)}), expected JSON as in docs/data.md") from None
    recipe = serialize.read(Recipe, content, str(path))
    if not recipe.sources:
        raise BadInput(f"{path}: sources: got none, expected one or more")
    for i, source in enumerate(recipe.sources):
        require_at_least(f"{path}: sources[{i}].share", source.share, 1)
    files = [open_data(path.parent / source.path) for source in recipe.sources]
    for file in files[1:]:
        for name in ("tokenizer", "vocab_size", "end_of_text"):
            got, expected = getattr(file, name), getattr(files[0], name)
            if got != expected:
                hint = "prepare all of a mixture with one --tokenizer and --end_of_text"
                raise BadInput(f"{file.path}: {name}: got {got!r}, expected {expected!r} as in {files[0].path}; {hint}")
    return Mixture(path, files, recipe.sources)
