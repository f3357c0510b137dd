"""Kills one of several processes with SIGKILL while they average a vector, again and again, and looks at every result.

    python scripts/experiments/kill_averaging.py [--tries=50] [--n_peers=4] [--n_elements=10000000] [--seed=0]

Real machines, loop and sockets over TLS. In each try a fleet starts anew, does three rounds, and in the first or second
one peer, drawn from the seed, is killed at a random moment from the beginning of the exchange to a little after the
update of the slowest. A result may then be one of two vectors, bit by bit: the sum of all peers, or the sum of the
survivors with what the dead peer had added done again; and all survivors must apply the same, this step and the next.
Each result is looked at before the coordinator hears of it, and again when it is applied. Prints a line a try and one
JSON object:

  whole     tries in which the step was finished with the sum of all, taken from a survivor or the owners
  redone    tries in which it was averaged again among the survivors
  moments   tries by what the others held when the peer died: nothing, some of them the whole result, or committed
  bad       tries in which a vector was neither, survivors differed, or the run did not come to its end
"""

import functools
import json
import multiprocessing
import os
import random
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from absl import flags  # noqa: E402
from averaging_peers import FLOOR_S, HEARTBEAT_S, Options, be_peer, open_loop, whole_sum  # noqa: E402

from jaxdt.cli import script_main  # noqa: E402
from jaxdt.membership.coordinator import Coordinator  # noqa: E402
from jaxdt.membership.coordinator_config import CoordinatorConfig  # noqa: E402
from jaxdt.protocol.events import COORDINATOR, Report, Stop  # noqa: E402
from jaxdt.runtime.net import credential  # noqa: E402
from jaxdt.runtime.storage.durable import FileStore  # noqa: E402
from jaxdt.spec.seq_lengths import SeqLengths

TRIES = flags.DEFINE_integer("tries", 50, "Fleets that lose a peer.", 1)
N_PEERS = flags.DEFINE_integer("n_peers", 4, "Processes.", 2)
N_ELEMENTS = flags.DEFINE_integer("n_elements", 10_000_000, "fp32 numbers of the vector.", 1)
SLICE_BYTES = flags.DEFINE_integer("slice_bytes", 1 << 20, "Unit of the exchange.", 4)
SEED = flags.DEFINE_integer("seed", 0, "Of the victims and the moments.")

N_STEPS = 3
MARGIN = 1.3  # some moments fall behind the update
OVER_S = 120.0  # a fleet that has not ended by then never will


@dataclass
class Try:
    """What happened to one fleet. `said[peer]`: (what, when, round, CRC) of results and updates; `died_s` is when the
    victim was killed, None in a try without."""

    victim: int | None = None
    step: int = 0
    began_s: float = 0.0
    died_s: float | None = None
    committed_s: dict[int, float] = field(default_factory=dict)
    members: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by the number of the view
    said: dict[int, list[tuple]] = field(default_factory=dict)
    stop: Stop = Stop(3, "did not end")

    def report(self, report: Report) -> None:
        """What the coordinator says."""
        if report.kind == "step":
            self.committed_s[report.fields["step"]] = time.monotonic()
        elif report.kind == "view":
            self.members[report.fields["view"]] = tuple(sorted(report.fields["members"]))

    def applied(self, peer: int) -> list[tuple]:
        """Round and CRC of every update."""
        return [(round, crc) for what, _, round, crc in self.said[peer] if what == "applied"]

    @property
    def survivors(self) -> list[int]:
        return [peer for peer in sorted(self.said) if peer != self.victim]

    @property
    def moment(self) -> str:
        """How far the others were when the victim died."""
        if self.committed_s.get(self.step, self.died_s) < self.died_s:
            return "committed"
        held = [peer for peer in self.survivors for what, at_s, round, _ in self.said[peer]
                if what == "prepared" and round.step == self.step and at_s < self.died_s]  # fmt: skip
        return f"held by {len(held)}" if held else "held by none"

    @property
    def redone(self) -> bool:
        """Whether the step of the kill was finished with a round of the survivors."""
        rounds = [round for round, _ in self.applied(self.survivors[0]) if round.step == self.step]
        return len(self.members[rounds[0].group_view]) < len(self.said)


def problems(one: Try, right) -> list[str]:
    """What is wrong with a try; `right(step, members)` is the CRC of the only right sum."""
    found = [] if one.stop.code == 0 else [f"the run ended with {one.stop}"]
    for peer, said in one.said.items():
        for what, _, round, crc in said:
            if crc != right(round.step, one.members[round.group_view]):
                found.append(f"peer {peer} {what} a mixed vector as {round}")
    expected = one.applied(one.survivors[0])
    if [round.step for round, _ in expected] != list(range(N_STEPS)):
        found.append(f"peer {one.survivors[0]} applied {expected}")
    for peer in one.survivors[1:]:
        if one.applied(peer) != expected:
            found.append(f"peer {peer} applied {one.applied(peer)}, peer {one.survivors[0]} {expected}")
    return found


class Fleet:
    """The processes of one try. The coordinator runs in this one."""

    def __init__(self, options: Options, victim: int | None, step: int):
        self.found = Try(victim, step)
        self._options = options
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["jaxdt.runtime.loop"])
        self._began_s = [context.RawArray("d", N_STEPS) for _ in range(options.n_peers)]
        self._pipes = [context.Pipe(duplex=False) for _ in range(options.n_peers)]
        self._process = context.Process
        self._peers: list = []

    def run(self, after_s: float) -> Try:
        """What came of it; the victim is killed after_s after the first peer has begun the exchange of its step."""
        n_peers, found = self._options.n_peers, self.found
        stage_of = dict.fromkeys(range(n_peers), 0)
        terms = CoordinatorConfig(
            "averaging", "", stage_of, 1, 0, 0, N_STEPS, SeqLengths(1), "stop", HEARTBEAT_S, FLOOR_S
        )
        with tempfile.TemporaryDirectory() as folder:
            durable = FileStore(Path(folder))
            loop, address = open_loop(COORDINATOR, Coordinator(terms), self._options.secret, found.report, durable)
            host, _, port = address.rpartition(":")
            for peer in range(n_peers):
                self._start(peer, (host, int(port)))
            threads = [threading.Thread(target=self._listen, args=(peer,)) for peer in range(n_peers)]
            threads.append(threading.Thread(target=self._kill, args=(after_s,)))
            over = threading.Timer(OVER_S, loop.post, [found.stop])
            for thread in (*threads, over):
                thread.start()
            found.stop = loop.run(address)
            over.cancel()
            for process in self._peers:
                process.join(10.0)
                process.kill()
            for thread in threads:
                thread.join()
        return found

    def _start(self, peer: int, coordinator: tuple[str, int]) -> None:
        out = self._pipes[peer][1]
        arguments = (peer, self._options, coordinator, self._began_s[peer], out)
        self._peers.append(self._process(target=be_peer, args=arguments, daemon=True))
        self._peers[-1].start()
        out.close()  # now the process holds the only one, and the pipe ends with it

    def _kill(self, after_s: float) -> None:
        found, step, deadline_s = self.found, self.found.step, time.monotonic() + OVER_S
        while not any(began[step] for began in self._began_s) and time.monotonic() < deadline_s:
            time.sleep(1e-4)
        found.began_s = min((began[step] for began in self._began_s if began[step]), default=deadline_s)
        if found.victim is not None:
            time.sleep(max(0.0, found.began_s + after_s - time.monotonic()))
            self._peers[found.victim].kill()
            found.died_s = time.monotonic()

    def _listen(self, peer: int) -> None:
        said = self.found.said.setdefault(peer, [])
        try:
            while True:
                said.append(self._pipes[peer][0].recv())
        except (EOFError, OSError):
            return  # the process has ended, perhaps in the middle of a word


def undisturbed(options: Options, step: int) -> tuple[Try, float]:
    """A fleet that loses nobody, and seconds from the first peer's beginning of a step to the last one's update."""
    calm = Fleet(options, None, step).run(0.0)
    ends_s = [at_s for said in calm.said.values() for _, at_s, round, _ in said if round.step == step]
    return calm, max(ends_s) - calm.began_s


def main() -> int:
    chance = random.Random(SEED.value)
    with tempfile.TemporaryDirectory() as folder:
        secret = str(Path(folder) / "credential.pem")
        credential.create(secret)
        options = Options(N_PEERS.value, N_ELEMENTS.value, N_STEPS, SLICE_BYTES.value, secret)
        right = functools.lru_cache(maxsize=None)(lambda step, members: whole_sum(step, members, options))
        calm = [undisturbed(options, step) for step in range(N_STEPS - 1)]
        lasts_s = [seconds for _, seconds in calm]
        bad = {f"undisturbed {n}": wrong for n, (one, _) in enumerate(calm) if (wrong := problems(one, right))}
        good = []
        for n in range(TRIES.value):
            victim, step = chance.randrange(options.n_peers), chance.randrange(N_STEPS - 1)
            after_s = chance.uniform(0.0, MARGIN * lasts_s[step])
            one = Fleet(options, victim, step).run(after_s)
            wrong = problems(one, right)
            if wrong:
                bad[f"try {n}"] = wrong
            else:
                good.append(one)
            how = wrong or ("redone" if one.redone else "whole")
            print(f"try {n}: peer {victim} killed {after_s:.3f} s into step {step}, {one.moment}: {how}", flush=True)
    result = {
        "tries": TRIES.value,
        "whole": sum(not one.redone for one in good),
        "redone": sum(one.redone for one in good),
        "moments": dict(sorted(Counter(one.moment for one in good).items())),
        "bad": bad,
        "seed": SEED.value,
        "n_elements": options.n_elements,
        "exchange_s": lasts_s,
    }
    print(json.dumps(result))
    return 1 if bad else 0


if __name__ == "__main__":
    script_main.run(main)
