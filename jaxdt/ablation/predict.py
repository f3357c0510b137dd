"""What a step costs on links of some bandwidth, simulated from its measured parts.

A stage encodes what it sends and decodes what it receives on its own device, as part of its Work; the compression
layers are in the stage's own seconds already."""

from jaxdt.ablation.grid import LAYERS, Case, run_of
from jaxdt.sim.predict import Conditions, predict_step_s
from jaxdt.spec.config import RunConfig
from jaxdt.spec.network import Link
from jaxdt.spec.work import BACKWARD, FORWARD


def step_seconds(config: RunConfig, case: Case, parts: dict, gbps: float) -> float:
    """Simulated seconds of a step: every stage on a host of its own, links of `gbps` each way without latency."""
    config, plan = run_of(config, case)
    outside = case.method not in LAYERS
    encode_s, decode_s = (parts[name] * outside for name in ("encode_s", "decode_s"))
    seconds = {}
    for s, own in enumerate(parts["seconds"]):
        first, last = s == 0, s == case.stages - 1
        ins, outs = 0 if first else 1, 0 if last else 1
        there = encode_s * outs + decode_s * ins
        seconds[s] = own | {
            FORWARD: own[FORWARD] + (0.0 if last else there),
            BACKWARD: own[BACKWARD] + decode_s * outs + encode_s * ins + (decode_s * ins if last else 0.0),
        }
    hosts = {s: f"host{s}" for s in seconds}
    link = lambda src, dst: Link(0.0, gbps)  # noqa: E731
    conditions = Conditions(seconds, link, hosts, dict.fromkeys(hosts.values(), 1.0))
    return predict_step_s(config, plan, conditions)
