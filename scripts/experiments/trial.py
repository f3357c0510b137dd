"""Play a trial: a fleet of real processes, disturbances at their moments, and what has to hold afterwards.

    python scripts/experiments/trial.py NAME --run_dir=runs/x [--seed=0] [--tries=N] [--minutes=M | --steps=N]
        [--kind=KIND]... [--config=FILE] [--config.FIELD=VALUE] [--overwrite]

A trial is a file of scripts/experiments/trials: its config, when it ends, its disturbances, and its expectations. Its
docstring says what it shows, and how long it takes. Flags of the config, the duration and the tries change what the
file says. --seed draws the victims and the moments. Each try has a folder of its own in --run_dir, where one process
trains alone to compare losses with. Prints a line a disturbance and a try, and one JSON object, which
run_dir/trial.json keeps: what each try has measured, and under `bad` what it must not show. Exit code 1 if that is not
empty.
"""

import json
import random
from dataclasses import replace
from pathlib import Path

from absl import flags
from processes import NAMES, clear, judged, play, trial_of, with_config

from jaxdt.cli import config_flag, environment, local_run, option_flags, script_main
from jaxdt.cli.run_inputs import ProcessOptions, RunOptions
from jaxdt.run.errors import BadInput

option_flags.define(ProcessOptions, "run_dir")
SEED = flags.DEFINE_integer("seed", 0, "Seed of the victims and the moments.")
TRIES = flags.DEFINE_integer("tries", 0, "Fleets, one after the other; 0: as the trial says.", 0)
MINUTES = flags.DEFINE_float("minutes", 0.0, "Duration of a try that ends by the clock; 0: as the trial says.", 0.0)
STEPS = flags.DEFINE_integer("steps", 0, "Steps of a try; 0: as the trial or the config says.", 0)
KINDS = flags.DEFINE_multi_string("kind", [], "Only these kinds of what happens in turn, where a trial has such.")
OVERWRITE = flags.DEFINE_bool("overwrite", False, "Delete the files of an earlier trial in run_dir.")


def main(name: str) -> int:
    environment.compute_on_cpu()
    folder, rng = Path(script_main.required("run_dir")), random.Random(SEED.value)
    trial = trial_of(name)
    seconds, steps = 60.0 * MINUTES.value or trial.seconds, STEPS.value or trial.steps
    trial = replace(trial, seconds=seconds, steps=steps, flags=tuple(local_run.config_flags()))
    if unknown := {*KINDS.value} - {*trial.kinds}:
        raise BadInput(f"--kind: got {', '.join(sorted(unknown))}, expected one of {', '.join(trial.kinds) or 'none'}")
    trial = replace(trial, kinds={kind: trial.kinds[kind] for kind in KINDS.value or trial.kinds})
    config_flag.inputs(RunOptions())
    clear(folder, OVERWRITE.value)
    figures, bad = [], {}
    for number in range(TRIES.value or trial.tries):
        played = play(trial, folder / str(number), rng)
        found, problems = judged(trial, played)
        figures.append(found)
        bad |= {number: problems} if problems else {}
        print(f"try {number}: {json.dumps(found)}, {'; '.join(problems) or 'as expected'}", flush=True)
        samples = {"samples": played.samples} if played.samples else {}
        (folder / f"{number}.json").write_text(json.dumps(found | samples) + "\n")
    result = {"trial": name, "seed": SEED.value, "tries": figures, "bad": bad}
    (folder / "trial.json").write_text(json.dumps(result) + "\n")
    print(json.dumps(result))
    return 1 if bad else 0


if __name__ == "__main__":
    script_main.run(main, NAMES, complete=with_config)
