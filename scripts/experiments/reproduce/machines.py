"""Peers that have a machine each, as the simulator gets them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxdt.protocol import events as ev
from jaxdt.run.network import Link
from jaxdt.run.work import WorkKind
from jaxdt.sim.predict import Conditions

FREE = Link()  # takes no time
BACKWARD_SHARE = 0.75  # of a microbatch's compute: recomputation and backward, 3 of 4 forwards' worth


def on_machines(
    seconds: Mapping[int, Mapping[str, float]],
    link: Callable[[int, int], Link],
    coordinator: Link = FREE,
    **more: Any,
) -> Conditions:
    """Each peer on a host of its own with one core. `coordinator`: its links to all peers. `more`: of Conditions."""
    hosts = {peer: str(peer) for peer in seconds}
    return Conditions(
        seconds=seconds,
        link=lambda src, dst: coordinator if ev.COORDINATOR in (src, dst) else link(src, dst),
        host_of=hosts,
        cores=dict.fromkeys(hosts.values(), 1),
        **more,
    )


def work_s(compute_s: float, is_last: bool = False) -> dict[str, float]:
    """Seconds of each kind of Work of a stage. `compute_s`: forward, recomputation and backward of a microbatch. The
    last stage's backward contains its forward."""
    forward_s = 0.0 if is_last else (1 - BACKWARD_SHARE) * compute_s
    return dict.fromkeys(WorkKind, 0.0) | {WorkKind.FORWARD: forward_s, WorkKind.BACKWARD: compute_s - forward_s}


def shares(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """`total` divided in proportion to `weights` by largest remainders, of equal ones the first."""
    exact = [total * weight / sum(weights) for weight in weights]
    found = [int(part) for part in exact]
    for i in sorted(range(len(exact)), key=lambda i: (found[i] - exact[i], i))[: total - sum(found)]:
        found[i] += 1
    return tuple(found)
