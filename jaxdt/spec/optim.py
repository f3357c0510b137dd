"""The options of the optimizer, checked; the update rules themselves are in jaxdt.model.optim."""

import math
from dataclasses import dataclass

from jaxdt.spec.errors import BadInput, nearest

OPTIMIZERS = ("adamw", "lamb", "sgd")
LR_SCHEDULES = ("constant", "cosine", "linear")


@dataclass(frozen=True)
class OptimConfig:
    """`lr` climbs linearly over `warmup_steps` updates, then stays or falls to `final_lr_frac * lr` at update
    `decay_steps` (counted from the first update, warm-up included; a constant schedule does not read it).
    `momentum` is for sgd, `b1`, `b2` and `eps` for the others. `gradient_frac` is for adamw: so much of an update is
    the newest gradient by itself, the rest its running mean; with a larger `b1` it steadies delayed updates.
    `clip_norm` bounds the norm of the whole model's gradient, 0 turns it off; no single stage can apply it, so it
    reaches `update` inside `scale`."""

    name: str = "adamw"
    lr: float = 1e-3
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    gradient_frac: float = 0.0
    weight_decay: float = 0.0
    momentum: float = 0.9
    warmup_steps: int = 0
    decay_steps: int = 0
    lr_schedule: str = "constant"
    final_lr_frac: float = 0.1
    clip_norm: float = 1.0

    def __post_init__(self):
        self._check_choice("name", OPTIMIZERS)
        self._check_choice("lr_schedule", LR_SCHEDULES)
        for field in ("lr", "eps"):
            self._check_number(field, "a number > 0", lambda v: v > 0)
        for field in ("b1", "b2", "momentum", "gradient_frac"):
            self._check_number(field, "a number in [0, 1)", lambda v: 0 <= v < 1)
        if self.gradient_frac and self.name != "adamw":
            raise BadInput(f"optim.gradient_frac: got {self.gradient_frac}, expected 0 with optim.name {self.name}")
        for field in ("weight_decay", "clip_norm"):
            self._check_number(field, "a number >= 0", lambda v: v >= 0)
        self._check_number("final_lr_frac", "a number in [0, 1]", lambda v: 0 <= v <= 1)
        for field in ("warmup_steps", "decay_steps"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise BadInput(f"optim.{field}: got {value!r}, expected an integer >= 0")
        if self.lr_schedule != "constant" and self.decay_steps <= self.warmup_steps:
            raise BadInput(
                f"optim.decay_steps: got {self.decay_steps}, the {self.lr_schedule} schedule needs more than "
                f"optim.warmup_steps, {self.warmup_steps}"
            )

    def _check_choice(self, field: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, field)
        if value not in choices:
            hint = nearest(str(value), choices)
            raise BadInput(f"optim.{field}: got {value!r}, expected one of {', '.join(choices)}{hint}")

    def _check_number(self, field: str, expected: str, holds) -> None:
        value = getattr(self, field)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or not holds(value):
            raise BadInput(f"optim.{field}: got {value!r}, expected {expected}")
