"""`python -m planner devices`: the catalogue of devices."""

from argparse import Namespace

from planner.model.devices import CATALOGUE, UTILISATION, DeviceSpec
from planner.report.tables import NONE, line

WIDTHS = (11, 8, 11, 10, 8, 9)


def table() -> str:
    """The catalogue, a row for each kind."""
    head = line(WIDTHS, "kind", "memory", "bandwidth", "bfloat16", "TF32", "float32") + "  source"
    units = line(WIDTHS, "", "GB", "GB/s", "TFLOP/s")
    foot = (
        "Rates are peaks for dense matrices. Without a measured profile a kind is taken to reach "
        f"{UTILISATION:g} of the rate\nin which JAX computes: for bfloat16 that of float32 where it has no units for "
        "bfloat16, for float32 that of\nTF32 or, on TPUs, of bfloat16. Network files may also name a device as "
        "nvidia-smi or JAX do, such as NVIDIA\nGeForce RTX 4090, NVIDIA A100-SXM4-80GB, Tesla T4, TPU v5 lite."
    )
    return "\n".join([head, units, *map(_row, CATALOGUE.values()), foot])


def _row(spec: DeviceSpec) -> str:
    rates = (spec.bfloat16_flops, spec.tensorfloat32_flops, spec.float32_flops)
    sizes = f"{spec.memory_bytes / 1e9:.2f}", f"{spec.memory_bytes_per_s / 1e9:g}"
    shown = (NONE if rate is None else f"{rate / 1e12:g}" for rate in rates)
    return f"{line(WIDTHS, spec.kind, *sizes, *shown)}  {spec.source}"


def run(flags: Namespace) -> int:
    del flags
    print(table())
    return 0
