"""What averaging costs over home lines when a model is fine-tuned: all of it or an adapter, at each step or every 50th,
simulated. Computation and the tensors between stages take no time here: only what replicas exchange does."""

from functools import partial
from typing import Any

from experiments.reproduce.machines import on_machines, work_s
from experiments.reproduce.results import Job, Results

from jaxdt.protocol.reports import GroupReport, StepReport
from jaxdt.run.config import GroupsConfig, PlanConfig, RunConfig, SyncConfig, TrainConfig, default_plan
from jaxdt.run.model import options_of
from jaxdt.run.model_spec import ModelSpec
from jaxdt.run.network import Link
from jaxdt.sim.link_table import LinkOptions
from jaxdt.sim.predict import simulate
from jaxdt.sim.scenario import RARE

MODELS = {"SmolLM2-135M": "smollm2_135m", "Llama 3 8B": "llama3_8b"}
STAGES, PIPELINES = 4, 2
LATENCY_S = 0.01
RATES_MBPS = (20, 100, 1000)
SLICE_BYTES = 1 << 30
EVERY_STEPS = 50
# (adapter, or "" where the model is trained, or "untied" for the same with a head of its own; codec; local steps to an
# average)
METHODS = [("", "none", 1), ("", "bf16", 1), ("lora:16", "none", 1), ("lora:16", "bf16", 1), ("lora:8:q,v", "none", 1)]
METHODS += [(what, "bf16", EVERY_STEPS) for what in ("", "untied", "lora:16", "lora:8:q,v")]
TIED = ("SmolLM2-135M",)


def model_of(preset: str, what: str) -> ModelSpec:
    if what == "untied":
        return options_of(preset).untied()
    return options_of(preset, adapter=what)


def config_of(preset: str, what: str, codec: str, every_steps: int) -> RunConfig:
    groups = GroupsConfig(every_steps=every_steps, outer="nesterov") if every_steps > 1 else GroupsConfig()
    kind = "groups" if every_steps > 1 else "allreduce"
    return RunConfig(
        model_of(preset, what),
        PlanConfig(STAGES, PIPELINES, microbatches=PIPELINES),
        train=TrainConfig(steps=2 * every_steps),
        sync=SyncConfig(kind, slice_bytes=SLICE_BYTES, codec=codec, groups=groups, check_every_steps=0),
        net=RARE,
    )


def exchanged(preset: str, what: str) -> int:
    """Numbers that the replicas of all stages average."""
    return model_of(preset, what).facts.n_trained


def step_s(preset: str, what: str, codec: str, every_steps: int, mbps: float) -> list[float]:
    """Seconds of averaging by step, over one period."""
    config = config_of(preset, what, codec, every_steps)
    plan = default_plan(config)
    gbps = mbps / 1000
    conditions = on_machines(
        {peer: work_s(0.0) for peer in plan.peers},
        lambda src, dst: Link(LATENCY_S, gbps),
        options=LinkOptions(access_gbps={str(peer): (gbps, gbps) for peer in plan.peers}),
        free=frozenset(("transfer",)),
    )
    outcome = simulate(config, plan, conditions)
    if every_steps == 1:
        return [outcome.of(StepReport)[-1].step_s]
    ends = sorted(at_s for at_s, _, report in outcome.reports if isinstance(report, GroupReport))
    return [(ends[-1] - ends[0]) / every_steps]


def run(results: Results) -> dict[str, Any]:
    """What the page shows."""
    rows: list[list[Any]] = []
    found: dict[tuple[str, str, str, int], list[float]] = {}
    for name, preset in MODELS.items():
        for what, codec, every_steps in METHODS:
            if what == "untied" and name not in TIED:
                continue
            jobs = []
            for mbps in RATES_MBPS:
                inputs = f"{preset} {what or 'all'} {codec} every={every_steps} {mbps} Mb/s"
                jobs.append(Job(inputs, 10_000, partial(step_s, preset, what, codec, every_steps, mbps)))
            seconds = [results.get(job)[0] for job in jobs]
            mb = exchanged(preset, what) * (2 if codec == "bf16" else 4) / every_steps / 1e6
            label = what if what.startswith("lora") else "all of it" + (", untied" if what else "")
            rows.append([name, label, codec, every_steps, *map(_rounded, (mb, *seconds))])
            found[name, what, codec, every_steps] = seconds
    slowest = {what: found["Llama 3 8B", what, "none", 1][0] for what in ("", "lora:16")}
    return dict(rows=rows, whole_s=slowest[""], adapter_s=slowest["lora:16"])


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
