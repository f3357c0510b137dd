"""The results of runs whose machines come and go, from the coordinator's trace.

The trace's report of a step has the fields of the step's line in metrics.jsonl, and the moment of its commit.
"""

import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

BIN_S = 5.0
DIFFERENCE_MAX = 1e-5
LATE_S = 1.0  # largest difference of an event's moments in two runs


@dataclass(frozen=True)
class Run:
    """The figures of one run. Times are seconds after the beginning of the schedule.

    held_up_s: the longest delay of the process that carried out the schedule. cores_busy: the mean number of busy
    cores, with everything that ran on the machine. events: (time, what was done, to which machine). ends_s, losses:
    commit time and loss of each committed step, by the number of the step. peers: (time, number of peers of each stage)
    for the last view before the beginning and for each later change. A peer
        counts from the end of the step in which it gets the state.
    """

    name: str
    seconds: float
    held_up_s: float
    cores_busy: float
    events: tuple[tuple[float, str, str], ...]
    n_samples: int
    ends_s: Mapping[int, float]
    losses: Mapping[int, float]
    peers: tuple[tuple[float, tuple[int, ...]], ...]
    moves_s: tuple[float, ...]

    def samples(self, from_s: float, to_s: float) -> float:
        """Samples of the steps between two moments. A step that lies partly between them counts in part."""
        ends = sorted(self.ends_s.values())
        parts = (
            max(0.0, min(end_s, to_s) - max(start_s, from_s)) / (end_s - start_s)
            for start_s, end_s in itertools.pairwise(ends)
            if end_s > start_s
        )
        return self.n_samples * sum(parts)

    def rate(self, from_s: float, to_s: float) -> float:
        """Samples per second between two moments."""
        return self.samples(from_s, to_s) / (to_s - from_s)

    @property
    def rates(self) -> list[tuple[float, float]]:
        """(time, samples per second in the BIN_S after it)."""
        starts = [n * BIN_S for n in range(int(self.seconds // BIN_S))]
        return [(start_s, self.rate(start_s, start_s + BIN_S)) for start_s in starts]


def run_of(played: dict, records: Sequence[dict]) -> Run:
    """The figures of a run. `played`: what `processes.Played` says of it, the run's name, and the samples of a step.
    `records`: the coordinator's trace."""
    began_s = played["began_s"]
    seconds = played["seconds"]
    steps = {r["fields"]["step"]: r for r in records if r["kind"] == "step"}  # of a repeated step the last record
    moves_s = [r["t"] - began_s for r in records if r["kind"] == "move"]
    return Run(
        name=played["name"],
        seconds=seconds,
        held_up_s=played["held_up_s"],
        cores_busy=played["cores_busy"],
        events=tuple((at_s, what, machine) for at_s, what, machine in played["events"]),
        n_samples=played["n_samples"],
        ends_s={step: r["t"] - began_s for step, r in steps.items()},
        losses={step: r["fields"]["loss"] for step, r in steps.items()},
        peers=tuple(peers_of(records, began_s, seconds)),
        moves_s=tuple(at_s for at_s in moves_s if 0 <= at_s <= seconds),
    )


def peers_of(records: Sequence[dict], began_s: float, seconds: float) -> list[tuple[float, tuple[int, ...]]]:
    """(time, number of peers of each stage) for each change. A joining peer counts from the end of the step in which it
    gets the state: the next step that is committed."""
    changes: list[tuple[float, tuple[int, ...]]] = []
    joining: set[str] = set()
    members: dict[str, int] = {}
    stages = sorted({stage for r in records if r["kind"] == "view" for stage in r["fields"]["members"].values()})
    for r in records:
        if r["kind"] == "view":
            members = r["fields"]["members"]
            joining = {str(peer) for peer in r["fields"]["joining"]}
        elif r["kind"] == "step" and joining:
            joining = set()
        else:
            continue
        sizes = Counter(stage for peer, stage in members.items() if str(peer) not in joining)
        changes.append((r["t"] - began_s, tuple(sizes[stage] for stage in stages)))
    before = [sizes for at_s, sizes in changes if at_s <= 0]
    return [(0.0, before[-1])] * bool(before) + [(at_s, sizes) for at_s, sizes in changes if 0 < at_s <= seconds]


def is_alone(records: Sequence[dict], peer: int, killed: Collection[int]) -> bool:
    """Whether `peer` is, by the last view, the only peer of its stage that has the state and was not killed."""
    views = [n for n, r in enumerate(records) if r["kind"] == "view"]
    if not views:
        return False
    fields = records[views[-1]]["fields"]
    members = {int(member): stage for member, stage in fields["members"].items()}
    joiners_have_state = any(r["kind"] == "step" for r in records[views[-1] :])
    unusable = set(killed) | (set() if joiners_have_state else set(fields["joining"]))
    stage = members.get(peer)
    return stage is not None and not {p for p, s in members.items() if s == stage} - unusable - {peer}


def compare(runs: Sequence[Run]) -> dict:
    """The figures of each run, how much their losses differ, and under `bad` what the comparison must not show."""
    difference, n_common = loss_difference(runs)
    events = [[(what, machine) for _, what, machine in run.events] for run in runs]
    bad = [] if n_common and difference <= DIFFERENCE_MAX else [f"losses differ by {difference:.1e}"]
    for run, run_events in zip(runs, events, strict=True):
        if run_events != events[0]:
            bad.append(f"{run.name}: other events than {runs[0].name}")
    late_s = max(
        (abs(a[0] - b[0]) for run in runs for a, b in zip(run.events, runs[0].events, strict=False)), default=0
    )
    bad += [f"an event came {late_s:.1f} s later in one run than in another"] if late_s > LATE_S else []
    figures = {run.name: figures_of(run) for run in runs}
    return {"runs": figures, "loss_difference": difference, "steps_compared": n_common, "bad": bad}


def figures_of(run: Run) -> dict:
    """Throughput over the whole run and while the stages were uneven, and how often each event happened."""
    n_events = Counter(what for _, what, _ in run.events)
    return {
        "steps": sum(0 < end_s <= run.seconds for end_s in run.ends_s.values()),
        "samples_per_s": round(run.rate(0.0, run.seconds), 3),
        "samples_per_s_uneven": uneven_rate(run),
        "uneven_s": round(sum(b - a for a, b in uneven_spans(run)), 1),
        "leaves": n_events["leave"],
        "joins": n_events["join"],
        "spared": n_events["spared"],
        "moves": len(run.moves_s),
        "held_up_s": round(run.held_up_s, 2),
        "cores_busy": round(run.cores_busy, 2),
    }


def uneven_spans(run: Run) -> list[tuple[float, float]]:
    """(from, to) of the times when one stage had at least two peers more than another, so that a move helps."""
    ends = [at_s for at_s, _ in run.peers[1:]] + [run.seconds]
    return [(at_s, end_s) for (at_s, sizes), end_s in zip(run.peers, ends, strict=True) if max(sizes) - min(sizes) > 1]


def uneven_rate(run: Run) -> float | None:
    """Samples per second in the uneven spans; None if there are none."""
    spans = uneven_spans(run)
    seconds = sum(b - a for a, b in spans)
    return round(sum(run.samples(a, b) for a, b in spans) / seconds, 3) if seconds else None


def loss_difference(runs: Sequence[Run]) -> tuple[float, int]:
    """The largest relative difference of two runs' losses in a step that all runs have done, and the number of such
    steps."""
    common = set.intersection(*(set(run.losses) for run in runs))
    largest = 0.0
    for step in common:
        losses = [run.losses[step] for run in runs]
        largest = max(largest, (max(losses) - min(losses)) / abs(min(losses)))
    return largest, len(common)
