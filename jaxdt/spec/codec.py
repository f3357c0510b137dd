"""How boundary tensors travel, by name, and how many bytes that is: integer arithmetic, no arrays.

none          as they are
bf16          rounded to bfloat16
int8          blocks of 256 numbers with one fp32 absmax each, a byte a number, linear map
int8-dynamic  blocks of 4096 numbers, the signed dynamic map: more steps for small numbers
auto          none or int8 link by link, decided before a run begins (jaxdt.spec.codec_choice)

`int8:1024` is int8 in blocks of 1024 numbers. In a plan a boundary has one entry: a name, or one name per pipeline as
in "int8,none"; a name may be two, "int8/none", for the activation's link and the gradient's.
"""

from dataclasses import dataclass

from jaxdt.spec.errors import BadInput, nearest
from jaxdt.spec.model import COMPRESSION

NONE, BF16, INT8, DYNAMIC, AUTO = "none", "bf16", "int8", "int8-dynamic", "auto"
DEFAULT_BLOCK = {INT8: 256, DYNAMIC: 4096}
NAMES = (NONE, BF16, INT8, DYNAMIC, AUTO)
ABSMAX_BYTES = 4
BF16_BYTES = 2


@dataclass(frozen=True)
class CodecSpec:
    """A codec and the numbers per block, 0 for a codec without blocks."""

    name: str
    block: int = 0

    def __str__(self) -> str:
        return self.name if self.block == DEFAULT_BLOCK.get(self.name, 0) else f"{self.name}:{self.block}"


def parse(text: str, where: str = "codec") -> CodecSpec:
    """The codec of a name such as int8 or int8:1024; `where` names the field in errors."""
    name, colon, block = text.partition(":")
    if name not in NAMES or (colon and name not in DEFAULT_BLOCK):
        expected = f"{', '.join(NAMES)}; {' and '.join(DEFAULT_BLOCK)} also with a block, as in int8:1024"
        raise BadInput(f"{where}: got {text!r}, expected one of {expected}{nearest(name, NAMES)}")
    if not colon:
        return CodecSpec(name, DEFAULT_BLOCK.get(name, 0))
    if not (block.isascii() and block.isdigit() and int(block) > 0):
        raise BadInput(f"{where}: got {text!r}, expected an integer >= 1 behind the colon, the numbers in a block")
    return CodecSpec(name, int(block))


def wire_bytes(spec: CodecSpec, n_numbers: int, dtype_bytes: int) -> int:
    """Payload of a tensor of n_numbers, dtype_bytes each before encoding."""
    if spec.name == AUTO:
        raise BadInput("codec: auto is decided when a run is launched with a network, expected a codec by now")
    if spec.name == NONE:
        return n_numbers * dtype_bytes
    if spec.name == BF16:
        return n_numbers * BF16_BYTES
    return n_numbers + ABSMAX_BYTES * n_blocks(spec, n_numbers)


def n_blocks(spec: CodecSpec, n_numbers: int) -> int:
    """Blocks of a tensor, the last of which may be partial."""
    return -(-n_numbers // spec.block)


def loses(spec: CodecSpec, dtype_bytes: int) -> bool:
    """Whether decoding gives other numbers than were encoded."""
    return spec.name != NONE and not (spec.name == BF16 and dtype_bytes <= BF16_BYTES)


def split_compression(text: str) -> tuple[str, str]:
    """("maxout2", "int8") of "maxout2+int8", ("maxout2", "none") of "maxout2", ("none", text) of any other codec: the
    layers that narrow a boundary are part of the model, and a codec may come on top of them."""
    layers, plus, rest = text.partition("+")
    if COMPRESSION.fullmatch(layers):
        return layers, rest if plus else NONE
    if plus:
        raise BadInput(f"codec: got {text!r}, expected bottleneckR or maxoutR, R an integer >= 2, before the plus")
    return NONE, text


def of_link(entry: str, pipeline: int, forward: bool) -> str:
    """The name, in a boundary's entry of a plan, for one pipeline's activations (forward) or gradients."""
    names = entry.split(",")
    there, slash, back = (names[pipeline] if len(names) > 1 else names[0]).partition("/")
    return back if slash and not forward else there


def entry_of(links: list[tuple[str, str]]) -> str:
    """The shortest entry of a boundary whose pipelines have these names for (activations, gradients)."""
    names = [there if there == back else f"{there}/{back}" for there, back in links]
    return names[0] if len(set(names)) == 1 else ",".join(names)
