"""Slices of states and of checkpoints' parts as 4-byte words, with a checksum at their end."""

import zlib

import numpy as np

from jaxdt.spec.errors import BadInput

WORD = np.dtype(np.int32)


def with_checksum(words: np.ndarray) -> np.ndarray:
    """Words, followed by one word with their CRC-32."""
    return sealed(np.append(words, WORD.type(0)))


def sealed(words: np.ndarray) -> np.ndarray:
    """Words whose last one becomes the CRC-32 of the others, in place."""
    words[-1:].view(np.uint32)[0] = zlib.crc32(words[:-1].data)
    return words


def check_slice(words: np.ndarray, what: object) -> None:
    """BadInput, which names `what`, if the last word of a slice is not the checksum of the others."""
    checksum = zlib.crc32(words[:-1].data)
    expected = int(words[-1:].view(np.uint32)[0])
    if checksum != expected:
        raise BadInput(f"{what}: checksum {checksum}, expected {expected}, which came with it")
