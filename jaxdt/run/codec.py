"""Codecs by name, and how many bytes a boundary tensor has with each: integer arithmetic, no arrays.

none          the numbers as they are
bf16          rounded to bfloat16
int8          blocks of 256 numbers with one fp32 absmax each, a byte a number, linear map
int8-dynamic  blocks of 4096 numbers, the signed dynamic map: more steps for small numbers
auto          none or int8 link by link, decided before a run begins (jaxdt.run.codec_choice)

`int8:1024` is int8 in blocks of 1024 numbers. In a plan a boundary has one entry: a name, or one name per pipeline as
in "int8,none". A name may also be a pair, "int8/none": the first codec is for activations, the second for gradients.

A new codec has an entry in FAMILIES here and one in jaxdt.codec.base, which holds the arithmetic.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxdt.run.errors import BadInput, nearest

# Layers of a model that narrow a boundary; a config may name them where it names codecs.
COMPRESSION = re.compile("(?:bottleneck|maxout)([2-9]|[1-9][0-9]+)")
NONE, BF16, INT8, DYNAMIC, AUTO = "none", "bf16", "int8", "int8-dynamic", "auto"
ABSMAX_BYTES = 4
BF16_BYTES = 2
FLOAT32_BYTES = 4
FLOAT64_BYTES = 8


def _unencoded_bytes(n_numbers: int, dtype_bytes: int, block: int) -> int:
    del block
    return n_numbers * dtype_bytes


def _bf16_bytes(n_numbers: int, dtype_bytes: int, block: int) -> int:
    del dtype_bytes, block
    return n_numbers * BF16_BYTES


def _block_bytes(n_numbers: int, dtype_bytes: int, block: int) -> int:
    """A byte per number and an absmax per block. The last block may be partial."""
    del dtype_bytes
    n_blocks = -(-n_numbers // block)
    return n_numbers + ABSMAX_BYTES * n_blocks


@dataclass(frozen=True)
class CodecFamily:
    """The facts about a codec that need no arithmetic. `wire_bytes(n_numbers, dtype_bytes, block)` is the payload of a
    tensor. Numbers of at most `exact_dtype_bytes` each come back as they were. `default_block` is the number of numbers
    per block, 0 for a codec without blocks. `is_identity`: the encoded tensor is the tensor itself."""

    wire_bytes: Callable[[int, int, int], int]
    exact_dtype_bytes: int = 0
    default_block: int = 0
    is_identity: bool = False


FAMILIES = {
    NONE: CodecFamily(_unencoded_bytes, exact_dtype_bytes=FLOAT64_BYTES, is_identity=True),
    BF16: CodecFamily(_bf16_bytes, exact_dtype_bytes=BF16_BYTES),
    INT8: CodecFamily(_block_bytes, default_block=256),
    DYNAMIC: CodecFamily(_block_bytes, default_block=4096),
}
NAMES = (*FAMILIES, AUTO)
EXCHANGED = (NONE, BF16, INT8)  # the codecs of what replicas exchange (sync.codec)
BLOCK_NAMES = tuple(name for name, family in FAMILIES.items() if family.default_block)
ACCEPTED = f"one of {', '.join(NAMES)}; {' and '.join(BLOCK_NAMES)} also with a block, as in int8:1024"


@dataclass(frozen=True)
class CodecSpec:
    """A codec's name and the numbers per block, 0 for a codec without blocks."""

    name: str
    block: int = 0

    def __str__(self) -> str:
        return self.name if self.block == _default_block(self.name) else f"{self.name}:{self.block}"

    @property
    def is_identity(self) -> bool:
        """Whether the encoded tensor is the tensor itself."""
        return self.name in FAMILIES and FAMILIES[self.name].is_identity


EXACT = CodecSpec(NONE)


def parse(text: str, where: str = "codec") -> CodecSpec:
    """The codec of a name such as int8 or int8:1024; `where` names the field in errors."""
    name, colon, block = text.partition(":")
    if name not in NAMES or (colon and name not in BLOCK_NAMES):
        raise BadInput(f"{where}: got {text!r}, expected {ACCEPTED}{nearest(name, NAMES)}")
    if not colon:
        return CodecSpec(name, _default_block(name))
    if not (block.isascii() and block.isdigit() and int(block) > 0):
        raise BadInput(f"{where}: got {text!r}, expected an integer >= 1 behind the colon, the numbers in a block")
    return CodecSpec(name, int(block))


def exchanged_bytes(spec: CodecSpec, n_numbers: int) -> int:
    """Payload of so many fp32 numbers of a vector that replicas exchange."""
    return wire_bytes(spec, n_numbers, FLOAT32_BYTES)


def _default_block(name: str) -> int:
    return FAMILIES[name].default_block if name in FAMILIES else 0


def wire_bytes(spec: CodecSpec, n_numbers: int, dtype_bytes: int) -> int:
    """Payload of a tensor of n_numbers, dtype_bytes each before encoding."""
    if spec.name == AUTO:
        raise BadInput("codec: auto is decided when a run is launched with a network, expected a codec by now")
    return FAMILIES[spec.name].wire_bytes(n_numbers, dtype_bytes, spec.block)


def loses(spec: CodecSpec, dtype_bytes: int) -> bool:
    """Whether decoding gives other numbers than were encoded."""
    return spec.name == AUTO or dtype_bytes > FAMILIES[spec.name].exact_dtype_bytes


def split_compression(text: str) -> tuple[str, str]:
    """(compression layers, codec) of a config's `codec`: ("maxout2", "int8") of "maxout2+int8", ("maxout2", "none") of
    "maxout2", ("none", text) of any other name. The layers that narrow a boundary are part of the model, and a codec
    may come on top of them."""
    layers, plus, rest = text.partition("+")
    if COMPRESSION.fullmatch(layers):
        return layers, rest if plus else NONE
    if plus:
        raise BadInput(f"codec: got {text!r}, expected bottleneckR or maxoutR, R an integer >= 2, before the plus")
    return NONE, text


def of_link(entry: str, pipeline: int, forward: bool) -> str:
    """The name, in a boundary's entry of a plan, for one pipeline's activations (forward) or gradients."""
    names = entry.split(",")
    activation, slash, gradient = (names[pipeline] if len(names) > 1 else names[0]).partition("/")
    return gradient if slash and not forward else activation


def entry_of(links: Sequence[tuple[str, str]]) -> str:
    """The shortest entry of a boundary whose pipelines have these names for (activations, gradients)."""
    names = [activation if activation == gradient else f"{activation}/{gradient}" for activation, gradient in links]
    return names[0] if len(set(names)) == 1 else ",".join(names)
