"""`planner.replan` against a solve from nothing on the same devices: cost, seconds, and what moves.

    python scripts/bench/bench_replan.py --seconds=30

For each kind of network 64 devices are planned (8 stages x 8 pipelines). Then two of them are replaced, eight leave, or
two leave. The baseline solves the devices that the new plan uses from nothing, in the same shape, within --seconds. The
first replan of a process also loads compiled code and is not timed. About a minute and a half for each line.
"""

import time

import numpy as np
from absl import flags

import planner
from jaxdt.cli import script_main
from jaxdt.run.network import Network
from planner.model.change import part_of
from planner.model.generate import generate

CASES = (
    ("worldwide", "replaced"),
    ("random", "replaced"),
    ("jitter", "8 left"),
    ("gaming", "8 left"),
    ("spot", "8 left"),
    ("multi_dc", "replaced"),
    ("random", "2 left"),
)
SIZES = planner.ByteSizes(65e7, 471249220)
N, N_STAGES = 64, 8
FIRST_S = 10.0  # of the plan that runs before the change

_SECONDS = flags.DEFINE_float("seconds", 30.0, "time of the solve from nothing")


def change_of(kind: str, what: str, seed: int) -> tuple[Network, planner.Change]:
    whole = generate(kind, N + 2, seed) if what == "replaced" else generate(kind, N, seed)
    rng = np.random.default_rng(seed)
    n_gone = {"replaced": 2, "8 left": 8, "2 left": 2}[what]
    came = rng.choice(len(whole.devices), len(whole.devices) - N, replace=False)
    before = part_of(whole, np.setdiff1d(np.arange(whole.n_devices), came))
    gone = tuple(before.devices[int(d)].name for d in rng.choice(N, n_gone, replace=False))
    return before, planner.Change(gone, whole if len(came) else None)


def line(kind: str, what: str, seed: int) -> str:
    before, change = change_of(kind, what, seed)
    plan = planner.solve(before, planner.Job(SIZES, N_STAGES, 8), planner.Stop(FIRST_S)).plan
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    found = planner.replan(plan, before, change, None)
    took_s, took_cpu_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
    new = found.result.plan
    used = part_of(found.result.network, np.sort(np.array(new.placement).ravel()))
    # Fewer pipelines send more microbatches each.
    sizes = planner.ByteSizes(new.found["c_dp_bytes"], new.found["c_pp_bytes"])
    anew = planner.solve(used, planner.Job(sizes, N_STAGES, new.n_pipelines), planner.Stop(_SECONDS.value))
    ratio = found.result.score_s / anew.score_s - 1
    cells = [
        *(kind, what, f"{found.mended.score_s:.3f}", f"{found.result.score_s:.3f}", f"{anew.score_s:.3f}"),
        *(f"{ratio:+.2%}", f"{took_s:.2f}", f"{took_cpu_s:.2f}"),
        *(str(len(found.moves)), f"{found.moved_bytes / 1e9:.1f}", f"{found.move_s:.1f}"),
    ]
    return f"| {' | '.join(cells)} |"


def main() -> int:
    before, change = change_of("random", "2 left", 1)
    job = planner.Job(SIZES, N_STAGES, 8)
    planner.replan(planner.solve(before, job, planner.Stop(1.0)).plan, before, change, None)
    head = ["network", "change", "mended", "replan", "from nothing", "difference", "s", "CPU s", "moves", "GB", "s"]
    print(f"| {' | '.join(head)} |")
    print("|---" * len(head) + "|")
    for seed, (kind, what) in enumerate(CASES):
        print(line(kind, what, seed), flush=True)
    return 0


if __name__ == "__main__":
    script_main.run(main)
