"""A coordinator and a large fleet on one machine: how long its loop is busy at a time, as one JSON object.

    python scripts/bench/bench_fleet.py [--peers=256] [--steps=20] [--lost=10]

The coordinator is the real process. The peers are fakes in this process: each has a transport of its own, says hello,
sends heartbeats, and is prepared for each step half a second to a second after the last one was committed; none of them
computes. In the middle of the run --lost of them are killed at once. `loop_busy_s_max` is the longest time in which the
coordinator's loop never had to wait for an event, so that a message may have waited so long.

Measured on 2 cores on which other programs computed (load 28), with --steps=10 and nice -8, coordinator and fakes
together: ready after 12.9 s, 1.6 s a step, 5.0 s for the step that lost ten peers, loop_busy_s_max 0.46 s.
"""

import heapq
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from absl import flags

from jaxdt.build import fingerprint
from jaxdt.cli import environment, local_run, script_main
from jaxdt.cli.run_inputs import token_file
from jaxdt.protocol import events as ev
from jaxdt.protocol.message import from_plain, to_plain
from jaxdt.protocol.round_id import RoundId, RoundKind
from jaxdt.run.config import RunConfig, default_plan, parse
from jaxdt.run.cpus import allowed_cpus
from jaxdt.run.errors import BadInput
from jaxdt.run.plan import Plan
from jaxdt.run.run_folder import ADDRESS
from jaxdt.runtime.identity.authority import create_missing, peer_file
from jaxdt.runtime.identity.credential import load as load_credential
from jaxdt.runtime.net.transport import Transport
from jaxdt.runtime.run_dir import CREDENTIALS, coordinator_credential, job_flags, write_job

PEERS = flags.DEFINE_integer("peers", 256, "Peers of the fleet, in stages of 32.", 32)
STEPS = flags.DEFINE_integer("steps", 20, "Steps of the run.", 4)
LOST = flags.DEFINE_integer("lost", 10, "Peers that are killed in the middle of the run.", 0)

PIPELINES = 32
PREPARED_S = (0.5, 1.0)  # after the last commit
START_EVERY_S = 0.05  # one peer after another: they share this process
RUN_S_MAX = 600.0
SCRIPTS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Fleet:
    """The values that all fake peers share."""

    config: RunConfig
    plan: Plan
    run: str
    fingerprint: str
    credentials: Path
    coordinator: tuple[str, int]
    events: SimpleQueue[tuple[int, ev.Message]]
    views: dict[int, ev.Received] = field(default_factory=dict[int, ev.Received])

    def read(self, head: Any) -> ev.Received:
        """A message. A view is parsed once for all fakes, which on real hosts do so at the same time."""
        if head["kind"] != "View":
            return from_plain(head)
        number = head["body"]["number"]
        if number not in self.views:
            self.views[number] = from_plain(head)
        return self.views[number]


class FakePeer:
    """A peer that speaks the protocol and computes nothing."""

    def __init__(self, fleet: Fleet, peer: int):
        self.peer = peer
        self._fleet = fleet
        self._stage = fleet.plan.seat(peer)[0]
        self._view: ev.View | None = None
        self._n_committed = 0
        self._n_heartbeats = 0
        self._address = ""
        self._transport = Transport(
            peer,
            f"{fleet.run}, {fleet.fingerprint}",
            on_message=lambda src, event, leaves: self._on_message(event),
            read=fleet.read,
            listen=("127.0.0.1", 0),
            credential=load_credential(peer_file(fleet.credentials, peer)),
        )

    def start(self) -> None:
        host, port = self._transport.start() or ("", 0)
        self._address = f"{host}:{port}"
        self._transport.connect(ev.COORDINATOR, self._fleet.coordinator)
        self._offer()

    def _offer(self) -> None:
        self._send(ev.Hello(self.peer, self._stage, self._fleet.fingerprint, self._address, process=1))
        self._send(ev.Profiled({"F": 0.01, "B": 0.02, "G": 0.001, "U": 0.001}, self._n_committed, process=1))

    def close(self) -> None:
        self._transport.close(0.0)

    def heartbeat(self) -> None:
        self._n_heartbeats += 1
        self._send(ev.Heartbeat(self._n_heartbeats, {"step": float(self._n_committed)}))

    def handle(self, message: ev.Message) -> bool:
        """Take in a message; whether this peer has to prepare a step now."""
        if isinstance(message, ev.View) and (self._view is None or message.number > self._view.number):
            self._view = message
            self._n_committed = max(self._n_committed, message.n_committed)
            is_member = self.peer in message.by_peer
            if not is_member:  # taken for lost
                self._offer()
            return is_member
        if isinstance(message, ev.Committed) and message.record.step >= self._n_committed:
            self._n_committed = message.record.step + 1
            return True
        return False

    def prepare(self) -> None:
        """Be prepared for the next step; after the last one, write the stage's part of the checkpoint and be done."""
        view, step = self._view, self._n_committed
        assert view is not None, "a step begins with a view"
        if self.peer not in view.by_peer:
            return
        if step >= self._fleet.config.train.steps:
            if view.stage_peers(self._stage)[0] == self.peer:
                self._send(ev.Saved(step, self._stage))
            self._send(ev.Done(step, {"clock_offset_s": 0.0}, {}))
            return
        held = [round for round, _ in view.results if (round.number, round.stage) == (step, self._stage)]
        last_change = view.stage_views[self._stage]
        round = held[0] if held else RoundId(RoundKind.GRADIENT, self._stage, step, view=last_change)
        n_samples = self._fleet.plan.n_microbatches
        is_last = self._stage == self._fleet.plan.n_stages - 1
        tally = ev.Tally(float(n_samples), n_samples) if is_last else ev.Tally()
        result = ev.GroupResult(round, 1, 1.0, n_samples, tally)
        self._send(ev.Prepared(step, view.by_peer[self.peer].admission, (result,)))

    def _on_message(self, event: ev.Received) -> None:
        self._fleet.events.put((self.peer, event.body))

    def _send(self, body: ev.Message) -> None:
        view = self._view
        header = ev.Header(self._fleet.run, view.generation if view else 0, view.number if view else 0, self.peer)
        self._transport.send(ev.COORDINATOR, to_plain(header, body))


class Driver:
    """The loop of all fake peers."""

    def __init__(self, fleet: Fleet):
        self._fleet = fleet
        self._rng = random.Random(0)
        self._peers = {peer: FakePeer(fleet, peer) for peer in sorted(fleet.plan.peers)}
        self._timers: list[tuple[float, int, str]] = []
        self._last_committed = -1

    def run(self) -> ev.Ended:
        """Play the fleet until the run has ended."""
        heartbeat_s = self._fleet.config.net.heartbeat_s
        for number in self._peers:
            self._at(number * START_EVERY_S, number, "start")
        began_s = time.monotonic()
        while time.monotonic() < began_s + RUN_S_MAX:
            for peer in self._due():
                self._at(heartbeat_s, peer.peer, "heartbeat")
                peer.heartbeat()
            ended = self._next_event()
            if ended:
                for peer in self._peers.values():
                    peer.close()
                return ended
        raise BadInput(f"the run is not over after {RUN_S_MAX:.0f} s")

    def _at(self, after_s: float, peer: int, what: str) -> None:
        heapq.heappush(self._timers, (time.monotonic() + after_s, peer, what))

    def _due(self) -> list[FakePeer]:
        """Peers whose heartbeat is due; the steps that are due are prepared."""
        beating: list[FakePeer] = []
        while self._timers and self._timers[0][0] <= time.monotonic():
            _, number, what = heapq.heappop(self._timers)
            peer = self._peers.get(number)
            if peer is not None and what == "start":
                peer.start()
            if peer is not None and what in ("start", "heartbeat"):
                beating.append(peer)
            elif peer is not None:
                peer.prepare()
        return beating

    def _next_event(self) -> ev.Ended | None:
        try:
            number, message = self._fleet.events.get(timeout=max(0.0, self._timers[0][0] - time.monotonic()))
        except Empty:
            return None
        if isinstance(message, ev.Ended):
            return message
        peer = self._peers.get(number)
        if peer is not None and peer.handle(message):
            self._at(self._rng.uniform(*PREPARED_S), number, "prepare")
        if isinstance(message, ev.Committed) and message.record.step > self._last_committed:
            self._last_committed = message.record.step
            if self._last_committed == STEPS.value // 2:
                self._kill()
        return None

    def _kill(self) -> None:
        """Each stage loses fewer peers than it has."""
        for number in self._rng.sample(sorted(self._peers), LOST.value):
            self._peers.pop(number).close()


def make_job(folder: Path) -> tuple[RunConfig, Plan, str]:
    """Write the job of the run; its config, its plan, and what its processes compare."""
    n_stages = PEERS.value // PIPELINES
    data = token_file("")
    model = dict(preset="debug", n_layers=n_stages, tied_head=False, vocab_size=data.vocab_size)
    size = dict(stages=n_stages, pipelines=PIPELINES, microbatches=2 * PIPELINES)
    config = parse(dict(model=model, plan=size, train=dict(steps=STEPS.value)), data.vocab_size)
    config = replace(config, wiring=replace(config.wiring, kind="swarm"))
    config = replace(config, sync=replace(config.sync, check_every_steps=0))  # the fakes have no parameters
    plan = default_plan(config)
    write_job(folder, config, plan)
    create_missing(folder / CREDENTIALS, plan.peers)
    return config, plan, fingerprint(config, plan, data.checksum)


def address_of(path: Path, coordinator: subprocess.Popen) -> tuple[str, int]:
    """The address at which the coordinator listens, once it does."""
    while not path.exists() or not path.read_text():
        if coordinator.poll() is not None:
            raise BadInput(f"coordinator: ended with code {coordinator.returncode} before it had an address")
        time.sleep(0.05)
    host, _, port = path.read_text().rpartition(":")
    return host, int(port)


def measure(folder: Path) -> dict[str, Any]:
    config, plan, compared = make_job(folder)
    own_flags = [f"--run_dir={folder}", "--nolive", *job_flags(folder), coordinator_credential(folder)]
    command = [sys.executable, str(SCRIPTS / "coordinate.py"), *own_flags]
    with (folder / "coordinator.log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            address = address_of(folder / ADDRESS, process)
            run = (folder / "run").read_text().strip()
            ended = Driver(Fleet(config, plan, run, compared, folder / CREDENTIALS, address, SimpleQueue())).run()
            process.wait()
        finally:
            process.kill()
    if ended.code:
        raise BadInput(f"the run ended with code {ended.code}: {ended.reason}")
    return found(folder, n_peers=len(plan.peers))


def found(folder: Path, n_peers: int) -> dict[str, Any]:
    summary, steps_s = local_run.summary(folder), local_run.step_seconds(folder)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "peers": n_peers,
        "lost": LOST.value,
        "cores": len(allowed_cpus()),
        "load": round(os.getloadavg()[0], 1),
        "start_s": round(summary["start_s"], 2),
        "step_s_p50": round(statistics.median(steps_s), 3),
        "step_s_max": round(max(steps_s), 3),
        "loop_busy_s_max": round(summary["loop_busy_s_max"], 3),
        "coordinator_cpu_s": round(used.ru_utime + used.ru_stime, 1),
        "wall_s": round(summary["wall_s"], 1),
    }


def main() -> int:
    environment.compute_on_cpu()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(Path(folder))))
    return 0


if __name__ == "__main__":
    script_main.run(main)
