"""profile.json: seconds of a model's parts on each kind of device, measured or derived from FLOP/s.

A stage's seconds are sums over its parts: layers, and the embedding on the first stage, head and loss on the last.
`forward_s` and `backward_s` are for one microbatch, backward with the recomputation that `remat` asks for; `update_s`
is for the optimizer's step on the part's parameters, `gather_s` for laying out its gradient for the exchange. A codec's
seconds are for one boundary tensor of the full width. A codec with another block than the measured one takes the
seconds of its family (int8's for int8:1024). Kinds of devices that differ by a factor need one entry each.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxdt.run import codec as codec_names
from jaxdt.run import serialize
from jaxdt.run.errors import BadInput, nearest, read_text
from jaxdt.run.model import read_options
from jaxdt.run.model_facts import MicrobatchShape
from jaxdt.run.model_spec import ModelSpec
from jaxdt.run.optim import OPTIMIZERS
from jaxdt.run.options import (
    NOT_NEGATIVE,
    SAMPLES_MAX,
    SECONDS,
    about,
    at_least,
    in_range,
    one_of,
    option,
    require_accepted,
)
from jaxdt.run.sizes import DTYPE_BYTES
from jaxdt.run.work import WorkKind

FORMAT = "jaxdt-profile-1"
SCHEMA = "urn:jaxdt:schema:profile:1"
RECOMPUTE = {"recompute": 1.0, "dots": 0.0}
UPDATE_BYTES_PER_NUMBER = 28  # Adam reads gradient, parameter and two moments, and writes the last three, fp32
GATHER_BYTES_PER_NUMBER = 8


@dataclass(frozen=True)
class PartTimes:
    """Seconds of one part of the model."""

    forward_s: float = option(0.0, "the forward of a microbatch", SECONDS)
    backward_s: float = option(0.0, "the backward of a microbatch", SECONDS)
    gather_s: float = option(0.0, "laying out the gradient for the exchange", SECONDS)
    update_s: float = option(0.0, "the optimizer's step", SECONDS)

    def __post_init__(self) -> None:
        require_accepted(self, "profile: ")

    def __add__(self, other: "PartTimes") -> "PartTimes":
        return PartTimes(
            forward_s=self.forward_s + other.forward_s,
            backward_s=self.backward_s + other.backward_s,
            gather_s=self.gather_s + other.gather_s,
            update_s=self.update_s + other.update_s,
        )


@dataclass(frozen=True)
class CodecTimes:
    """Seconds of encoding and of decoding one boundary tensor of the full width."""

    encode_s: float = field(metadata=about("encoding", SECONDS))
    decode_s: float = field(metadata=about("decoding", SECONDS))


NO_CODEC = CodecTimes(0.0, 0.0)


@dataclass(frozen=True)
class DeviceKind:
    """One kind of device. `layer`: the seconds of each layer but for those in `other_layers`, by the first layer that
    takes the same time (jaxdt.run.model_facts). `work_s`: seconds that each Work costs besides its maths.
    `spread_frac`: the middle half of repeated timings over their median. `memory_bytes`: what a peer may use, None for
    unknown; on an `accelerator` that is its own memory, and some of what a peer holds is in the host's
    (jaxdt.run.memory)."""

    layer: PartTimes
    embedding: PartTimes = PartTimes()
    head: PartTimes = PartTimes()
    work_s: float = option(0.0, "of each Work besides its maths", SECONDS)
    codecs: dict[str, CodecTimes] = field(default_factory=dict[str, CodecTimes])
    spread_frac: float = option(0.0, "of repeated timings", NOT_NEGATIVE)
    memory_bytes: int | None = option(None, "what a peer may use", at_least(1))
    accelerator: bool = False
    other_layers: dict[str, PartTimes] = field(default_factory=dict[str, PartTimes])


@dataclass(frozen=True)
class Profile:
    """Kinds of devices and their seconds, for one model, shape of microbatches, dtype and rematerialisation mode.
    `seq_len`: tokens of a sample, 0 for as many as the model takes."""

    model: ModelSpec
    microbatch_size: int = field(metadata=about("samples of a microbatch", in_range(1, SAMPLES_MAX)))
    kinds: dict[str, DeviceKind]
    dtype: str = option("float32", "numbers that stages compute with", one_of(DTYPE_BYTES))
    remat: str = option("recompute", "rematerialisation mode", one_of(RECOMPUTE))
    source: str = ""
    seq_len: int = option(0, "tokens of a sample", at_least(0))

    def __post_init__(self) -> None:
        if not self.kinds:
            raise BadInput("profile.kinds: got none, expected at least one kind of device")

    @property
    def microbatch_shape(self) -> MicrobatchShape:
        return MicrobatchShape(self.microbatch_size, self.seq_len or self.model.max_len)

    def kind(self, name: str) -> DeviceKind:
        """A kind by name; a network without kinds means the only one there is."""
        if name in self.kinds:
            return self.kinds[name]
        if not name and len(self.kinds) == 1:
            return next(iter(self.kinds.values()))
        known = ", ".join(sorted(self.kinds))
        raise BadInput(f"profile.kinds: no kind {name!r}{nearest(name, self.kinds)}; known: {known}")


def stage_seconds(profile: Profile, kind: str, lo: int, hi: int) -> dict[str, float]:
    """Seconds per kind of Work of a stage of layers lo..hi-1; a block that several layers share is updated once. The
    last stage's forward is fused into its backward, and its forward Work only takes the input in."""
    times = profile.kind(kind)
    facts = profile.model.facts
    last = hi == facts.n_layers
    forward_s = backward_s = gather_s = update_s = 0.0
    for like, (n_layers, n_runs) in facts.alike(lo, hi).items():
        layer = times.other_layers.get(str(like), times.layer)
        forward_s += n_layers * layer.forward_s
        backward_s += n_layers * layer.backward_s
        gather_s += n_runs * layer.gather_s
        update_s += n_runs * layer.update_s
    ends = (times.embedding if lo == 0 else PartTimes()) + (times.head if last else PartTimes())
    forward_s += ends.forward_s
    backward_s += ends.backward_s
    return {
        WorkKind.FORWARD: times.work_s + (0.0 if last else forward_s),
        WorkKind.BACKWARD: times.work_s + backward_s + (forward_s if last else 0.0),
        WorkKind.EVALUATE: times.work_s + forward_s,
        WorkKind.GATHER: gather_s + ends.gather_s,
        WorkKind.UPDATE: update_s + ends.update_s,
    }


def codec_times(profile: Profile, kind: str, name: str) -> CodecTimes:
    """Seconds of a codec on a kind of device: measured under this name, else under another name of its family. A codec
    that leaves every number as it is costs nothing. BadInput where nothing of the family was measured."""
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
    model: ModelSpec,
    microbatch_size: int,
    flops: Mapping[str, float],
    efficiency: float,
    memory_gbps: float = 8000.0,
    dtype: str = "float32",
    remat: str = "recompute",
    *,
    seq_len: int = 0,
    optimizer: str = "adamw",
) -> Profile:
    """A profile of devices that were not measured: `flops[kind]` peak FLOP/s, of which the maths reaches the share
    `efficiency`; the optimizer and the codecs are bound by memory at `memory_gbps` (1e9 bit/s). Forward is 2 FLOP per
    parameter and token, backward 4, recomputation 2 more (SWARM Sec. 3.1). `optimizer`: by its products, if its updates
    have any."""
    if not 0 < efficiency <= 1:
        raise BadInput(f"efficiency: got {efficiency}, expected a share in (0, 1]")
    facts, n_tokens = model.facts, microbatch_size * (seq_len or model.max_len)
    bytes_per_s = memory_gbps * 1e9 / 8

    matrix_flop = OPTIMIZERS[optimizer].matrix_flop
    update_flop = {
        layer: sum(
            matrix_flop(leaf.shape) for entry in facts.entries if layer in entry.layers for leaf in entry.matrices
        )
        for layer in facts.alike(0)
    }

    def part(n_params: int, n_used: int, peak: float, recomputed: float, update_flop: float = 0.0) -> PartTimes:
        forward_s = 2.0 * n_used * n_tokens / (peak * efficiency)
        return PartTimes(
            forward_s=forward_s,
            backward_s=(2.0 + recomputed) * forward_s,
            gather_s=n_params * GATHER_BYTES_PER_NUMBER / bytes_per_s,
            update_s=n_params * UPDATE_BYTES_PER_NUMBER / bytes_per_s + update_flop / (peak * efficiency),
        )

    codecs = _codecs_from_memory(facts.boundary_numbers(n_tokens), DTYPE_BYTES[dtype], bytes_per_s)
    kinds: dict[str, DeviceKind] = {}
    for name, peak in flops.items():
        if not 0 < peak < float("inf"):
            raise BadInput(f"flops[{name}]: got {peak}, expected FLOP/s > 0")
        firsts = {like: facts.layers[like] for like in facts.alike(0)}
        try:
            table = part(facts.n_logit_params, facts.n_logit_params, peak, 0.0)
            layers = {
                like: part(one.n_params, one.n_used, peak, RECOMPUTE[remat], update_flop[like])
                for like, one in firsts.items()
            }
        except BadInput as error:
            raise BadInput(f"flops[{name}]: got {peak:g}, of which the maths reaches {efficiency:g}: {error}") from None
        embedding = replace(table, forward_s=0.0, backward_s=0.0)  # a look-up
        others = {str(like): times for like, times in layers.items() if times != layers[0]}
        kinds[name] = DeviceKind(layers[0], embedding, table, codecs=codecs, other_layers=others)
    source = f"derived: {efficiency:g} of {', '.join(f'{name} {peak:g} FLOP/s' for name, peak in flops.items())}"
    return Profile(model, microbatch_size, kinds, dtype, remat, source, seq_len)


def parse_flops(text: str) -> float | dict[str, float]:
    """FLOP/s of all devices, or of each kind, from the text of a flag: 125e12, or V100=125e12,T4=65e12."""
    entries = [entry.rpartition("=")[::2] for entry in text.split(",")]
    try:
        flops = {kind: float(value) for kind, value in entries}
    except ValueError:
        flops = {}
    if len(flops) != len(entries) or ("" in flops and len(entries) > 1):
        raise BadInput(f"--flops: got {text!r}, expected FLOP/s of all devices, or KIND=FLOP/s, each kind once")
    return flops.get("", flops)


def _codecs_from_memory(n_numbers: int, dtype_bytes: int, bytes_per_s: float) -> dict[str, CodecTimes]:
    """Seconds of every codec that computes, for a tensor of n_numbers: the time in which memory moves what it reads and
    writes. Encoding in blocks reads the tensor twice, once for the largest number of each block."""
    times: dict[str, CodecTimes] = {}
    for name, family in codec_names.FAMILIES.items():
        if not family.is_identity:
            tensor_bytes = n_numbers * dtype_bytes
            wire_bytes = codec_names.wire_bytes(codec_names.parse(name), n_numbers, dtype_bytes)
            n_reads = 2 if family.default_block else 1
            encode_s = (n_reads * tensor_bytes + wire_bytes) / bytes_per_s
            times[name] = CodecTimes(encode_s, (tensor_bytes + wire_bytes) / bytes_per_s)
    return times


def to_json(profile: Profile) -> dict[str, Any]:
    """The content of profile.json."""
    return {serialize.SCHEMA_KEY: SCHEMA, "format": FORMAT, **serialize.write(profile)}


def parse(text: str, source: str) -> Profile:
    """A profile from the text of a profile.json; `source` names it in errors."""
    data = serialize.json_object(text, source, FORMAT)
    if "model" in data:
        data["model"] = read_options(data["model"], f"{source}: profile.model")
    return serialize.read(Profile, data, f"{source}: profile")


def load(path: str | Path) -> Profile:
    """Read a profile.json."""
    return parse(read_text(path), str(path))
