"""A trace in the Chrome trace event format, which ui.perfetto.dev and chrome://tracing open.

One process per peer with the tracks receive, compute and send (one send track per link), and an arrow from each send to
its receive. A message's slice on its send track lasts until it has arrived, but begins no earlier than the arrival of
the one before it on that link.
"""

from jaxdt.spec.work import parse_work

RECEIVE, COMPUTE, SEND = 1, 2, 3
RECEIVE_US = 50.0


def chrome(records: list[dict], stage_of: dict[int, int]) -> dict:
    """The content of timeline.json for the records of a trace, in order of time."""
    timed = [r for r in records if r["what"] != "report"]
    if not timed:
        return {"traceEvents": [], "displayTimeUnit": "ms"}
    zero_s = min(r["t"] for r in timed)
    us = lambda t_s: (t_s - zero_s) * 1e6  # noqa: E731
    arrivals = {(r["from"], r["peer"], r["tensor"]): r["t"] for r in timed if r["what"] == "recv"}
    free_s: dict[tuple[int, int], float] = {}
    events, tracks = [], set()
    for r in timed:
        if r["what"] == "run":
            work = parse_work(r["work"])
            tracks.add((r["peer"], COMPUTE, "compute"))
            about = {"step": work.step, "microbatch": work.microbatch}
            events.append(_slice(r["peer"], COMPUTE, us(r["t"]), r["s"] * 1e6, f"{work.kind}{_m(work)}", about))
        elif r["what"] == "send":
            src, dst = r["peer"], r["to"]
            arrival_s = arrivals.get((src, dst, r["tensor"]))
            if arrival_s is None:
                continue
            start_s = max(r["t"], free_s.get((src, dst), r["t"]))
            free_s[src, dst] = arrival_s
            track = SEND + dst
            tracks |= {(src, track, f"send to p{dst}"), (dst, RECEIVE, "receive")}
            about = {"bytes": r["bytes"]}
            events.append(_slice(src, track, us(start_s), (arrival_s - start_s) * 1e6, r["tensor"], about))
            events.append(_slice(dst, RECEIVE, us(arrival_s), RECEIVE_US, r["tensor"], {"from": src}))
            arrow = {"name": "message", "cat": "message", "id": f"{src}>{dst} {r['tensor']}"}
            events.append(arrow | {"ph": "s", "pid": src, "tid": track, "ts": us(start_s)})
            events.append(arrow | {"ph": "f", "bp": "e", "pid": dst, "tid": RECEIVE, "ts": us(arrival_s)})
    return {"traceEvents": _labels(tracks, stage_of) + events, "displayTimeUnit": "ms"}


def _slice(peer: int, track: int, start_us: float, us: float, name: str, about: dict) -> dict:
    start, length = round(start_us, 3), round(us, 3)
    return {"name": name, "ph": "X", "pid": peer, "tid": track, "ts": start, "dur": length, "args": about}


def _labels(tracks: set[tuple[int, int, str]], stage_of: dict[int, int]) -> list[dict]:
    peers = sorted({peer for peer, _, _ in tracks})
    label = lambda kind, peer, track, name: {  # noqa: E731
        "name": kind,
        "ph": "M",
        "pid": peer,
        "tid": track,
        "args": {"name": name},
    }
    return [label("process_name", peer, 0, f"peer {peer} (stage {stage_of.get(peer, '?')})") for peer in peers] + [
        label("thread_name", peer, track, name) for peer, track, name in sorted(tracks)
    ]


def _m(work) -> str:
    return "" if work.microbatch is None else str(work.microbatch)
