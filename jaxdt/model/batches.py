"""What a microbatch is made of: its tokens, where documents begin in its samples, and how much each target counts.

The loss of a step is the mean over all targets that count in it (`Samples`), however they are spread over microbatches:
a target weighs (samples of the step) / (targets of the step that count), so that the sum over the step, divided by its
samples as rounds do, is that mean. Which targets count follows from the token file and the numbers of the step's
microbatches alone, so nobody has to tell another.

B samples, T tokens."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from jaxtyping import Bool, Int32

from jaxdt.run.config import MASK, TrainConfig


class Batch(NamedTuple):
    """Some samples, as arrays of numpy or of jax.

    - `tokens`: int32 [B, T+1]. The inputs are all but the last, the targets all but the first. Only a stage between the
      first and the last does without.
    - `begins`: int32 [B, T], where in its sample the document of each input begins. None: a sample is one document.
    - `weights`: float32 [B, T], of each target in the sum of the losses of the samples. None: each weighs 1 / T, so a
      sample's loss is the mean over its tokens."""

    tokens: Any = None
    begins: Any = None
    weights: Any = None


class TokenSource(Protocol):
    """Where samples come from, such as a TokenFile, whose methods these are. Those that are about places are asked for
    where documents are set apart or some tokens do not count."""

    @property
    def counts_all(self) -> bool: ...

    def train_batch(
        self, seed: int, step: int, microbatch: int, microbatch_size: int, seq_len: int, n_microbatches: int
    ) -> Int32[np.ndarray, "B T+1"]: ...
    def train_places(
        self, seed: int, step: int, microbatch: int, microbatch_size: int, seq_len: int, n_microbatches: int
    ) -> list[int]: ...
    def n_eval_batches(self, microbatch_size: int, seq_len: int) -> int: ...
    def eval_batch(self, index: int, microbatch_size: int, seq_len: int) -> Int32[np.ndarray, "B T+1"]: ...
    def eval_places(self, index: int, microbatch_size: int, seq_len: int) -> list[int]: ...
    def held_out_source(self, index: int) -> int: ...
    def begins(self, place: int, seq_len: int) -> Int32[np.ndarray, " T"]: ...
    def counted_targets(self, place: int, seq_len: int, *, within_documents: bool) -> Bool[np.ndarray, " T"]: ...


class Samples:
    """The batches of a run. `n_microbatches`: of a step of the whole run. `together` is over which microbatches the
    loss is a mean: all of a step, those of a pipeline that steps by itself, or those of a held-out loss that are of one
    source."""

    def __init__(self, source: TokenSource, train: TrainConfig, n_microbatches: int, borders: str):
        self._source = source
        self._size = train.microbatch_size
        self._n_microbatches = n_microbatches
        self._masks = borders == MASK
        self._is_weighted = self._masks or not source.counts_all
        # Targets are counted once for a step, not for each of its microbatches.
        self._weight = functools.lru_cache(8)(self._samples_by_targets)
        self._n_held_out = train.eval_microbatches
        self._held_out: dict[int, int] = {}  # length of samples -> how many batches there are

    def train(self, seed: int, step: int, microbatch: int, seq_len: int, together: Sequence[int]) -> Batch:
        """A microbatch of a step."""
        drawn = (self._size, seq_len, self._n_microbatches)
        tokens_BT = self._source.train_batch(seed, step, microbatch, *drawn)
        return self._batch(tokens_BT, seq_len, (seed, step), microbatch, together)

    def held_out(self, microbatch: int, seq_len: int) -> Batch:
        """A microbatch of a held-out loss. There may be fewer batches than a loss takes; then they come again."""
        n_batches = self.n_held_out(seq_len)
        index, together = microbatch % n_batches, list[int]()
        if self._is_weighted:
            source_of = self._source.held_out_source
            all_of_loss = [m % n_batches for m in range(self._n_held_out)]
            together = [one for one in all_of_loss if source_of(one) == source_of(index)]
        return self._batch(self._source.eval_batch(index, self._size, seq_len), seq_len, None, index, together)

    def n_held_out(self, seq_len: int) -> int:
        """How many different batches of held-out samples there are."""
        if seq_len not in self._held_out:
            self._held_out[seq_len] = self._source.n_eval_batches(self._size, seq_len)
        return self._held_out[seq_len]

    def _batch(
        self,
        tokens_BT: np.ndarray,
        seq_len: int,
        drawn: tuple[int, int] | None,
        microbatch: int,
        together: Sequence[int],
    ) -> Batch:
        if not self._is_weighted:
            return Batch(tokens_BT)
        places = self._places(drawn, microbatch, seq_len)
        begins_BT = np.stack([self._source.begins(place, seq_len) for place in places]) if self._masks else None
        weights_BT = self._counted(places, seq_len) * self._weight(drawn, seq_len, tuple(together))
        return Batch(tokens_BT, begins_BT, weights_BT.astype(np.float32))

    def _places(self, drawn: tuple[int, int] | None, microbatch: int, seq_len: int) -> list[int]:
        """Of the samples of a microbatch, `drawn` with a seed for a step, or of the held-out ones."""
        if drawn is None:
            return self._source.eval_places(microbatch, self._size, seq_len)
        return self._source.train_places(*drawn, microbatch, self._size, seq_len, self._n_microbatches)

    def _counted(self, places: list[int], seq_len: int) -> Bool[np.ndarray, "B T"]:
        masks = self._masks
        return np.stack([self._source.counted_targets(one, seq_len, within_documents=masks) for one in places])

    def _samples_by_targets(self, drawn: tuple[int, int] | None, seq_len: int, together: tuple[int, ...]) -> float:
        """(samples) / (targets that count) of these microbatches; 0 where no target does."""
        n_counted = sum(int(self._counted(self._places(drawn, m, seq_len), seq_len).sum()) for m in together)
        return len(together) * self._size / n_counted if n_counted else 0.0
