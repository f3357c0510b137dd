"""Kill a peer every 15 s, with a newcomer in its place, and once the coordinator; measure how soon the run goes on.

`recovered_s` has, by the kind of process, the seconds from each kill to the next committed step; none may take longer
than 60 s, and losses are those of one process. A minute and a half. On an idle machine the kill of a peer costs about
two seconds.
"""

from bisect import bisect

from processes import Join, Kill, Played, Trial, at, every, has_losses_of_one

LIMIT_S = 60.0


def goes_on_after_each(played: Played) -> str:
    """After each kill a step is committed; the last one counts if the trial was long enough to see it."""
    found: dict[str, list[float]] = {}
    for at_s, what, whom in played.events:
        after = bisect(played.rows_s, at_s)
        ends_s = played.rows_s[after] if after < len(played.rows_s) else played.seconds
        if what == "leave":
            found.setdefault(whom.split()[0], []).append(round(ends_s - at_s, 2))
    played.figures["recovered_s"] = found
    slow = [f"{kind} {seconds} s" for kind, own in found.items() for seconds in own if seconds > LIMIT_S]
    return f"no step after a kill: {', '.join(slow)}, expected at most {LIMIT_S:.0f} s" if slow else ""


TRIAL = Trial(
    config="configs/swarm.py",
    flags=("--config.codec=none",),
    seconds=70.0,
    disturbances=(every(15.0, Kill("peer", spares_alone=True), Join()), at(38.0, Kill("coordinator"))),
    expected=(goes_on_after_each, has_losses_of_one(1e-5, first=300)),
)
