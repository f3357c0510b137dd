"""A new wiring and a new sync cost one module and one table entry: here is one of each, defined in this file alone."""

import subprocess
import sys
from pathlib import Path

import pytest
from report_fields import report_fields

from jaxdt import build
from jaxdt.build import RunStart, build_coordinator, build_peers
from jaxdt.membership.commit import TwoPhaseCommit
from jaxdt.protocol import events as ev
from jaxdt.protocol.round_id import RoundId, RoundKind
from jaxdt.run.config import RunConfig, default_plan, parse
from jaxdt.run.errors import BadInput
from jaxdt.run.network import Link
from jaxdt.run.work import Work, WorkKind
from jaxdt.sim.predict import Conditions, simulate
from jaxdt.sync.base import SYNCS, SyncEntry
from jaxdt.wiring.base import WIRINGS, PeerLoad, WiringEntry

ROOT = Path(__file__).resolve().parents[1]


class OneByOne:
    """A wiring of one pipeline: a microbatch goes forward through all stages and back before the next one begins."""

    READS = frozenset({ev.ViewChanged, ev.Updated, ev.Boundary, ev.Ran})
    queue = (0, False)

    def __init__(self, setup):
        self.plan, self.peer, self.stage = setup.plan, setup.peer, setup.stage
        self.n_steps = setup.config.train.steps
        self.view, self.step = None, None

    def handle(self, now_s, event):
        match event:
            case ev.ViewChanged(view):
                self.view = view
            case ev.Updated(_, version) if version < self.n_steps:
                self.step = version
                return self.run(WorkKind.FORWARD, 0) if self.stage == 0 else []
            case ev.Received(_, ev.Boundary(ev.Key(kind, _, _, m))):
                return self.run(WorkKind.BACKWARD if kind == "grad" or self.is_last else WorkKind.FORWARD, m)
            case ev.Ran(Work(_, kind, m), _, _, values) if kind in (WorkKind.FORWARD, WorkKind.BACKWARD):
                return self.finished(kind, m, values)
        return []

    @property
    def is_last(self):
        return self.stage == self.plan.n_stages - 1

    def run(self, kind, m):
        return [ev.Run(Work(self.stage, kind, m, self.peer, self.step))]

    def finished(self, kind, m, values):
        if kind == WorkKind.FORWARD and not self.is_last:
            key = ev.Key("act", self.step, self.stage + 1, m)
            return [ev.Send(self.view.stage_peers(self.stage + 1)[0], ev.Boundary(key), 8)]
        if kind == WorkKind.FORWARD:
            return self.run(WorkKind.BACKWARD, m)
        loss_sum = values.get("loss_sum") if self.is_last else None
        actions = [ev.Accumulated(self.step, self.stage, m, int(values["n_samples"]), loss_sum)]
        is_over = m == self.plan.n_microbatches - 1
        if self.stage:
            actions.append(
                ev.Send(
                    self.view.stage_peers(self.stage - 1)[0], ev.Boundary(ev.Key("grad", self.step, self.stage, m)), 8
                )
            )
        elif not is_over:
            actions += self.run(WorkKind.FORWARD, m + 1)
        return [*actions, ev.Drained(self.step)] if is_over else actions

    def cancel_run(self):
        raise NotImplementedError


WIRING = WiringEntry(
    build=lambda setup, n_under_way: [OneByOne(setup)],
    check=lambda config, plan: "" if plan.n_pipelines == 1 else "plan.pipelines: got more than one, one_by_one has 1",
    peer_load=lambda config, plan, stage, pipeline: PeerLoad(1, plan.n_microbatches),
    follows_plan=True,
    may_change_stages=False,
)


class Alone:
    """A sync of stages without replicas: a peer's own gradient is the stage's."""

    READS = frozenset({ev.ViewChanged, ev.Accumulated, ev.Drained, ev.Ran, ev.Committed})

    def __init__(self, setup):
        self.peer, self.stage = setup.peer, setup.stage
        self.n_samples, self.view = 0, None

    def handle(self, now_s, event):
        match event:
            case ev.ViewChanged(view):
                self.view = view
                return [ev.Updated(self.stage, view.n_committed)]
            case ev.Accumulated():
                self.n_samples += event.n_samples
            case ev.Drained(step):
                return [ev.Run(Work(self.stage, WorkKind.GATHER, None, self.peer, step))]
            case ev.Ran(Work(_, "G", _, _, step)):
                result = ev.GroupResult(RoundId(RoundKind.GRADIENT, self.stage, step, view=1), 0, 1.0, self.n_samples)
                return [ev.Send(-1, ev.Prepared(step, self.view.by_peer[self.peer].admission, (result,)))]
            case ev.Received(_, ev.Committed(record)):
                return [ev.Run(Work(self.stage, WorkKind.UPDATE, None, self.peer, record.step), 1.0)]
            case ev.Ran(Work(_, "U", _, _, step)):
                self.n_samples = 0
                return [ev.Free(step), ev.Updated(self.stage, step + 1)]
        return []


SYNC = SyncEntry(
    build=Alone,
    build_agreement=lambda coordinator, config, plan: TwoPhaseCommit(coordinator),
    check=lambda config, plan: "" if plan.n_pipelines == 1 else "plan.pipelines: got more than one, alone has 1",
)


def entry_module(name, entry):
    """A module of the table: whatever the name leads to needs an ENTRY."""
    module = type(sys)(name)
    module.ENTRY = entry
    return module


@pytest.fixture
def toys(monkeypatch):
    """The two kinds stand in the tables."""
    for table, kind, entry in ((WIRINGS, "one_by_one", WIRING), (SYNCS, "alone", SYNC)):
        monkeypatch.setitem(table, kind, f"toy_{kind}")
        monkeypatch.setitem(sys.modules, f"toy_{kind}", entry_module(f"toy_{kind}", entry))


def make_config(wiring="one_by_one", sync="alone", **plan) -> RunConfig:
    return parse(
        {
            "model": {"preset": "debug"},
            "plan": {"stages": 2, "microbatches": 3, **plan},
            "train": {"steps": 3, "microbatch_size": 2},
            "wiring": {"kind": wiring},
            "sync": {"kind": sync},
        },
        vocab_size=64,
    )


def outcome_of(config):
    plan = default_plan(config)
    seconds = dict.fromkeys(plan.peers, {"F": 1.0, "B": 2.0, "E": 1.0, "G": 0.0, "U": 0.0})
    hosts = {peer: f"h{peer}" for peer in plan.peers}
    conditions = Conditions(seconds, lambda src, dst: Link(), hosts, dict.fromkeys(hosts.values(), 1))
    return simulate(config, plan, conditions)


@pytest.mark.parametrize(("wiring", "sync"), [("one_by_one", "alone"), ("one_by_one", "allreduce"), ("fixed", "alone")])
def test_a_toy_of_one_file_runs_in_the_simulator_alone_and_with_what_exists(toys, wiring, sync):
    outcome = outcome_of(make_config(wiring, sync))
    assert outcome.stopped[-1].code == 0, outcome.stopped
    steps = report_fields(outcome, "step")
    assert [fields["step"] for fields in steps] == [0, 1, 2]
    if wiring == "one_by_one":  # 1 s and 2 s at the first stage, 2 s fused at the last, 3 times, one after the other
        assert steps[-1]["step_s"] == pytest.approx(3 * (1 + 2 + 2))


def test_a_toy_of_one_file_runs_in_one_process(toys):
    """All machines in one loop, without simulator, links or clock."""
    config = make_config()
    plan = default_plan(config)
    machines = build_peers(config, plan, RunStart("r")) | {-1: build_coordinator(config, plan, RunStart("r"))}
    assert [step for step in steps_of(machines) if step < 3] == [0, 1, 2]


def steps_of(machines):
    """The committed steps of machines whose messages arrive at once and whose Work takes no time."""
    from jaxdt.protocol.reports import StepReport

    events = [(peer, ev.Started()) for peer in machines] + [(peer, ev.Ready({})) for peer in machines if peer >= 0]
    steps = []
    for peer, event in events:  # grows while it is read
        for action in machines[peer].handle(0.0, event):
            match action:
                case ev.Send(dst, body):
                    events.append((dst, ev.Received(action.header, body)))
                case ev.Persist(name):
                    events.append((peer, ev.Persisted(name)))
                case ev.Run(work):
                    values = {"n_samples": 2, "loss_sum": 1.0} if work.kind == WorkKind.BACKWARD else {}
                    events.append((peer, ev.Ran(work, 0.0, 0.0, values)))
                case StepReport():
                    steps.append(action.step)
                case ev.Stop():
                    return steps
        if len(steps) == 3:
            return steps
    return steps


def test_what_makes_no_sense_with_a_kind_is_refused_with_its_reason(toys):
    config = make_config(pipelines=2)
    with pytest.raises(BadInput, match="one_by_one has 1"):
        build.check(config, default_plan(config))


@pytest.mark.parametrize(("field", "kind"), [("wiring", "sworm"), ("sync", "allredoce")])
def test_a_kind_that_does_not_exist_is_refused(field, kind):
    config = make_config(**{"wiring": "fixed", "sync": "allreduce", field: kind})
    with pytest.raises(BadInput, match=f"{field}.kind: got '{kind}', expected one of .*did you mean"):
        build.check(config, default_plan(config))


BLOCKED = """
import sys
import pytest
sys.modules["jaxdt.wiring.{other}"] = None
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "{tests}"]))
"""


@pytest.mark.parametrize(
    ("other", "tests"),
    [("swarm", "tests/wiring/test_fixed.py"), ("fixed", "tests/wiring/test_router.py")],
    ids=["fixed without swarm", "swarm without fixed"],
)
def test_no_kind_needs_another_one(other, tests):
    code = BLOCKED.format(other=other, tests=tests)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout


RUN_BLOCKED = """
import sys
sys.modules["jaxdt.wiring.{other}"] = None
from jaxdt.build import RunStart, build_coordinator, build_peers
from jaxdt.testing.case import finding
from jaxdt.testing.cases import draw_case
for seed in range(3):
    assert not finding(draw_case(seed, "{kind}"))
"""


@pytest.mark.parametrize(("kind", "other"), [("fixed", "swarm"), ("swarm", "fixed")])
def test_runs_under_faults_need_one_kind_only(kind, other):
    code = RUN_BLOCKED.format(kind=kind, other=other)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
