"""What a run of scripts/experiments/study.py comes to, from the coordinator's trace: its report of a step is the line
that metrics.jsonl has of it, with the moment at which it was committed."""

import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

BIN_S = 5.0
DIFFERENCE_MAX = 1e-5
LATE_S = 1.0  # by which an event may come after its moment


@dataclass(frozen=True)
class Run:
    """All times in seconds from the moment at which the trace began to be played. `ends_s` and `losses` are those of
    the committed steps by number, `peers` the (time, peers of each stage) from the last view before on, without those
    who have not got the state yet. `cores_busy` in the mean, with all that ran on the machine."""

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
        """Samples of the steps that were done between two moments; of one that was under way, its part of them."""
        ends = sorted(self.ends_s.values())
        parts = (
            max(0.0, min(end_s, to_s) - max(start_s, from_s)) / (end_s - start_s)
            for start_s, end_s in itertools.pairwise(ends)
            if end_s > start_s
        )
        return self.n_samples * sum(parts)

    def rate(self, from_s: float, to_s: float) -> float:
        """Samples per second."""
        return self.samples(from_s, to_s) / (to_s - from_s)

    @property
    def rates(self) -> list[tuple[float, float]]:
        """(time, samples per second of the BIN_S from then on)."""
        starts = [n * BIN_S for n in range(int(self.seconds // BIN_S))]
        return [(start_s, self.rate(start_s, start_s + BIN_S)) for start_s in starts]


def run_of(played: dict, records: Sequence[dict]) -> Run:
    """`played` is what scripts/experiments/study.py did and saw; `records` the coordinator's trace."""
    began_s, seconds = played["began_s"], played["seconds"]
    steps = {r["fields"]["step"]: r for r in records if r["kind"] == "step"}  # the last of those that were done again
    moves = [r["t"] - began_s for r in records if r["kind"] == "move"]
    return Run(
        played["name"],
        seconds,
        played["held_up_s"],
        played["cores_busy"],
        tuple((at_s, what, who) for at_s, what, who in played["events"]),
        played["n_samples"],
        {step: r["t"] - began_s for step, r in steps.items()},
        {step: r["fields"]["loss"] for step, r in steps.items()},
        tuple(peers_of(records, began_s, seconds)),
        tuple(at_s for at_s in moves if 0 <= at_s <= seconds),
    )


def peers_of(records: Sequence[dict], began_s: float, seconds: float) -> list[tuple[float, tuple[int, ...]]]:
    """(time, peers of each stage) of each view. Who joins counts from the end of the step in which it gets the state,
    which is the next one that is committed."""
    found, joining, members = [], set(), {}
    stages = sorted({stage for r in records if r["kind"] == "view" for stage in r["fields"]["members"].values()})
    for r in records:
        if r["kind"] == "view":
            members, joining = r["fields"]["members"], {str(peer) for peer in r["fields"]["joining"]}
        elif r["kind"] == "step" and joining:
            joining = set()
        else:
            continue
        sizes = Counter(stage for peer, stage in members.items() if str(peer) not in joining)
        found.append((r["t"] - began_s, tuple(sizes[stage] for stage in stages)))
    before = [sizes for at_s, sizes in found if at_s <= 0]
    return [(0.0, before[-1])] * bool(before) + [(at_s, sizes) for at_s, sizes in found if 0 < at_s <= seconds]


def alone(records: Sequence[dict], peer: int, killed: Collection[int]) -> bool:
    """Whether a peer is the only one of its stage, by the last view, that has the state and was not killed."""
    views = [n for n, r in enumerate(records) if r["kind"] == "view"]
    if not views:
        return False
    fields = records[views[-1]]["fields"]
    members = {int(member): stage for member, stage in fields["members"].items()}
    waiting = not any(r["kind"] == "step" for r in records[views[-1] :])
    gone = set(killed) | (set(fields["joining"]) if waiting else set())
    stage = members.get(peer)
    return stage is not None and not {p for p, s in members.items() if s == stage} - gone - {peer}


def together(runs: Sequence[Run], **about) -> dict:
    """The result: a line of figures a run, and what is not as promised."""
    difference, n_common = loss_difference(runs)
    done = [[(what, who) for _, what, who in run.events] for run in runs]
    bad = [] if n_common and difference <= DIFFERENCE_MAX else [f"losses differ by {difference:.1e}"]
    bad += [f"{run.name}: other events than {runs[0].name}" for run, own in zip(runs, done, strict=True)
            if own != done[0]]  # fmt: skip
    late_s = max(
        (abs(a[0] - b[0]) for run in runs for a, b in zip(run.events, runs[0].events, strict=False)), default=0
    )
    bad += [f"an event came {late_s:.1f} s later in one run than in another"] if late_s > LATE_S else []
    figures = {run.name: figures_of(run) for run in runs}
    return {"runs": figures, "loss_difference": difference, "steps_compared": n_common, "bad": bad, **about}


def figures_of(run: Run) -> dict:
    """Throughput over all the time and while the stages were uneven, and what happened."""
    kinds = Counter(what for _, what, _ in run.events)
    return {
        "steps": sum(0 < end_s <= run.seconds for end_s in run.ends_s.values()),
        "samples_per_s": round(run.rate(0.0, run.seconds), 3),
        "samples_per_s_uneven": uneven(run),
        "uneven_s": round(sum(b - a for a, b in spans(run)), 1),
        "leaves": kinds["leave"],
        "joins": kinds["join"],
        "spared": kinds["spared"],
        "moves": len(run.moves_s),
        "held_up_s": round(run.held_up_s, 2),
        "cores_busy": round(run.cores_busy, 2),
    }


def spans(run: Run) -> list[tuple[float, float]]:
    """From when to when one stage had at least two peers more than another: those in which a move helps."""
    ends = [at_s for at_s, _ in run.peers[1:]] + [run.seconds]
    return [(at_s, end_s) for (at_s, sizes), end_s in zip(run.peers, ends, strict=True) if max(sizes) - min(sizes) > 1]


def uneven(run: Run) -> float | None:
    """Samples per second in those spans."""
    parts = spans(run)
    seconds = sum(b - a for a, b in parts)
    return round(sum(run.samples(a, b) for a, b in parts) / seconds, 3) if seconds else None


def loss_difference(runs: Sequence[Run]) -> tuple[float, int]:
    """The largest relative one between any two runs over the steps that all have done, and how many those are."""
    common = set.intersection(*(set(run.losses) for run in runs))
    spread = ((max(own) - min(own)) / abs(min(own)) for own in ([run.losses[step] for run in runs] for step in common))
    return max(spread, default=0.0), len(common)


def curves(runs: Sequence[Run]) -> dict:
    """What the picture shows."""
    return {
        run.name: {"samples_per_s": run.rates, "peers": run.peers, "events": run.events, "moves_s": run.moves_s}
        for run in runs
    }
