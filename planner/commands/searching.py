"""What the runs of both objectives share: how long to search, showing it, and writing the plan."""

import json
import math
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from jaxdt.spec import plan as plans
from jaxdt.spec.errors import BadInput
from jaxdt.spec.network import Network
from jaxdt.spec.plan import Plan
from planner.report.text import Progress
from planner.search.incumbent import Board, Limits

DEFAULT_TIME_S = 30.0
DTYPE, REMAT = "bfloat16", "recompute"
Result = TypeVar("Result")


def limits_of(time_limit_s: float | None, evaluations: int | None) -> Limits:
    """An evaluation limit alone leaves the clock out."""
    for name, value in (("time_limit_s", time_limit_s), ("evaluations", evaluations)):
        if value is not None and not 0 < value < math.inf:
            raise BadInput(f"--{name}: got {value}, expected a positive number")
    if time_limit_s is None and evaluations is None:
        time_limit_s = DEFAULT_TIME_S
    return Limits(time_limit_s, evaluations)


def search(work: Callable[[], Result], board: Board, progress: Progress) -> Result:
    """Do the work in a thread while this one shows progress; Ctrl-C ends it with the best plan so far."""
    outcome: list = []

    def guarded():
        try:
            outcome.append(work())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    before = signal.signal(signal.SIGINT, lambda number, frame: board.stop())
    try:
        thread.start()
        while thread.is_alive():
            thread.join(0.1)
            progress.show(board)
    finally:
        signal.signal(signal.SIGINT, before)
    progress.close()
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


def refuse_missing(network: Network, plan: Plan):
    """A plan over a link that does not exist is no plan."""
    if not math.isfinite(plan.found["cost"]["total_s"] + plan.found.get("step_s", 0.0)):
        raise BadInput(
            f"{network.name or 'network'}: bandwidth_gbps: found no plan of {plan.n_stages} stages x "
            f"{plan.n_pipelines} pipelines that avoids the links of zero bandwidth"
        )


def write(plan: Plan, out: str | None):
    if out:
        try:
            Path(out).write_text(json.dumps(plans.to_json(plan), indent=1) + "\n")
        except OSError as error:
            raise BadInput(f"--out: {out} cannot be written ({error.strerror})") from None
        print(f"wrote {out}")
