"""Kill one of several processes with SIGKILL while they average a vector, many times, and check every result.

    python scripts/experiments/kill_averaging.py [--tries=50] [--n_peers=4] [--n_elements=10000000] [--seed=0]

Real machines, loop and sockets over TLS. Each try starts a new fleet that does three rounds. In the first or second
round one peer, drawn from the seed, is killed at a random moment between the beginning of the exchange and shortly
after the last update. A result must then equal one of two vectors, bit by bit: the sum of all peers, or the sum of the
survivors, who redo the microbatches of the dead peer. All survivors must apply the same vector, in this step and in the
next. Each result is checked before the coordinator is told of it, and again when it is applied. Prints a line a try and
one JSON object:

  whole     tries in which the step was finished with the sum of all peers, from a survivor or from the slices' owners
  redone    tries in which the vector was averaged again among the survivors
  moments   tries by the state of the others when the peer died: how many held the complete result, or committed
  bad       tries in which a vector was neither of the two, survivors differed, or the run did not end
"""

import functools
import json
import multiprocessing
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from absl import flags
from averaging_peers import DEADLINE_FLOOR_S, HEARTBEAT_S, Options, be_peer, whole_sum

from jaxdt.cli import environment, script_main
from jaxdt.cli.averaging_loop import RUN, open_loop
from jaxdt.membership.commit import TwoPhaseCommit
from jaxdt.membership.coordinator import Coordinator
from jaxdt.membership.coordinator_config import CoordinatorConfig
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import Report, StepReport, ViewReport
from jaxdt.run.seq_lengths import SeqLengths
from jaxdt.runtime.identity import authority
from jaxdt.runtime.net.address import parse_address
from jaxdt.runtime.storage.durable import FileStore

TRIES = flags.DEFINE_integer("tries", 50, "Number of fleets, each of which loses a peer.", 1)
N_PEERS = flags.DEFINE_integer("n_peers", 4, "Processes.", 2)
N_ELEMENTS = flags.DEFINE_integer("n_elements", 10_000_000, "fp32 numbers of the vector.", 1)
SLICE_BYTES = flags.DEFINE_integer("slice_bytes", 1 << 20, "Unit of the exchange.", 4)
SEED = flags.DEFINE_integer("seed", 0, "Seed of the victims and the moments.")

N_STEPS = 3
MARGIN = 1.3  # over the seconds of a step, so that some moments are after the update
TIMEOUT_S = 120.0  # of a fleet


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
        """Take a report of the coordinator."""
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


class Fleet:
    """The processes of one try. The coordinator runs in this process."""

    def __init__(self, options: Options, victim: int | None, step: int):
        self._try = Try(victim, step)
        self._options = options
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["jaxdt.runtime.loop"])
        self._began_s = [context.RawArray("d", N_STEPS) for _ in range(options.n_peers)]
        self._pipes = [context.Pipe(duplex=False) for _ in range(options.n_peers)]
        self._process = context.Process
        self._peers: list = []

    def run(self, after_s: float) -> Try:
        """Run the fleet to its end. The victim is killed after_s after the first peer begins the exchange of the
        step."""
        n_peers = self._options.n_peers
        config = coordinator_config(n_peers)
        with tempfile.TemporaryDirectory() as folder:
            loop, address = open_loop(
                ev.COORDINATOR,
                Coordinator(config, TwoPhaseCommit(config)),
                self._options.credentials,
                self._try.report,
                FileStore(Path(folder)),
            )
            for peer in range(n_peers):
                self._start(peer, parse_address("coordinator", address))
            threads = [threading.Thread(target=self._listen, args=(peer,)) for peer in range(n_peers)]
            threads.append(threading.Thread(target=self._kill, args=(after_s,)))
            timeout = threading.Timer(TIMEOUT_S, loop.post, [self._try.stop])
            for thread in (*threads, timeout):
                thread.start()
            self._try.stop = loop.run(address)
            timeout.cancel()
            for process in self._peers:
                process.join(10.0)
                process.kill()
            for thread in threads:
                thread.join()
        return self._try

    def _start(self, peer: int, coordinator: tuple[str, int]) -> None:
        out = self._pipes[peer][1]
        arguments = (peer, self._options, coordinator, self._began_s[peer], out)
        self._peers.append(self._process(target=be_peer, args=arguments, daemon=True))
        self._peers[-1].start()
        out.close()  # the process now holds the only copy, so the pipe ends with the process

    def _kill(self, after_s: float) -> None:
        step = self._try.step
        deadline_s = time.monotonic() + TIMEOUT_S
        while not any(began[step] for began in self._began_s) and time.monotonic() < deadline_s:
            time.sleep(1e-4)
        self._try.began_s = min((began[step] for began in self._began_s if began[step]), default=deadline_s)
        if self._try.victim is not None:
            time.sleep(max(0.0, self._try.began_s + after_s - time.monotonic()))
            self._peers[self._try.victim].kill()
            self._try.died_s = time.monotonic()

    def _listen(self, peer: int) -> None:
        results = self._try.results.setdefault(peer, [])
        try:
            while True:
                results.append(self._pipes[peer][0].recv())
        except (EOFError, OSError):
            return  # the process has ended, perhaps in the middle of a message


def coordinator_config(n_peers: int) -> CoordinatorConfig:
    return CoordinatorConfig(
        run=RUN,
        fingerprint="",
        stage_of=dict.fromkeys(range(n_peers), 0),
        n_stages=1,
        start_version=0,
        start_generation=0,
        n_steps=N_STEPS,
        tokens_per_sample=SeqLengths(1),
        on_nonfinite="stop",
        heartbeat_s=HEARTBEAT_S,
        deadline_floor_s=DEADLINE_FLOOR_S,
    )


def undisturbed(options: Options, step: int) -> tuple[Try, float]:
    """A try without a victim, and the seconds from the beginning of a step's exchange to its last update."""
    calm = Fleet(options, None, step).run(0.0)
    ends_s = [at_s for results in calm.results.values() for _, at_s, round, _ in results if round.number == step]
    return calm, max(ends_s) - calm.began_s


def main() -> int:
    environment.compute_on_cpu()
    rng = random.Random(SEED.value)
    with tempfile.TemporaryDirectory() as folder:
        authority.create_missing(Path(folder), range(N_PEERS.value))
        options = Options(N_PEERS.value, N_ELEMENTS.value, N_STEPS, SLICE_BYTES.value, Path(folder))
        correct_crc = functools.lru_cache(maxsize=None)(lambda step, members: whole_sum(step, members, options))
        calm = [undisturbed(options, step) for step in range(N_STEPS - 1)]
        step_s = [seconds for _, seconds in calm]
        bad = {f"undisturbed {n}": errors for n, (run, _) in enumerate(calm) if (errors := problems(run, correct_crc))}
        good: list[Try] = []
        for n in range(TRIES.value):
            victim = rng.randrange(options.n_peers)
            step = rng.randrange(N_STEPS - 1)
            after_s = rng.uniform(0.0, MARGIN * step_s[step])
            attempt = Fleet(options, victim, step).run(after_s)
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


if __name__ == "__main__":
    script_main.run(main)
