"""Compare systems whose replicas are equal or may differ, with real processes: seconds, bytes, and loss.

    python scripts/experiments/compare_replicas.py --run_dir=runs/replicas --page=configs/replicas --about=TEXT
        [--seeds=0,1,2,3,4,5] [--systems=none,streaming_diloco] [--stalls]
    python scripts/experiments/compare_replicas.py --trial=sdpipe --run_dir=runs/sdpipe_measured
        --page=configs/reproduce/sdpipe_measured --about=TEXT [--seeds=0,1,2,3,4] [--systems=...] [--steps=40]

Runs each system once with each seed, as processes of this machine; the first system is another one from seed to seed.
Forwards take at least 30 ms, so two cores are enough. Each run is added to PAGE/runs.jsonl, and PAGE/README.md is
written again; a run that is there already is not made again, so the same command goes on after an interruption. TEXT
says machine, load and commit.

The trial `replicas` (default) has four peers over the emulated links of configs/networks/four_cities.json, and six
seeds. With --stalls each peer pauses for a second in a tenth of its steps, by the same draws under each system. A run
takes a minute and a quarter. The trial `sdpipe` has 2 stages x 4 pipelines whose peers always stall, for 0.3 s:
SDPipe's stragglers of configs/reproduce/sdpipe as real processes, with five seeds of about 8 minutes each.
"""

import json
from pathlib import Path

from absl import flags
from replica_comparison import page
from replica_comparison.page import Run
from replica_comparison.systems import ROOT, TRIALS, Trial, replica_bytes

from jaxdt.cli import local_run, script_main
from jaxdt.run.errors import BadInput

TRIAL = flags.DEFINE_enum("trial", "replicas", list(TRIALS), "The systems, and how they run.")
RUN_DIR = flags.DEFINE_string("run_dir", None, "A folder for the runs.")
PAGE = flags.DEFINE_string("page", None, "The folder of raw data and page.")
ABOUT = flags.DEFINE_string("about", None, "Machine, load and commit of the runs.")
SEEDS = flags.DEFINE_list("seeds", [], "Seeds, one run of each system with each; as many as the trial says by default.")
CHOSEN = flags.DEFINE_list("systems", [], "Some of the trial's systems; all by default.")
STEPS = flags.DEFINE_integer("steps", 0, "Steps of each run, more than 10; 0: as the trial says.", 0)
STALLING = flags.DEFINE_bool("stalls", False, "Peers pause now and then.")


def main() -> int:
    for flag in (RUN_DIR, PAGE, ABOUT):
        if not flag.value:
            raise BadInput(f"--{flag.name}: missing, expected --{flag.name}=..., see --help")
    trial = TRIALS[TRIAL.value]
    for name in CHOSEN.value:
        if name not in trial.systems:
            raise BadInput(f"--systems: got {name!r}, expected some of {', '.join(trial.systems)}")
    if 0 < STEPS.value <= trial.warm_up:
        raise BadInput(f"--steps: got {STEPS.value}, expected more than the {trial.warm_up} that are not timed")
    if not all(seed.isdecimal() for seed in SEEDS.value):
        raise BadInput(f"--seeds: got {','.join(SEEDS.value)!r}, expected integers >= 0")
    folder, systems = Path(PAGE.value), CHOSEN.value or list(trial.systems)
    peers = "stalling" if STALLING.value or not trial.may_be_even else "even"
    runs, n_steps = page.read(folder)[1], STEPS.value or trial.n_steps
    if any(run.steps != n_steps for run in runs):
        raise BadInput(
            f"--page: {folder} has runs of {runs[0].steps} steps, expected an own folder for {n_steps} steps"
        )
    there = {run.name for run in runs}
    for number, seed in enumerate(map(int, SEEDS.value or range(trial.n_seeds))):
        first = number % len(systems)
        for system in systems[first:] + systems[:first]:
            if (peers, system, seed) not in there:
                run = made(trial, system, peers, seed)
                page.add(TRIAL.value, folder, ABOUT.value, run)
                print(run, flush=True)
    return 0


def made(trial: Trial, system: str, peers: str, seed: int) -> Run:
    """Make a run, and read what it has measured."""
    run_dir = Path(RUN_DIR.value) / f"{peers}_{system}_{seed}"
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    config, *fields = trial.systems[system]
    n_steps = STEPS.value or trial.n_steps
    words = [
        config.replace("configs", str(ROOT / "configs")),
        *fields,
        f"--config.train.seed={seed}",
        f"--config.train.steps={n_steps}",
        f"--config.train.eval_every_steps={n_steps}",
        "--config.train.eval_microbatches=8",
        *trial.how,
        f"--run_dir={run_dir}",
        "--report=false",
        "--overwrite",
    ]
    words += [f"--stall={trial.stalls.format(seed=seed)}"] if peers == "stalling" else []
    log = run_dir.with_suffix(".log")
    launcher = local_run.start(log, "launch.py", words)
    try:
        code = launcher.wait()
    finally:
        local_run.end(launcher, [])
    if code:
        raise BadInput(f"{system}, seed {seed}: the run ended with code {code}, {log} says why")
    rows = local_run.objects(run_dir / "metrics.jsonl")
    summary = json.loads((run_dir / "summary.json").read_text())
    timed = [row["step_s"] for row in rows[trial.warm_up :]]
    return Run(
        system,
        peers,
        seed,
        len(rows),
        round(sum(timed) / len(timed), 5),
        replica_bytes(run_dir, summary["bytes_on_links"]),
        round(summary["eval_loss_last"], 5),
        summary["step_s_predicted"],
        summary["step_s_measured"],
    )


if __name__ == "__main__":
    script_main.run(main)
