"""Failures of all kinds in a fleet of real processes without a common disk, for as long as one likes.

A small model is trained by a coordinator and six peers in two stages, each with a folder of its own. Each kind of
failure comes once, in a drawn order, and then again and again at random moments; some begin before the fleet has
recovered from the one before. At the end all peers are started again and the operator's `stop` ends the run. Half an
hour; --minutes=2 --kind=kill --kind=pause is less, --config.wiring.kind=fixed another run. What must not happen:

  a loss differs by more than 1e-5 from that of one process. Two sums of the same float32 numbers in another order
  differ by 1e-7. The optimizer is SGD with clipped gradients, since AdamW divides a tiny gradient by its own size and
  so doubles such a difference every twenty steps: an undisturbed fleet of this model differed from one process by 2e-5
  after 150 steps with AdamW, and by 1e-7 after 300 steps with SGD
  a rollback that a living process would have made needless (rollback_proof.py), or of which that cannot be told
  a process that ends by itself, or with another exit code than was expected
  a second process of a peer, or a second coordinator, that is not refused
  no committed step for 150 s

The kinds:

  kill                kill -9 of a peer, which is started again
  pause               SIGSTOP of a peer for up to 12 s
  pause_last          kill -9 of all replicas of a stage but one, which is paused until the others wait to join
  pause_stage         SIGSTOP of all replicas of a stage
  kill_coordinator    kill -9 of the coordinator, which is started again
  pause_coordinator   SIGSTOP of the coordinator
  second_peer         the command of a running peer is started once more
  second_coordinator  the same of the coordinator
  replaced            a peer is paused, its command started again, and the first process goes on when the second is in
  full_disk           a peer cannot write any file for 20 to 60 s
  lost_stage          kill -9 of all replicas of a stage, for good; newcomers with empty folders fill it
  drain               SIGTERM of a peer, which is started again
  operator            fleet.py status, pause and resume, drain, checkpoint, evict, one after another
"""

import itertools
import signal
from collections import Counter

import rollback_proof
from processes import Kill, Pause, Played, Trial, has_losses_of_one, loss_difference
from trial_fleets import KILLED, RECOVERED_S, REFUSED, Host, HostFleet, Script

N_STAGES = 2
FIRST_COMPARED = 300
PUT_OUT, NO_SIGNAL = 3, 0
OPERATOR_COMMANDS = ("status", "pause", "drain", "checkpoint", "evict")


# ------------------------------------------------------------------------------------- whom a failure may meet, if any


def one(fleet: HostFleet) -> Host | None:
    """A peer to which nothing else happens now."""
    name = fleet.victim("peer")
    return fleet.host(name) if name else None


def one_of_several(fleet: HostFleet) -> Host | None:
    """The same, if its stage has another one in the run."""
    host = one(fleet)
    stage = fleet.stage_of(host) if host else None
    others = [other for other in fleet.of_stage(stage) if other is not host] if stage is not None else []
    return host if any(is_undisturbed(fleet, other) for other in others) else None


def whole_stage(fleet: HostFleet) -> tuple[int, list[Host]]:
    """A stage, and its hosts if all of them are in the run and nothing happens to them now."""
    stage = fleet.rng.randrange(N_STAGES)
    hosts = fleet.of_stage(stage)
    return stage, hosts if all(is_undisturbed(fleet, host) for host in hosts) else []


def is_undisturbed(fleet: HostFleet, host: Host) -> bool:
    return fleet.is_member(host) and host.name not in fleet.busy


# ----------------------------------------------------------------------------------------------------------- the kinds


def pause_last(fleet: HostFleet) -> Script:
    _, hosts = whole_stage(fleet)
    last = fleet.rng.choice(hosts) if hosts else None
    for host in hosts:
        if host is not last:
            fleet.scripts.go(fleet.leaves(host.name, signal.SIGKILL, fleet.rng.uniform(0.5, 3.0)))
    if last:
        yield from fleet.pauses(last.name, fleet.rng.uniform(8.0, 20.0))


def pause_stage(fleet: HostFleet) -> Script:
    for host in whole_stage(fleet)[1]:
        fleet.scripts.go(fleet.pauses(host.name, fleet.rng.uniform(4.0, 15.0)))
    yield from ()


def second(fleet: HostFleet, host: Host) -> Script:
    """Start a host's command once more; it has to be refused."""
    fleet.happened("second", f"{host}")
    fleet.busy.add(host.name)
    yield from fleet.ends(host.spawn(), {REFUSED})
    fleet.busy.discard(host.name)


def second_peer(fleet: HostFleet) -> Script:
    host = one(fleet)
    if host and fleet.is_member(host):  # of two processes that both are new, either may be let in
        yield from second(fleet, host)


def second_coordinator(fleet: HostFleet) -> Script:
    # Of two that have just begun and have no folder yet, either may be the one that is refused.
    if fleet.victim("coordinator") and fleet.coordinator.process.log.read_text():
        yield from second(fleet, fleet.coordinator)


def replaced(fleet: HostFleet) -> Script:
    if not (host := one_of_several(fleet)):
        return
    first = host.process
    first.popen.send_signal(signal.SIGSTOP)
    first.ends()  # its owner takes it for dead
    first.expected |= {KILLED, REFUSED, PUT_OUT}
    fleet.busy.add(host.name)
    host.start("--listen=127.0.0.1:0")
    fleet.happened("replaced", f"{host}")
    if not (yield from fleet.within(RECOVERED_S, lambda: fleet.is_member(host))):
        fleet.problem(f"{host}: a second process was not let in, its log is {host.process.log}")
    first.popen.send_signal(signal.SIGCONT)
    yield fleet.now_s + 10.0
    first.kill()
    fleet.busy.discard(host.name)


def full_disk(fleet: HostFleet) -> Script:
    stage, hosts = whole_stage(fleet)
    if not fleet.is_whole():
        return
    hosts.sort(key=lambda host: host.peer or 0)
    host = hosts[0] if fleet.rng.random() < 0.7 else fleet.rng.choice(hosts)  # the first one writes checkpoints
    process, seconds = host.process, fleet.rng.uniform(20.0, 60.0)
    process.fill_disk(True)
    process.expected.add(REFUSED)
    names = {other.name for other in hosts}
    fleet.busy |= names  # if all others were gone meanwhile, nothing would be durable, and the run would end
    fleet.happened("full_disk", f"{host}", f", of stage {stage}, for {seconds:.1f} s")
    yield fleet.now_s + seconds
    process.fill_disk(False)
    fleet.busy -= names
    if process.runs:
        process.expected.discard(REFUSED)


def lost_stage(fleet: HostFleet) -> Script:
    stage, hosts = whole_stage(fleet)
    if fleet.is_whole():
        fleet.happened("lost_stage", f"{stage}", f": {', '.join(map(str, hosts))} for good, newcomers come")
        for host in hosts:
            fleet.retire(host)
        for host in [fleet.newcomer() for _ in hosts]:
            fleet.scripts.go(comes(fleet, host, fleet.rng.uniform(0.0, 5.0)))
    yield from ()


def comes(fleet: HostFleet, host: Host, seconds: float) -> Script:
    yield fleet.now_s + seconds
    host.start()


def drain(fleet: HostFleet) -> Script:
    if host := one_of_several(fleet):
        yield from fleet.leaves(host.name, signal.SIGTERM, 0.0)


def operator(fleet: HostFleet) -> Script:
    coordinator, host = fleet.coordinator, one_of_several(fleet)
    if not host or not fleet.victim("coordinator"):
        return
    n_before = sum(what == "operator" for _, what, _ in fleet.played.events)
    command = OPERATOR_COMMANDS[n_before % len(OPERATOR_COMMANDS)]
    words = [str(host.peer)] if command in ("drain", "evict") else []
    fleet.busy.add(coordinator.name)
    fleet.happened("operator", " ".join([command, *words]))
    if words:
        fleet.scripts.go(fleet.leaves(host.name, NO_SIGNAL, 0.0, {0, PUT_OUT}))
    yield from fleet.ends(fleet.ask(command, *words), {0})
    if command == "pause":
        yield fleet.now_s + fleet.rng.uniform(1.0, 6.0)
        yield from fleet.ends(fleet.ask("resume"), {0})
    fleet.busy.discard(coordinator.name)


# -------------------------------------------------------------------------------------------------------- expectations


def has_needed_rollbacks(played: Played) -> str:
    records = [r for r in played.records() if r["what"] == "report"]
    found = rollback_proof.rollbacks(records, played.lives, N_STAGES)
    played.figures["rollbacks"] = [{"step": r.step, "to": r.to, "holders": r.holders} for r in found]
    played.figures["reports"] = dict(sorted(Counter(record["kind"] for record in records).items()))
    return "; ".join(f"needless rollback: {rollback}" for rollback in found if not rollback.was_needed)


def has_no_traceback(played: Played) -> str:
    logs = sorted((played.folder / "logs").iterdir())
    played.figures["processes"] = sum(not log.name.startswith("operator") for log in logs)
    return "; ".join(f"{log} has a traceback" for log in logs if "Traceback" in log.read_text(errors="replace"))


def measures_speed_and_first_losses(played: Played) -> str:
    """The longest time without a step, and the losses of the first steps: figures, no limits."""
    gaps = [b - a for a, b in itertools.pairwise(played.rows_s)]
    played.figures["longest_without_step_s"] = round(max(gaps, default=0.0), 1)
    played.figures[f"loss_difference_first_{FIRST_COMPARED}"] = loss_difference(played, FIRST_COMPARED)[0]
    return ""


FIELDS = """
    model.n_layers=2 model.d_model=32 model.n_heads=2 model.d_ff=64 model.max_len=16 model.tied_head=true data.seq_len=0
    plan.stages=2 plan.pipelines=3 plan.microbatches=6 wiring.kind=swarm sync.slice_bytes=4096 sync.check_every_steps=10
    train.microbatch_size=2 train.checkpoint_every_steps=5 train.eval_every_steps=0
    optim.name=sgd optim.lr=0.1 optim.lr_schedule=constant optim.warmup_steps=0 optim.decay_steps=0 optim.weight_decay=0
"""
TRIAL = Trial(
    config="configs/baseline.py",
    flags=tuple(f"--config.{field}" for field in FIELDS.split()),
    seconds=1800.0,
    begins=3,
    forward_s=0.15,  # so that failures meet Work of all kinds, and 300 steps last for most of the run
    n_hosts=6,
    kinds={
        "kill": Kill("peer", back_s=8.0),
        "pause": Pause("peer", 12.0, 0.5),
        "pause_last": pause_last,
        "pause_stage": pause_stage,
        "kill_coordinator": Kill("coordinator", back_s=8.0, back_least_s=0.5),
        "pause_coordinator": Pause("coordinator", 12.0, 1.0),
        "second_peer": second_peer,
        "second_coordinator": second_coordinator,
        "replaced": replaced,
        "full_disk": full_disk,
        "lost_stage": lost_stage,
        "drain": drain,
        "operator": operator,
    },
    expected=(has_losses_of_one(1e-5), measures_speed_and_first_losses, has_needed_rollbacks, has_no_traceback),
)
