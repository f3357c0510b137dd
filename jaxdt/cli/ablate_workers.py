"""Processes that train the cases of an ablation, one thread each, and tell their parent about it."""

import multiprocessing
import os
import queue
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from jaxdt.ablation.grid import Case
from jaxdt.cli import run_flags
from jaxdt.model.data import open_data
from jaxdt.spec.config import RunConfig

POLL_S = 1.0
SPAWN = multiprocessing.get_context("spawn")  # a fork would share the parent's threads and locks


class WorkerLost(Exception):
    """A worker ended before its work was done."""


@contextmanager
def trained(config: RunConfig, data: Path, cases: list[Case], n_workers: int) -> Iterator[Iterator[tuple]]:
    """The messages of workers that train the cases: ("step", case, step done) and ("done", case, record). Raises
    WorkerLost when the rest of the workers have nothing more to say; leaving the context ends all of them."""
    tasks, told = SPAWN.Queue(), SPAWN.Queue()
    for case in [*cases, *[None] * n_workers]:
        tasks.put(case)
    cpus = [str(index % (os.cpu_count() or 1)) if n_workers > 1 else "" for index in range(n_workers)]
    workers = [SPAWN.Process(target=_work, args=(config, data, cpu, tasks, told), daemon=True) for cpu in cpus]
    for worker in workers:
        worker.start()
    try:
        yield _messages(told, workers, len(cases))
    finally:
        for worker in workers:
            worker.terminate()


def _messages(told: Any, workers: list, n_left: int) -> Iterator[tuple]:
    while n_left:
        try:
            message = told.get(timeout=POLL_S)
        except queue.Empty:
            codes = [worker.exitcode for worker in workers if worker.exitcode]
            if codes:
                raise WorkerLost(f"a worker ended with code {codes[0]}") from None
            continue
        n_left -= message[0] == "done"
        yield message


def _work(config: RunConfig, data: Path, cpu: str, tasks: Any, told: Any) -> None:
    """A worker's life: a case after the other. It ends with its parent, which alone hears of Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    run_flags.set_cpus([cpu] if cpu else [])
    from jaxdt.ablation.train import train  # imports jax, which counts the CPUs

    def done(case: Case, step: int) -> None:
        if not multiprocessing.parent_process().is_alive():
            sys.exit(1)
        told.put(("step", case, step))

    tokens = open_data(data)
    while (case := tasks.get()) is not None:
        told.put(("done", case, train(config, case, tokens, partial(done, case))))
