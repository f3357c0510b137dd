"""One peer's tensors, and the computations on them. The machines name tensors by key; the store holds them.

Both drivers use it: the runtime's loop over sockets, and the simulator where it does real arithmetic under virtual
time. The compute thread calls `run`, `restore`, `install`, `digest` and `drop_results`; receiver threads call `expect`;
the loop calls the rest.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdt.build import replicas_may_differ
from jaxdt.codec.vectors import vector_leaf
from jaxdt.model.adapter import held
from jaxdt.model.averaging import ReplicaState, averaged, exchanged, fragment_entries
from jaxdt.model.batches import Batch, Samples, TokenSource
from jaxdt.model.float_vector import FloatVector
from jaxdt.model.optim import by_facts, optimizer
from jaxdt.model.pushed_change import PushedChange, with_change
from jaxdt.model.stage import StageFunctions, StageOptions, auxiliary_figures, build_stage
from jaxdt.model.vectors import STAGE_GROUP, TIED_GROUP, group_entries, trained
from jaxdt.protocol import events as ev
from jaxdt.protocol.message import tensor_key
from jaxdt.protocol.round_id import RoundId, RoundKind
from jaxdt.run import codec as codecs
from jaxdt.run.codec import CodecSpec
from jaxdt.run.config import MASK, RunConfig
from jaxdt.run.errors import BadInput
from jaxdt.run.plan import Plan
from jaxdt.run.sizes import SHARED_TABLE, exchanged_elements, replica_elements
from jaxdt.run.work import Work, WorkKind
from jaxdt.runtime.compute_environment import return_freed_memory
from jaxdt.runtime.storage.boundary_codec import HELD_OUT, BoundaryCodec
from jaxdt.runtime.storage.entries import initial_params, join_entries
from jaxdt.runtime.storage.gradient_slices import FED_BACK, GradientSlices, RoundAborted, sq_norm
from jaxdt.runtime.storage.owed import Debtor
from jaxdt.runtime.storage.parameter_versions import ParameterVersions, WeightStash
from jaxdt.runtime.storage.state_vector import StateVector, digest, norm_and_sums
from jaxdt.runtime.storage.words import WORD, aligned_empty, joined
from jaxdt.sync.error_feedback import Slot
from jaxdt.sync.transfer import FetchedStates

# After a gradient that was not finite, other samples are drawn from the checkpoint on: with seeds that are far from
# those that people choose. After any other return to a checkpoint the samples are the same again, and so are the
# losses.
RESEED_STRIDE = 1_000_003
NO_STATE: tuple[int, tuple[Any, ...]] = (-1, ())
# From this Work on memory fills up to its peak. By then the heap has holes which other arrays have left and which large
# vectors do not fit into: 10 bytes a parameter. Whoever uses a hole again faults it in, and with a state of fewer words
# would feel that.
BEFORE_PEAK = {WorkKind.GATHER, WorkKind.LOCAL_STEP, WorkKind.ADOPT}
LARGE_WORDS = 1 << 24
LoadOwed = Callable[[int, tuple[ev.Part, ...], Debtor], Mapping[Slot, np.ndarray]]
LoadEntries = Callable[[int, tuple[ev.Part, ...], list[str]], Iterable[tuple[str, dict[str, Any]]]]


def stage_functions(
    config: RunConfig, plan: Plan, stage: int, devices: int = 1, *, vocab_size: int = 0
) -> StageFunctions:
    """The stage's jitted functions as the config asks for them. `vocab_size`: the token file's, 0 for the model's."""
    lo, hi = plan.stages[stage]
    options = StageOptions(
        config.train.microbatch_size,
        config.remat,
        config.dtype,
        devices,
        is_table_shared=replicas_may_differ(config),
        seq_len=config.seq_len,
        vocab_size=vocab_size,
    )
    rule = optimizer(config.optim, plan.n_pipelines, by_facts(config.model.facts))
    return build_stage(config.model, lo, hi, rule, options)


def _codec_of(spec: CodecSpec, may_differ: bool, round: RoundId) -> CodecSpec:
    """How the numbers of a round travel, with this sync.codec. Where replicas may differ a gradient is that of a table
    which the stages of one pipeline share, and exact."""
    is_of_table = round.kind == RoundKind.GRADIENT and may_differ
    return spec if round.kind.is_coded and not is_of_table else codecs.EXACT


class StepFreed(Exception):
    """A Work's tensors have been deleted, since its step was given up after the Work was requested."""


class Store:
    """The tensors of one peer. Boundary tensors are held encoded, as they are sent. The initial parameters are drawn
    from the config's seed, or those of the model with which the run begins. `load_entries(version, parts, names)` gives
    entries of a checkpoint one by one, and `load_owed(version, parts, debtor)` what the peer owes with it."""

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        peer: int,
        data: TokenSource,
        functions: StageFunctions,
        load_entries: LoadEntries | None = None,
        load_owed: LoadOwed = lambda version, parts, debtor: {},
    ):
        self._is_worker = plan.is_worker(peer)
        if self._is_worker:  # its server updates the parameters
            functions = replace(functions, init_optimizer=lambda params: ())
        self.functions = functions
        self.generation = 0
        self.n_reseeds = 0
        self.boundary_codec = BoundaryCodec(config, plan, peer, functions)
        has_outer = config.sync.groups.outer != "none"
        self._versions = ParameterVersions(functions, config.delay, has_outer)
        self._is_worker = plan.is_worker(peer)
        lo, hi = plan.stages[plan.seat(peer)[0]]
        self._is_between = not (functions.first or functions.last)
        self._table_entries = group_entries(config.model, lo, hi).get(TIED_GROUP, [])
        is_borrowed = replicas_may_differ(config) and lo > 0  # the first stage's, with which this one computes
        self._table = self._table_of(functions.zeros()) if is_borrowed else {}
        shapes = self._versions.shapes
        self._state_vector = StateVector(shapes[:1] if self._is_worker else shapes)
        self.n_words = self._state_vector.n_words
        self._entries = [entry for entry in config.model.facts.entries_in(lo, hi) if entry.name not in self._table]
        self._n_held = self.n_words + config.model.facts.stage_params(lo, hi)
        self._config = config
        self._plan = plan
        self._samples = Samples(data, config.train, plan.n_microbatches, config.data.borders)
        self._load_entries, self._load_owed = load_entries, load_owed
        self.debtor = Debtor(peer, lo, hi, 1 + config.delay.steps)
        self._stage, pipeline = plan.seat(peer)
        self._fetched = FetchedStates(self.n_words)
        self._accumulators: dict[int, Any] = {}
        self._residuals: dict[ev.Key, Any] = {}
        self._boundaries: dict[ev.Key, Any] = {}
        self._freed_step = -1  # the last step of which `free` has deleted the tensors
        # No method of the store: a store that holds itself keeps its arrays until the next garbage collection.
        self._codec_of = partial(_codec_of, config.sync.codec_spec, replicas_may_differ(config))
        groups = config.sync.groups
        fed_back = FED_BACK if groups.feeds_back else FED_BACK - {RoundKind.MEAN}
        self._slices = GradientSlices(peer, self._codec_of, 1 + config.delay.steps, fed_back)
        self._pushed = PushedChange()
        self._fragments = fragment_entries(config.model, lo, hi, groups.fragments)
        self._n_params = replica_elements(config, lo, hi)
        self._exchanged_sizes = [exchanged_elements(config, lo, hi, f) for f in range(groups.fragments)]
        self._weight = groups.weight(plan.shares[pipeline])
        self._frozen: tuple[int, np.ndarray] | None = None  # the local steps after which a fragment was, and its vector
        self._stash = WeightStash(plan.n_ahead(self._stage))
        are_equal = not replicas_may_differ(config)
        self._retains_boundaries = are_equal and config.wiring.retain_bytes > 0  # they may have to be sent again
        self._frees_held_out = are_equal
        self._mean: tuple[RoundId, Any] | None = None  # for a held-out loss
        self._kept_state: tuple[int, tuple[Any, ...]] = NO_STATE  # version, and the mean of replicas that may differ
        # Over the targets of these microbatches a step's loss is the mean.
        self._together = range(plan.n_microbatches) if are_equal else plan.microbatches(pipeline)
        if config.train.eval_every_steps:
            self._samples.n_held_out(config.seq_len)  # BadInput if there are too few

    @property
    def parameter_versions(self) -> ParameterVersions:
        """The parameters and the optimizer state: until others are restored or installed, fresh ones, which are drawn
        when they are first needed. A stage with frozen parameters reads them then: these stay."""
        if not self._versions.is_held:
            has_frozen = bool(self._config.model.facts.frozen)
            self._versions.initialize(self._initial_params() if has_frozen else self._drawn_params())
        return self._versions

    def _drawn_params(self) -> dict[str, Any]:
        return self.functions.init(self._config.train.seed)

    def drop_state(self) -> None:
        """Give the state up; one that is to be restored or installed is held alone."""
        self._versions.drop()
        self.return_freed_memory()

    def _own(self, tree: Any) -> Any:
        """A tree of numpy arrays on the stage's devices, in memory of its own. jax takes an aligned array over as it
        is: it could not donate that to an update, and a view would keep the whole. One leaf at a time is there twice.
        """
        return jax.tree.map(lambda leaf: jax.block_until_ready(jnp.copy(self.functions.place(leaf))), tree)

    def return_freed_memory(self) -> None:
        """Give memory back that was needed once, to compile or to read: its holes may suit no later array."""
        if self._n_held >= LARGE_WORDS:
            return_freed_memory()

    def restore(self, restore: ev.Restore) -> None:
        """Take parameters and optimizer state from a checkpoint, or for version 0 the initial ones; in place those that
        are here. The state of before is given up first, and entries are read one by one."""
        self._begin(restore.version, restore.generation, restore.n_reseeds)
        if restore.in_place:
            return
        found = self.entries_of(restore)  # what is not there is reported while the state of before is still held
        self.drop_state()
        if restore.version == 0:
            self._versions.initialize(self._initial_params())
            return
        assert found is not None, "only parameters of version 0 are drawn"
        self._hold_frozen()
        entries: dict[str, Any] = {}
        for name, entry in found:
            entries[name] = self._own(entry)
            del entry  # before the next one is read
        self._versions.put(restore.version, join_entries(entries, self._versions.shapes))
        self._slices.feedback.reset()
        if not replicas_may_differ(self._config):  # only equal replicas write what they owe, and it is of gradients
            self._slices.feedback.reset(self._load_owed(restore.version, restore.parts, self.debtor))

    def entries_of(self, restore: ev.Restore) -> Iterable[tuple[str, dict[str, Any]]] | None:
        """The entries of a checkpoint or of a model with which this stage is restored, each read when it is asked for;
        None where the initial parameters are drawn. BadInput if they are not there. A checkpoint has none without
        trained parameters."""
        if restore.version == 0 and not self._config.init.digest:
            return None
        names = [entry.name for entry in self._entries if entry.n_trained or restore.version == 0]
        if restore.version == 0:
            return ((name, {"params": tree}) for name, tree in initial_params(self._config, names))
        assert self._load_entries is not None, "a run that goes back to a checkpoint can read its entries"
        return self._load_entries(restore.version, restore.parts, names)

    def _initial_params(self) -> dict[str, Any]:
        """The parameters of version 0: drawn, or those of the model with which the run begins, one entry at a time, the
        largest first, while little else is held. Frozen ones that are held already are left out."""
        model = self._config.model
        if not self._config.init.digest and not model.facts.frozen:
            return self._drawn_params()
        lacks_frozen = self._versions.lacks_frozen
        needed = [entry for entry in self._entries if entry.n_trained or lacks_frozen]
        names = [entry.name for entry in sorted(needed, key=lambda entry: -entry.n_params)]
        found: dict[str, Any] = {}
        for name, tree in initial_params(self._config, names):
            if not lacks_frozen:
                tree = trained(model, {name: tree})[name]
            found[name] = self._own(held(model, name, tree, self._config.dtype))
            del tree  # before the next one is read
        self.return_freed_memory()
        return found

    def _hold_frozen(self) -> None:
        """Draw or read the parameters that a state which comes from elsewhere has not got."""
        if self._versions.lacks_frozen:
            self._versions.hold_frozen(self._initial_params())

    def install(self, install: ev.Install) -> ev.Installed | ev.NotInstalled:
        """Take parameters and optimizer state from the slices that other peers have sent. Nothing changes if they are
        not those any more."""
        try:
            state = self._state_vector.tree(joined(self._fetched.take(install.version)))
        except BadInput as error:
            return ev.NotInstalled(install.version, str(error))
        self._hold_frozen()
        is_repaired = (install.version, install.generation) == (self._versions.version, self.generation)
        if not is_repaired and not install.beside_work:  # else Work under way continues
            self._begin(install.version, install.generation, install.n_reseeds)
        if self._is_worker:
            self._versions.receive(install.version, state[0], keeps_before=install.beside_work)
        else:
            self._versions.put(install.version, self._own(state))
        return ev.Installed(install.version)

    def digest(self) -> tuple[int, float, tuple[float, ...]]:
        """A digest of parameters and optimizer state, the norm of the parameters, and their sums."""
        versions = self.parameter_versions
        return digest(versions.state), *norm_and_sums(versions.trained)

    def _begin(self, version: int, generation: int, n_reseeds: int) -> None:
        """Drop the results of earlier Work, also of Work that began after its step was freed, and draw samples for
        `n_reseeds` from now on. No Work is running, since this is the compute thread. Of a run that goes back, tensors
        of the steps that are open now may have come already; those of later steps are of before."""
        if generation != self.generation:
            last = max(self._config.delay.open(version))
            self._drop_boundaries(lambda key: key.step > last)
        self.generation = generation
        self.n_reseeds = n_reseeds
        self.boundary_codec.reset_error_feedback()
        if not self._is_worker:  # whose debts end with its admission
            self._slices.feedback.reset()
        self._freed_step = -1
        self._accumulators.clear()
        self._residuals.clear()
        self._drop_boundaries(lambda key: self._is_freed(key, version - 1))
        self._stash.clear()

    @property
    def owed(self) -> Mapping[Slot, np.ndarray]:
        """What this peer owes with its state, by sync group and series."""
        return self._slices.feedback.of_state

    def reset_error_feedback(self) -> None:
        """Drop what codecs have lost so far: what follows belongs to another series."""
        self.boundary_codec.reset_error_feedback()
        self._slices.feedback.reset()

    # ------------------------------------------------------------------------------------------------------- compute

    def run(self, work: Work, scale: float, rounds: tuple[RoundId, ...] = ()) -> dict[str, float]:
        """Do the Work and wait for its result. Returns the values of its Ran. This does not wait for the encoding of a
        tensor that is sent to a neighbour, since the next Work does not need it."""
        assert work.step is not None, "all Work that runs belongs to a step"
        names_its_input = bool(rounds) or work.kind in (WorkKind.GATHER, WorkKind.UPDATE)
        if work.step < self.parameter_versions.version and not names_its_input:
            return {}  # its step has ended since the Work was requested, and its inputs have been freed
        try:
            return self._compute(work, scale, rounds)
        except StepFreed:
            return {}  # the step was given up while the Work waited, so its result is not needed

    def _compute(self, work: Work, scale: float, rounds: tuple[RoundId, ...]) -> dict[str, float]:
        assert work.step is not None, "all Work that runs belongs to a step"
        if work.kind in BEFORE_PEAK and self.n_words >= LARGE_WORDS:
            return_freed_memory()
        if work.kind == WorkKind.FORWARD:
            return self._forward(work)
        if work.kind == WorkKind.BACKWARD:
            return self._backward(work)
        if work.kind == WorkKind.REGENERATE:
            return self._regenerate(work)
        if work.kind == WorkKind.EVALUATE:
            return self._evaluate(work, self._mean_with_table(rounds, scale) if rounds else self._params(work))
        if work.kind == WorkKind.GATHER:
            return self._gather(work.step, rounds)
        if work.kind == WorkKind.UPDATE:
            return self._update(scale, rounds)
        if work.kind == WorkKind.CONTRIBUTE:
            return self._contribute(work.step, rounds)
        if work.kind == WorkKind.NORM:
            return {"sq_norm": self._gradient_sq_norm(work.step)}
        return self._run_local(work, scale, rounds)

    def _run_local(self, work: Work, scale: float, rounds: tuple[RoundId, ...]) -> dict[str, float]:
        """Work of replicas that may differ."""
        step = work.step
        assert step is not None, "all Work that runs belongs to a step"
        if work.kind == WorkKind.LOCAL_STEP:
            figures = self._auxiliary_figures(step)
            self.parameter_versions.update(self._own_gradient(step) if scale else {}, scale)
            return figures
        if work.kind == WorkKind.LAY_OUT and not rounds:
            self._freeze(step)
        elif work.kind == WorkKind.LAY_OUT:
            for round in rounds:
                self._slices.offer(round, self._vector_of(round))
        elif work.kind == WorkKind.TABLE:
            self._move_table(rounds[0], scale)
        else:
            assert work.kind == WorkKind.ADOPT
            adopted, *snapshots = rounds
            self._adopt(adopted, step, scale)
            for snapshot in snapshots:  # a push goes into these too
                self._slices.add(snapshot, adopted)
        return {}

    def _gradient_sq_norm(self, step: int) -> float:
        return math.fsum(sq_norm(np.asarray(vector)) for vector in self._own_gradient(step).values())

    def _own_gradient(self, step: int) -> dict[str, Any]:
        """The accumulated gradient of a step, without that of a table which belongs to another stage."""
        vectors = self.functions.gradient_vectors(self._gradient_sum(step))
        return {name: vector for name, vector in vectors.items() if not (self._table and name == TIED_GROUP)}

    # ------------------------------------------------------------------------- a table that belongs to the first stage

    def _table_of(self, params: Any) -> dict[str, Any]:
        return {name: params[name] for name in self._table_entries}

    def _move_table(self, round: RoundId, scale: float) -> None:
        """At the first stage the vector of a round is its table, or that of the mean which is the sum of another round
        times `scale`. At the last stage the result of the round is the table from now on."""
        if self._table:
            self._table = self._received_table(round)
            return
        params = self.parameter_versions.params
        if round.kind == RoundKind.HELD_OUT_TABLE:
            params = self._mean_of(replace(round, kind=RoundKind.HELD_OUT, stage=self._stage), scale)
        table = self._table_of(params)
        self._slices.offer(round, FloatVector(table).of(table))

    def _received_table(self, round: RoundId) -> dict[str, Any]:
        return self.functions.place(FloatVector(self._table).tree(self._slices.result(round), 1.0))

    def _vector_of(self, round: RoundId) -> np.ndarray:
        """The contribution of this peer to a round of replicas that may differ: the change that it pushes, its state,
        its parameters, or the vector that a group exchanges."""
        versions = self.parameter_versions
        if round.kind == RoundKind.PUSH:
            return self._pushed.next(versions.trained)
        if round.kind == RoundKind.MEAN:
            return self._exchanged(round.fragment)
        exchanged = versions.state if round.kind == RoundKind.STATE else versions.trained
        return FloatVector(exchanged).of(exchanged)

    def _exchanged(self, fragment: int) -> np.ndarray:
        groups, names = self._config.sync.groups, self._fragments[fragment]
        return exchanged(groups, self._replica, names, self._weight)

    @property
    def _replica(self) -> ReplicaState:
        versions = self.parameter_versions
        return ReplicaState(versions.trained, versions.outer, versions.opt_state)

    def _freeze(self, step: int) -> None:
        """Keep what a group exchanges of the fragment that is due after `step` local steps. The one before is not
        needed any more: its mean has been adopted."""
        fragment = self._config.sync.groups.fragment_due(step)
        assert fragment is not None, "a vector is kept where a fragment is due"
        self._frozen = (step, self._exchanged(fragment))

    def _adopt(self, round: RoundId, version: int, scale: float) -> None:
        """The sum of a round, times `scale`, replaces what was averaged, or is kept for a checkpoint of `version`. That
        of a push is added to the parameters."""
        versions = self.parameter_versions
        total = self._slices.result(round)
        if round.kind == RoundKind.PUSH:
            versions.put(version, versions.state_from(with_change(versions.trained, total)))
        elif round.kind == RoundKind.PULL:
            self._pushed.pulled(total)
            versions.put(version, versions.state_from(FloatVector(versions.trained).tree(total, scale)))
        elif round.kind == RoundKind.CHECKPOINT:  # the next update donates the optimizer's state
            part = FloatVector(versions.trained).tree(total, scale)
            self._kept_state = (version, (part, jax.tree.map(lambda leaf: np.array(leaf), versions.opt_state)))
        elif round.kind == RoundKind.STATE:
            mean = FloatVector(versions.state).tree(total, scale)
            if version == self._config.train.steps:
                versions.put(version, mean)
            else:
                self._kept_state = (version, mean)
        else:
            names = self._fragments[round.fragment]
            mean = total * np.float32(scale)
            versions.adopt(averaged(self._config.sync.groups, self._replica, names, mean))
            self._slices.feedback.commit((round,))

    def state_of(self, version: int) -> tuple[Any, ...]:
        """The state that a checkpoint of `version` holds: this peer's, or the mean that was kept for it. That
        stays until the next one is kept, since a disk may refuse it at first. The result of the run may be the state of
        a replica that is alone, whatever the number of its steps. LookupError if there is no such state any more."""
        kept_version, state = self._kept_state
        if version == kept_version:
            return state
        own_version = self.parameter_versions.version
        if version not in (own_version, self._config.train.steps):
            raise LookupError(f"the state is that of {own_version} steps by now, not of {version}")
        return self.parameter_versions.state

    def _forward(self, work: Work) -> dict[str, float]:
        """The last stage does nothing here: its backward contains the forward."""
        if not self.functions.last:
            assert self.functions.forward is not None, "only the last stage has none"
            x = self._input(work)
            y, residual = self.functions.forward(self._params(work), x, self._batch(work))
            self._residuals[self._key("act", work)] = residual
            self._encode_boundary("act", work, 1, y)
        return {}

    def _encode_boundary(self, kind: str, work: Work, offset: int, tensor) -> None:
        """Encode a boundary tensor and hold the result for sending. Waits until the tensor is computed."""
        key = self._key(kind, work, offset)
        self._boundaries[key] = self.boundary_codec.encode(key, tensor)
        jax.block_until_ready(tensor)

    def _backward(self, work: Work) -> dict[str, float]:
        step = work.step
        assert step is not None, "all Work that runs belongs to a step"
        accumulator = self._accumulators.pop(step, None)
        if accumulator is None:
            accumulator = self.functions.zeros()
        values, self._accumulators[step] = self._accumulate(accumulator, work)
        return values

    def _regenerate(self, work: Work) -> dict[str, float]:
        """Compute the input gradient again. The parameter gradient is dropped, since another peer has counted it
        already."""
        self._accumulate(self.functions.zeros(), work)
        return {}

    def _accumulate(self, accumulator, work: Work) -> tuple[dict[str, float], Any]:
        """Run a backward that adds to an accumulator, which it donates."""
        functions = self.functions
        params = self._params(work)
        values: dict[str, float] = {"n_samples": self._config.train.microbatch_size}
        if functions.last:
            assert functions.loss_backward is not None, "the last stage has it"
            batch = self._batch(work)
            loss, gx, accumulator = functions.loss_backward(params, self._input(work), batch, accumulator)
            values["loss_sum"] = float(loss)
        else:
            assert functions.backward is not None, "only the last stage has none"
            gy = self._received(self._key("grad", work, 1))
            residual = self._taken(self._residuals, self._key("act", work))
            gx, accumulator = functions.backward(params, residual, gy, accumulator)
        if not functions.first:
            self._encode_boundary("grad", work, 0, gx)
        return values, jax.block_until_ready(accumulator)

    def _mean_of(self, round: RoundId, scale: float) -> Any:
        """The parameters that are the sum of a round times `scale`, which are held until the round is forgotten."""
        if self._mean is None or self._mean[0] != round:
            versions = self.parameter_versions
            part = FloatVector(versions.trained).tree(self._slices.result(round), scale)
            self._mean = (round, versions.whole(self.functions.place(part)))
        return self._mean[1]

    def _mean_with_table(self, rounds: tuple[RoundId, ...], scale: float) -> Any:
        """The parameters that are the sum of the first round times `scale`, with the table of the second, if there is
        one."""
        mean, *tables = rounds
        params = self._mean_of(mean, scale)
        return params | self._received_table(tables[0]) if tables else params

    def _evaluate(self, work: Work, params: Any) -> dict[str, float]:
        x, batch = self._input(work, "eval"), self._batch(work)
        if not self.functions.last:
            y = self.functions.evaluate(params, x, batch)
            self._encode_boundary("eval", work, 1, y)
            return {}
        assert self.functions.eval_loss is not None, "the last stage has it"
        loss = self.functions.eval_loss(params, x, batch)
        return {"n_samples": self._config.train.microbatch_size, "loss_sum": float(loss)}

    def _gather(self, step: int, rounds: tuple[RoundId, ...]) -> dict[str, float]:
        vectors = self.functions.gradient_vectors(self._gradient_sum(step))
        figures = self._auxiliary_figures(step)
        by_stage = {self._stage_of(name): vector for name, vector in vectors.items()}
        for round in rounds:
            self._slices.offer(round, by_stage[round.stage])
            if round.kind == RoundKind.CONTRIBUTION:  # what comes now is for another one
                self._accumulators.pop(step, None)
        return figures

    def _contribute(self, step: int, rounds: tuple[RoundId, ...]) -> dict[str, float]:
        """Add the gradient that a pool's worker has sent, as the vectors of these rounds, to the accumulator. StepFreed
        if they are void by now."""
        names = {self._stage_of(name): name for name in self.functions.group_sizes}
        try:
            vectors = {names[round.stage]: self._slices.result(round) for round in rounds}
        except RoundAborted:
            raise StepFreed from None
        self._accumulators[step] = self.functions.add_vectors(self._gradient_sum(step), vectors)
        jax.block_until_ready(self._accumulators[step])
        return {}

    def _gradient_sum(self, step: int):
        """The accumulator of a step. A peer without a microbatch in that step contributes zeros."""
        return self._accumulators[step] if step in self._accumulators else self.functions.zeros()

    def _auxiliary_figures(self, step: int) -> dict[str, float]:
        return auxiliary_figures(self._accumulators.get(step, {}))

    def _update(self, scale: float, rounds: tuple[RoundId, ...]) -> dict[str, float]:
        names = {self._stage_of(name): name for name in self.functions.group_sizes}
        held = [round for round in rounds if not (self._table and round.stage == SHARED_TABLE)]
        vectors = {names[round.stage]: self._slices.result(round) for round in held}
        self.parameter_versions.update(vectors, scale)
        self._slices.feedback.commit(rounds)
        return {}

    def _params(self, work: Work) -> Any:
        """The parameters with which a Work computes."""
        assert work.step is not None, "all Work that runs belongs to a step"
        if self._stash.n_ahead:
            return self._stash.of(work, self.parameter_versions)
        params = self.parameter_versions.of(work.step)
        return params | self._table if self._table else params

    def _input(self, work: Work, kind: str = "act"):
        return None if self.functions.first else self._received(self._key(kind, work))

    def _received(self, key: ev.Key):
        """Decode a received boundary tensor, and drop it. Only a pool's worker holds the tensor until the step has
        ended: its lease may run out and be given to it again, with the same tensor, before the first Work has begun."""
        return self.boundary_codec.decode(key, self._taken(self._boundaries, key, stays=self._is_worker))

    def _taken(self, tensors: dict[ev.Key, Any], key: ev.Key, stays: bool = False) -> Any:
        """A tensor that a Work takes away, unless it stays; StepFreed if its step was given up while the Work
        waited."""
        try:
            return tensors[key] if stays else tensors.pop(key)
        except KeyError:
            if self._is_freed(key, self._freed_step):
                raise StepFreed from None
            raise

    def _is_freed(self, key: ev.Key, step: int) -> bool:
        """Whether a Free of `step` deletes a tensor. Where replicas may differ a held-out tensor names no local step,
        and is given away when it is used."""
        return key.step <= step and (self._frees_held_out or key.kind != HELD_OUT)

    def _batch(self, work: Work) -> Batch:
        """What this stage needs of a microbatch, whose samples have the length of its step. It depends only on the
        microbatch's number, its step, the number of reseeds and the config."""
        assert work.step is not None and work.microbatch is not None, "samples are those of a microbatch of a step"
        if self._is_between and self._config.data.borders != MASK:
            return Batch()
        lengths = self._config.seq_lengths
        if work.kind == WorkKind.EVALUATE:
            batch = self._samples.held_out(work.microbatch, lengths.full)
        else:
            seed = self._config.train.seed + RESEED_STRIDE * self.n_reseeds
            batch = self._samples.train(seed, work.step, work.microbatch, lengths.at(work.step), self._together)
        return Batch(begins=batch.begins) if self._is_between else batch

    def _key(self, kind: str, work: Work, offset: int = 0) -> ev.Key:
        assert work.step is not None and work.microbatch is not None, "boundary tensors are of a microbatch of a step"
        return ev.Key(kind, work.step, work.stage + offset, work.microbatch)

    def _stage_of(self, local_name: str) -> int:
        """The `stage` of the rounds of a sync group of the stage functions."""
        return {STAGE_GROUP: self._stage, TIED_GROUP: SHARED_TABLE}[local_name]

    # ------------------------------------------------------------------------------------------------------- tensors

    def tensor_to_send(self, body: ev.Message) -> Any:
        """The tensor to send with a message. A boundary tensor is given away, unless it may have to be sent again: then
        it is held until its step has ended. A slice is held."""
        key = tensor_key(body)
        if isinstance(key, ev.Key):
            # A held-out microbatch that is lost starts over from its tokens, so its tensors are never sent again.
            retains = self._retains_boundaries and key.kind != "eval" and not isinstance(body, ev.TaskOutput)
            return self._boundaries[key] if retains else self._boundaries.pop(key)
        if isinstance(key, ev.StateKey):
            return self._state_vector.slice_with_checksum(self.parameter_versions.state, key.lo, key.hi)
        assert key is not None, "only a message that names a tensor is asked about"
        return self._slices.part_to_send(key)

    def put(self, body: ev.Message, src: int, tensor: Any) -> None:
        """Hold the tensor that was received with a message which the machine has accepted. That of a State has passed
        `check_slice`."""
        if isinstance(body, ev.Boundary | ev.TaskOutput):
            self._boundaries[body.key] = tensor
        elif isinstance(body, ev.State):
            self._fetched.put(body.key, tensor)
        else:
            key = tensor_key(body)
            assert isinstance(key, ev.SliceKey), "no other message comes with a tensor"
            self._slices.put(key, tensor)

    def expect(self, body: ev.Message, table: list[tuple[np.dtype, tuple[int, ...]]]) -> list[np.ndarray]:
        """Buffers for the tensors that a message announces; BadInput if they are not those that it must carry."""
        key = tensor_key(body)
        wanted = []
        if isinstance(key, ev.Key):
            wanted = [self.boundary_codec.wire_leaf(key, isinstance(body, ev.TaskOutput))]
        elif isinstance(key, ev.StateKey):
            if not 0 <= key.lo < key.hi <= self.n_words:
                raise BadInput(f"{key}: expected a slice of the {self.n_words} words of this stage's state")
            wanted = [(WORD, (key.hi - key.lo + 1,))]
        elif key is not None:
            n = self._n_numbers(key.round)
            if not 0 <= key.lo < key.hi <= n:
                raise BadInput(f"{type(body).__name__} {key}: expected a slice of the {n} numbers that are held here")
            wanted = [vector_leaf(self._codec_of(key.round), key.hi - key.lo)]
        if [(dtype, tuple(shape)) for dtype, shape in table] != wanted:
            raise BadInput(f"{type(body).__name__} {key}: got tensors {table}, expected {wanted}")
        return [aligned_empty(shape, dtype) for dtype, shape in wanted]

    def _n_numbers(self, round: RoundId) -> int:
        """Numbers of a round's vector; 0 where this peer has no part in it."""
        if round.kind == RoundKind.STATE:
            return self.n_words if round.stage == self._stage else 0
        if round.kind == RoundKind.MEAN:
            is_here = round.stage == self._stage and round.fragment in range(len(self._exchanged_sizes))
            return self._exchanged_sizes[round.fragment] if is_here else 0
        if round.kind in (RoundKind.GRADIENT, RoundKind.CONTRIBUTION) or round.stage == SHARED_TABLE:
            return sum(n for name, n in self.functions.group_sizes.items() if self._stage_of(name) == round.stage)
        return self._n_params if round.stage == self._stage else 0

    def offer(self, round: RoundId, step: int) -> None:
        """The vector that was kept after `step` local steps is this peer's contribution to a round."""
        assert self._frozen and self._frozen[0] == step, "a replica keeps one vector, until its mean is adopted"
        self._slices.offer(round, self._frozen[1])

    def sum(self, key: ev.SliceKey, members: tuple[int, ...]) -> tuple[int, float]:
        """Add up a slice. Returns its digest and squared norm."""
        return self._slices.sum(key, members)

    def forget(self, round: RoundId) -> None:
        """A round of averaging was aborted, or its result is not needed any more."""
        self._slices.forget(round)
        if self._mean and self._mean[0] == round:
            self._mean = None

    def reopen(self, round: RoundId) -> None:
        """The result of a round of averaging comes, which may have been aborted here."""
        self._slices.reopen(round)

    def discard(self, key: ev.Key | ev.StateKey) -> None:
        """A boundary tensor need not be held any longer, or the slices of a download that was given up."""
        if isinstance(key, ev.StateKey):
            self._fetched.begin()
        else:
            self._boundaries.pop(key, None)

    def free(self, step: int, rounds: tuple[RoundId, ...]) -> None:
        """Delete the boundary tensors and accumulators of a step and of earlier steps, and what belongs to rounds that
        are over."""
        self._freed_step = step
        self._drop_boundaries(lambda key: self._is_freed(key, step))
        self.drop_results(step)
        self._slices.free(rounds)

    def _drop_boundaries(self, is_over: Callable[[ev.Key], bool]) -> None:
        for key in [key for key in list(self._boundaries) if is_over(key)]:
            self._boundaries.pop(key, None)

    def drop_results(self, step: int) -> None:
        """Delete accumulators and residuals of a step and of earlier steps. The loop calls this in `free`, and the
        compute thread once more after all Work that was requested before: else a peer that was evicted while it
        computed, and comes back in the same step, would count that microbatch beside the one who did it again."""
        for past_step in [held_step for held_step in list(self._accumulators) if held_step <= step]:
            self._accumulators.pop(past_step, None)  # the compute thread may take it meanwhile
        for key in [key for key in list(self._residuals) if self._is_freed(key, step)]:
            self._residuals.pop(key, None)

    def write_checkpoint(self, version: int) -> None:
        """The simulator calls this, and writes nothing. In the runtime the loop's Checkpointer writes."""
