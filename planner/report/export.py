"""`--export`: the cut and the placement of a plan as settings of other trainers.

Megatron-LM gets flags, torchtitan a table for its `Trainer.Config`, both of data and pipeline parallelism alone. Both
give a rank to each place in the same order: all pipelines of stage 0, then those of stage 1. So the placement is the
order of the devices. Comments say how a file is used, which device is which rank, and what these trainers cannot do.

Names and rules are those of Megatron-LM (megatron/core/transformer/pipeline_parallel_layer_layout.py, and the flags of
its arguments.py) and of torchtitan 0.3.0 (torchtitan/config/configs.py, distributed/pipeline_parallel.py).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxdt.run.errors import BadInput

if TYPE_CHECKING:
    from jaxdt.run.config import RunConfig
    from jaxdt.run.plan import Plan

MEGATRON, TORCHTITAN = TARGETS = ("megatron", "torchtitan")
ENDINGS = {MEGATRON: "_megatron.args", TORCHTITAN: "_torchtitan.toml"}  # in place of .json of the plan's file
USE = {
    MEGATRON: "grep -v '^#' FILE | xargs torchrun --nproc-per-node=1 --nnodes={n} ... pretrain_gpt.py ...",
    TORCHTITAN: "set these fields of the Trainer.Config that your configuration returns: config.SECTION.NAME = VALUE",
}


def exported(plan: Plan, run: RunConfig | None, target: str) -> str:
    """The text of the settings. `run`: None where only bytes were given, so that nothing is known of sequences.
    BadInput for a plan whose stages have unequal numbers of replicas."""
    if not plan.is_even:
        raise BadInput(f"--export: got {plan.shape}, expected as many in every stage: {target} has no others")
    ranks = [plan.devices[peer] if plan.devices else str(peer) for row in plan.placement for peer in row]
    lines = [
        f"{plan.shape}, layers {[hi - lo for lo, hi in plan.stages]}",
        USE[target].format(n=len(ranks)),
        *(f"rank {rank}: {name}" for rank, name in enumerate(ranks)),
        *(f"not said: {what}" for what in _unsaid(plan, run, target)),
    ]
    text = _megatron(plan, run) if target == MEGATRON else _torchtitan(plan, run)
    return "".join(f"# {line}\n" for line in lines) + text


def _share(plan: Plan) -> int:
    """The microbatches of each pipeline, where all take as many."""
    return max(1, plan.n_microbatches // plan.n_pipelines)


def _unsaid(plan: Plan, run: RunConfig | None, target: str) -> list[str]:
    """What the settings of a trainer cannot say of a plan, one line each."""
    found: list[str] = []
    if len(set(plan.shares)) > 1:
        found.append(f"microbatches {list(plan.shares)} of the pipelines: here each takes {_share(plan)}")
    usual = tuple(plan.n_stages - stage for stage in range(plan.n_stages))
    if plan.in_flight and plan.in_flight != usual:
        found.append(f"forwards in flight {list(plan.in_flight)}: 1F1B has at most {list(usual)} here")
    if plan.schedule not in (("1f1b", "gpipe") if target == TORCHTITAN else ("1f1b",)):
        found.append(f"schedule {plan.schedule}: it runs 1F1B")
    if codecs := sorted({name for entry in plan.codec for name in entry.split(",")} - {"none"}):
        found.append(f"codec {', '.join(codecs)}: tensors cross boundaries in the dtype of the computation")
    if run is None:
        return [*found, "batch and sequence length: the sizes were given in bytes"]
    if run.sync.kind != "allreduce" or run.sync.delay:
        found.append(f"sync.kind {run.sync.kind}, delay {run.sync.delay}: gradients are averaged in every step")
    if target == TORCHTITAN:
        from jaxdt.interop.hf_config import NAMED_AS_LLAMA  # the command's help needs no models

        if run.model.family not in NAMED_AS_LLAMA:
            found.append(f"the family {run.model.family}: module names are those of torchtitan's llama3 and qwen3")
        facts = run.model.facts
        if plan.n_stages > 1 and facts.n_split_trained:
            found.append("parameters that the first and the last stage share: torchtitan refuses a tied head there")
    return found


def _megatron(plan: Plan, run: RunConfig | None) -> str:
    """Flags, one a line. An uneven cut is said by the numbers of layers of the first and the last stage where all
    others are equal, else by a layout of all."""
    sizes = [hi - lo for lo, hi in plan.stages]
    flags: dict[str, Any] = {
        "tensor-model-parallel-size": 1,
        "pipeline-model-parallel-size": plan.n_stages,
        "num-layers": plan.n_layers,
    }
    if len(set(sizes)) > 1 and len(set(sizes[1:-1])) <= 1:
        flags |= {"decoder-first-pipeline-num-layers": sizes[0], "decoder-last-pipeline-num-layers": sizes[-1]}
    elif len(set(sizes)) > 1:
        flags["pipeline-model-parallel-layout"] = "E" + "|".join(f"t*{size}" for size in sizes) + "L"
    if run is not None:
        size = run.train.microbatch_size
        flags |= {
            "micro-batch-size": size,
            "global-batch-size": size * _share(plan) * plan.n_pipelines,
            "seq-length": run.microbatch_shape.seq_len,
        }
    return "".join(f"--{name}={shlex.quote(str(value))}\n" for name, value in flags.items())


def _torchtitan(plan: Plan, run: RunConfig | None) -> str:
    """A table in TOML, a section for each one of the config."""
    modules = [[f"layers.{layer}" for layer in range(lo, hi)] for lo, hi in plan.stages]
    modules[0].insert(0, "tok_embeddings")
    modules[-1] += ["norm", "lm_head"]
    parallelism: dict[str, Any] = {
        "data_parallel_replicate_degree": plan.n_pipelines,
        "data_parallel_shard_degree": 1,
        "pipeline_parallel_degree": plan.n_stages,
    }
    if plan.n_stages > 1:
        parallelism |= {
            "pipeline_parallel_schedule": "GPipe" if plan.schedule == "gpipe" else "1F1B",
            "module_fqns_per_model_part": modules,
        }
    sections: dict[str, Mapping[str, Any]] = {"parallelism": parallelism}
    if run is not None:
        size = run.train.microbatch_size
        parallelism["pipeline_parallel_microbatch_size"] = size
        local = size * _share(plan)
        sections["training"] = {
            "local_batch_size": local,
            "global_batch_size": local * plan.n_pipelines,
            "seq_len": run.microbatch_shape.seq_len,
        }
    lines = [line for name, fields in sections.items() for line in (f"[{name}]", *_toml(fields), "")]
    return "\n".join(lines)


def _toml(fields: Mapping[str, Any]) -> list[str]:
    """Numbers, texts and lists of lists of texts, which JSON writes as TOML does; a list for each stage has a line."""
    lines: list[str] = []
    for name, value in fields.items():
        if isinstance(value, list):
            lines += [f"{name} = [", *(f"  {json.dumps(row)}," for row in value), "]"]
        else:
            lines.append(f"{name} = {json.dumps(value)}")
    return lines
