"""`python -m planner devices`: the catalogue of devices."""

from argparse import Namespace

from planner.model.devices import CATALOGUE, UTILISATION, DeviceSpec
from planner.report.tables import NONE


def table() -> str:
    """The catalogue, a row for each kind."""
    head = f"{'kind':<11}{'memory':>8}{'bandwidth':>11}{'bfloat16':>10}{'TF32':>8}{'float32':>9}  source"
    units = f"{'':<11}{'GB':>8}{'GB/s':>11}{'TFLOP/s':>10}"
    foot = (
        "Rates are peaks for dense matrices. Without a measured profile a kind is taken to reach "
        f"{UTILISATION:g} of the rate\nin which JAX computes: for bfloat16 that of float32 where it has no units for "
        "bfloat16, for float32 that of\nTF32 or, on TPUs, of bfloat16. Network files may also name a device as "
        "nvidia-smi or JAX do, such as NVIDIA\nGeForce RTX 4090, NVIDIA A100-SXM4-80GB, Tesla T4, TPU v5 lite."
    )
    return "\n".join([head, units, *map(_row, CATALOGUE.values()), foot])


def _row(spec: DeviceSpec) -> str:
    rates = (spec.bfloat16_flops, spec.tensorfloat32_flops, spec.float32_flops)
    bfloat16, tf32, float32 = (NONE if rate is None else f"{rate / 1e12:g}" for rate in rates)
    sizes = f"{spec.memory_bytes / 1e9:>8.2f}{spec.memory_bytes_per_s / 1e9:>11g}"
    return f"{spec.kind:<11}{sizes}{bfloat16:>10}{tf32:>8}{float32:>9}  {spec.source}"


def run(flags: Namespace) -> int:
    del flags
    print(table())
    return 0
