"""GPipe and 1F1B as pure orders of Work per stage, their text form, and a dry run that finds deadlocks.

GPipe: all forwards, then all backwards (Huang et al. 2019). 1F1B: `depth` forwards to fill the pipeline, then one
backward and one forward in turn, then the remaining backwards (PipeDream-Flush, Narayanan et al. 2021). A larger depth
than n_stages - stage keeps more microbatches in flight, which hides the latency of slow links.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxdt.run.plan import Plan
from jaxdt.run.work import Work, WorkKind, parse_work

Order = tuple[Work, ...]


def gpipe(stage: int, microbatches: Sequence[int]) -> Order:
    """All forwards, then all backwards, both in the order of `microbatches`."""
    forwards = [Work(stage, WorkKind.FORWARD, m) for m in microbatches]
    return (*forwards, *(Work(stage, WorkKind.BACKWARD, m) for m in microbatches))


def one_f_one_b(stage: int, microbatches: Sequence[int], depth: int) -> Order:
    """`depth` forwards, then alternately a backward and a forward, then the rest of the backwards."""
    warm_up = min(depth, len(microbatches))
    order = [Work(stage, WorkKind.FORWARD, m) for m in microbatches[:warm_up]]
    for done, m in enumerate(microbatches):
        order.append(Work(stage, WorkKind.BACKWARD, m))
        if warm_up + done < len(microbatches):
            order.append(Work(stage, WorkKind.FORWARD, microbatches[warm_up + done]))
    return tuple(order)


def stage_order(plan: Plan, stage: int, pipeline: int) -> Order:
    """The order in which the plan's schedule has a peer compute one step."""
    microbatches = plan.microbatches(pipeline)
    if plan.schedule == "gpipe":
        return gpipe(stage, microbatches)
    return one_f_one_b(stage, microbatches, plan.depth(stage))


def text(order: Order) -> str:
    """The order of a stage as one line: 0F0 0F1 0B0 ..."""
    return " ".join(str(work) for work in order)


def parse(line: str) -> Order:
    """The order that `text` has written; raises ValueError for anything else."""
    return tuple(parse_work(word) for word in line.split())


@dataclass(frozen=True)
class DryRun:
    """The result of running one pipeline's orders in ticks of equal length: `ticks[t][stage]` is the Work of a stage in
    tick t. Where the orders deadlock, `waits_for[work]` are the Works that the next Work of each stage waits for."""

    ticks: list[dict[int, Work]]
    waits_for: dict[Work, list[Work]]

    @property
    def deadlock(self) -> str:
        """A text that says what every stage waits for; '' if the orders run to their end."""
        waits = [f"{work} waits for {', '.join(map(str, missing))}" for work, missing in self.waits_for.items()]
        return "; ".join(waits)


def dry_run(orders: Mapping[int, Order]) -> DryRun:
    """Run the orders (stage -> order) of one pipeline. Raises ValueError if a stage does not hold the forward and the
    backward of each microbatch exactly once."""
    n_stages = len(orders)
    _check_complete(orders)
    position = dict.fromkeys(orders, 0)
    done: set[Work] = set()
    ticks: list[dict[int, Work]] = []
    while True:
        next_work = {stage: order[position[stage]] for stage, order in orders.items() if position[stage] < len(order)}
        tick = {stage: work for stage, work in next_work.items() if needs(work, n_stages) <= done}
        if not tick:
            waits_for = {work: sorted(needs(work, n_stages) - done) for work in next_work.values()}
            return DryRun(ticks, waits_for)
        ticks.append(tick)
        done |= set(tick.values())
        for stage in tick:
            position[stage] += 1


def grid(run: DryRun) -> str:
    """A row per stage, a column per tick; where the orders deadlock, each row ends with what its stage waits for."""
    stages = sorted({stage for tick in run.ticks for stage in tick} | {work.stage for work in run.waits_for})
    width = max((len(str(work)) for tick in run.ticks for work in tick.values()), default=0)
    waits = {work.stage: f"   {work} waits for {', '.join(map(str, m))}" for work, m in run.waits_for.items()}
    rows: list[str] = []
    for stage in stages:
        cells = [str(tick[stage]) if stage in tick else "." for tick in run.ticks]
        row = f"stage {stage:<3}" + "".join(f" {cell:>{width}}" for cell in cells)
        rows.append(row + waits.get(stage, ""))
    return "\n".join(rows)


def needs(work: Work, n_stages: int) -> set[Work]:
    """The Work whose results this Work reads."""
    stage, m = work.stage, work.microbatch
    if work.kind == WorkKind.FORWARD:
        return {Work(stage - 1, WorkKind.FORWARD, m)} if stage > 0 else set()
    own = {Work(stage, WorkKind.FORWARD, m)}
    return own | {Work(stage + 1, WorkKind.BACKWARD, m)} if stage < n_stages - 1 else own


def _check_complete(orders: Mapping[int, Order]) -> None:
    for stage, order in orders.items():
        for work in order:
            if work.stage != stage:
                raise ValueError(f"stage {stage}: its order holds Work of another stage")
            is_plain = work.microbatch is not None and work == Work(stage, work.kind, work.microbatch)
            if work.kind not in (WorkKind.FORWARD, WorkKind.BACKWARD) or not is_plain:
                raise ValueError(f"stage {stage}: got {work}, expected forwards and backwards such as {stage}F0")
    expected = {m for order in orders.values() for work in order if (m := work.microbatch) is not None}
    for stage, order in orders.items():
        for kind in (WorkKind.FORWARD, WorkKind.BACKWARD):
            got = [work.microbatch for work in order if work.kind == kind]
            if len(got) != len(set(got)) or set(got) != expected:
                raise ValueError(f"stage {stage}: {kind} of {got}, expected each of {sorted(expected)} once")
