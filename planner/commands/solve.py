"""`python -m planner solve`: which objective's run it is."""

import sys
from argparse import Namespace

from jaxdt.spec import network as networks
from jaxdt.spec.errors import BadInput
from jaxdt.spec.network import Network
from planner.commands import cost, step
from planner.model.problem import asymmetric_links

WARNINGS_SHOWN = 3


def run(flags: Namespace) -> int:
    network = networks.load(flags.network)
    for name in ("stages", "pipelines"):
        count = getattr(flags, name)
        if count is None and flags.stages != "auto":
            raise BadInput(f"--{name}: missing, expected a number or auto")
        if isinstance(count, int) and count < 1:
            raise BadInput(f"--{name}: got {count}, expected an integer >= 1, or auto")
    warn_asymmetric(network)
    if flags.objective == "step_time" or "auto" in (flags.stages, flags.pipelines):
        return step.run(flags, network)
    return cost.run(flags, network)


def warn_asymmetric(network: Network):
    found = asymmetric_links(network)
    for line in found[:WARNINGS_SHOWN]:
        print(f"warning: averaged both directions of {line}", file=sys.stderr)
    if len(found) > WARNINGS_SHOWN:
        print(f"warning: and {len(found) - WARNINGS_SHOWN} more links", file=sys.stderr)
