"""profile.json: seconds of a model's parts on each kind of device, measured or derived from FLOP/s.

A stage's seconds are sums over its parts: layers, and the embedding on the first stage, head and loss on the last.
`forward_s` and `backward_s` are for one microbatch, backward with the recomputation that `remat` asks for; `update_s`
is the optimizer's step on the part's parameters, `gather_s` laying its gradient out for the exchange. A codec's seconds
are for one boundary tensor of the full width; one with another block than what was measured takes its family's (int8's
for int8:1024). Kinds of devices that differ by a factor need one entry each.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from jaxdt.spec import codec as codec_names
from jaxdt.spec import serialize
from jaxdt.spec.errors import BadInput, nearest
from jaxdt.spec.model import GPTConfig
from jaxdt.spec.sizes import DTYPE_BYTES
from jaxdt.spec.work import BACKWARD, EVALUATE, FORWARD, GATHER, UPDATE

FORMAT = "jaxdt-profile-1"
RECOMPUTE = {"recompute": 1.0, "dots": 0.0}
UPDATE_BYTES_PER_NUMBER = 28  # Adam reads gradient, parameter and two moments, and writes the last three, fp32
GATHER_BYTES_PER_NUMBER = 8


@dataclass(frozen=True)
class Part:
    """Seconds of one part of the model."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    gather_s: float = 0.0
    update_s: float = 0.0

    def __post_init__(self):
        for name, value in serialize.write(self).items():
            if not 0 <= value < float("inf"):
                raise BadInput(f"profile: {name}: got {value}, expected finite seconds >= 0")

    def __add__(self, other: "Part") -> "Part":
        return Part(
            *(a + b for a, b in zip(serialize.write(self).values(), serialize.write(other).values(), strict=True))
        )


@dataclass(frozen=True)
class CodecTimes:
    encode_s: float
    decode_s: float


NO_CODEC = CodecTimes(0.0, 0.0)


@dataclass(frozen=True)
class Kind:
    """One kind of device. `work_s`: what each Work costs besides its maths. `spread_frac`: the middle half of repeated
    timings over their median. `memory_bytes`: what a peer may use, None for unknown."""

    layer: Part
    embedding: Part = Part()
    head: Part = Part()
    work_s: float = 0.0
    codecs: dict[str, CodecTimes] = field(default_factory=dict)
    spread_frac: float = 0.0
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Profile:
    """Kinds of devices and their seconds, for one model, microbatch size, dtype and rematerialisation mode."""

    model: GPTConfig
    microbatch_size: int
    kinds: dict[str, Kind]
    dtype: str = "float32"
    remat: str = "recompute"
    source: str = ""

    def __post_init__(self):
        if not self.kinds:
            raise BadInput("profile.kinds: got none, expected at least one kind of device")

    def kind(self, name: str) -> Kind:
        """A kind by name; a network without kinds means the only one there is."""
        if name in self.kinds:
            return self.kinds[name]
        if not name and len(self.kinds) == 1:
            return next(iter(self.kinds.values()))
        known = ", ".join(sorted(self.kinds))
        raise BadInput(f"profile.kinds: no kind {name!r}{nearest(name, self.kinds)}; known: {known}")


def stage_seconds(profile: Profile, kind: str, lo: int, hi: int) -> dict[str, float]:
    """Seconds per kind of Work of a stage of layers lo..hi-1; a block that several layers share is updated once. The
    last stage's forward is fused into its backward, and
    its forward Work only takes the input in."""
    times = profile.kind(kind)
    last = hi == profile.model.n_layers
    n_layers, n_blocks = hi - lo, len(profile.model.blocks_in(lo, hi))
    ends = (times.embedding if lo == 0 else Part()) + (times.head if last else Part())
    forward_s = n_layers * times.layer.forward_s + ends.forward_s
    backward_s = n_layers * times.layer.backward_s + ends.backward_s
    return {
        FORWARD: times.work_s + (0.0 if last else forward_s),
        BACKWARD: times.work_s + backward_s + (forward_s if last else 0.0),
        EVALUATE: times.work_s + forward_s,
        GATHER: n_blocks * times.layer.gather_s + ends.gather_s,
        UPDATE: n_blocks * times.layer.update_s + ends.update_s,
    }


def codec_times(profile: Profile, kind: str, name: str) -> CodecTimes:
    """Seconds of a codec on a kind of device: what was measured under this name, else under another of its family; what
    leaves every number as it is costs nothing. BadInput where nothing of the family was measured."""
    spec, known = codec_names.parse(name), profile.kind(kind).codecs
    if not codec_names.loses(spec, DTYPE_BYTES[profile.dtype]):
        return NO_CODEC
    family = [other for other in sorted(known) if codec_names.parse(other).name == spec.name]
    for measured in (name, str(spec), *family):
        if measured in known:
            return known[measured]
    raise BadInput(
        f"profile.kinds[{kind!r}].codecs: has no seconds of {name}, expected those of its family; known: "
        f"{', '.join(sorted(known)) or 'none'}"
    )


def from_flops(
    model: GPTConfig,
    microbatch_size: int,
    flops: Mapping[str, float],
    efficiency: float,
    memory_gbps: float = 8000.0,
    dtype: str = "float32",
    remat: str = "recompute",
) -> Profile:
    """A profile for devices that one does not have: `flops[kind]` peak FLOP/s, of which the maths reaches the share
    `efficiency`; the optimizer and the codecs are bound by memory at `memory_gbps` (1e9 bit/s). Forward is 2 FLOP per
    parameter and token, backward 4, recomputation 2 more (SWARM Sec. 3.1)."""
    if not 0 < efficiency <= 1:
        raise BadInput(f"efficiency: got {efficiency}, expected a share in (0, 1]")
    n_tokens, bytes_per_s = microbatch_size * model.seq_len, memory_gbps * 1e9 / 8

    def part(n_params: int, peak: float, recomputed: float) -> Part:
        forward_s = 2.0 * n_params * n_tokens / (peak * efficiency)
        moved_s = [n_params * n / bytes_per_s for n in (GATHER_BYTES_PER_NUMBER, UPDATE_BYTES_PER_NUMBER)]
        return Part(forward_s, (2.0 + recomputed) * forward_s, *moved_s)

    def times(codec: str) -> CodecTimes:
        spec, n_numbers = codec_names.parse(codec), model.boundary_numbers(microbatch_size)
        tensor, wire = n_numbers * DTYPE_BYTES[dtype], codec_names.wire_bytes(spec, n_numbers, DTYPE_BYTES[dtype])
        n_reads = 2 if spec.block else 1  # once for the largest of each block
        return CodecTimes((n_reads * tensor + wire) / bytes_per_s, (tensor + wire) / bytes_per_s)

    codecs = {name: times(name) for name in (codec_names.BF16, codec_names.INT8, codec_names.DYNAMIC)}
    kinds = {}
    for name, peak in flops.items():
        if not 0 < peak < float("inf"):
            raise BadInput(f"flops[{name}]: got {peak}, expected FLOP/s > 0")
        table = part(model.token_table_params, peak, 0.0)
        embedding = replace(table, forward_s=0.0, backward_s=0.0)  # a look-up
        kinds[name] = Kind(part(model.block_params, peak, RECOMPUTE[remat]), embedding, table, codecs=codecs)
    source = f"derived: {efficiency:g} of {', '.join(f'{name} {peak:g} FLOP/s' for name, peak in flops.items())}"
    return Profile(model, microbatch_size, kinds, dtype, remat, source)


def to_json(profile: Profile) -> dict:
    """The content of profile.json."""
    return {"format": FORMAT, **serialize.write(profile)}


def parse(text: str, source: str) -> Profile:
    """A profile from the text of a profile.json; `source` names it in errors."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise BadInput(f"{source}: not JSON ({error})") from None
    if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
        raise BadInput(f'{source}: format: expected "{FORMAT}"')
    return serialize.read(Profile, data, f"{source}: profile")


def load(path: str | Path) -> Profile:
    """Read a profile.json."""
    try:
        return parse(Path(path).read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read ({error})") from None
