"""The log of a run whose replicas may differ, as replay.py reads it, and the comparison of two states. No flags."""

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxdt.protocol import trace
from jaxdt.protocol.incarnations import Incarnations
from jaxdt.protocol.reports import (
    CandidateReport,
    PipelineEndReport,
    PipelineJoinReport,
    ReadyReport,
    StateMeanReport,
)
from jaxdt.run.errors import BadInput
from jaxdt.run.plan import Plan
from jaxdt.runtime.compute_environment import ONE_THREAD, n_threads

THREADS = re.compile(r", (\d+) threads?$")  # of a device, as jax_setup.device_text says it


def incarnations_of(plan: Plan, reports: list[trace.TraceRecord], versions: Collection[int]) -> Incarnations:
    """The pipelines of the log, with their last steps. A pipeline that was stopped has no last step in the log. It does
    as many as its states in checkpoints of these versions have, and those that a pipeline takes over which comes
    back."""
    kinds = {kind.kind: kind for kind in (PipelineJoinReport, PipelineEndReport)}
    log = [kinds[report["kind"]](**report["fields"]) for report in reports if report["kind"] in kinds]
    incarnations = Incarnations(plan.n_pipelines, log)
    known = {number: one.first_step for number, one in enumerate(incarnations.all)}
    for one in incarnations.all:
        if one.donor is not None:
            known[one.donor] = max(known[one.donor], one.first_step)
    for mean in checkpoint_means(reports, versions):
        for member, n_steps in zip(mean.members, mean.steps, strict=True):
            number = incarnations.of(plan.seat(member)[1], mean.view)
            known[number] = max(known[number], n_steps)
    incarnations.n_steps = known | incarnations.n_steps
    return incarnations


def peers_by_threads(reports: Iterable[trace.TraceRecord]) -> dict[int, list[str]]:
    """Number of threads -> the peers that said so when they were ready to compute: each in its own log, and those that
    came later in the coordinator's."""
    found: dict[int, list[str]] = {}
    for report in reports:
        if report["kind"] in (ReadyReport.kind, CandidateReport.kind) and (
            threads := THREADS.search(report["fields"]["device"])
        ):
            names = found.setdefault(int(threads[1]), [])
            name = f"peer {report['fields'].get('peer', report['peer'])}"
            names += [name] if name not in names else []
    return found


def take_threads(peers: Mapping[int, Sequence[str]]) -> None:
    """Have this process compute on as many threads as the peers of a run did; on one if none says how many."""
    if len(peers) > 1:
        found = "; ".join(f"{n} at {', '.join(names)}" for n, names in sorted(peers.items()))
        raise BadInput(
            f"run_dir: its peers computed on different numbers of threads ({found}), which round sums differently, so "
            "no one process can do the run again; expected peers and newcomers with equally many --cpus"
        )
    n = next(iter(peers), 1)
    if n == 1:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {ONE_THREAD}".strip()
    elif n_threads() < n:
        raise BadInput(f"run_dir: its peers computed on {n} threads each, this process may use {n_threads()} CPUs")
    else:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:n])


def checkpoint_means(reports: list[trace.TraceRecord], versions: Collection[int]) -> list[StateMeanReport]:
    """The means of stages that are in checkpoints of these versions. When members of a mean are lost it is made again;
    the last one counts."""
    found = [StateMeanReport(**fields) for fields in fields_of(reports, StateMeanReport.kind)]
    return list({(mean.version, mean.stage): mean for mean in found if mean.version in versions}.values())


def fields_of(reports: list[trace.TraceRecord], kind: str) -> list[dict[str, Any]]:
    """The fields of all reports of a kind, in their order."""
    return [report["fields"] for report in reports if report["kind"] == kind]


def compared(made: dict[str, dict], kept: dict[str, dict]) -> tuple[int, int]:
    """How many numbers of two states differ in a bit, and how many there are. A NaN is equal to itself."""
    pairs = [(bits_of(a), bits_of(b)) for a, b in zip(*map(jax.tree.leaves, (made, kept)), strict=True)]
    return sum(int(np.sum(a != b)) for a, b in pairs), sum(a.size for a, _ in pairs)


def bits_of(values: Any) -> np.ndarray:
    """The numbers of an array as unsigned integers with the same bits."""
    array = np.asarray(values)
    return array.view(f"u{array.itemsize}")
