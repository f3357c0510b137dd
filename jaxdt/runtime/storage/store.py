"""One peer's tensors by key, and the Work on them: what the machines name, this holds and computes.

Serves both drivers: the runtime's loop over sockets, and the simulator for real arithmetic under virtual time. `run` is
called by one compute thread; `put` and `expect` by receiver threads; the rest by the loop.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxdt.model.base import model_of
from jaxdt.model.data import TokenFile
from jaxdt.model.optim import optimizer
from jaxdt.model.stage import StageFunctions, StageOptions, build_stage
from jaxdt.model.vectors import STAGE_GROUP, TIED_GROUP
from jaxdt.protocol.events import Boundary, Key, Message, Round, SliceKey, State, StateKey
from jaxdt.protocol.message import tensor_key
from jaxdt.runtime.storage.aligned_buffer import aligned_empty
from jaxdt.runtime.storage.boundary_codec import BoundaryCodec
from jaxdt.runtime.storage.checkpoint import join_entries
from jaxdt.runtime.storage.gradient_slices import Slices
from jaxdt.runtime.storage.parameter_versions import ParameterVersions
from jaxdt.runtime.storage.state_vector import WORD, StateVector, checked
from jaxdt.spec.config import RunConfig
from jaxdt.spec.errors import BadInput
from jaxdt.spec.plan import Plan
from jaxdt.spec.sizes import TIED
from jaxdt.spec.work import BACKWARD, EVALUATE, FORWARD, GATHER, REGENERATE, UPDATE, Work

# Samples after a rollback are others than before: a generation draws as a seed far away from those that people choose.
LINEAGE_STRIDE = 1_000_003


def stage_functions(config: RunConfig, plan: Plan, stage: int, devices: int = 1) -> StageFunctions:
    """The stage's jitted functions as the config asks for them."""
    lo, hi = plan.stages[stage]
    options = StageOptions(config.train.microbatch_size, config.remat, config.dtype, devices)
    return build_stage(config.model, lo, hi, optimizer(config.optim), options)


class Store:
    """See the module text. Boundary tensors are kept as they travel: encoded. Parameters start as the config's seed
    says; `restore` takes those of a checkpoint, which it reads with `load_entries(version, names)`."""

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        peer: int,
        data: TokenFile,
        functions: StageFunctions,
        load_entries: Callable[[int, list[str]], dict[str, dict]] | None = None,
    ):
        self.functions, self._load_entries = functions, load_entries
        self.generation = 0
        self._config, self._plan, self._data = config, plan, data
        self._stage, _ = plan.seat(peer)
        self.crossing = BoundaryCodec(config, plan, peer, functions)
        self.versions = ParameterVersions(functions, config.delay, config.train.seed)
        self._words = StateVector(self.versions.state)
        self.n_words = self._words.n_words
        self._fetched: np.ndarray | None = None
        self._accumulators: dict[int, Any] = {}
        self._residuals: dict[Key, Any] = {}
        self._boundaries: dict[Key, Any] = {}
        self._slices = Slices(peer)
        self._retains = config.wiring.retain_bytes > 0
        self._n_evals = 1
        if config.train.eval_every_steps:
            self._n_evals = data.n_eval_batches(config.train.microbatch_size, config.model.seq_len)

    def restore(self, version: int, generation: int) -> None:
        """Parameters and optimizer state of a checkpoint, or for version 0 the initial ones; samples of
        `generation`."""
        self._start_over(generation)
        if version == 0:
            self.versions.begin()
            return
        lo, hi = self._plan.stages[self._stage]
        names = model_of(self._config.model).entries(self._config.model, lo, hi)
        entries = self._load_entries(version, names)
        self.versions.put(version, join_entries(entries, self.versions.state))

    def install(self, version: int, generation: int) -> None:
        """Parameters and optimizer state are the fetched ones; samples of `generation`."""
        self._start_over(generation)
        self.versions.put(version, self._words.tree(self._fetched))
        self._fetched = None

    def _start_over(self, generation: int) -> None:
        """What Work of before left behind belongs to nobody. On the compute thread, so none is running."""
        self.generation = generation
        self.crossing.forget()
        self._accumulators.clear()
        self._residuals.clear()

    # ------------------------------------------------------------------------------------------------------- compute

    def run(self, work: Work, scale: float, rounds: tuple[Round, ...] = ()) -> dict[str, float]:
        """Do the Work and wait for its result, but not until what a neighbour gets of it is encoded: the next Work need
        not wait for that. The values of its Ran."""
        if work.step < self.versions.version and work.kind not in (GATHER, UPDATE):
            return {}  # its step has been over since it was wanted; what it needs is gone
        if work.kind == FORWARD:
            return self._forward(work)
        if work.kind == BACKWARD:
            return self._backward(work)
        if work.kind == REGENERATE:
            return self._regenerate(work)
        if work.kind == EVALUATE:
            return self._evaluate(work)
        if work.kind == GATHER:
            return self._gather(work.step, rounds)
        return self._update(scale, rounds)

    def _forward(self, work: Work) -> dict[str, float]:
        """The last stage leaves everything to its fused backward."""
        if not self.functions.last:
            x = self._input(work)
            y, residual = self.functions.forward(self.versions.of(work.step), x)
            self._residuals[self._key("act", work)] = residual
            self._hand_out("act", work, 1, y)
        return {}

    def _hand_out(self, kind: str, work: Work, offset: int, tensor) -> None:
        """Keep a boundary tensor as it will be sent, once it is computed."""
        key = self._key(kind, work, offset)
        self._boundaries[key] = self.crossing.outgoing(key, tensor)
        jax.block_until_ready(tensor)

    def _backward(self, work: Work) -> dict[str, float]:
        accumulator = self._accumulators.pop(work.step, None)
        if accumulator is None:
            accumulator = self.functions.zeros()
        values, self._accumulators[work.step] = self._into(accumulator, work)
        return values

    def _regenerate(self, work: Work) -> dict[str, float]:
        """The input gradient again; its parameter gradient is counted elsewhere already."""
        self._into(self.functions.zeros(), work)
        return {}

    def _into(self, accumulator, work: Work) -> tuple[dict[str, float], Any]:
        """A backward into an accumulator, which it donates."""
        functions, params = self.functions, self.versions.of(work.step)
        values: dict[str, float] = {"n_samples": self._config.train.microbatch_size}
        if functions.last:
            targets = self._tokens(work)[:, 1:]
            loss, gx, accumulator = functions.loss_backward(params, self._input(work), targets, accumulator)
            values["loss_sum"] = float(loss)
        else:
            gy = self._arrived(self._key("grad", work, 1))
            residual = self._residuals.pop(self._key("act", work))
            gx, accumulator = functions.backward(params, residual, gy, accumulator)
        if not functions.first:
            self._hand_out("grad", work, 0, gx)
        return values, jax.block_until_ready(accumulator)

    def _evaluate(self, work: Work) -> dict[str, float]:
        x = self._input(work, "eval")
        if not self.functions.last:
            y = self.functions.evaluate(self.versions.of(work.step), x)
            self._hand_out("eval", work, 1, y)
            return {}
        loss = self.functions.eval_loss(self.versions.of(work.step), x, self._tokens(work)[:, 1:])
        return {"n_samples": self._config.train.microbatch_size, "loss_sum": float(loss)}

    def _gather(self, step: int, rounds: tuple[Round, ...]) -> dict[str, float]:
        vectors = self.functions.gradient_vectors(self._gradient_sum(step))
        by_group = {self._group(name): vector for name, vector in vectors.items()}
        for round in rounds:
            self._slices.offer(round, np.asarray(by_group[round.group]))
        return {}

    def _gradient_sum(self, step: int):
        """The step's accumulator; a peer that got no microbatch of it contributes zeros."""
        return self._accumulators[step] if step in self._accumulators else self.functions.zeros()

    def _update(self, scale: float, rounds: tuple[Round, ...]) -> dict[str, float]:
        names = {self._group(name): name for name in self.functions.group_sizes}
        vectors = {names[round.group]: self._slices.result(round) for round in rounds}
        self.versions.update(vectors, scale)
        return {}

    def _input(self, work: Work, kind: str = "act"):
        if self.functions.first:
            return self._tokens(work)[:, :-1]
        return self._arrived(self._key(kind, work))

    def _arrived(self, key: Key):
        """A boundary tensor that is used up."""
        return self.crossing.incoming(key, self._boundaries.pop(key))

    def _tokens(self, work: Work) -> np.ndarray:
        """[microbatch_size, T + 1] of a microbatch, a pure function of its name; T is the length of its step."""
        train, lengths = self._config.train, self._config.seq_lengths
        if work.kind == EVALUATE:
            return self._data.eval_batch(work.microbatch % self._n_evals, train.microbatch_size, lengths.full)
        n = self._plan.n_microbatches
        seed = train.seed + LINEAGE_STRIDE * self.generation
        seq_len = lengths.at(work.step)
        return self._data.train_batch(seed, work.step, work.microbatch, train.microbatch_size, seq_len, n)

    def _key(self, kind: str, work: Work, offset: int = 0) -> Key:
        return Key(kind, work.step, work.stage + offset, work.microbatch)

    def _group(self, local_name: str) -> str:
        """The run's name of one of the stage functions' groups."""
        return {STAGE_GROUP: f"stage{self._stage}", TIED_GROUP: TIED}[local_name]

    # ------------------------------------------------------------------------------------------------------- tensors

    def take(self, body: Message) -> Any:
        """The tensor to send with a message. A boundary tensor is handed over, or stays until its step is over where
        it may have to be sent again; a slice stays."""
        key = tensor_key(body)
        if isinstance(key, Key):
            retains = self._retains and key.kind != "eval"  # held-out microbatches begin anew
            return self._boundaries[key] if retains else self._boundaries.pop(key)
        if isinstance(key, StateKey):
            return self._words.cut(self.versions.state, key.lo, key.hi)
        return self._slices.take(key)

    def put(self, body: Message, src: int, tensor: Any) -> None:
        """Keep the tensor that came with a message."""
        if isinstance(body, Boundary):
            self._boundaries[body.key] = tensor
        elif isinstance(body, State):
            if self._fetched is None:
                self._fetched = np.empty(self.n_words, WORD)
            self._fetched[body.key.lo : body.key.hi] = checked(tensor, body)
        else:
            self._slices.put(tensor_key(body), tensor)

    def expect(self, body: Message, table: list[tuple[np.dtype, tuple[int, ...]]]) -> list[np.ndarray]:
        """Buffers for the tensors that are announced beside a message; BadInput if they are not what it must carry."""
        key = tensor_key(body)
        wanted = []
        if isinstance(key, Key):
            wanted = [self.crossing.leaf(key)]
        elif isinstance(key, StateKey):
            if not 0 <= key.lo < key.hi <= self.n_words:
                raise BadInput(f"{key}: expected a slice of the {self.n_words} words of this stage's state")
            wanted = [(WORD, (key.hi - key.lo + 1,))]
        elif key is not None:
            n = sum(n for name, n in self.functions.group_sizes.items() if self._group(name) == key.round.group)
            if not 0 <= key.lo <= key.hi <= n:
                raise BadInput(f"{type(body).__name__} {key}: expected a slice of the {n} numbers that are held here")
            wanted = [(np.dtype(np.float32), (key.hi - key.lo,))]
        if [(dtype, tuple(shape)) for dtype, shape in table] != wanted:
            raise BadInput(f"{type(body).__name__} {key}: got tensors {table}, expected {wanted}")
        return [aligned_empty(shape, dtype) for dtype, shape in wanted]

    def sum(self, key: SliceKey, members: tuple[int, ...]) -> tuple[int, float]:
        """Add up a slice; its digest and squared norm."""
        return self._slices.sum(key, members)

    def forget(self, round: Round) -> None:
        """A round of averaging is void."""
        self._slices.forget(round)

    def discard(self, key: Key) -> None:
        """A boundary tensor is not kept any longer."""
        self._boundaries.pop(key, None)

    def free(self, step: int, rounds: tuple[Round, ...]) -> None:
        """Forget boundary tensors and accumulators of a step and of earlier ones, and all of rounds that are over."""
        for old in [kept for kept in self._accumulators if kept <= step]:
            del self._accumulators[old]
        for kept in (self._residuals, self._boundaries):
            for key in [key for key in kept if key.step <= step]:
                del kept[key]
        self._slices.free(rounds)

    def write_checkpoint(self, version: int) -> None:
        """Under the simulator nothing is written; the runtime's loop has a Checkpointer for it."""
