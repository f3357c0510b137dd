"""Processes of fleets as forks of one that has imported jax and the rest: three of the four seconds of processor time
with which a peer begins are imports.

A process that starts others asks a server for each. The server forks twice and the process between ends, so the new one
is adopted by who asked, which is the "subreaper" of its descendants: it is a child like one that was executed, with a
pid, a command line, pipes, signals and an exit code of its own. Linux only.

The tests have one server for each process of a session. A launcher that comes from it begins with a server of its own,
a fork of itself, whose processes are the launcher's.
"""

import ctypes
import importlib
import io
import json
import os
import runpy
import socket
import subprocess
import sys
from types import SimpleNamespace

from jaxdt.runtime.compute_environment import MALLOC_ENVIRONMENT

IMPORTS = ("jaxdt.runtime.coordinator_process", "jaxdt.runtime.peer_process", "jaxdt.runtime.worker_process")
PR_SET_CHILD_SUBREAPER = 36
N_FDS_MAX = 8
MESSAGE_BYTES_MAX = 1 << 17
ROOM = "." * 8192  # for the command lines of the processes


class Forked(subprocess.Popen):
    """A process that runs a Python script, started by the server of this process."""

    server: socket.socket | None = None
    server_process: subprocess.Popen | None = None  # nobody waits for it: it ends with this process

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others):
        pipes, start_new_session = others[3:9], others[-2]
        p2cread, _, _, c2pwrite, _, errwrite = pipes
        own = [fd if fd >= 0 else standard for standard, fd in enumerate((p2cread, c2pwrite, errwrite))]
        environment = (os.environ if env is None else env) | MALLOC_ENVIRONMENT  # the server has these settings
        request = [args, dict(environment), start_new_session]
        if not Forked.server:
            Forked.server, its_end = _connect()
            Forked.server_process = subprocess.Popen(
                [sys.executable, "-W", "ignore", __file__, str(its_end.fileno()), ROOM],
                stdin=subprocess.DEVNULL,
                env=os.environ | MALLOC_ENVIRONMENT,
                pass_fds=[its_end.fileno()],
            )
            its_end.close()
        socket.send_fds(Forked.server, [json.dumps(request).encode()], [*own, *pass_fds])
        self.pid = int(Forked.server.recv(20))
        self._child_created = True
        self._close_pipe_fds(*pipes)


FORKS = SimpleNamespace(Popen=Forked, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT)  # in the place of subprocess


def _connect() -> tuple[socket.socket, socket.socket]:
    """The ends of this process and of its server; this process will adopt what the server forks."""
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def divide() -> str:
    """Fork a server of this process, which came from a server itself. Returns "" here, and in each process that the new
    server forks the script that it is to run."""
    Forked.server, its_end = _connect()
    if os.fork():
        its_end.close()
        return ""
    Forked.server.close()
    Forked.server = None
    for standard in range(3):  # who reads them waits until every process has closed them
        os.dup2(os.open(os.devnull, os.O_RDWR), standard)
    return serve(its_end)


def serve(requests: socket.socket) -> str:
    """Fork for each request until who asks has ended. In a forked process, return the script that it is to run."""
    while True:
        text, fds, _, _ = socket.recv_fds(requests, MESSAGE_BYTES_MAX, N_FDS_MAX)
        if not text:
            os._exit(0)
        reader, writer = os.pipe()
        between = os.fork()
        if between == 0:
            if os.fork():
                os._exit(0)
            os.write(writer, str(os.getpid()).encode())
            for fd in (requests.detach(), reader, writer):
                os.close(fd)
            return become(fds, *json.loads(text))
        os.waitpid(between, 0)
        requests.send(os.read(reader, 20))
        for fd in (*fds, reader, writer):
            os.close(fd)


def become(fds: list[int], command: list[str], environment: dict[str, str], start_new_session: bool) -> str:
    """Take over what Popen gives to a process that it executes. Returns the script."""
    if start_new_session:
        os.setsid()
    for standard, fd in enumerate(fds[:3]):
        os.dup2(fd, standard)
        os.close(fd)
    for fd in fds[3:]:
        os.set_inheritable(fd, True)
    os.environ.clear()
    os.environ.update(environment)
    sys.orig_argv, sys.argv = command, command[1:]
    sys.path[0] = os.path.dirname(sys.argv[0])
    # The server's own may be of a file, where this one is a pipe.
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), line_buffering=True)
    show_command(command)
    return sys.argv[0]


def show_command(command: list[str]) -> None:
    """Make /proc show this command line, which is shorter than that of the server."""
    with open("/proc/self/stat") as stat:
        start, end = (int(word) for word in stat.read().rpartition(")")[2].split()[45:47])
    words = "\0".join(command).encode() + b"\0"
    assert len(words) <= end - start, f"{len(words)} bytes of arguments"
    ctypes.memmove(start, words.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    for module in IMPORTS:
        importlib.import_module(module)
    stage_times = sys.modules["jaxdt.runtime.calibrate.stage_times"]
    stage_times.STAGE_S, stage_times.N_TIMED = 0.0, 1  # no such fleet is measured, nor predicted by one process more
    sys.modules["jaxdt.runtime.reporting.prediction"].Prediction.start = lambda *arguments: None
    runpy.run_path(serve(socket.socket(fileno=int(sys.argv[1]))), run_name="__main__")
