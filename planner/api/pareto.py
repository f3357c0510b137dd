"""`planner.pareto`: plans between the shortest step and the cheapest one.

The ends are searched first. Then the shortest step is searched under budgets between the prices of their devices, in
equal ratios, and what another plan beats in both is dropped. So the front is as good as these searches.
"""

from dataclasses import replace

from jaxdt.run.errors import BadInput
from jaxdt.run.network import Network
from planner.api.job import Job
from planner.api.solve import solve
from planner.model.prices import PriceRules
from planner.model.stop import Stop
from planner.report.result import Result

DEFAULT_POINTS = 8


def pareto(
    network: Network, job: Job, stop: Stop | None = None, seed: int = 0, n_points: int = DEFAULT_POINTS
) -> tuple[Result, ...]:
    """Plans of which none has both a shorter step and a cheaper one than another, the shortest step first.

    job       one with a profile; its price rules do not count but for a budget, which no plan exceeds
    stop      of all searches together, in equal parts
    n_points  searches; the front has at most as many plans

    Raises BadInput as `solve` does, and for less than two points."""
    if n_points < 2:
        raise BadInput(f"--points: got {n_points}, expected an integer >= 2")
    stop = stop or Stop()
    n_each = None if stop.evaluations is None else max(1, stop.evaluations // n_points)

    def search(rules: PriceRules) -> Result:
        part = Stop(None if stop.time_s is None else stop.time_s / n_points, n_each)
        with stop.on_interrupt(part.interrupt):
            return solve(network, replace(job, price_rules=rules), part, seed)

    most = job.price_rules.budget_per_hour
    results = [search(PriceRules(True, most)), search(PriceRules(False, most))]
    low, high = (_per_hour(result) for result in results)
    n_between = n_points - 2
    for k in range(1, n_between + 1):
        if 0 < low < high and not stop.interrupted:
            budget = low * (high / low) ** (k / (n_between + 1))
            results.append(search(PriceRules(False, budget)))
    return front(results)


def _per_hour(result: Result) -> float:
    assert result.price is not None  # a network without prices is refused
    return result.price.per_hour


def front(results: list[Result]) -> tuple[Result, ...]:
    """The results that no other one beats in step time and price, the shortest step first."""
    kept: list[Result] = []
    for result in sorted(results, key=_step_and_price):
        if not kept or _step_and_price(result)[1] < _step_and_price(kept[-1])[1]:
            kept.append(result)
    return tuple(kept)


def _step_and_price(result: Result) -> tuple[float, float]:
    assert result.step_s is not None and result.price is not None  # of a job with a profile and prices
    return result.step_s, result.price.per_step
