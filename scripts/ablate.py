"""Compare what crosses a stage boundary: codecs and compression layers, in quality and in time (SWARM Tables 7 and 8).

    python scripts/ablate.py --config=configs/ablation.py --run_dir=runs/ablation
        [--config.train.steps=100] [--config.ablation.seeds=1] [--remeasure] [--page=TEXT]

Trains every case that has no line in RUN_DIR/results.jsonl yet, so after an interruption the same command goes on with
the models that were not finished, each from its first step. Then measures the parts of a step (timings.jsonl) and
writes table.md and curves.png; with --page also README.md, where SWARM's numbers stand beside these and TEXT says
machine, load and commit. Where no line is missing nothing is trained or measured, and all is written from the two
files. The fields of `config.ablation` are those of experiments.ablation.grid.AblationConfig.
Exit codes: 0 done, 2 bad input, 3 a worker was lost, 130 interrupted.
"""

import check_installed  # noqa: F401

# isort: split
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from absl import flags
from experiments.ablation import page, results
from experiments.ablation.grid import AblationConfig, Case, cases, cut
from experiments.ablation.picture import draw
from experiments.ablation.progress import GridProgress
from experiments.ablation.report import cut_cases, markdown, rows, step_seconds
from experiments.ablation.workers import SPAWN, WorkerLost, trained
from experiments.page import append
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, track

from jaxdt import build
from jaxdt.cli import config_flag, option_flags, run_inputs, script_main
from jaxdt.cli.run_inputs import ProcessOptions
from jaxdt.model.data import TokenFile
from jaxdt.run import config as configs
from jaxdt.run import serialize
from jaxdt.run.config import RunConfig
from jaxdt.run.cpus import allowed_cpus
from jaxdt.run.errors import BadInput
from jaxdt.runtime.compute_environment import set_cpus

option_flags.define(ProcessOptions, "run_dir")
REMEASURE = flags.DEFINE_bool("remeasure", False, "Measure the parts of a step again; the machine should be idle.")
SAY_EVERY_S = 10.0  # a line on what is under way, where no progress bar can be drawn
PAGE = flags.DEFINE_string("page", "", "Write RUN_DIR/README.md with SWARM's numbers; this text says where it ran.")


def main() -> int:
    config_flag.config_dict()  # it is missing before --run_dir is
    run_dir = Path(script_main.required("run_dir"))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    config, ablation, data = config_of_flags()
    if (run_dir / "config.json").exists():
        raise BadInput(f"--run_dir: {run_dir} is the folder of a run, expected a new one, or that of an ablation")
    run_dir.mkdir(parents=True, exist_ok=True)
    mark = results.fingerprint(config, data.checksum)
    path = run_dir / "results.jsonl"
    finished = results.load(path, mark)
    grid = cases(ablation)
    left = [case for case in grid if case not in finished]
    progress = GridProgress(len(grid), len(grid) - len(left), config.train.steps)
    try:
        if left:
            save = lambda record: append(path, record | {"config": mark})  # noqa: E731
            messages = trained(config, data.path, left, ablation.workers)
            train(messages, left, ablation.workers, progress, save)
    except (KeyboardInterrupt, WorkerLost) as error:
        print(f"{str(error) or 'interrupted'}: {progress.text}", file=sys.stderr)
        return 3 if isinstance(error, WorkerLost) else 130
    timings = measured(config, ablation, run_dir / "timings.jsonl", mark)
    finished = results.load(path, mark)
    table = rows(config, ablation, finished, timings)
    (run_dir / "table.md").write_text(markdown(config, ablation, table))
    draw(run_dir / "curves.png", ablation, table, finished)
    print(f"wrote {run_dir / 'table.md'}, {run_dir / 'curves.png'}")
    if PAGE.value:
        (run_dir / "README.md").write_text(page.text(config, ablation, table, PAGE.value))
        print(f"wrote {run_dir / 'README.md'}")
    return 0


def train(
    trained: AbstractContextManager[Iterator[tuple]],
    left: list[Case],
    n_workers: int,
    progress: GridProgress,
    save: Callable[[dict], None],
) -> None:
    """Train the cases `left`, show how far they are, and save the record of each that is finished."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[left]}"))
    began_s, said_s = time.monotonic(), 0.0
    with Progress(*columns, disable=not sys.stdout.isatty()) as shown, trained as messages:
        start = "runs: workers start"
        if shown.disable:
            pace = f"{min(n_workers, len(left))} at a time, {progress.n_steps} steps each"
            print(f"{progress.state}; trains {len(left)}, {pace}", flush=True)
        all_runs = shown.add_task(start, total=progress.n_models, completed=progress.n_finished, left="")
        bars: dict[Case, TaskID] = {}
        for what, case, value in messages:
            if what == "done":
                save(value)
                shown.remove_task(bars.pop(case))
                print(f"{case}: held-out loss {value['eval'][-1][1]:.4f}", flush=True)
            now_s = time.monotonic() - began_s
            progress.heard(now_s, what, case, value)
            left_s = progress.left_s(now_s)
            time_left = "" if left_s is None else f"about {left_s / 60:.1f} min left"
            if shown.disable and what == "steps" and value == 0:
                print(progress.description(case), flush=True)
            elif shown.disable and now_s - said_s >= SAY_EVERY_S:
                said_s = now_s
                print(f"{progress.state}{time_left and f', {time_left}'}", flush=True)
            shown.update(all_runs, description="runs", completed=progress.n_finished, left=time_left)
            if case in progress.under_way:
                if case not in bars:
                    bars[case] = shown.add_task("", total=progress.n_steps, left="")
                shown.update(bars[case], description=progress.description(case), completed=value)


def measured(config: RunConfig, ablation: AblationConfig, path: Path, mark: str) -> dict[Case, dict]:
    """The seconds of the parts of every kind of step, with its simulated step times; `seed` is the number of the
    measurement. Parts that the file `path` lacks are measured and appended to it."""
    if REMEASURE.value:
        path.unlink(missing_ok=True)
    parts = results.load(path, mark)
    wanted = [replace(case, seed=n) for n in range(ablation.measurements) for case in cut_cases(ablation)]
    left = [case for case in wanted if case not in parts]
    if left:
        print(f"measuring the parts of {len(left)} kinds of step", flush=True)
        # A process of its own computes on one thread, as the workers do.
        with ProcessPoolExecutor(
            1, mp_context=SPAWN, initializer=set_cpus, initargs=([str(allowed_cpus()[0])],)
        ) as pool:
            for case in track(left, "measuring", disable=not sys.stdout.isatty()):
                append(path, pool.submit(parts_of, config, case).result() | {"config": mark})
        parts = results.load(path, mark)
    timings = {}
    for case in wanted:
        seconds = parts[case]
        timings[case] = seconds | {"step_s": [step_seconds(config, case, seconds, gbps) for gbps in ablation.gbps]}
    return timings


def parts_of(config: RunConfig, case: Case) -> dict:
    """The measured parts of one kind of step."""
    from experiments.ablation.measure import measure  # imports jax, which counts the CPUs

    return {"case": vars(case)} | measure(config, case)


def config_of_flags() -> tuple[RunConfig, AblationConfig, TokenFile]:
    """The config without its group `ablation`, that group, and the token file."""
    fields = config_flag.config_dict().to_dict()
    ablation = serialize.read(AblationConfig, fields.pop("ablation", {}), "ablation")
    data = run_inputs.token_file(fields.get("data", {}).get("path", ""))
    config = configs.parse(fields, data.vocab_size)
    build.check_config(config)
    if config.model != config.model.with_compression("none", ()) or config.codec != "none":
        raise BadInput("model.compression, codec: expected none, the ablation sets them itself")
    for n_stages in ablation.stages:
        cut(config.model, n_stages)
    return config, ablation, data


if __name__ == "__main__":
    script_main.run(main)
