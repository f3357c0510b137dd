"""Processes that train the cases of an ablation, one case after the other, and report to their parent."""

import multiprocessing
import queue
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.queues import Queue
from pathlib import Path

from experiments.ablation.grid import Case

from jaxdt.model.data import open_data
from jaxdt.run.config import RunConfig
from jaxdt.run.cpus import allowed_cpus
from jaxdt.runtime.compute_environment import set_cpus

POLL_S = 1.0
SPAWN = multiprocessing.get_context("spawn")  # a fork would share the parent's threads and locks


class WorkerLost(Exception):
    """A worker ended before its cases were done."""


@contextmanager
def trained(config: RunConfig, data: Path, cases: list[Case], n_workers: int) -> Iterator[Iterator[tuple]]:
    """The messages of workers that train the cases: ("steps", case, number of steps done), the first time with 0 before
    the case is compiled, and ("done", case, record). The iterator raises WorkerLost when a worker was lost and no
    message is left. Leaving the context ends all workers."""
    tasks = SPAWN.Queue()
    messages = SPAWN.Queue()
    for case in [*cases, *[None] * n_workers]:
        tasks.put(case)
    allowed = allowed_cpus()
    cpus = [[str(allowed[index % len(allowed)])] if n_workers > 1 else [] for index in range(n_workers)]
    workers = [SPAWN.Process(target=_work, args=(config, data, own, tasks, messages), daemon=True) for own in cpus]
    for worker in workers:
        worker.start()
    try:
        yield _received(messages, workers, len(cases))
    finally:
        for worker in workers:
            worker.terminate()


def _received(messages: Queue, workers: list, n_left: int) -> Iterator[tuple]:
    while n_left:
        try:
            message = messages.get(timeout=POLL_S)
        except queue.Empty:
            codes = [worker.exitcode for worker in workers if worker.exitcode]
            if codes:
                raise WorkerLost(f"a worker ended with code {codes[0]}") from None
            continue
        n_left -= message[0] == "done"
        yield message


def _work(config: RunConfig, data: Path, cpus: list[str], tasks: Queue, messages: Queue) -> None:
    """The main function of a worker. Only its parent reacts to Ctrl-C; the worker ends when its parent has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_cpus(cpus)
    from experiments.ablation.train import train  # imports jax, which counts the CPUs

    def on_step(case: Case, step: int) -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None  # this is a child process
        if not parent.is_alive():
            sys.exit(1)
        messages.put(("steps", case, step + 1))

    tokens = open_data(data)
    while (case := tasks.get()) is not None:
        messages.put(("steps", case, 0))
        messages.put(("done", case, train(config, case, tokens, partial(on_step, case))))
