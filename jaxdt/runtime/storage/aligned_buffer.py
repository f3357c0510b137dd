"""Aligned memory for received tensors."""

import math

import numpy as np

ALIGNMENT_BYTES = 64


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array that starts on a 64-byte boundary, so that `jax.device_put` takes it over without a copy.

    The array must not be written after that.
    """
    n_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(n_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT_BYTES
    return raw[start : start + n_bytes].view(dtype).reshape(shape)
