"""`python -m planner pareto`: plans between the shortest step and the cheapest one, as a table, a picture and files."""

from argparse import Namespace
from pathlib import Path

from jaxdt.run import network as networks
from jaxdt.run.errors import BadInput
from planner.api.job import COST_PER_STEP
from planner.api.pareto import pareto
from planner.commands.common import interruptible, write
from planner.commands.flags_job import job_of
from planner.model.stop import Stop
from planner.report.front import draw, markdown


def run(flags: Namespace) -> int:
    """Exit code 0, or BadInput."""
    out = Path(flags.out)
    if out.exists() and not out.is_dir():
        raise BadInput(f"--out: {out} is not a folder, expected one, or a name for a new one")
    if flags.objective:
        raise BadInput(f"--objective: got {flags.objective}, expected none: `pareto` goes by step time and by price")
    flags.objective = COST_PER_STEP
    network = networks.load(flags.network)
    job = job_of(flags, network)
    stop = Stop(flags.time_limit_s, flags.evaluations)
    with interruptible(stop):
        points = pareto(network, job, stop, flags.seed, flags.points)
    out.mkdir(parents=True, exist_ok=True)
    table = markdown(points)
    (out / "front.md").write_text(table)
    draw(points, str(out / "front.png"))
    print(table, end="")
    for k, point in enumerate(points):
        write(point.plan, str(out / f"plan_{k}.json"), flags.network)
    print(f"wrote {out / 'front.md'} and {out / 'front.png'}")
    return 0
