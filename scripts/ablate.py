"""Compare what crosses a stage boundary: codecs and compression layers, in quality and in time (SWARM Tables 7 and 8).

    python scripts/ablate.py --config=configs/ablation.py --run_dir=runs/ablation
        [--config.train.steps=100] [--config.ablation.seeds=1] [--remeasure]

Trains every case that has no line in RUN_DIR/results.jsonl yet, so the same command goes on after an interruption; then
measures the parts of a step (timings.jsonl) and writes table.md and curves.png. The fields of `config.ablation`:
jaxdt.ablation.grid. Exit codes: 0 done, 2 bad input, 3 a worker was lost, 130 interrupted.
"""

import signal
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from absl import flags
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn, track

from jaxdt import build
from jaxdt.ablation import results
from jaxdt.ablation.grid import AblationConfig, Case, cases, cut
from jaxdt.ablation.picture import draw
from jaxdt.ablation.predict import step_seconds
from jaxdt.ablation.report import cut_cases, markdown, rows
from jaxdt.cli import run_flags
from jaxdt.cli.ablate_workers import SPAWN, WorkerLost, trained
from jaxdt.model.data import TokenFile
from jaxdt.spec import config as configs
from jaxdt.spec import serialize
from jaxdt.spec.config import RunConfig
from jaxdt.spec.errors import BadInput

REMEASURE = flags.DEFINE_bool("remeasure", False, "Measure the parts of a step again, on a machine that is idle now.")


def main() -> int:
    run_flags.required("config", "run_dir")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    config, ablation, data = config_of_flags()
    run_dir = Path(run_flags.RUN_DIR.value)
    run_dir.mkdir(parents=True, exist_ok=True)
    mark, path = results.fingerprint(config, data.checksum), run_dir / "results.jsonl"
    try:
        train_missing(config, ablation, data, path, mark)
    except (KeyboardInterrupt, WorkerLost) as error:
        print(f"{error or 'interrupted'}; the same command goes on from {path}", file=sys.stderr)
        return 3 if isinstance(error, WorkerLost) else 130
    timed = measured(config, ablation, run_dir / "timings.jsonl", mark)
    finished = results.load(path, mark)
    found = rows(config, ablation, finished, timed)
    (run_dir / "table.md").write_text(markdown(config, ablation, found))
    draw(run_dir / "curves.png", ablation, found, finished)
    print(f"wrote {run_dir / 'table.md'}, {run_dir / 'curves.png'}")
    return 0


def train_missing(config: RunConfig, ablation: AblationConfig, data: TokenFile, path: Path, mark: str) -> None:
    """Train every case that the results file lacks, and keep each record as it comes."""
    grid, finished = cases(ablation), results.load(path, mark)
    left = [case for case in grid if case not in finished]
    if not left:
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress, trained(config, data.path, left, ablation.workers) as messages:
        whole, bars = progress.add_task("runs", total=len(grid), completed=len(grid) - len(left)), {}
        for what, case, value in messages:
            if case not in bars:
                bars[case] = progress.add_task(str(case), total=config.train.steps)
            if what == "step":
                progress.update(bars[case], completed=value + 1)
            else:
                results.append(path, value | {"config": mark})
                progress.remove_task(bars[case])
                progress.advance(whole)
                progress.console.print(f"{case}: held-out loss {value['eval'][-1][1]:.4f}")


def measured(config: RunConfig, ablation: AblationConfig, path: Path, mark: str) -> dict[Case, dict]:
    """The parts of every kind of step, from the file or measured now, each with its simulated step times."""
    if REMEASURE.value:
        path.unlink(missing_ok=True)
    parts = results.load(path, mark)
    left = [case for case in cut_cases(ablation) if case not in parts]
    if left:
        # In a process of its own, so that it has one thread as the workers have.
        with ProcessPoolExecutor(1, mp_context=SPAWN, initializer=run_flags.set_cpus, initargs=(["0"],)) as pool:
            for case in track(left, "measuring"):
                results.append(path, pool.submit(parts_of, config, case).result() | {"config": mark})
        parts = results.load(path, mark)
    step_s = {case: [step_seconds(config, case, own, gbps) for gbps in ablation.gbps] for case, own in parts.items()}
    return {case: own | {"step_s": step_s[case]} for case, own in parts.items()}


def parts_of(config: RunConfig, case: Case) -> dict:
    from jaxdt.ablation.measure import measure  # imports jax, which counts the CPUs

    return {"case": vars(case)} | measure(config, case)


def config_of_flags() -> tuple[RunConfig, AblationConfig, TokenFile]:
    """The run's config without its group `ablation`, that group, and the tokens."""
    fields = run_flags.config_dict().to_dict()
    ablation = serialize.read(AblationConfig, fields.pop("ablation", {}), "ablation")
    data = run_flags.token_file(fields.get("data", {}).get("path", ""))
    config = configs.parse(fields, data.vocab_size)
    build.check_config(config)
    if config.model.compression != "none" or config.codec != "none":
        raise BadInput("model.compression, codec: expected none, the ablation sets them itself")
    for n_stages in ablation.stages:
        cut(config.model, n_stages)
    return config, ablation, data


if __name__ == "__main__":
    run_flags.run(main)
