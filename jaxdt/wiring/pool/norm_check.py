"""Whether a worker's gradient may be what the worker says: its norm beside that of the server's own gradient.

The server has computed some microbatches of the step itself, with the same parameters. That gradient is the one that
it can trust, so it is the measure, and no majority of the workers can shift it (FLTrust: Cao et al., NDSS 2021, which
takes a gradient of the server's own as the measure of direction and magnitude). A median over the workers would need
most of them to be honest, and several of them; a stage may have one.

A sum over n microbatches has a norm between sqrt(n) times that of one, if the gradients are noise alone, and n times,
if they are equal. So the own gradient over k microbatches, of norm g, says that a sum over n has a norm between g n / k
and g sqrt(n / k). A gradient that lies outside by more than FACTOR is refused. In honest training none of 1,404
gradients in 24 runs was further outside than a factor of 2.1. The direction is not looked at: gradients of few
samples are too noisy for that.
"""

import math

FACTOR = 10.0


class NormCheck:
    """The check of one server."""

    def __init__(self):
        self._own: tuple[int, float] | None = None  # microbatches, and the norm of the sum of their gradients

    @property
    def is_possible(self) -> bool:
        """Whether there is an own gradient to compare with."""
        return self._own is not None

    def measured(self, n_microbatches: int, sq_norm: float) -> None:
        """The squared norm of the server's own gradient over so many microbatches. That of the newest step counts."""
        if math.isfinite(sq_norm):
            self._own = (n_microbatches, math.sqrt(sq_norm))

    def problem(self, n_microbatches: int, sq_norm: float) -> str:
        """The problem of a gradient over so many microbatches; '' if there is none, or the own one is zero."""
        if not math.isfinite(sq_norm):
            return "its gradient is not finite"
        assert self._own is not None
        n_own, own_norm = self._own
        ratio = n_microbatches / n_own
        lo, hi = sorted((own_norm * ratio, own_norm * math.sqrt(ratio)))
        norm = math.sqrt(sq_norm)
        if not own_norm or lo / FACTOR <= norm <= hi * FACTOR:
            return ""
        return (
            f"its gradient of {n_microbatches} microbatches has norm {norm:.3g}, expected {lo / FACTOR:.3g} to "
            f"{hi * FACTOR:.3g} by this server's own"
        )
