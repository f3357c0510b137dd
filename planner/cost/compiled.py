"""The tools of all compiled loops: the decorator that compiles them, copies, and random numbers.

A first search waits for the compiler. Kernels therefore copy and fill arrays by loops: one assignment of an array to a
slice makes numba compile the text of its error message as well, some thirty functions on strings. Callers in Python
allocate the arrays of a kernel where they can. A literal integer that another kernel gets is an np.int64, as other
integers are, also where a variable only begins with it: for each literal the other one is compiled once more.
"""

import functools
import types
from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from numba.core.dispatcher import Dispatcher

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def compiled(function: Kernel) -> Kernel:
    """numba.njit without the interpreter lock; the result is cached on disk if some directory can be written. A kernel
    whose name begins with _ is called by other kernels alone: no entry from Python is compiled for it, which takes
    longer than many a kernel. No kernel divides by zero, so none is compiled with a check for that."""
    options = {
        "nogil": True,
        "error_model": "numpy",
        "no_cfunc_wrapper": True,
        "no_cpython_wrapper": function.__name__.startswith("_"),
    }
    try:
        dispatcher: Any = numba.njit(function, cache=True, **options)
    except RuntimeError:  # numba has no writable place for its cache
        uncached: Any = numba.njit(function, **options)
        return uncached
    _drop_unreadable_cache(dispatcher._cache)
    return dispatcher


def _drop_unreadable_cache(cache):
    """Empty a cache whose types no longer exist. numba reads the types before it looks whether the source has changed,
    so a NamedTuple that was renamed since would fail the first call."""
    try:
        cache._cache_file._load_index()
    except (AttributeError, ImportError):
        cache.flush()


def is_compiled(kernel: Any) -> bool:
    """Whether a kernel is compiled: in this process, or by an earlier one that left it in the cache on disk."""
    cache_file = getattr(kernel._cache, "_cache_file", None)  # None where no directory can be written
    return bool(kernel.signatures) or (cache_file is not None and bool(cache_file._load_index()))


@functools.cache
def interpreted(kernel: Any) -> Callable[..., Any]:
    """A kernel as the plain Python that it is written in, with those that it calls: some hundred times slower, at
    once."""
    function = kernel.py_func
    names = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    callees = {name: interpreted(value) for name, value in names.items() if isinstance(value, Dispatcher)}
    return types.FunctionType(function.__code__, function.__globals__ | callees, function.__name__)


def at_once(kernel: Any) -> Callable[..., Any]:
    """The kernel if it is compiled, else the interpreted one: a call that does not wait for the compiler."""
    return kernel if is_compiled(kernel) else interpreted(kernel)


@compiled
def copy_row(source, target):
    """Copy one array of one dimension into another."""
    for a in range(target.shape[0]):
        target[a] = source[a]


@compiled
def copy_rows(source, target):
    """Copy one array of two dimensions into another."""
    for s in range(target.shape[0]):
        for a in range(target.shape[1]):
            target[s, a] = source[s, a]


def generator(seed: int) -> np.ndarray:
    """State of `next_bits` (uint64 [1]); equal seeds give equal streams in every thread."""
    return np.array([(seed * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) % 2**64], dtype=np.uint64)


@compiled
def next_bits(state):
    """64 random bits (splitmix64)."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    z = state[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@compiled
def below(state, n) -> Any:
    """A random integer in 0..n-1 (int64)."""
    return np.int64((next_bits(state) >> np.uint64(32)) * np.uint64(n) >> np.uint64(32))


@compiled
def unit(state):
    """A random number in [0, 1)."""
    return np.float64(next_bits(state) >> np.uint64(11)) * (1.0 / 9007199254740992.0)
