"""One process of a run: a peer or the coordinator, from its job to its exit code."""

import contextlib
import functools
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxdt.build import RunStart, build_coordinator, build_newcomer, build_peer, fingerprint
from jaxdt.membership.coordinator_config import DurableState, load_durable_state
from jaxdt.model.data import TokenFile
from jaxdt.protocol.events import COORDINATOR, Event, Interrupted, Leave, MoveTo, Ready, Report, Stop
from jaxdt.protocol.message import from_plain
from jaxdt.protocol.trace import Trace
from jaxdt.runtime.calibrate.message_cost import MessageCostProbe
from jaxdt.runtime.calibrate.stage_times import compile_step, time_stage
from jaxdt.runtime.journal import Journal
from jaxdt.runtime.loop import Loop
from jaxdt.runtime.net.credential import load as load_credential
from jaxdt.runtime.net.options import TransportCallbacks, TransportSettings
from jaxdt.runtime.net.shaper import LinkShape
from jaxdt.runtime.net.transport import Transport
from jaxdt.runtime.storage.checkpoint import (
    Checkpointer,
    Stamp,
    about_run,
    check_resumable,
    complete_checkpoints,
    load_entries,
    step_folder,
)
from jaxdt.runtime.storage.durable import FileStore, LateFile
from jaxdt.runtime.storage.store import Store, stage_functions
from jaxdt.sim.predict import device_links
from jaxdt.spec.config import RunConfig
from jaxdt.spec.errors import BadInput
from jaxdt.spec.network import Network
from jaxdt.spec.plan import Plan
from jaxdt.spec.sizes import sync_groups
from jaxdt.spec.work import BACKWARD, FORWARD, REGENERATE


@dataclass(frozen=True)
class Job:
    """What every process of a run is given. `run` names the run on every connection; without a credential only
    loopback addresses are allowed; `network` is emulated inside the transport; `resume` is a complete checkpoint.
    `forward_s` emulates a slower device: what a forward takes at least, and half of what a backward does."""

    config: RunConfig
    plan: Plan
    data: TokenFile
    run: str
    run_dir: Path
    credential: Path | None = None
    network: Network | None = None
    resume: Path | None = None
    trace_steps: int = 30
    allow_plaintext: bool = False
    forward_s: float = 0.0

    @property
    def about(self) -> dict:
        return about_run(self.config, self.data.checksum)

    @property
    def name(self) -> str:
        """Of the run and of what is run in it. Connections begin with it, so who runs something else is turned away."""
        return f"{self.run}, {fingerprint(self.config, self.plan, self.data.checksum)}"

    @functools.cached_property
    def start(self) -> Stamp:
        return check_resumable(self.resume, self.about) if self.resume else Stamp(0, 0)

    @property
    def run_start(self) -> RunStart:
        return RunStart(self.run, self.start.version, self.start.generation, self.data.checksum)

    def load_entries(self, version: int, names: list[str]) -> dict[str, dict]:
        resumed = self.resume and version == self.start.version
        return load_entries(self.resume if resumed else step_folder(self.run_dir, version), names)

    def least_s(self, stage: int) -> dict[str, float]:
        """Of each kind of Work on the emulated device; the last stage's backward has the forward in it."""
        last = stage == self.plan.n_stages - 1
        forward_s, backward_s = (0.0, 3 * self.forward_s) if last else (self.forward_s, 2 * self.forward_s)
        return {FORWARD: forward_s, BACKWARD: backward_s, REGENERATE: backward_s}

    def checkpointer(self, stage: int | None) -> Checkpointer:
        about = self.about | {"stages": self.plan.n_stages}
        return Checkpointer(self.run_dir, about, self.config.train.keep_checkpoints, stage)


class Orders:
    """What others ask of this process, whichever machine it runs. The first SIGINT or SIGTERM is handed to the machine
    as `asked`, another one interrupts it. With a launcher, so does a line "CODE REASON" on standard input, and its end,
    which means that the launcher was killed."""

    def __init__(self, asked: Event, with_parent: bool):
        self._loop: Loop | None = None
        self._given: list[Event] = []
        requests = itertools.chain([asked], itertools.repeat(Interrupted()))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self._give(next(requests)))
        if with_parent:
            threading.Thread(target=self._watch, name="parent", daemon=True).start()

    def obey(self, loop: Loop) -> None:
        """From now on orders go to this loop, those too that another may have heard too late."""
        self._loop = loop
        for event in self._given:
            loop.post(event)

    def _give(self, event: Event) -> None:
        self._given.append(event)
        if self._loop:
            self._loop.post(event)

    def _watch(self) -> None:
        said = b""
        while chunk := os.read(sys.stdin.fileno(), 4096):  # not the buffered reader: a thread inside it breaks the exit
            said += chunk
            if b"\n" in said:
                code, _, reason = said.decode().strip().partition(" ")
                self._give(Interrupted(int(code), reason))
                return
        self._give(Interrupted())


def run_peer(
    job: Job,
    peer: int,
    coordinator: str,
    listen: str,
    devices: int = 1,
    with_parent: bool = False,
    joins: int | None = None,
) -> Stop:
    """Be one peer of the plan until the run ends; `with_parent`: or until standard input does. `joins`: the stage of a
    newcomer that the plan does not know. When it is wanted for another stage, it goes on there as a newcomer: what it
    held is let go of, that stage's functions are compiled, and its state is fetched from those who hold it."""
    orders = Orders(Leave(), with_parent)
    end: Stop | MoveTo = _sit(job, peer, coordinator, listen, devices, orders, joins, False)
    while isinstance(end, MoveTo):
        end = _sit(job, peer, coordinator, listen, devices, orders, end.stage, True)
    return end


def _sit(
    job: Job, peer: int, coordinator: str, listen: str, devices: int, orders: Orders, joins: int | None, again: bool
) -> Stop | MoveTo:
    """One machine of the peer, for one stage, until it ends or another takes its place; `again`: not the first one."""
    config, plan = job.config, job.plan
    if joins is None:
        stage, _ = plan.seat(peer)
        start = job.start
        machine = build_peer(config, plan, peer, job.run_start)
    else:
        stage, plan = joins, plan.with_newcomer(peer, joins)
        machine = build_newcomer(config, job.plan, peer, stage, RunStart(job.run, data_checksum=job.data.checksum))
    with contextlib.closing(LateFile(job.run_dir / "trace" / f"peer_{peer}.jsonl", again)) as trace_file:
        trace = Trace(trace_file.write, job.trace_steps)
        slow = dict(queue_bytes=config.net.queue_bytes, least_s=job.least_s(stage))
        loop = Loop(peer, machine, trace, _say, job.checkpointer(stage), **slow)
        address = _open(job, loop, peer, listen)
        loop.transport.connect(COORDINATOR, parse_address("coordinator", coordinator))

        def prepare() -> Ready:
            functions = stage_functions(config, plan, stage, devices)
            store = Store(config, plan, peer, job.data, functions, job.load_entries)
            if joins is None:
                store.restore(job.start.version, job.start.generation)
            loop.tensors = store
            groups = {group.name: group.n_elements for group in sync_groups(config, plan) if stage in group.stages}
            for step in config.seq_lengths.first_steps(job.start.version, config.train.steps):
                compile_step(store, peer, stage, step)
            first = plan.microbatches(plan.seat(peer)[1]).start
            evaluates, full_step = config.train.eval_every_steps > 0, config.data.seq_growth_steps
            with MessageCostProbe(load_credential(job.credential) if job.credential else None) as echo:
                seconds = time_stage(store, peer, stage, groups, evaluates, full_step, first, echo)
            least_s = job.least_s(stage)
            return Ready({kind: max(s, least_s.get(kind, 0.0)) for kind, s in seconds.items()}, store.n_words)

        orders.obey(loop)
        return loop.run(address, prepare)


def run_coordinator(
    job: Job,
    listen: str,
    started: Callable[[str], None],
    live: bool,
    with_parent: bool,
    began_s: float | None = None,
) -> Stop:
    """Be the coordinator: `started` is called with its address; writes metrics and summary, and shows the fleet.
    `began_s`: when the launcher began, on this host's monotonic clock."""
    if not listen:
        raise BadInput("listen: got no address, expected host:port, at which all peers reach the coordinator")
    start = job.start
    durable = FileStore(job.run_dir / "coordinator")
    memory = _memory(job, durable)
    machine = build_coordinator(job.config, job.plan, job.run_start, memory)
    link = device_links(job.network)
    journal = Journal(job.run_dir, job.config, job.plan, machine, durable, link, live, began_s)
    with contextlib.closing(
        LateFile(job.run_dir / "trace" / "coordinator.jsonl", memory is not None, True)
    ) as trace_file:
        trace = Trace(trace_file.write)
        loop = Loop(COORDINATOR, machine, trace, journal.report, job.checkpointer(None), durable=durable)
        address = _open(job, loop, COORDINATOR, listen)
        with journal:
            durable.put("run", job.run)
            started(address)
            Orders(Interrupted(), with_parent).obey(loop)
            stop = loop.run(address)
            durable.put("run", "")  # nothing is left to go on with
            return stop


def _memory(job: Job, durable: FileStore) -> DurableState | None:
    """What another coordinator of this very run left behind, which did not come to its end."""
    if job.resume or durable.get("run") != job.run:
        return None
    complete = complete_checkpoints(job.run_dir)
    checkpoint = check_resumable(complete[-1], job.about).version if complete else job.start.version
    return load_durable_state({name: durable.get(name) for name in ("coordinator_term", "view", "records")}, checkpoint)


def parse_address(name: str, address: str) -> tuple[str, int]:
    """host:port, or BadInput."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise BadInput(f"{name}: got {address!r}, expected host:port")
    return host, int(port)


def _open(job: Job, loop: Loop, me: int, listen: str) -> str:
    """Start the loop's transport; the address under which others reach it, '' for one that nobody can dial."""
    link = device_links(job.network)

    def shape(dst: int) -> LinkShape | None:
        if job.network is None or max(me, dst) >= job.network.n_devices:
            return None  # a newcomer, which the network does not know
        to = link(me, dst)
        free = to.latency_s == 0 and to.bandwidth_gbps == float("inf")
        return None if free else LinkShape(to.latency_s, to.bandwidth_gbps)

    loop.transport = Transport(
        me,
        job.name,
        parse_address("listen", listen) if listen else None,
        load_credential(job.credential) if job.credential else None,
        TransportCallbacks(loop.on_message, loop.on_link, loop.expect, read=from_plain),
        TransportSettings(shape, allow_plaintext=job.allow_plaintext),
    )
    bound = loop.transport.start()
    return "{}:{}".format(*bound) if bound else ""


def _say(report: Report) -> None:
    """A peer's own log: one line per report."""
    fields = " ".join(f"{name}={value}" for name, value in report.fields.items())
    print(f"{time.strftime('%H:%M:%S')} {report.kind} {fields}", flush=True)


def set_up_jax(cache_dir: Path) -> None:
    """Before the first computation: results are waited for on the compute thread, compilations are kept."""
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    jax.config.update("jax_compilation_cache_dir", str(cache_dir))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
