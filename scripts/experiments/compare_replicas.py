"""Compare systems whose replicas are equal or may differ: seconds, bytes between replicas, and loss over four cities.

    python scripts/experiments/compare_replicas.py --run_dir=runs/replicas --page=configs/replicas --about=TEXT
        [--seeds=0,1,2,3,4,5] [--systems=none,streaming_diloco] [--stalls]

Runs each system once with each seed, as four processes of this machine over the emulated links of
configs/networks/four_cities.json; the first system is another one from seed to seed. Forwards take at least 30 ms, so
two cores are enough. With --stalls each peer pauses for a second in a tenth of its steps, by the same draws under each
system. Each run is added to PAGE/runs.jsonl, and PAGE/README.md is written again; a run that is there already is not
made again. TEXT says machine, load and commit. A run takes a minute and a quarter.
"""

import json
from pathlib import Path

from absl import flags
from replica_comparison import page
from replica_comparison.page import Run
from replica_comparison.systems import ROOT, SYSTEMS, replica_bytes

from jaxdt.cli import local_run, script_main
from jaxdt.spec.errors import BadInput

FORWARD_S = 0.03
STALLS = "0.1,1.0,{seed}"
WARM_UP = 10  # steps before those that are timed
N_STEPS = 100

RUN_DIR = flags.DEFINE_string("run_dir", None, "A folder for the runs.")
PAGE = flags.DEFINE_string("page", None, "The folder of raw data and page.")
ABOUT = flags.DEFINE_string("about", None, "Machine, load and commit of the runs.")
SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2", "3", "4", "5"], "Seeds, one run of each system with each.")
CHOSEN = flags.DEFINE_list("systems", list(SYSTEMS), f"Some of {', '.join(SYSTEMS)}.")
STALLING = flags.DEFINE_bool("stalls", False, "Peers pause now and then.")


def main() -> int:
    for flag in (RUN_DIR, PAGE, ABOUT):
        if not flag.value:
            raise BadInput(f"--{flag.name}: missing, expected --{flag.name}=..., see --help")
    for name in CHOSEN.value:
        if name not in SYSTEMS:
            raise BadInput(f"--systems: got {name!r}, expected some of {', '.join(SYSTEMS)}")
    if not SEEDS.value or not all(seed.isdecimal() for seed in SEEDS.value):
        raise BadInput(f"--seeds: got {','.join(SEEDS.value)!r}, expected integers >= 0")
    folder, peers = Path(PAGE.value), "stalling" if STALLING.value else "even"
    there = {run.name for run in page.read(folder)[1]}
    for number, seed in enumerate(map(int, SEEDS.value)):
        first = number % len(CHOSEN.value)
        for system in CHOSEN.value[first:] + CHOSEN.value[:first]:
            if (peers, system, seed) not in there:
                run = made(system, peers, seed)
                page.add(folder, ABOUT.value, run)
                print(run, flush=True)
    return 0


def made(system: str, peers: str, seed: int) -> Run:
    """Make a run, and read what it has measured."""
    run_dir = Path(RUN_DIR.value) / f"{peers}_{system}_{seed}"
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    config, *fields = SYSTEMS[system]
    words = [
        config.replace("configs", str(ROOT / "configs")),
        *fields,
        f"--config.train.seed={seed}",
        f"--config.train.steps={N_STEPS}",
        f"--config.train.eval_every_steps={N_STEPS}",
        "--config.train.eval_microbatches=8",
        f"--emulate={ROOT / 'configs/networks/four_cities.json'}",
        f"--emulate_forward_s={FORWARD_S}",
        f"--run_dir={run_dir}",
        "--report=false",
        "--overwrite",
    ]
    words += [f"--stall={STALLS.format(seed=seed)}"] if peers == "stalling" else []
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
    timed = [row["step_s"] for row in rows[WARM_UP:]]
    return Run(
        system,
        peers,
        seed,
        len(rows),
        round(sum(timed) / len(timed), 5),
        replica_bytes(run_dir, summary["bytes_on_links"]),
        round(summary["eval_loss_last"], 5),
    )


if __name__ == "__main__":
    script_main.run(main)
