"""A trace in the Chrome trace event format, which ui.perfetto.dev and chrome://tracing open.

Each peer is one process with the tracks receive, compute and send (one send track per link), and an arrow leads from
each send to its receive. The slice of a message on its send track lasts until the message has arrived, but begins no
earlier than the arrival of the message before it on that link.
"""

from typing import Any

from jaxdt.protocol.trace import TraceRecord
from jaxdt.run.work import parse_work

TimelineEvent = dict[str, Any]  # of the Chrome trace event format

RECEIVE, COMPUTE, SEND = 1, 2, 3  # tracks; that of a link to dst is SEND + dst
RECEIVE_US = 50.0


def chrome(records: list[TraceRecord], stage_of: dict[int, int]) -> dict[str, Any]:
    """The content of timeline.json for the records of a trace, in order of time."""
    timed = [record for record in records if record["what"] != "report"]
    if not timed:
        return {"traceEvents": [], "displayTimeUnit": "ms"}
    zero_s: float = min(record["t"] for record in timed)

    def us(t_s: float) -> float:
        return (t_s - zero_s) * 1e6

    arrivals: dict[tuple[int, int, str], float] = {
        (r["from"], r["peer"], r["tensor"]): r["t"] for r in timed if r["what"] == "recv"
    }
    free_s: dict[tuple[int, int], float] = {}
    events: list[TimelineEvent] = []
    tracks: set[tuple[int, int, str]] = set()
    for record in timed:
        if record["what"] == "run":
            work = parse_work(record["work"])
            tracks.add((record["peer"], COMPUTE, "compute"))
            name = f"{work.kind}{'' if work.microbatch is None else work.microbatch}"
            details = {"step": work.step, "microbatch": work.microbatch}
            events.append(_slice(record["peer"], COMPUTE, us(record["t"]), record["s"] * 1e6, name, details))
        elif record["what"] == "send":
            src, dst = record["peer"], record["to"]
            arrival_s = arrivals.get((src, dst, record["tensor"]))
            if arrival_s is None:
                continue
            start_s = max(record["t"], free_s.get((src, dst), record["t"]))
            free_s[src, dst] = arrival_s
            tracks |= {(src, SEND + dst, f"send to p{dst}"), (dst, RECEIVE, "receive")}
            events += _message(record, us(start_s), us(arrival_s), (arrival_s - start_s) * 1e6)
    return {"traceEvents": _labels(tracks, stage_of) + events, "displayTimeUnit": "ms"}


def _message(record: TraceRecord, start_us: float, arrival_us: float, length_us: float) -> list[TimelineEvent]:
    """A message's slices on its send track and its receive track, and the arrow between them."""
    src, dst, tensor = record["peer"], record["to"], record["tensor"]
    arrow = {"name": "message", "cat": "message", "id": f"{src}>{dst} {tensor}"}
    return [
        _slice(src, SEND + dst, start_us, length_us, tensor, {"bytes": record["bytes"]}),
        _slice(dst, RECEIVE, arrival_us, RECEIVE_US, tensor, {"from": src}),
        arrow | {"ph": "s", "pid": src, "tid": SEND + dst, "ts": start_us},
        arrow | {"ph": "f", "bp": "e", "pid": dst, "tid": RECEIVE, "ts": arrival_us},
    ]


def _slice(
    peer: int, track: int, start_us: float, length_us: float, name: str, details: dict[str, Any]
) -> TimelineEvent:
    return {
        "name": name,
        "ph": "X",
        "pid": peer,
        "tid": track,
        "ts": round(start_us, 3),
        "dur": round(length_us, 3),
        "args": details,
    }


def _labels(tracks: set[tuple[int, int, str]], stage_of: dict[int, int]) -> list[TimelineEvent]:
    peers = sorted({peer for peer, _, _ in tracks})
    processes = [_label("process_name", peer, 0, f"peer {peer} (stage {stage_of.get(peer, '?')})") for peer in peers]
    return processes + [_label("thread_name", peer, track, name) for peer, track, name in sorted(tracks)]


def _label(kind: str, peer: int, track: int, name: str) -> TimelineEvent:
    return {"name": kind, "ph": "M", "pid": peer, "tid": track, "args": {"name": name}}
