"""Average a vector among local peers: time it, or kill one of them meanwhile and check every result.

    python scripts/bench/averaging.py time [--n_peers=4] [--n_elements=25000000] [--tls] [--rival "CMD"]
    python scripts/bench/averaging.py kill [--tries=50] [--n_peers=4] [--n_elements=10000000] [--seed=0]

Both go through the real machines, loop and sockets, and print one JSON object at the end.

time

  allreduce_s   seconds from the frozen vectors to the complete averaged result of the slowest peer, median of rounds
  rival_s       with --rival: an external baseline that runs in turn with ours. CMD is its command; the value is the
                median of --rival_key in the JSON object on the last line of its output

Quote the results from an otherwise idle machine only.

kill

Each try starts a new fleet that does three rounds over TLS. In the first or second round one peer, drawn from the seed,
gets SIGKILL at a random moment between the beginning of the exchange and shortly after the last update. A result must
then equal one of two vectors, bit by bit: the sum of all peers, or the sum of the survivors, who redo the microbatches
of the dead peer. All survivors must apply the same vector, in this step and in the next. Each result is checked before
the coordinator is told of it, and again when it is applied. Prints a line a try, too.

  whole     tries in which the step was finished with the sum of all peers, from a survivor or from the slices' owners
  redone    tries in which the vector was averaged again among the survivors
  moments   tries by the state of the others when the peer died: how many held the complete result, or committed
  bad       tries in which a vector was neither of the two, survivors differed, or the run did not end
"""

import functools
import json
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from absl import flags
from averaging_peers import Fleet, Options, whole_sum
from external_baseline import baseline_seconds, check_command

from jaxdt.cli import environment, script_main
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import Report, StepReport, ViewReport
from jaxdt.runtime.compute_environment import MALLOC_ENVIRONMENT
from jaxdt.runtime.identity import authority

N_PEERS = flags.DEFINE_integer("n_peers", 4, "Processes.", 2)
N_ELEMENTS = flags.DEFINE_integer("n_elements", None, "fp32 numbers of the vector; 25 million, with kill 10.", 1)
N_ROUNDS = flags.DEFINE_integer("rounds", 6, "time: rounds of one start; the first is not counted.", 2)
N_STARTS = flags.DEFINE_integer("starts", 3, "time: how many times all are started, in turn with the baseline.", 1)
TLS = flags.DEFINE_bool("tls", False, "time: with a credential, as runs have by default: TLS, then AEAD records.")
RIVAL = flags.DEFINE_string("rival", None, "time: command of an external baseline that averages the same vector.")
RIVAL_KEY = flags.DEFINE_string("rival_key", "allreduce_s_median", "Key of its seconds in the baseline's JSON.")
TRIES = flags.DEFINE_integer("tries", 50, "kill: number of fleets, each of which loses a peer.", 1)
SEED = flags.DEFINE_integer("seed", 0, "kill: seed of the victims and the moments.")

TIMED = dict(slice_bytes=1 << 22, heartbeat_s=1.0, deadline_floor_s=60.0)
# A dead peer is noticed by its broken connections, not by its silence: the deadline is long.
KILLED = dict(slice_bytes=1 << 20, heartbeat_s=0.2, deadline_floor_s=20.0)
N_STEPS = 3  # of a fleet that loses a peer
MARGIN = 1.3  # over the seconds of a step, so that some moments are after the update
TIMEOUT_S = 120.0  # of a fleet


# ---------------------------------------------------------------------------------------------------------------- time


def timed() -> int:
    os.environ.update(MALLOC_ENVIRONMENT)  # for the peers, which are child processes, as train.py has it
    check_command(RIVAL.value)
    ours: list[float] = []
    baseline: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        credentials = Path(folder) if TLS.value else None
        if credentials:
            authority.create_missing(credentials, range(N_PEERS.value))
        options = Options(
            N_PEERS.value, N_ELEMENTS.value or 25_000_000, N_ROUNDS.value, credentials=credentials, **TIMED
        )
        for _ in range(N_STARTS.value):
            ours.append(statistics.median(rounds_s(options)))
            if RIVAL.value:
                baseline.append(baseline_seconds(RIVAL.value, RIVAL_KEY.value))
    result = {"allreduce_s": statistics.median(ours), "starts": ours, "tls": TLS.value}
    if baseline:
        result |= {"rival_s": statistics.median(baseline), "rival_starts": baseline}
    print(json.dumps(result))
    return 0


def rounds_s(options: Options) -> list[float]:
    """Start all processes once. Seconds of each counted round."""
    fleet = Fleet(options, observed=False)
    fleet.run(TIMEOUT_S * options.n_steps, lambda report: None, ())
    steps = zip(zip(*fleet.began_s, strict=True), zip(*fleet.ended_s, strict=True), strict=True)
    return [max(ended_s) - max(began_s) for began_s, ended_s in steps][1:]


# ---------------------------------------------------------------------------------------------------------------- kill


@dataclass
class Try:
    """The events of one fleet. `results[peer]` holds (what, moment, round, CRC) of its results and updates. `died_s` is
    the moment at which the victim was killed, None in a try without a victim."""

    victim: int | None = None
    step: int = 0
    began_s: float = 0.0
    died_s: float | None = None
    committed_s: dict[int, float] = field(default_factory=dict)
    members: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by the number of the view
    results: dict[int, list[tuple]] = field(default_factory=dict)
    stop: ev.Stop = ev.Stop(3, "did not end")

    def report(self, report: Report) -> None:
        if isinstance(report, StepReport):
            self.committed_s[report.step] = time.monotonic()
        elif isinstance(report, ViewReport):
            self.members[report.view] = tuple(sorted(report.members))

    def applied(self, peer: int) -> list[tuple]:
        """Round and CRC of every update of a peer."""
        return [(round, crc) for what, _, round, crc in self.results[peer] if what == "applied"]

    @property
    def survivors(self) -> list[int]:
        return [peer for peer in sorted(self.results) if peer != self.victim]

    @property
    def moment(self) -> str:
        """The state of the others when the victim died."""
        if self.committed_s.get(self.step, self.died_s) < self.died_s:
            return "committed"
        n_holders = 0
        for peer in self.survivors:
            for what, at_s, round, _ in self.results[peer]:
                n_holders += what == "prepared" and round.number == self.step and at_s < self.died_s
        return f"held by {n_holders}" if n_holders else "held by none"

    @property
    def redone(self) -> bool:
        """Whether the step of the kill was finished with a round of the survivors."""
        rounds = [round for round, _ in self.applied(self.survivors[0]) if round.number == self.step]
        return len(self.members[rounds[0].view]) < len(self.results)


def problems(attempt: Try, correct_crc: Callable[[int, tuple[int, ...]], int]) -> list[str]:
    """The errors in a try. `correct_crc(step, members)` is the CRC of the only correct sum."""
    errors = [] if attempt.stop.code == 0 else [f"the run ended with {attempt.stop}"]
    for peer, results in attempt.results.items():
        for what, _, round, crc in results:
            if crc != correct_crc(round.number, attempt.members[round.view]):
                errors.append(f"peer {peer} {what} a mixed vector as {round}")
    first = attempt.survivors[0]
    expected = attempt.applied(first)
    if [round.number for round, _ in expected] != list(range(N_STEPS)):
        errors.append(f"peer {first} applied {expected}")
    for peer in attempt.survivors[1:]:
        if attempt.applied(peer) != expected:
            errors.append(f"peer {peer} applied {attempt.applied(peer)}, peer {first} {expected}")
    return errors


def attempted(options: Options, victim: int | None, step: int, after_s: float = 0.0) -> Try:
    """Run a fleet to its end. The victim is killed after_s after the first peer begins the exchange of the step."""
    fleet, attempt = Fleet(options, observed=True), Try(victim, step)

    def kill() -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not any(began[step] for began in fleet.began_s) and time.monotonic() < deadline_s:
            time.sleep(1e-4)
        attempt.began_s = min((began[step] for began in fleet.began_s if began[step]), default=deadline_s)
        if victim is not None:
            time.sleep(max(0.0, attempt.began_s + after_s - time.monotonic()))
            fleet.peers[victim].kill()
            attempt.died_s = time.monotonic()

    def listen(peer: int) -> None:
        results = attempt.results.setdefault(peer, [])
        try:
            while True:
                results.append(fleet.pipes[peer].recv())
        except (EOFError, OSError):
            return  # the process has ended, perhaps in the middle of a message

    listening = [functools.partial(listen, peer) for peer in range(options.n_peers)]
    attempt.stop = fleet.run(TIMEOUT_S, attempt.report, [*listening, kill])
    return attempt


def undisturbed(options: Options, step: int) -> tuple[Try, float]:
    """A try without a victim, and the seconds from the beginning of a step's exchange to its last update."""
    calm = attempted(options, None, step)
    ends_s = [at_s for results in calm.results.values() for _, at_s, round, _ in results if round.number == step]
    return calm, max(ends_s) - calm.began_s


def kill() -> int:
    rng = random.Random(SEED.value)
    with tempfile.TemporaryDirectory() as folder:
        authority.create_missing(Path(folder), range(N_PEERS.value))
        options = Options(N_PEERS.value, N_ELEMENTS.value or 10_000_000, N_STEPS, credentials=Path(folder), **KILLED)
        correct_crc = functools.lru_cache(maxsize=None)(lambda step, members: whole_sum(step, members, options))
        calm = [undisturbed(options, step) for step in range(N_STEPS - 1)]
        step_s = [seconds for _, seconds in calm]
        bad = {f"undisturbed {n}": errors for n, (run, _) in enumerate(calm) if (errors := problems(run, correct_crc))}
        good: list[Try] = []
        for n in range(TRIES.value):
            victim = rng.randrange(options.n_peers)
            step = rng.randrange(N_STEPS - 1)
            after_s = rng.uniform(0.0, MARGIN * step_s[step])
            attempt = attempted(options, victim, step, after_s)
            errors = problems(attempt, correct_crc)
            if errors:
                bad[f"try {n}"] = errors
            else:
                good.append(attempt)
            outcome = errors or ("redone" if attempt.redone else "whole")
            moment = f"{after_s:.3f} s into step {step}, {attempt.moment}"
            print(f"try {n}: peer {victim} killed {moment}: {outcome}", flush=True)
    result = {
        "tries": TRIES.value,
        "whole": sum(not attempt.redone for attempt in good),
        "redone": sum(attempt.redone for attempt in good),
        "moments": dict(sorted(Counter(attempt.moment for attempt in good).items())),
        "bad": bad,
        "seed": SEED.value,
        "n_elements": options.n_elements,
        "exchange_s": step_s,
    }
    print(json.dumps(result))
    return 1 if bad else 0


COMMANDS = {"time": timed, "kill": kill}


def main(command: str) -> int:
    environment.compute_on_cpu()
    return COMMANDS[command]()


if __name__ == "__main__":
    script_main.run(main, COMMANDS)
