"""Many batches at once, on all cores."""

from collections.abc import Iterable

from experiments.reproduce.hybrid_ps_parts.cases import Run, chains_job
from experiments.reproduce.hybrid_ps_parts.simulated import System, clean_job, lossy_job
from experiments.reproduce.results import Results


def fill(runs: Iterable[Run], results: Results) -> None:
    """Get the batches: those without losses first, since the simulator's say when losses happen."""
    ours, bare = [], []
    for system, machines, losses in runs:
        if isinstance(system, System):
            ours.append((system, machines, losses))
        else:
            bare.append(chains_job(system, machines, losses))
    results.fill([clean_job(system, machines) for system, machines, _ in ours] + bare)
    lossy = ((system, machines, losses) for system, machines, losses in ours if losses and losses.of(machines))
    results.fill([lossy_job(system, machines, losses, results) for system, machines, losses in lossy])
