"""Compare `fixed`, `swarm` and `swarm` with rebalancing while machines leave and join as in a recorded trace.

    python scripts/experiments/study.py --run_dir=runs/study

Starts the same run three times, one after the other, as eight processes of this machine: two stages of four peers with
a tiny model. Forwards sleep for 0.15 s, so that two cores are enough. In each run the machines that the trace loses are
killed (kill -9), and those that it gains are started with `train.py --join`: the same machines at the same moments. The
killed machines are drawn from --seed. A peer that is alone at its stage is spared.

Hardware: any laptop, 2 cores and 4 GB of memory that are free; about 10 minutes. Expected (configs/study/README.md):
the losses of the three agree to 1e-5. While a stage has lost more peers than the other, the run that rebalances is up
to 1.8 times as fast as the two others, from the moment at which a peer has moved until newcomers have joined. With
equal machines and even stages all three are equally fast.

Writes run_dir/results.json and run_dir/study.png and prints the results as one line of JSON. Exit code 1 if the losses
do not agree, or if the three runs did not have the same events. With --again nothing is run: results and picture are
made again from the files in run_dir.

    python scripts/experiments/study.py --ten_seeds --run_dir=runs/study_seeds

does all that for seeds 0 to 9, none left out, each in a folder of its own; the first of the three runs is another one
from seed to seed. About 100 minutes on a machine that does nothing else. A seed that is there already is not run again.
With --page=FOLDER --about=TEXT it writes FOLDER/runs.jsonl, README.md and study.png: all runs, means and ratios paired
by seed with 95 % intervals, a picture of the first seed. --page without --ten_seeds makes the last two again from
FOLDER/runs.jsonl.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from churn_comparison import page, results
from churn_comparison.results import Run
from churn_comparison.run import played_of
from churn_comparison.setup import Setup

from jaxdt.cli import local_run, plots, script_main
from jaxdt.run.cpus import allowed_cpus
from jaxdt.run.errors import BadInput
from jaxdt.runtime.reporting.interval import SEEDS
from jaxdt.sim.availability import from_trace
from jaxdt.sim.faults import Fault

TRACE = local_run.SCRIPTS.parent / "configs" / "reproduce" / "traces" / "bamboo_aws_p3_v100.json"
TRACE_BEGIN_S, TRACE_S = 24060.0, 2240.0
TRACE_SPEED = 14.0  # seconds of the trace in one second of a run
SETUP = Setup(stages=2, pipelines=4, microbatches=12, forward_s=0.15)
SWARM = dict(kind="swarm", routers=2)
WIRINGS = {"fixed": dict(kind="fixed"), "swarm": SWARM, "swarm + rebalancing": SWARM | dict(rebalance_s=8.0)}
RUN_DIR = flags.DEFINE_string("run_dir", None, "A new or empty folder for the three runs and the results.")
SEED = flags.DEFINE_integer("seed", 1, "Seed of the killed machines.")
TEN_SEEDS = flags.DEFINE_bool("ten_seeds", False, "Seeds 0 to 9, and what they say together.")
PAGE = flags.DEFINE_string("page", None, "With --ten_seeds: write raw data and page there; alone: the page again.")
ABOUT = flags.DEFINE_string("about", None, "For --page: machine, load and commit of the runs.")
AGAIN = flags.DEFINE_bool("again", False, "Start nothing; make results and picture from run_dir.")


def main() -> int:
    if PAGE.value and not TEN_SEEDS.value:
        page.write(Path(PAGE.value))
        return 0
    if PAGE.value and not ABOUT.value:
        raise BadInput("--about: missing, expected the machine, its load and the commit, for --page")
    if not RUN_DIR.value:
        raise BadInput("--run_dir: missing, expected a new or empty folder")
    folder = Path(RUN_DIR.value)
    if not TEN_SEEDS.value:
        if not AGAIN.value:
            play_all(folder, SEED.value, list(WIRINGS))
        result = summarise(folder)
        print(json.dumps(result))
        return 1 if result["bad"] else 0
    found = []
    for seed in SEEDS:
        own = folder / f"seed_{seed}"
        if not (AGAIN.value or (own / "results.json").exists()):
            play_all(own, seed, results.rotated(list(WIRINGS), seed))
        found.append(summarise(own))
    print(results.seeds_table([result["runs"] for result in found]))
    if PAGE.value:
        page.write_raw(Path(PAGE.value), [runs_in(folder / f"seed_{seed}") for seed in SEEDS], ABOUT.value)
        page.write(Path(PAGE.value))
    return 1 if any(result["bad"] for result in found) else 0


def summarise(folder: Path) -> dict:
    """The results of the three runs in a folder; they and the picture are written there."""
    runs = runs_in(folder)
    result = results.compare(runs) | {"n_cpus": len(allowed_cpus()), "seed": played_in(folder)[0]["seed"]}
    (folder / "results.json").write_text(json.dumps(result | {"curves": results.curves(runs)}) + "\n")
    plots.churn_comparison(folder / "study.png", runs)
    return result


def runs_in(folder: Path) -> list[Run]:
    """The runs in a folder, in the order in which they were made."""
    return [results.run_of(run, local_run.objects(Path(run["trace"]))) for run in played_in(folder)]


def played_in(folder: Path) -> list[dict]:
    """The results that were written for each run in a folder."""
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("[0-9].json"))]
    if not runs:
        raise BadInput(f"--run_dir: {folder} has no run, expected the folder of a study")
    return runs


def play_all(folder: Path, seed: int, names: Sequence[str]) -> None:
    """Run the three runs in this order. The result of each is written to a file of its own."""
    if folder.exists() and any(folder.iterdir()):
        raise BadInput(f"--run_dir: {folder} is not empty, expected a new folder, or --again")
    seconds = TRACE_S / TRACE_SPEED
    for n, name in enumerate(names):
        print(f"seed {seed}, {name}: about {seconds + 30:.0f} s", flush=True)
        played = played_of(
            folder / f"{n}_{WIRINGS[name]['kind']}", WIRINGS[name], SETUP, schedule(seconds, seed), seconds
        )
        about = dict(name=name, n_samples=SETUP.microbatches, seed=seed)
        (folder / f"{n}.json").write_text(json.dumps(played | about))


def schedule(seconds: float, seed: int) -> list[Fault]:
    """The machines that leave and join, and the moments; the same for every run."""
    stages = [[p * SETUP.stages + s for p in range(SETUP.pipelines)] for s in range(SETUP.stages)]
    return from_trace(TRACE, stages, seed, seconds, TRACE_SPEED, TRACE_BEGIN_S, spare=True)


if __name__ == "__main__":
    script_main.run(main)
