"""The progress of the training of a grid, from the messages of its workers."""

import statistics
from dataclasses import dataclass, field

from experiments.ablation.grid import Case


@dataclass
class GridProgress:
    """The number of finished models, of `n_models`, and the steps of each model under way, of `n_steps`. Times are
    seconds since the training began."""

    n_models: int
    n_finished: int
    n_steps: int
    under_way: dict[Case, int] = field(default_factory=dict)
    n_finished_before: int = field(init=False)
    _times: dict[Case, tuple[float, float]] = field(default_factory=dict)  # its start and first step

    def __post_init__(self) -> None:
        self.n_finished_before = self.n_finished

    def heard(self, now_s: float, what: str, case: Case, value: int | dict) -> None:
        """Count a message of a worker (experiments.ablation.workers.trained)."""
        if what == "done":
            self.under_way.pop(case, None)
            self._times.pop(case, None)
            self.n_finished += 1
        elif isinstance(value, int):
            self.under_way[case] = value
            began_s, _ = self._times.get(case, (now_s, now_s))
            if value <= 1:
                self._times[case] = began_s, now_s

    def description(self, case: Case) -> str:
        """A model under way, for people. Before its first step it is compiled."""
        return str(case) if self.under_way[case] else f"{case}: compiles"

    def left_s(self, now_s: float) -> float | None:
        """Seconds until all models are finished, or None before one has done two steps. A model under way counts by
        its steps."""
        n_here = self.n_finished - self.n_finished_before
        if not n_here:
            return self._left_s_by_steps(now_s)
        n_done = n_here + sum(self.under_way.values()) / self.n_steps
        return now_s * (self.n_models - self.n_finished_before - n_done) / n_done

    def _left_s_by_steps(self, now_s: float) -> float | None:
        """The same while no model is finished: each takes as long as its start and its steps at the pace so far."""
        stepping = {case: n for case, n in self.under_way.items() if n > 1}
        if not stepping:
            return None
        model_s = statistics.fmean(
            first_s - began_s + (self.n_steps - 1) * (now_s - first_s) / (stepping[case] - 1)
            for case, (began_s, first_s) in self._times.items()
            if case in stepping
        )
        n_left = self.n_models - self.n_finished - sum(self.under_way.values()) / self.n_steps
        return model_s * n_left / len(self.under_way)

    @property
    def state(self) -> str:
        """The progress of all models, for people."""
        return f"{self.n_finished} of {self.n_models} models finished{self._under_way and f', {self._under_way}'}"

    @property
    def text(self) -> str:
        """The state of the models after an interruption, for people."""
        finished = f"{self.n_finished} of {self.n_models} models finished, the same command continues with the others"
        return f"{finished}; what is {self._under_way}, starts again" if self.under_way else finished

    @property
    def _under_way(self) -> str:
        """The models under way, for people; '' if none is."""
        steps = " and ".join(map(str, sorted(self.under_way.values(), reverse=True)))
        return f"under way, at {steps} of {self.n_steps} steps" if steps else ""
