"""A stage's parameters and optimizer state; with delayed updates also the parameters of the version before.

With delayed updates a step may still run when the next version of the parameters exists. The step keeps the
version that it began with, so two versions are held. A state that moves to another peer or to a disk contains both:
otherwise the run would continue with other numbers.

Leaves that are not trained stay as the run began with them. They are no part of a state: each peer draws them, or reads
them from its own copy of the model.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdt.model.averaging import ReplicaState
from jaxdt.model.stage import StageFunctions
from jaxdt.model.vectors import frozen, trained, with_trained
from jaxdt.run.delay import Delay
from jaxdt.run.work import Work, WorkKind


class ParameterVersions:
    """The parameters of one stage. `outer`: with an outer optimizer the anchor and the momentum
    (jaxdt.model.averaging), trees like the trained parameters. There is no state at first, nor after `drop`. `shapes`
    is the state's tree, of shapes and dtypes alone."""

    def __init__(self, functions: StageFunctions, delay: Delay, has_outer: bool = False):
        self._functions = functions
        self._config = functions.config
        self._delay = delay
        self._has_outer = has_outer
        self._frozen: Any = None  # with None for leaves that are trained
        self.shapes: tuple[Any, ...] = jax.eval_shape(lambda: self._initial_state(functions.init(0)))
        self.drop()

    def drop(self) -> None:
        """Give the state up, so that another one finds room for itself."""
        self._set(0, None, None, None)
        self.outer = ()

    @property
    def is_held(self) -> bool:
        """Whether there is a state."""
        return self.params is not None

    def initialize(self, params: Any) -> None:
        """Set the initial parameters, version 0; of frozen ones those that are held already will do."""
        self.hold_frozen(params)
        self.put(0, self._initial_state(self.whole(trained(self._config, params))))

    @property
    def lacks_frozen(self) -> bool:
        """Whether a state cannot be set, since it has frozen parameters beside it that are not held yet."""
        return self._frozen is None and bool(self._config.facts.frozen)

    def hold_frozen(self, params: Any) -> None:
        """Keep the frozen ones of the initial parameters, beside which each later state is set; the first time only."""
        if self.lacks_frozen:
            self._frozen = frozen(self._config, self._functions.place(params))

    def _initial_state(self, params: Any) -> tuple[Any, ...]:
        """The state of version 0 with these parameters."""
        opt_state, part = self._functions.init_optimizer(params), trained(self._config, params)
        if self._has_outer:
            opt_state = (opt_state, part, jax.tree.map(jnp.zeros_like, part))
        return (part, opt_state) + ((part,) if self._delay.steps else ())

    def whole(self, part: Any) -> Any:
        """The parameters whose trained ones are these."""
        return with_trained(self._frozen, part) if self._config.facts.frozen else part

    def put(self, version: int, state: tuple[Any, ...]) -> None:
        """Set a state that was read from a disk or fetched from a peer. If it lacks the parameters of the version
        before, its own parameters take their place."""
        part, opt_state, *before = (self._functions.place(tree) for tree in state)
        if self._has_outer:
            opt_state, *outer = opt_state
            self.outer = tuple(outer)
        params = self.whole(part)
        self._set(version, params, opt_state, self.whole(before[0]) if before else params)

    def receive(self, version: int, part: Any, keeps_before: bool) -> None:
        """Set a version of the trained parameters that a pool's worker has fetched, which has no optimizer. It computes
        with the version before only if that is here."""
        before = self.params if keeps_before else None
        params = self.whole(self._functions.place(part))
        self._set(version, params, self._functions.init_optimizer(params), before)

    def _set(self, version: int, params: Any, opt_state: Any, before: Any) -> None:
        self.version = version
        self.params = params
        self.opt_state = opt_state
        self.before: Any = before if self._delay.steps else None

    @property
    def state(self) -> tuple[Any, ...]:
        """(params, opt_state), and with delayed updates (params, opt_state, params of the version before), of trained
        parameters. With an outer optimizer its anchor and momentum are a part of the optimizer's state."""
        return self.state_with(self.opt_state)

    def state_with(self, opt_state: Any) -> tuple[Any, ...]:
        """The state, with this one of the optimizer in place of its own."""
        whole = (opt_state, *self.outer) if self._has_outer else opt_state
        return (self.trained, whole) + ((trained(self._config, self.before),) if self._delay.steps else ())

    @property
    def trained(self) -> Any:
        """The parameters that are trained."""
        return trained(self._config, self.params)

    def state_from(self, part: Any) -> tuple[Any, ...]:
        """The state whose trained parameters are these."""
        return part, *self.state[1:]

    def of(self, step: int) -> Any:
        """The parameters with which a step computes."""
        version = self._delay.version_of(step)
        if version == self.version:
            return self.params
        if version != self.version - 1 or self.before is None:
            raise RuntimeError(f"step {step} computes with version {version}, held is {self.version}")
        return self.before

    def adopt(self, state: ReplicaState) -> None:
        """Replace the trained parameters, the anchor and the momentum of the outer optimizer, and the replica's own
        optimizer's state; the version stays."""
        place = self._functions.place
        self.params, self.opt_state = self.whole(place(state.params)), place(state.opt_state)
        self.outer = tuple(place(tree) for tree in state.outer)

    def update(self, vectors: Mapping[str, Any], scale: float) -> None:
        """Make the next version from the summed gradients of the sync groups, times `scale`. Without vectors the update
        is skipped: the next version has the same parameters."""
        before = self.params
        if vectors:
            params, opt_state = self._functions.update(self.params, self.opt_state, vectors, np.float32(scale))
            self.params, self.opt_state = jax.block_until_ready((params, opt_state))
        self._set(self.version + 1, self.params, self.opt_state, before)


class WeightStash:
    """Weight stashing (PipeDream, Narayanan et al. 2019, Sec. 3.3): a backward computes with its forward's parameters,
    at a stage where the forwards of `n_ahead` further steps run before a step's backward.

    So the parameters change between the two of a step. Each step in flight keeps those with which its forward computed.
    They are not copied: an update makes new parameters, and leaves the old ones as they are."""

    def __init__(self, n_ahead: int):
        self.n_ahead = n_ahead
        self._by_step: dict[int, Any] = {}

    def of(self, work: Work, versions: ParameterVersions) -> Any:
        """The parameters with which a Work computes: a forward with the newest ones, whose version is the step's less
        `n_ahead` (at the start of a run the one with which it begins). RuntimeError for a Work out of order."""
        step = work.step
        assert step is not None, "all Work that runs belongs to a step"
        if work.kind == WorkKind.BACKWARD and step in self._by_step and step == versions.version:
            return self._by_step.pop(step)
        if work.kind == WorkKind.FORWARD and versions.version <= step <= versions.version + self.n_ahead:
            self._by_step[step] = versions.params
            return versions.params
        raise RuntimeError(f"{work} is out of order: held is version {versions.version}, stashed {list(self._by_step)}")

    def clear(self) -> None:
        """Drop all stashed versions: nothing is in flight any more."""
        self._by_step.clear()
