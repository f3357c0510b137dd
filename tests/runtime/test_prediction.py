"""The prediction of the step time is made beside the coordinator, never by its loop."""

import math
import os
import queue
from dataclasses import replace
from types import SimpleNamespace

import pytest

from jaxdt.build import RunStart, build_coordinator
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import EndedReport, PredictionReport, StepReport, ViewReport
from jaxdt.run.config import default_plan, parse
from jaxdt.run.network import Device, Host, uniform
from jaxdt.runtime.reporting import counts, prediction
from jaxdt.runtime.reporting import journal as journal_module
from jaxdt.runtime.reporting.counts import MembershipChanges
from jaxdt.runtime.reporting.journal import Journal
from jaxdt.runtime.reporting.prediction import Prediction, PredictionRequest, doubt, predict
from jaxdt.runtime.storage.durable import FileStore
from jaxdt.testing.cases import draw_case

CASE = draw_case(0)
SECONDS = {peer: dict(seconds) for peer, seconds in CASE.seconds.items()}


def request(**changes):
    fields = dict(
        config=CASE.config,
        plan=CASE.plan,
        network=None,
        seconds=SECONDS,
        host_of={peer: f"host{peer}" for peer in CASE.plan.peers},
        cores={f"host{peer}": math.inf for peer in CASE.plan.peers},
        persist_s=0.0,
    )
    return PredictionRequest(**fields | changes)


def test_the_child_process_predicts_what_this_one_would():
    reports = queue.Queue()
    asked = Prediction()
    asked.start(request(), reports.put)
    found = reports.get(timeout=60)
    assert found == predict(request()) and found.step_s and found.problem is None
    assert asked.end(60) == found


def test_a_prediction_that_fails_says_why():
    reports = queue.Queue()
    asked = Prediction()
    asked.start(request(seconds={}), reports.put)
    found = reports.get(timeout=60)
    assert found.step_s is None and "Error" in found.problem
    asked.end(60)


def test_a_prediction_that_is_given_up_reports_nothing():
    reports = queue.Queue()
    asked = Prediction()
    asked.start(request(), reports.put)
    assert asked.end(0.0) is None
    asked._thread.join(60)
    assert not asked._thread.is_alive() and reports.empty()


def test_the_first_view_does_not_wait_for_it(tmp_path, monkeypatch):
    """At the first view the loop only starts the prediction; a run that ends first has a summary without it."""

    class Started(Prediction):
        def start(self, request, post):
            requests.append(request)

    def long(*arguments):
        raise AssertionError("a prediction on the coordinator's loop")

    requests = []
    monkeypatch.setattr(prediction, "predict_step_s", long)
    monkeypatch.setattr(journal_module, "Prediction", Started)
    start = RunStart("r")
    machine = build_coordinator(CASE.config, CASE.plan, start)
    machine.profiles.update(SECONDS)
    machine.devices.update(dict.fromkeys(SECONDS, "cpu"))
    members = {peer: CASE.plan.seat(peer)[0] for peer in CASE.plan.peers}
    machine.roster.adopt(machine.roster.first_view(1, ev.Checkpoint()))
    job = SimpleNamespace(run_dir=tmp_path, config=CASE.config, plan=CASE.plan, network=None, stalls=None, run="r")
    journal = Journal(job, machine, FileStore(tmp_path), live=False)
    journal.post = journal.report
    with journal:
        journal.report(ViewReport(1, members, []))
        assert [asked.seconds for asked in requests] == [SECONDS]
        journal.report(EndedReport(130, "interrupted"))
        journal.finish(0.25)
    summary = (tmp_path / "summary.json").read_text()
    assert '"step_s_predicted": null' in summary and '"loop_busy_s_max": 0.25' in summary


def test_without_emulated_links_it_is_made_on_the_measured_ones(tmp_path):
    """The addresses are those of different hosts; the network says that their devices share two cores."""
    peers = sorted(CASE.plan.peers)
    devices = tuple(Device(f"d{peer}", host="one") for peer in range(max(peers) + 1))
    measured = replace(uniform(len(devices), 0.25, 0.5), devices=devices, hosts=(Host("one", cores=2),))
    machine = build_coordinator(CASE.config, CASE.plan, RunStart("r"))
    machine.profiles.update(SECONDS)
    view = machine.roster.first_view(1, ev.Checkpoint())
    members = tuple(replace(member, address=f"10.0.0.{member.peer}:7700") for member in view.members)
    machine.roster.adopt(replace(view, members=members))
    job = SimpleNamespace(run_dir=tmp_path, config=CASE.config, plan=CASE.plan, network=None, stalls=None, run="r")
    durable = SimpleNamespace(put_s=0.01)
    asked = Journal(job, machine, durable, live=False, measured=measured)._prediction_request()
    assert asked.network == measured
    assert asked.host_of == dict.fromkeys(peers, "one") and asked.cores["one"] == 2
    unshared = Journal(job, machine, durable, live=False, measured=uniform(len(devices)))._prediction_request()
    assert set(unshared.cores.values()) == {math.inf} and len(set(unshared.host_of.values())) == len(peers)
    emulated = SimpleNamespace(**vars(job) | {"network": uniform(len(devices))})
    assert Journal(emulated, machine, durable, live=False, measured=measured)._prediction_request().network != measured


@pytest.mark.parametrize("report", [PredictionReport(1.5, 2.0), PredictionReport(problem="killed")])
def test_a_prediction_is_shown(report, tmp_path, capsys):
    job = SimpleNamespace(run_dir=tmp_path, config=CASE.config, plan=CASE.plan, network=None, stalls=None, run="r")
    Journal(job, SimpleNamespace(n_committed=0), FileStore(tmp_path), live=False).report(report)
    shown = capsys.readouterr().out
    assert shown == ("predicted step time 1.500 s\n" if report.step_s else "no prediction of the step time: killed\n")


def test_a_prediction_where_samples_grow_says_for_which_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Prediction, "start", lambda *arguments: None)
    monkeypatch.setattr(Prediction, "end", lambda *arguments: PredictionReport(1.5))
    monkeypatch.setattr(journal_module, "doubt", lambda *arguments: "")
    full = CASE.config.model.max_len
    config = replace(CASE.config, data=replace(CASE.config.data, seq_start=full // 4, seq_growth_steps=100))
    machine = build_coordinator(config, CASE.plan, RunStart("r"))
    job = SimpleNamespace(run_dir=tmp_path, config=config, plan=CASE.plan, network=None, stalls=None, run="r")
    with Journal(job, machine, FileStore(tmp_path), live=False) as journal:
        journal.report(PredictionReport(1.5))
        for step in range(4):
            journal.report(StepReport(step, 5.0, 1.0, 10.0, 0.0, "apply"))
        journal.report(EndedReport(0, "done"))
        journal.finish(0.25)
    out = capsys.readouterr().out
    assert f"predicted step time 1.500 s for samples of {full} tokens\n" in out
    assert f"(samples had at most {full // 4} tokens, the prediction is for {full})\n" in out


def test_steps_with_an_average_now_and_then_are_measured_by_whole_periods(tmp_path, monkeypatch, capsys):
    """As they are predicted. An average in every fourth row takes a second; evaluations are left out with their
    periods."""
    monkeypatch.setattr(Prediction, "start", lambda *arguments: None)
    monkeypatch.setattr(Prediction, "end", lambda *arguments: PredictionReport(0.35))
    monkeypatch.setattr(journal_module, "doubt", lambda *arguments: "")
    fields = dict(
        model=dict(preset="debug", tied_head=False),
        plan=dict(pipelines=2, microbatches=2),
        sync=dict(kind="groups", groups=dict(every_steps=4)),
    )
    config = parse(fields)
    plan = default_plan(config)
    machine = build_coordinator(config, plan, RunStart("r"))
    job = SimpleNamespace(run_dir=tmp_path, config=config, plan=plan, network=None, stalls=None, run="r")
    with Journal(job, machine, FileStore(tmp_path), live=False) as journal:
        journal.report(PredictionReport(0.35))
        for row in range(13):
            measures = dict(eval_loss=5.0) if row == 5 else {}
            step_s = 1.1 if row and row % 4 == 0 else 0.1
            journal.report(StepReport(row, 5.0, 5.0 if measures else step_s, 10.0, 0.0, "apply", **measures))
        journal.report(EndedReport(0, "done"))
        journal.finish(0.25)
    out = capsys.readouterr().out
    assert "predicted step time 0.350 s, the mean over a period of 4 steps\n" in out
    assert "step           0.350 s measured, 0.350 s predicted" in out


def test_a_prediction_says_when_it_may_be_far_off():
    assert doubt(2, 4, 4, 1.0, 0.2, False) == ""
    line = "2 peers and the coordinator share 2 cores: of 360 runs like that the worst was 31% off"
    assert doubt(2, 2, 2, 0.1, 0.2, False) == line
    assert doubt(4, 2, 2, 0.1, 0.2, False) == "4 peers share 2 cores: of 360 runs like that the worst was 31% off"
    assert doubt(2, 4, 4, 2.5, 0.2, False) == "other programs used 2.5 of the 4 cores meanwhile"
    assert doubt(4, 2, 2, 0.5, 0.4, True) == "other programs used 0.5 of the 2 cores meanwhile"


def test_a_prediction_that_is_further_off_than_any_measured_one_names_no_band():
    further = "further off than the worst of 360 runs, 31%, as where a machine is slower"
    before = f"{further} before step 1, while stages are timed, than later"
    assert doubt(2, 4, 4, 0.1, 0.63, False) == before
    assert doubt(4, 2, 2, 0.1, 0.63, False) == f"4 peers share 2 cores: {before}"
    assert doubt(2, 4, 4, 0.1, -0.4, False) == f"{further} in the steps than before, when stages are timed"
    assert doubt(4, 2, 2, 0.1, -0.4, True) == ""


def test_programs_on_the_cores_that_a_quota_leaves_idle_are_no_reason():
    """A quota of half a core on two CPUs: others may use 1.5 of them without taking anything from the run."""
    shared = "2 peers share 0.5 cores: of 360 runs like that the worst was 31% off"
    assert doubt(2, 2, 0.5, 1.4, 0.2, False) == shared
    assert doubt(2, 2, 0.5, 1.6, 0.2, False) == "other programs used 1.6 of the 2 cores meanwhile"


def test_idle_time_is_that_of_the_cpus_of_the_mask(monkeypatch):
    class Stat:
        def __init__(self, path):
            assert path == "/proc/stat"

        def read_text(self):
            rows = ["cpu 1 1 1 900 90 0", *(f"cpu{cpu} 1 1 1 {cpu}00 {cpu} 0" for cpu in (1, 2, 3)), "intr 5"]
            return "\n".join(rows)

    monkeypatch.setattr(counts, "Path", Stat)
    monkeypatch.setattr(counts, "allowed_cpus", lambda: [1, 3])
    assert counts.idle_s() == pytest.approx(404 / os.sysconf("SC_CLK_TCK"))


def test_what_the_run_uses_itself_is_not_what_others_use(monkeypatch):
    """Peer 1 is killed after 6 s of processor time and started again; the coordinator's process uses 1 s."""
    idle_s, own_s = iter((1000.0, 1010.0)), iter((5.0, 6.0))
    monkeypatch.setattr(counts, "idle_s", lambda: next(idle_s))
    monkeypatch.setattr(counts, "_own_s", lambda: next(own_s))
    monkeypatch.setattr(counts, "allowed_cpus", lambda: [4, 5, 6, 7])
    use = counts.ProcessorUse()
    for peer, cpu_s in ((0, 4.0), (1, 6.0), (0, 9.0), (1, 2.0)):
        use.counted(peer, {"cpu_s": cpu_s})
    assert use.others_cores(10.0) == pytest.approx((40.0 - 10.0 - 1.0 - 9.0 - 6.0 - 2.0) / 10.0)


def test_a_system_that_does_not_count_idle_time_blames_nobody(monkeypatch):
    def idle_s():
        raise FileNotFoundError("/proc/stat")

    monkeypatch.setattr(counts, "idle_s", idle_s)
    assert counts.ProcessorUse().others_cores(10.0) == 0.0


@pytest.mark.parametrize(
    ("views", "text"),
    [
        ([{0: 0, 1: 1}, {0: 0, 1: 1}], ""),
        ([{0: 0, 1: 1}, {0: 0}, {0: 0, 2: 1}], "1 peer gone, 1 joined"),
        ([{0: 0, 1: 1}, {0: 0}, {0: 0, 1: 1}], "1 peer gone, 1 joined"),
        ([{0: 0, 1: 1, 2: 1}, {0: 0, 1: 1}, {0: 0, 1: 1, 2: 0}], "1 peer moved to another stage"),
        ([{0: 0, 1: 1}, {0: 1, 1: 1}, {0: 1, 1: 1, 2: 0, 3: 0}], "2 peers joined, 1 moved to another stage"),
    ],
)
def test_it_is_known_how_the_members_have_changed(views, text):
    changes = MembershipChanges()
    for members in views:
        changes.view(members)
    assert changes.text == text


def test_the_summary_says_that_the_prediction_is_of_other_members(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Prediction, "start", lambda *arguments: None)
    monkeypatch.setattr(Prediction, "end", lambda *arguments: PredictionReport(1.5, 2.0))
    monkeypatch.setattr(journal_module, "doubt", lambda *arguments: "the host is busy")
    machine = build_coordinator(CASE.config, CASE.plan, RunStart("r"))
    machine.devices.update(dict.fromkeys(SECONDS, "cpu"))
    machine.roster.adopt(machine.roster.first_view(1, ev.Checkpoint()))
    job = SimpleNamespace(run_dir=tmp_path, config=CASE.config, plan=CASE.plan, network=None, stalls=None, run="r")
    members = {peer: CASE.plan.seat(peer)[0] for peer in CASE.plan.peers}
    lost = max(members)
    with Journal(job, machine, FileStore(tmp_path), live=False) as journal:
        journal.post = journal.report
        journal.report(ViewReport(1, members, []))
        journal.report(ViewReport(2, {peer: stage for peer, stage in members.items() if peer != lost}, []))
        for step in range(4):
            journal.report(StepReport(step, 5.0, 1.0, 10.0, 0.0, "apply"))
        journal.report(EndedReport(0, "done"))
        journal.finish(0.25)
    first, second = "1 peer gone: the prediction is of the first plan", "the host is busy"
    indent = " " * 15
    assert f"1.500 s predicted (+50.0 %)\n{indent}({first})\n{indent}({second})\n" in capsys.readouterr().out
    assert f'"prediction_doubt": "{first}; {second}"' in (tmp_path / "summary.json").read_text()
