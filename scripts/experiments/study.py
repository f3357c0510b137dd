"""`fixed` against `swarm` against `swarm` with rebalancing while machines come and go as a recorded trace says.

    python scripts/experiments/study.py --run_dir=runs/study

Starts the same run three times, one after the other, as eight processes of this machine: two stages of four peers, a
tiny model whose forwards take --forward_s (they sleep), so that two cores are enough. In each, the machines that the
trace loses are killed (kill -9, or --leave_by=term) and those that it gains are started with `train.py --join`: the
same ones at the same moments. Who is killed is drawn from --seed, nobody who is alone at its stage unless
--lose_stages.

Hardware: any laptop, 2 cores and 4 GB of memory that are free; about 10 minutes. Expected (configs/study/README.md):
the losses of the three agree to 1e-5. While a stage has lost more peers than the other, the run that rebalances is up
to 1.8 times as fast as the two others, from when a peer has moved to when newcomers have come. Where machines are alike
and the stages even, all three are equally fast.

Writes run_dir/results.json and run_dir/study.png and prints the results as one line of JSON. Exit code 1 if the losses
do not agree or if not all three runs saw the same events. `--again` draws what is there anew.
"""

import json
import os
from pathlib import Path

import churn_comparison_results
import churn_comparison_run
from absl import flags

from jaxdt.cli import local_run, plots, script_main
from jaxdt.sim.availability import from_trace
from jaxdt.sim.faults import Fault
from jaxdt.spec.errors import BadInput

TRACES = local_run.SCRIPTS.parent / "configs" / "reproduce" / "traces"
RUN_DIR = flags.DEFINE_string("run_dir", None, "A new or empty folder for the three runs and the results.")
TRACE = flags.DEFINE_string("trace", str(TRACES / "bamboo_aws_p3_v100.json"), "Of jaxdt/sim/availability.py's form.")
TRACE_BEGIN_S = flags.DEFINE_float("trace_begin_s", 24060.0, "Second of the trace at which the runs begin.", 0.0)
TRACE_S = flags.DEFINE_float("trace_s", 2240.0, "Seconds of the trace that are played.", 1.0)
TRACE_SPEED = flags.DEFINE_float("trace_speed", 14.0, "How many times as fast the trace's time goes.", 1e-3)
SEED = flags.DEFINE_integer("seed", 1, "Of who is killed.")
STAGES = flags.DEFINE_integer("stages", 2, "Stages of the model.", 1)
PIPELINES = flags.DEFINE_integer("pipelines", 4, "Peers of each stage in the beginning.", 1)
MICROBATCHES = flags.DEFINE_integer("microbatches", 12, "Of a step, one sample each.", 1)
FORWARD_S = flags.DEFINE_float("forward_s", 0.15, "Seconds of a forward; a backward takes twice that.", 1e-3)
ROUTERS = flags.DEFINE_integer("routers", 2, "wiring.routers of the second and third run.", 1)
REBALANCE_S = flags.DEFINE_float("rebalance_s", 8.0, "wiring.rebalance_s of the third run.", 0.1)
LEAVE_BY = flags.DEFINE_enum("leave_by", "kill", ["kill", "term"], "SIGKILL, or SIGTERM, at which a peer says goodbye.")
LOSE_STAGES = flags.DEFINE_bool("lose_stages", False, "Kill also who is alone at its stage; the run then goes back.")
AGAIN = flags.DEFINE_bool("again", False, "Start nothing: results and picture of what run_dir holds.")


def main() -> int:
    if not RUN_DIR.value:
        raise BadInput("--run_dir: missing, expected a new or empty folder")
    folder = Path(RUN_DIR.value)
    if not AGAIN.value:
        play(folder)
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("[0-9].json"))]
    if not runs:
        raise BadInput(f"--run_dir: {folder} has no run, expected the folder of a study")
    found = [churn_comparison_results.run_of(run, local_run.objects(Path(run["trace"]))) for run in runs]
    result = churn_comparison_results.together(found, n_cpus=os.cpu_count(), flags=runs[0]["flags"])
    (folder / "results.json").write_text(json.dumps(result | {"curves": churn_comparison_results.curves(found)}) + "\n")
    plots.study(folder / "study.png", found)
    print(json.dumps(result))
    return 1 if result["bad"] else 0


def play(folder: Path) -> None:
    """The three runs; what each saw goes to a file."""
    if folder.exists() and any(folder.iterdir()):
        raise BadInput(f"--run_dir: {folder} is not empty, expected a new folder, or --again")
    seconds = TRACE_S.value / TRACE_SPEED.value
    common = STAGES.value, PIPELINES.value, MICROBATCHES.value, FORWARD_S.value, LEAVE_BY.value, LOSE_STAGES.value
    for n, (name, wiring) in enumerate(wirings().items()):
        print(f"{name}: about {seconds + 30:.0f} s", flush=True)
        run = churn_comparison_run.StudyRun(
            folder / f"{n}_{wiring['kind']}", wiring, churn_comparison_run.Setup(*common)
        )
        saw = run.play(events(seconds), seconds)
        about = dict(name=name, n_samples=MICROBATCHES.value, trace=str(run.trace), flags=said())
        (folder / f"{n}.json").write_text(json.dumps(saw | about))


def wirings() -> dict[str, dict]:
    """Of the three runs, by their names."""
    swarm = dict(kind="swarm", routers=ROUTERS.value)
    return {
        "fixed": dict(kind="fixed"),
        "swarm": swarm,
        "swarm + rebalancing": swarm | dict(rebalance_s=REBALANCE_S.value),
    }


def said() -> dict:
    """The flags that decide what happens."""
    own = (TRACE_BEGIN_S, TRACE_S, TRACE_SPEED, SEED, STAGES, PIPELINES, MICROBATCHES, FORWARD_S, ROUTERS)
    own += REBALANCE_S, LEAVE_BY, LOSE_STAGES
    return {"trace": Path(TRACE.value).name} | {flag.name: flag.value for flag in own}


def events(seconds: float) -> list[Fault]:
    """Who goes and who comes, and when; the same for every run."""
    stages = [[p * STAGES.value + s for p in range(PIPELINES.value)] for s in range(STAGES.value)]
    begin_s, speed = TRACE_BEGIN_S.value, TRACE_SPEED.value
    return from_trace(TRACE.value, stages, SEED.value, seconds, speed, begin_s, spare=not LOSE_STAGES.value)


if __name__ == "__main__":
    script_main.run(main)
