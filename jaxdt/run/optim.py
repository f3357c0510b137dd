"""The optimizers by name, and their options, checked field by field. The update rules are in jaxdt.model.optim, in a
table of the same names."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from jaxdt.run.errors import BadInput
from jaxdt.run.model_facts import Moments
from jaxdt.run.options import BELOW_ONE, NOT_NEGATIVE, POSITIVE, UP_TO_ONE, at_least, one_of, option, require_accepted


@dataclass(frozen=True)
class OptimizerSpec:
    """The facts about an optimizer that need no arithmetic: how many moments it holds per parameter, the FLOP of the
    products with which it updates a matrix of a shape, and whether it reads gradient_frac and second_moment."""

    moments: Moments
    matrix_flop: Callable[[tuple[int, ...]], float] = lambda shape: 0.0
    reads_gradient_frac: bool = False
    reads_second_moment: bool = False


@dataclass(frozen=True)
class LrScheduleSpec:
    """Whether a schedule of learning rates falls until decay_steps."""

    decays: bool


def _newton_schulz_flop(shape: tuple[int, ...]) -> float:
    """Five times X X^T, its square, and the product of both with X; of each matrix of the leaf."""
    *rows, n, m = shape
    short, long = min(n, m), max(n, m)
    return 5.0 * prod(rows) * (4.0 * short * short * long + 2.0 * short**3)


OPTIMIZERS = {
    "adamw": OptimizerSpec(Moments(2, 2), reads_gradient_frac=True, reads_second_moment=True),
    "lamb": OptimizerSpec(Moments(2, 2)),
    "muon": OptimizerSpec(Moments(1, 2), _newton_schulz_flop),
    "sgd": OptimizerSpec(Moments(1, 1)),
}
SECOND_MOMENTS = {"own": 0, "corrected": 1, "legacy": 1}  # name -> moments that it takes beside the optimizer's own
LR_SCHEDULES = {
    "constant": LrScheduleSpec(decays=False),
    "cosine": LrScheduleSpec(decays=True),
    "linear": LrScheduleSpec(decays=True),
}


@dataclass(frozen=True)
class OptimConfig:
    """`lr` climbs linearly over `warmup_steps` updates, then stays or falls to `final_lr_frac * lr` at update
    `decay_steps` (counted from the first update, warm-up included; a constant schedule does not read it).
    `momentum` is for sgd, and for muon's matrices; `b1`, `b2` and `eps` are for adamw, lamb, and muon's other leaves.
    `gradient_frac` is for adamw: this share of an update is the newest gradient by itself, the rest is the running
    mean. With a larger `b1` it steadies delayed updates.
    `second_moment` is for adamw where replicas average parameters and keep their own moments (sync.kind groups). Its
    variance is then that of one pipeline's gradient, not of the mean over all: "corrected" divides the variance by the
    number of pipelines (SDPipe, Sec. 4), "legacy" does so without the bias correction that its public code leaves out.
    `clip_norm` bounds the norm of the whole model's gradient, 0 turns it off. No single stage can apply it, so it
    reaches `update` inside `scale`."""

    name: str = option("adamw", "update rule", one_of(OPTIMIZERS))
    lr: float = option(1e-3, "learning rate after the warm-up", POSITIVE)
    b1: float = option(0.9, "decay of the mean of gradients (adamw, lamb, muon but for matrices)", BELOW_ONE)
    b2: float = option(0.95, "decay of the mean of squared gradients (as b1)", BELOW_ONE)
    eps: float = option(1e-8, "added to the root of that mean (as b1)", POSITIVE)
    gradient_frac: float = option(0.0, "share of an update that is the newest gradient by itself (adamw)", BELOW_ONE)
    second_moment: str = option(
        "own",
        "with groups: own (one pipeline's variance), or corrected or legacy (that of all)",
        one_of(SECOND_MOMENTS),
    )
    weight_decay: float = option(0.0, "weight decay of matrices, multiplied by the learning rate", NOT_NEGATIVE)
    momentum: float = option(0.9, "momentum (sgd, muon for matrices)", BELOW_ONE)
    warmup_steps: int = option(0, "updates over which the learning rate climbs to lr", at_least(0))
    decay_steps: int = option(0, "update at which the decay ends, the warm-up counted", at_least(0))
    lr_schedule: str = option("constant", "learning rate after the warm-up", one_of(LR_SCHEDULES))
    final_lr_frac: float = option(0.1, "share of lr that is left at decay_steps", UP_TO_ONE)
    clip_norm: float = option(1.0, "largest norm of the whole model's gradient; 0: no clipping", NOT_NEGATIVE)

    def __post_init__(self) -> None:
        require_accepted(self, "optim.")
        if self.gradient_frac and not OPTIMIZERS[self.name].reads_gradient_frac:
            raise BadInput(f"optim.gradient_frac: got {self.gradient_frac}, expected 0 with optim.name {self.name}")
        if SECOND_MOMENTS[self.second_moment]:
            expected = f"optim.second_moment: got {self.second_moment}, expected own with optim."
            if not OPTIMIZERS[self.name].reads_second_moment:
                raise BadInput(f"{expected}name {self.name}")
            if self.gradient_frac:
                raise BadInput(f"{expected}gradient_frac {self.gradient_frac}")
        if LR_SCHEDULES[self.lr_schedule].decays and self.decay_steps <= self.warmup_steps:
            raise BadInput(
                f"optim.decay_steps: got {self.decay_steps}, the {self.lr_schedule} schedule needs more than "
                f"optim.warmup_steps, {self.warmup_steps}"
            )

    @property
    def moments(self) -> Moments:
        """Moments per parameter."""
        added = SECOND_MOMENTS[self.second_moment]
        return Moments(*(n + added for n in OPTIMIZERS[self.name].moments))

    @property
    def state_name(self) -> str:
        """A name for the contents of its state. Two optimizers with the same name can go on from each other's state."""
        return self.name + (" with a mean of b2" if SECOND_MOMENTS[self.second_moment] else "")
