"""Make the runs of a comparison, one after the other, keep what they measure, and write its page from that.

    python scripts/experiments/compare.py NAME --run_dir=runs/NAME [--page=FOLDER] [--about=TEXT] [--seeds=0,1]
        [--only=REGEX] [--steps=N] [--overwrite] [--config=FILE] [--config.FIELD=VALUE]
    python scripts/experiments/compare.py NAME --from_results|--check [--page=FOLDER]

A comparison is a file of scripts/experiments/comparisons: the names of its runs, how one is made, and what its page
shows. Its docstring says what it compares, and how long it takes. --run_dir gets a folder for each run. The folder
--page, by default the same, gets a line for each run as soon as it has ended; at the end the page and its pictures,
where the data suffice for it. A run that is there already is not made again, so the same command goes on after an
interruption; --overwrite begins with none. --only selects the runs whose names, such as `system=none seed=2`, match.
Where no --about says machine, load and commit, they are looked up. Prints a line a run and one JSON object.

--from_results writes the page again from the data in --page, by default the committed ones, without any run; --check
compares it with what stands there, text byte for byte, pictures pixel for pixel, and changes nothing. Exit codes: 0
done, 1 the object has something under `bad` or the page differs, 2 bad input. Quote figures from an otherwise idle
machine only.
"""

import json
import re
import tempfile
from pathlib import Path

from absl import flags
from comparison import NAMES, PAGE, Comparison, Given, Line, comparison_of, this_machine
from page import differences

from jaxdt.cli import config_flag, option_flags, script_main
from jaxdt.cli.run_inputs import ProcessOptions
from jaxdt.run.errors import BadInput

flags.adopt_module_key_flags(config_flag)  # for `delay`
option_flags.define(ProcessOptions, "run_dir")
FOLDER = flags.DEFINE_string("page", None, "Folder of raw data and page.")
ABOUT = flags.DEFINE_string("about", None, "Machine, load and commit of the runs; by default looked up.")
SEEDS = flags.DEFINE_list("seeds", [], "Seeds, all runs with each; by default as many as the comparison says.")
ONLY = flags.DEFINE_string("only", "", "Make only the runs whose names match this regular expression.")
STEPS = flags.DEFINE_integer("steps", 0, "Steps of each run; 0: as the comparison says.", 0)
OVERWRITE = flags.DEFINE_bool("overwrite", False, "Delete the raw data of earlier runs in --page.")
FROM_RESULTS = flags.DEFINE_bool("from_results", False, "Write the page from the raw data, without any run.")
CHECK = flags.DEFINE_bool("check", False, "Compare the page with what the raw data give, and change nothing.")


def main(name: str) -> int:
    comparison = comparison_of(name)
    if FROM_RESULTS.value or CHECK.value:
        return again(comparison, Path(FOLDER.value or comparison.page))
    run_dir = Path(script_main.required("run_dir"))
    folder, given = Path(FOLDER.value or run_dir), given_of(comparison)
    for path in (run_dir, folder):
        path.mkdir(parents=True, exist_ok=True)
    if OVERWRITE.value:
        (folder / comparison.file).unlink(missing_ok=True)
    lines = comparison.read(folder)[1]
    wrong = {line.get("steps", given.steps) for line in lines} - {given.steps} if comparison.steps else set()
    if wrong:
        raise BadInput(f"--page: {folder} has runs of {wrong.pop()} steps, expected an own folder for {given.steps}")
    left = [case for case in chosen(comparison.cases(given)) if comparison.lacks(case, lines)]
    about = ABOUT.value or this_machine(given)
    for line in comparison.made(left, given, run_dir):
        comparison.add(folder, about, line)
        print(f"{json.dumps(line):.300}", flush=True)
    lines = comparison.read(folder)[1]
    if not lines:
        return 0  # it has said why it has made none
    if comparison.write(folder, folder):
        print(f"wrote {folder / PAGE}")
    result = comparison.result(lines)
    print(json.dumps(result))
    return 1 if result.get("bad") else 0


def given_of(comparison: Comparison) -> Given:
    """What the command line says, checked."""
    seeds, n = SEEDS.value or list(map(str, range(comparison.n_seeds))), comparison.seeds_min
    if len(seeds) < n or not all(seed.isdecimal() for seed in seeds):
        raise BadInput(f"--seeds: got {','.join(seeds)}, expected {n} or more integers >= 0")
    if 0 < STEPS.value < comparison.steps_min:
        raise BadInput(f"--steps: got {STEPS.value}, expected at least {comparison.steps_min}: the first are not timed")
    return Given([*map(int, seeds)], STEPS.value or comparison.steps)


def chosen(cases: list[Line]) -> list[Line]:
    """The runs that --only selects."""
    found = [case for case in cases if re.search(ONLY.value, named(case))]
    if not found:
        raise BadInput(f"--only: {ONLY.value!r} matches none of the runs, such as {named(cases[-1])}")
    return found


def named(case: Line) -> str:
    return " ".join(f"{field}={value}" for field, value in case.items())


def again(comparison: Comparison, folder: Path) -> int:
    """The page without any run, written or compared."""
    if not comparison.read(folder)[1]:
        raise BadInput(f"--page: {folder} has no runs, expected a folder with {comparison.file}")
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) if CHECK.value else folder
        if not comparison.write(folder, out):
            raise BadInput(f"--page: {folder} has not all the runs that the page needs, see --help")
        if not CHECK.value:
            print(f"wrote {folder / PAGE}")
            return 0
        files = {path.name for path in out.iterdir()}
        lines = differences(folder, out, files)
        print("\n".join(lines) or "the page is what its raw data give")
        return 1 if lines else 0


if __name__ == "__main__":
    script_main.run(main, NAMES)
