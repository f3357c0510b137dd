"""What `solve` does by either objective: read the network, limit and watch the search, refuse or write the plan."""

import contextlib
import json
import math
import select
import signal
import socket
import sys
import threading
from argparse import Namespace
from pathlib import Path

from jaxdt.spec import network as networks
from jaxdt.spec import plan as plans
from jaxdt.spec.errors import BadInput
from jaxdt.spec.network import Network
from jaxdt.spec.plan import Plan
from planner.model.problem import asymmetric_links
from planner.report.tables import ProgressLine
from planner.search.incumbent import Budget, Incumbent

DEFAULT_TIME_S = 30.0
DEFAULT_DTYPE, DEFAULT_REMAT = "bfloat16", "recompute"
MAX_WARNINGS = 3
WATCH_INTERVAL_S = 0.1


def read_network(flags: Namespace) -> Network:
    """The network of the flags, with warnings; BadInput where the numbers of stages and pipelines make no sense."""
    network = networks.load(flags.network)
    for name in ("stages", "pipelines"):
        count = getattr(flags, name)
        if count is None and flags.stages != "auto":
            raise BadInput(f"--{name}: missing, expected a number or auto")
        if isinstance(count, int) and count < 1:
            raise BadInput(f"--{name}: got {count}, expected an integer >= 1, or auto")
    warnings = asymmetric_links(network)
    for line in warnings[:MAX_WARNINGS]:
        print(f"warning: averaged both directions of {line}", file=sys.stderr)
    if len(warnings) > MAX_WARNINGS:
        print(f"warning: and {len(warnings) - MAX_WARNINGS} more links", file=sys.stderr)
    return network


def budget_of(flags: Namespace) -> Budget:
    """The budget of the flags. With an evaluation limit alone the clock does not count."""
    for name in ("time_limit_s", "evaluations"):
        value = getattr(flags, name)
        if value is not None and not 0 < value < math.inf:
            raise BadInput(f"--{name}: got {value}, expected a positive number")
    if flags.time_limit_s is None and flags.evaluations is None:
        return Budget(DEFAULT_TIME_S)
    return Budget(flags.time_limit_s, flags.evaluations)


@contextlib.contextmanager
def watching(incumbent: Incumbent, progress: ProgressLine):
    """Inside this context a thread shows progress, and Ctrl-C stops the search, which then ends with its best plan.

    The thread learns of the signal through a socket, into which the interpreter writes at once: the main thread, where
    Python's own handler would run, may be inside a long call of CP-SAT."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def watch():
        while True:
            if select.select([reader], [], [], WATCH_INTERVAL_S)[0]:
                signals = reader.recv(64)
                if not signals:  # the context has ended
                    return
                if signal.SIGINT in signals:
                    incumbent.stop()
            progress.show(incumbent)

    thread = threading.Thread(target=watch, daemon=True)
    old_handler = signal.signal(signal.SIGINT, lambda number, frame: None)
    old_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(old_fd)
        signal.signal(signal.SIGINT, old_handler)
        writer.close()
        thread.join()
        reader.close()
        progress.close()


def refuse_missing_links(network: Network, cost_s: float, shape: tuple[int, int], none_exists: bool):
    """Raise BadInput where the plan found uses a link that does not exist, so that its cost is infinite; none_exists if
    it is proved that every plan of this shape (stages, pipelines) does."""
    if not math.isfinite(cost_s):
        found = "there is no plan (proved)" if none_exists else "found no plan"
        raise BadInput(
            f"{network.name or 'network'}: bandwidth_gbps: {found} of {shape[0]} stages x {shape[1]} pipelines that "
            f"avoids the links of zero bandwidth"
        )


def write(plan: Plan, out: str | None):
    if out:
        try:
            Path(out).write_text(json.dumps(plans.to_json(plan), indent=1) + "\n")
        except OSError as error:
            raise BadInput(f"--out: {out} cannot be written ({error.strerror})") from None
        print(f"wrote {out}")
