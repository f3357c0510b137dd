"""Draw one batch of a pool in which three workers vanish, from the simulator.

    python docs/pool_picture.py --out=docs/pool.png

Two stages with one server and four workers each, 24 microbatches; links of 100 Mb/s and 10 ms. The second of two steps
is drawn. Workers 3, 5 and 8 crash after a quarter, a third and a half of it, and what they had not handed in is
computed again.
"""

from collections.abc import Sequence

from absl import flags
from matplotlib.figure import Figure

from jaxdt.cli import plots, script_main
from jaxdt.protocol import trace
from jaxdt.protocol.attempts import attempts
from jaxdt.protocol.reports import StepReport
from jaxdt.run import config as configs
from jaxdt.run.network import Link
from jaxdt.sim.faults import CRASH, Fault
from jaxdt.sim.predict import Conditions, simulate

OUT = flags.DEFINE_string("out", "docs/pool.png", "Where the picture goes.")

VANISH = {3: 1 / 4, 5: 1 / 3, 8: 1 / 2}  # worker -> share of the step, as long as it is without losses
SECONDS = dict(F=1.0, B=2.0, E=1.0, G=0.1, U=0.1)
CONFIG = configs.parse(
    dict(
        model=dict(preset="debug", n_layers=2, vocab_size=256),
        plan=dict(stages=2, pipelines=1, workers=4, microbatches=24),
        wiring=dict(kind="pool"),
        train=dict(steps=2, microbatch_size=4),
        net=dict(heartbeat_s=0.5, deadline_floor_s=30.0),
    )
)


def main() -> int:
    begin_s, end_s = stepped(())[1]
    lost = [Fault(begin_s + share * (end_s - begin_s), CRASH, worker) for worker, share in VANISH.items()]
    records, (begin_s, end_s) = stepped(lost)
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    axes = figure.subplots()
    plots.timeline(axes, next(attempt for attempt in attempts(records) if attempt.step == 1))
    rows = [label.get_text() for label in axes.get_yticklabels()]
    zero_s = min(record["t"] for record in records if record["what"] == "run" and record["t"] >= begin_s)
    for fault in lost:
        row = next(n for n, text in enumerate(rows) if text.startswith(f"p{fault.peer} "))
        axes.plot(fault.at_s - zero_s, row, "kx", ms=10, mew=2)
    axes.set(title="One batch of a pool: p0 and p1 are servers; workers p3, p5 and p8 vanish at the crosses")
    figure.savefig(OUT.value, dpi=80)
    print(f"wrote {OUT.value}: the batch takes {end_s - begin_s:.1f} s")
    return 0


def stepped(faults: Sequence[Fault]) -> tuple[list[trace.TraceRecord], tuple[float, float]]:
    """The records of a run with these faults, and when its second step begins and ends."""
    plan, lines = configs.default_plan(CONFIG), list[str]()
    peers = [*plan.peers, *plan.workers]
    conditions = Conditions(
        seconds=dict.fromkeys(peers, SECONDS),
        link=lambda src, dst: Link(0.1, 0.01),
        host_of={peer: f"h{peer}" for peer in peers},
        cores={f"h{peer}": 1 for peer in peers},
    )
    outcome = simulate(CONFIG, plan, conditions, trace.Trace(lines.append), faults)
    times = [at_s for at_s, _, report in outcome.reports if isinstance(report, StepReport)]
    return list(trace.read(lines)), (times[0], times[1])


if __name__ == "__main__":
    script_main.run(main)
