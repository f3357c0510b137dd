"""The code that all searching commands share: interrupts, and the files that they write."""

import contextlib
import select
import signal
import socket
import threading
from dataclasses import replace

from jaxdt.run.plan import Plan
from planner.model.stop import Stop
from planner.report.plan_file import save_plan

SIGNALS = (signal.SIGINT, signal.SIGTERM)  # after either, a search ends and its best plan is written


@contextlib.contextmanager
def interruptible(stop: Stop):
    """Inside this context Ctrl-C and SIGTERM interrupt the stop.

    A thread learns of the signal through a socket, into which the interpreter writes at once: the main thread, where
    Python's own handler would run, may be inside a long call of CP-SAT."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def watch():
        while True:
            select.select([reader], [], [])
            signals = reader.recv(64)
            if not signals:  # the context has ended
                return
            if any(number in signals for number in SIGNALS):
                stop.interrupt()

    thread = threading.Thread(target=watch, daemon=True)
    old_handlers = {number: signal.signal(number, lambda number, frame: None) for number in SIGNALS}
    old_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(old_fd)
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
        writer.close()
        thread.join()
        reader.close()


def write(plan: Plan, out: str | None, network_file: str, **facts: str | int):
    """Write the plan to the file of --out, if there is one, with the name of its network's file and other facts."""
    if out:
        save_plan(replace(plan, found=plan.found | facts), out, network_file)
        print(f"wrote {out}")
