"""Operate a live run: ask its coordinator, with the operator's credential.

    python scripts/fleet.py status|pause|resume|checkpoint|stop --run_dir=runs/x
    python scripts/fleet.py drain|evict PEER --run_dir=runs/x

status      prints steps, view, checkpoint, members and a pool's workers
pause       holds the run before the next step is committed, until resume
checkpoint  makes a checkpoint after the next step
stop        makes one and ends the run, which `launch.py --resume` continues
drain PEER  lets a peer leave between two steps, as SIGTERM on its host does
evict PEER  puts a peer out at once; the others do its unfinished work again

Elsewhere than on the coordinator's host: --coordinator=HOST:PORT --credential=operator.pem. No command changes a loss.
"""

import check_installed  # noqa: F401

from jaxdt.cli import interrupts  # noqa: F401

# isort: split
import json

from jaxdt.cli import operator_flags, script_main
from jaxdt.run.errors import BadInput
from jaxdt.runtime.run_end import how_to_go_on

COMMANDS = ("status", "pause", "resume", "checkpoint", "stop", "drain", "evict")

OUTSIDERS = {  # in the answer to status, and for people
    "coming": "on their way in",
    "workers_coming": "workers that get ready",
    "candidates": "ready to join",
    "revoked": "put out for good",
}


def main(command: str, *words: str) -> int:
    if len(words) > 1 or not all(word.isdigit() for word in words):
        raise BadInput(f"{command}: got {' '.join(words)!r}, expected at most one peer id")
    text = operator_flags.ask(command, *map(int, words))
    print(table(json.loads(text)) if command == "status" else text)
    if command == "stop" and operator_flags.RUN_DIR.value:
        print(how_to_go_on(operator_flags.folders().run_dir, makes_one=True))
    return 0


def table(status: dict) -> str:
    """The answer to `status`, for people."""
    state = " (paused)" if status["paused"] else " (stopping)" if status["stopping"] else ""
    newest = f"newest checkpoint: {status['checkpoint']} steps" if status["checkpoint"] else "no checkpoint yet"
    lines = [
        f"step {status['steps']} of {status['of_steps']}{state}; {newest}; "
        f"view {status['view']}; coordinator started {times(status['coordinator_term'])}, "
        f"returns to a checkpoint: {status['generation']}",
        f"{'peer':>8} {'stage':>6}  {'state':<9} {'last heard':<12} address",
    ]
    for member in sorted(status["members"], key=lambda member: (member["stage"], member["peer"])):
        place = f"{member['peer']:>8} {member['stage']:>6}  {member['state']:<9}"
        lines.append(f"{place} {ago(member['silent_s']):<12} {member['address']}")
    if status["workers"]:
        lines.append(f"{'worker':>8} {'stage':>6}  server  microbatches  last heard")
    for worker in status["workers"]:
        place = f"{worker['worker']:>8} {worker['stage']:>6} {worker['server']:>7}"
        lines.append(f"{place} {worker['n_counted']:>13}  {ago(worker['silent_s'])}")
    for name, meaning in OUTSIDERS.items():
        if status[name]:
            lines.append(f"{meaning}: {', '.join(map(str, status[name]))}")
    return "\n".join(lines)


def ago(silent_s: float | None) -> str:
    """How long ago, for people; None: a coordinator that was started again has not heard of it yet."""
    return "not yet" if silent_s is None else f"{silent_s:.1f} s ago"


def times(n: int) -> str:
    """How often, for people."""
    return ("never", "once", "twice")[n] if n < 3 else f"{n} times"


if __name__ == "__main__":
    script_main.run(main, COMMANDS, takes_words=True)
