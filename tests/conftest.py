"""Settings that must be in place before anything imports jax; given through the environment, so that tests of modules
without jax do not import it: eight virtual CPU devices, no silent change of a dtype or of a rank. Compiling takes most
of the time of these tests, and half of it goes into optimising programs that run for microseconds: that is off. Off is
also the cutting of each program into parts that compile side by side: small programs take half as long again with it.
"""

import fcntl
import importlib.metadata
import os
import signal
import sys
import threading
from importlib.util import cache_from_source
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples in each run, and no limit in seconds: on a busy machine a test is slow, not wrong.
settings.register_profile("deterministic", derandomize=True, deadline=None)
settings.load_profile("deterministic")

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
FLAGS += " --xla_cpu_parallel_codegen_split_count=1"
if importlib.metadata.version("jaxlib").startswith("0.10."):  # compiles twice as fast; later versions lack the flag
    FLAGS += " --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = f"{FLAGS} {os.environ.get('XLA_FLAGS', '')}"  # the caller's come last and win
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # else a twentieth of the time goes into stack traces

# Functions with the same program are compiled once, also those of other tests, processes and earlier sessions. All
# processes of a session share the folder: a program is written with one call, and who reads it before that compiles it.
PROGRAMS = Path(__file__).resolve().parents[1] / ".pytest_cache" / "programs"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(PROGRAMS))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def pytest_addoption(parser):
    parser.addoption("--readme", action="store_true", help="run the long blocks of README.md too (ten minutes)")
    parser.addoption("--stuck", action="store_true", help="run real processes until they stand still (three minutes)")
    parser.addoption("--pool_seeds", type=int, default=1, help="seeds of pools that train while workers come and go")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """In a fresh clone most of the collection is pytest's work on asserts. One process of a session does it, and the
    others, which wait meanwhile, read what that has written."""
    with Path(__file__).open() as lock:
        if not has_written_asserts():
            fcntl.flock(lock, fcntl.LOCK_EX)
        if has_written_asserts():
            fcntl.flock(lock, fcntl.LOCK_UN)
        return (yield)


def has_written_asserts() -> bool:
    """Whether pytest has kept its tests with the asserts as it runs them, or will keep none."""
    return sys.dont_write_bytecode or any(Path(cache_from_source(__file__)).parent.glob("test_*-pytest-*.pyc"))


def pytest_collection_finish():
    """Ctrl-C ends the tests in pytest's way, though scripts that they import take it over."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    if config.getvalue("dist") != "loadgroup":
        return None
    from groups import Groups  # needs pytest-xdist

    return Groups(config, log)
