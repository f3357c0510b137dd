"""The catalogue of devices: what a data sheet says of each kind, and the seconds that follow for a model's layers.

Rates are for dense matrices, with accumulation in float32 where the sheet tells that apart; sheets often print twice as
much, which holds for sparse matrices only. `python -m planner devices` prints the table. A kind that was measured
(`measure.py profile`) needs none of this.

Memory is what the driver reports (nvidia-smi, in MiB): a card of "24 GB" has 24 GiB less what it reserves. Where we
know no driver's figure the vendor's stands, in 1e9 bytes, which is at most as much.
"""

import difflib
import re
from collections.abc import Collection
from dataclasses import dataclass, replace

from jaxdt.run.config import RunConfig
from jaxdt.run.errors import BadInput
from jaxdt.run.profile import DeviceKind, Profile, from_flops

# Share of the peak rate that a model's maths reaches. Large runs reached 21 % (GPT-3), 30 % (MT-NLG), 33 % (Gopher) and
# 46 % (PaLM) with communication and idle time counted (arXiv 2204.02311, Table 3). Here both are counted apart, so the
# share is above the mean of these (33 %), rounded. It differs by model and device: measure, or say --efficiency.
UTILISATION = 0.35

# The number formats that JAX computes in, by the run's dtype: the first one for which a device has a rate. JAX's
# default precision multiplies float32 in TF32 where a GPU has it, and in bfloat16 on TPUs (docs.jax.dev, "Matmul
# precision"). A device without bfloat16 units computes in float32.
RATES = {"bfloat16": ("bfloat16", "float32"), "float32": ("tensorfloat32", "float32", "bfloat16")}


@dataclass(frozen=True)
class DeviceSpec:
    """One kind of device. memory_bytes_per_s: bandwidth of its memory; peak FLOP/s by number format, None where it has
    no units for the format or the vendor says nothing. `source` names the vendor's document. `accelerator`: whether its
    memory is apart from the host's."""

    kind: str
    memory_bytes: int
    memory_bytes_per_s: float
    bfloat16_flops: float | None
    tensorfloat32_flops: float | None
    float32_flops: float | None
    source: str
    accelerator: bool

    def peak_flops(self, dtype: str) -> float:
        """FLOP/s in which a run with this dtype computes."""
        rates = (getattr(self, f"{name}_flops") for name in RATES[dtype])
        return next(rate for rate in rates if rate is not None)


def _spec(
    kind: str, memory_gb: float, memory_gb_per_s: float, tflops: tuple[float | None, ...], source: str
) -> DeviceSpec:
    """A row of the table; tflops of bfloat16, TF32 and float32."""
    rates = (None if rate is None else rate * 1e12 for rate in tflops)
    memory_bytes = DRIVER_MIB[kind] * MIB if kind in DRIVER_MIB else round(memory_gb * 1e9)
    is_apart = not source.startswith("Apple")
    return DeviceSpec(kind, memory_bytes, memory_gb_per_s * 1e9, *rates, source=source, accelerator=is_apart)


MIB = 1 << 20
DRIVER_MIB = {  # total memory as nvidia-smi prints it, with drivers 535 to 610
    "T4": 15360,
    "A10": 23028,
    "L4": 23034,
    "L40S": 46068,
    "A100": 40960,
    "A100-80GB": 81920,
    "H100": 81559,
    "RTX3090": 24576,
    "RTX4090": 24564,
    "RTX5090": 32607,
}
_H100 = (989.4, 494.7, 66.9)

#       kind, the vendor's GB, GB/s, (bfloat16, TF32, float32) TFLOP/s, source
CATALOGUE: dict[str, DeviceSpec] = {
    spec.kind: spec
    for spec in (
        _spec("T4", 16, 320, (None, None, 8.1), "NVIDIA T4 data sheet; its 65 TFLOP/s are for float16"),
        _spec("V100", 16, 900, (None, None, 15.7), "NVIDIA V100 data sheet, SXM2; its 125 TFLOP/s are for float16"),
        _spec("V100-32GB", 32, 900, (None, None, 15.7), "NVIDIA V100 data sheet, SXM2"),
        _spec("A10", 24, 600, (125, 62.5, 31.2), "NVIDIA A10 data sheet"),
        _spec("L4", 24, 300, (121, 60, 30.3), "NVIDIA L4 data sheet, half of its sparse figures"),
        _spec("L40S", 48, 864, (362.05, 183, 91.6), "NVIDIA L40S data sheet"),
        _spec("A100", 40, 1555, (312, 156, 19.5), "NVIDIA A100 data sheet, SXM4 40 GB"),
        _spec("A100-80GB", 80, 2039, (312, 156, 19.5), "NVIDIA A100 data sheet, SXM4 80 GB"),
        _spec("H100", 80, 3350, _H100, "NVIDIA H100 architecture white paper, SXM5, dense"),
        _spec("H200", 141, 4800, _H100, "NVIDIA H200 data sheet, SXM, half of its sparse figures"),
        _spec("B200", 180, 8000, (2250, 1125, 75), "NVIDIA HGX and DGX B200 data sheets, an eighth, dense"),
        _spec("RTX3080", 10, 760, (59.5, 29.8, 29.8), "NVIDIA Ampere GA102 white paper, dense"),
        _spec("RTX3090", 24, 936, (71, 35.6, 35.6), "NVIDIA Ampere GA102 white paper, dense"),
        _spec("RTX4090", 24, 1008, (165.2, 82.6, 82.6), "NVIDIA Ada white paper, dense"),
        _spec("RTX5090", 32, 1792, (209.5, 104.8, 104.8), "NVIDIA RTX Blackwell white paper, dense"),
        _spec("M1", 16, 68, (None, None, 2.6), "Apple, M1 announcement (2020): its GPU, largest memory"),
        _spec("M1-Max", 64, 400, (None, None, 10.4), "Apple, M1 Max announcement (2021): its GPU, largest memory"),
        _spec("M2", 24, 100, (None, None, 3.6), "Apple, M2 announcement (2022): its GPU, largest memory"),
        _spec("M4-Max", 128, 546, (None, None, 17.2), "Apple, M4 Max announcement (2024); rate from its clock"),
        _spec("TPU-v4", 32, 1200, (275, None, None), "Google Cloud TPU v4 documentation"),
        _spec("TPU-v5e", 16, 819, (197, None, None), "Google Cloud TPU v5e documentation"),
    )
}


# Names that a driver (nvidia-smi) or JAX (device_kind) prints, where they say more than the kind and who makes it.
PRINTED_NAMES = {
    "V100": ("Tesla V100-SXM2-16GB",),
    "V100-32GB": ("Tesla V100-SXM2-32GB",),
    "A100": ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"),
    "A100-80GB": ("NVIDIA A100-SXM4-80GB",),
    "H100": ("NVIDIA H100 80GB HBM3",),
    "TPU-v5e": ("TPU v5 lite",),
}
MAKERS_WORDS = {"nvidia", "tesla", "geforce", "apple"}


def _folded(name: str) -> str:
    """The letters and digits of a device's name, without those that only say who makes it."""
    return "".join(word for word in re.findall("[a-z0-9]+", name.lower()) if word not in MAKERS_WORDS)


_SPELLED = {_folded(kind): kind for kind in CATALOGUE}
_SPELLED |= {_folded(name): kind for kind, names in PRINTED_NAMES.items() for name in names}


def catalogue_kind(name: str) -> str | None:
    """The kind of the catalogue with this name, as the catalogue, a driver or JAX spells it; None for another device. A
    card that differs in one word, such as one for laptops, is another device."""
    return _SPELLED.get(_folded(name))


def spec_of(name: str) -> DeviceSpec:
    """A device of the catalogue; BadInput for a kind that it does not have."""
    kind = catalogue_kind(name)
    if kind is None:
        folded = _folded(name)
        variant_of = sorted((known for known in _SPELLED if folded.startswith(known)), key=len, reverse=True)
        near = difflib.get_close_matches(folded, _SPELLED, cutoff=0.8)
        close = near or variant_of or difflib.get_close_matches(folded, _SPELLED)
        hint = f' (did you mean "{_SPELLED[close[0]]}"?)' if close else ""
        raise BadInput(
            f"--profile: missing, and no device of the catalogue (`python -m planner devices`) is of the kind {name!r}"
            f"{hint}; expected a profile, or --flops"
        )
    return CATALOGUE[kind]


def profile_of_catalogue(run: RunConfig, kinds: Collection[str], utilisation: float = UTILISATION) -> Profile:
    """A profile of kinds of the catalogue, for the run's model, microbatch size and dtype; BadInput for other kinds."""
    size = run.train.microbatch_size
    found: dict[str, DeviceKind] = {}
    for kind in sorted(kinds):
        spec = spec_of(kind)
        rates = {kind: spec.peak_flops(run.dtype)}
        memory_gbps = spec.memory_bytes_per_s * 8 / 1e9
        derived = from_flops(
            run.model, size, rates, utilisation, memory_gbps, run.dtype, run.remat, seq_len=run.data.seq_len
        )
        found[kind] = replace(derived.kinds[kind], memory_bytes=spec.memory_bytes, accelerator=spec.accelerator)
    source = f"derived: {utilisation:g} of the catalogue's FLOP/s of {', '.join(found)}"
    return Profile(run.model, size, found, run.dtype, run.remat, source, run.data.seq_len)
