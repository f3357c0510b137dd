"""Step times on links of a given bandwidth, simulated from the measured parts of the step.

A stage encodes what it sends and decodes what it receives on its own device, as part of its Work. The measured seconds
of a stage contain its compression layers already."""

from experiments.ablation.grid import LAYERS, Case, run_of

from jaxdt.run.config import RunConfig
from jaxdt.run.network import Link
from jaxdt.run.work import WorkKind
from jaxdt.sim.predict import Conditions, predict_step_s


def step_seconds(config: RunConfig, case: Case, parts: dict, gbps: float) -> float:
    """Simulated seconds of a step: every stage on a host of its own, links of `gbps` each way without latency."""
    config, plan = run_of(config, case)
    has_codec = case.method not in LAYERS
    encode_s = parts["encode_s"] * has_codec
    decode_s = parts["decode_s"] * has_codec
    seconds = {}
    for s, measured in enumerate(parts["seconds"]):
        last = s == case.stages - 1
        n_before = 0 if s == 0 else 1  # boundaries before and behind the stage
        n_behind = 0 if last else 1
        forward_codec_s = encode_s * n_behind + decode_s * n_before
        backward_codec_s = decode_s * n_behind + encode_s * n_before
        if last:  # its forward is part of its backward
            backward_codec_s += forward_codec_s
            forward_codec_s = 0.0
        seconds[s] = measured | {
            WorkKind.FORWARD: measured[WorkKind.FORWARD] + forward_codec_s,
            WorkKind.BACKWARD: measured[WorkKind.BACKWARD] + backward_codec_s,
        }
    hosts = {s: f"host{s}" for s in seconds}
    conditions = Conditions(seconds, lambda src, dst: Link(0.0, gbps), hosts, dict.fromkeys(hosts.values(), 1.0))
    return predict_step_s(config, plan, conditions)
