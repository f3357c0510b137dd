"""GPipe and 1F1B as pure per-stage orders of Work, their text form, and a dry run that finds deadlocks.

GPipe: all forwards, then all backwards (Huang et al. 2019). 1F1B: `depth` forwards to fill the pipeline, then one
backward and one forward in turn, then the remaining backwards (PipeDream-Flush, Narayanan et al. 2021). A larger depth
than n_stages - stage keeps more microbatches in flight, which hides the latency of slow links.
"""

from collections.abc import Mapping, Sequence

from jaxdt.spec.plan import Plan
from jaxdt.spec.work import BACKWARD, FORWARD, Work, parse_work

Order = tuple[Work, ...]


def gpipe(stage: int, microbatches: Sequence[int]) -> Order:
    """All forwards, then all backwards, both in the order of `microbatches`."""
    forwards = [Work(stage, FORWARD, m) for m in microbatches]
    return (*forwards, *(Work(stage, BACKWARD, m) for m in microbatches))


def one_f_one_b(stage: int, microbatches: Sequence[int], depth: int) -> Order:
    """`depth` forwards, then alternately a backward and a forward, then the rest of the backwards."""
    warm_up = min(depth, len(microbatches))
    order = [Work(stage, FORWARD, m) for m in microbatches[:warm_up]]
    for done, m in enumerate(microbatches):
        order.append(Work(stage, BACKWARD, m))
        if warm_up + done < len(microbatches):
            order.append(Work(stage, FORWARD, microbatches[warm_up + done]))
    return tuple(order)


def stage_order(plan: Plan, stage: int, pipeline: int) -> Order:
    """The order in which the plan's schedule has a peer compute one step."""
    microbatches = plan.microbatches(pipeline)
    if plan.schedule == "gpipe":
        return gpipe(stage, microbatches)
    return one_f_one_b(stage, microbatches, plan.depth(stage))


def text(order: Order) -> str:
    """One line: 0F0 0F1 0B0 ..."""
    return " ".join(str(work) for work in order)


def parse(line: str) -> Order:
    """The order that `text` printed."""
    return tuple(parse_work(word) for word in line.split())


def dry_run(orders: Mapping[int, Order]) -> list[Work]:
    """Run one pipeline's orders (stage -> order) without time; returns the Work in an order that is possible.

    Raises ValueError, with each stage's next Work and what it waits for, if they deadlock, or if a stage does not
    hold each microbatch's forward and then its backward exactly once."""
    n_stages = len(orders)
    _check_complete(orders)
    position = dict.fromkeys(orders, 0)
    done: set[Work] = set()
    trace: list[Work] = []
    progress = True
    while progress:
        progress = False
        for stage, order in orders.items():
            while position[stage] < len(order) and needs(order[position[stage]], n_stages) <= done:
                work = order[position[stage]]
                done.add(work)
                trace.append(work)
                position[stage] += 1
                progress = True
    stuck = {stage: order[position[stage]] for stage, order in orders.items() if position[stage] < len(order)}
    if stuck:
        lines = [f"{work} waits for {sorted(map(str, needs(work, n_stages) - done))}" for work in stuck.values()]
        raise ValueError("the schedule deadlocks: " + "; ".join(lines))
    return trace


def needs(work: Work, n_stages: int) -> set[Work]:
    """The Work whose results this Work reads."""
    stage, m = work.stage, work.microbatch
    if work.kind == FORWARD:
        return {Work(stage - 1, FORWARD, m)} if stage > 0 else set()
    own = {Work(stage, FORWARD, m)}
    return own | {Work(stage + 1, BACKWARD, m)} if stage < n_stages - 1 else own


def _check_complete(orders: Mapping[int, Order]) -> None:
    expected = {work.microbatch for order in orders.values() for work in order}
    for stage, order in orders.items():
        for kind in (FORWARD, BACKWARD):
            got = [work.microbatch for work in order if work.kind == kind]
            if len(got) != len(set(got)) or set(got) != expected:
                raise ValueError(f"stage {stage}: {kind} of {got}, expected each of {sorted(expected)} once")
        if any(work.stage != stage for work in order):
            raise ValueError(f"stage {stage}: its order holds Work of another stage")
