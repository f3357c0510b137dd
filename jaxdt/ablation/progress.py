"""The progress of the training of a grid, from the messages of its workers."""

from dataclasses import dataclass, field

from jaxdt.ablation.grid import Case


@dataclass
class GridProgress:
    """The number of finished models, of `n_models`, and the steps of each model under way, of `n_steps`."""

    n_models: int
    n_finished: int
    n_steps: int
    under_way: dict[Case, int] = field(default_factory=dict)
    n_finished_before: int = field(init=False)

    def __post_init__(self) -> None:
        self.n_finished_before = self.n_finished

    def heard(self, what: str, case: Case, value: int | dict) -> None:
        """Count a message of a worker (jaxdt.ablation.workers.trained)."""
        if what == "done":
            self.under_way.pop(case, None)
            self.n_finished += 1
        elif isinstance(value, int):
            self.under_way[case] = value

    def description(self, case: Case) -> str:
        """A model under way, for people. Before its first step it is compiled."""
        return str(case) if self.under_way[case] else f"{case}: compiles"

    def left_s(self, elapsed_s: float) -> float | None:
        """Seconds until all models are finished, after `elapsed_s` of training, or None before the first is: then a
        step's time is not known without its model's start. A model under way counts by its steps."""
        n_here = self.n_finished - self.n_finished_before
        if not n_here:
            return None
        n_done = n_here + sum(self.under_way.values()) / self.n_steps
        return elapsed_s * (self.n_models - self.n_finished_before - n_done) / n_done

    @property
    def state(self) -> str:
        """The progress of all models, for people."""
        return f"{self.n_finished} of {self.n_models} models finished{self._under_way and f', {self._under_way}'}"

    @property
    def text(self) -> str:
        """The state of the models after an interruption, for people."""
        finished = f"{self.n_finished} of {self.n_models} models finished, the same command goes on with the others"
        return f"{finished}; what is {self._under_way}, starts again" if self.under_way else finished

    @property
    def _under_way(self) -> str:
        """The models under way, for people; '' if none is."""
        steps = " and ".join(map(str, sorted(self.under_way.values(), reverse=True)))
        return f"under way, at {steps} of {self.n_steps} steps" if steps else ""
