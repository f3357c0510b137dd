"""Advice to replan comes from a search beside the coordinator's loop; whatever the search does, the run goes on.
test_churn.py has a real run that is advised."""

import json
import shlex
import threading
from types import SimpleNamespace

import pytest

from jaxdt.build import RunStart, build_coordinator
from jaxdt.cli import replan_advice
from jaxdt.cli.replan_advice import ReplanSearch, RunToReplan, device_kind, new_folder
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import ReplanReport, ViewReport
from jaxdt.run import network as networks
from jaxdt.run import plan as plans
from jaxdt.run.config import PlanConfig, RunConfig, WiringConfig, default_plan, parse
from jaxdt.run.errors import BadInput
from jaxdt.run.model import gpt_config
from jaxdt.run.profile import Profile, from_flops, stage_seconds
from jaxdt.runtime.reporting.journal import Journal
from jaxdt.runtime.reporting.replan_advice import NO_NETWORK, ReplanAdvice
from jaxdt.runtime.storage.durable import FileStore

CONFIG = RunConfig(
    gpt_config("debug", n_layers=4), PlanConfig(2, 2, microbatches=8), wiring=WiringConfig(replan="advise")
)
PLAN = default_plan(CONFIG)  # pipelines 0 - 1 and 2 - 3
PROFILE = from_flops(CONFIG.model, 1, {"": 1e9}, 0.5)
SECONDS = {peer: stage_seconds(PROFILE, "", *PLAN.stages[PLAN.seat(peer)[0]]) for peer in PLAN.peers}
FOUND = ReplanReport([0, 1, 2], 2.0, 1.0, 3.0, "do it")


class FakeSearch:
    """A search that ends when it is told to."""

    def __init__(self, present, outcome=FOUND):
        self.present = present
        self.outcome = outcome
        self.may_end = threading.Event()
        self.has_ended = threading.Event()
        self.is_cancelled = False

    def run(self):
        self.may_end.wait(10)
        self.has_ended.set()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    def cancel(self):
        self.is_cancelled = True
        self.may_end.set()


class Planner:
    """Makes fake searches, and holds what is posted to the loop."""

    def __init__(self, *outcomes):
        self.outcomes = list(outcomes)
        self.searches = []
        self.posted = []
        self.has_posted = threading.Event()

    def start(self, present, seconds):
        assert seconds == SECONDS
        self.searches.append(FakeSearch(present, *self.outcomes[:1]))
        del self.outcomes[:1]
        return self.searches[-1]

    def post(self, advised):
        self.posted.append(advised.report)
        self.has_posted.set()

    def finish(self):
        self.searches[-1].may_end.set()
        assert self.has_posted.wait(10)


def told(advice, planner, *changes):
    for members in changes:
        advice.members(members, SECONDS, planner.post)


def test_a_search_begins_when_a_member_has_left_and_its_result_is_told():
    planner = Planner()
    advice = ReplanAdvice(PLAN, planner.start)
    told(advice, planner, range(4))
    assert planner.searches == []
    told(advice, planner, range(3), range(3))
    assert [search.present for search in planner.searches] == [{0, 1, 2}]
    assert planner.posted == []  # the caller does not wait for the search
    planner.finish()
    assert planner.posted == [FOUND]


@pytest.mark.parametrize("members", [[0, 1], range(4)])
def test_a_search_is_given_up_when_members_change_again(members):
    planner = Planner()
    advice = ReplanAdvice(PLAN, planner.start)
    told(advice, planner, range(4), range(3), members)
    first = planner.searches[0]
    assert first.is_cancelled and first.has_ended.wait(10)
    assert len(planner.searches) == (1 if len(members) == 4 else 2)
    if len(planner.searches) == 2:
        planner.finish()
    assert planner.posted == [FOUND] * (len(planner.searches) - 1)


@pytest.mark.parametrize(("error", "reason"), [(BadInput("no plan"), "no plan"), (RuntimeError(), "RuntimeError")])
def test_a_search_that_fails_says_why(error, reason):
    planner = Planner(error)
    told(ReplanAdvice(PLAN, planner.start), planner, range(4), range(3))
    planner.finish()
    assert planner.posted == [ReplanReport([0, 1, 2], problem=reason)]


def test_without_a_network_that_is_said_once_at_the_start():
    planner = Planner()
    told(ReplanAdvice(PLAN, None), planner, range(4), range(3), range(2))
    assert planner.posted == [ReplanReport([], problem=NO_NETWORK)]
    assert "\n" not in planner.posted[0].text


def test_newcomers_are_not_in_the_network():
    planner = Planner()
    told(ReplanAdvice(PLAN, planner.start), planner, range(4), [0, 1, 2, 7])
    assert planner.searches == []
    assert "which devices the newcomers 7 are" in planner.posted[0].text


# ------------------------------------------------------------------------------------- journal and status of the fleet


def journal(tmp_path, capsys, config):
    planner = Planner()
    machine = build_coordinator(config, PLAN, RunStart("r"))
    machine.profiles.update(SECONDS)
    job = SimpleNamespace(run_dir=tmp_path, config=config, plan=PLAN, network=None, run="r")
    made = Journal(job, machine, FileStore(tmp_path), live=False, replan=planner.start)
    made.post = planner.post
    with made:
        made.report(ViewReport(2, {0: 0, 1: 1, 2: 0}, []))
        if planner.searches:
            planner.finish()
            made.report(planner.posted[0])
    return planner, capsys.readouterr().out


def test_the_journal_starts_searches_and_prints_advice(tmp_path, capsys):
    planner, shown = journal(tmp_path, capsys, CONFIG)
    assert [search.present for search in planner.searches] == [{0, 1, 2}]
    assert shown.splitlines()[-1] == (
        "replan: peers 0, 1, 2 are predicted to do a step in 2.000 s, on another plan in 1.000 s (-50%), after moving "
        "state for 3.0 s: do it"
    )


def test_the_journal_starts_none_unless_asked_to(tmp_path, capsys):
    planner, _ = journal(tmp_path, capsys, RunConfig(CONFIG.model, CONFIG.plan))
    assert planner.searches == []


@pytest.mark.parametrize(
    ("report", "text"),
    [
        (ReplanReport([0], 2.0, 1.9), "and no better plan of them was found"),
        (
            ReplanReport([0], None, 1.9, 0.0, "x"),
            "stands still; another plan of peers 0 is predicted to do a step",
        ),
        (ReplanReport([0], problem="late"), "no advice: late"),
    ],
)
def test_advice_in_words(report, text):
    assert text in report.text


def test_the_status_has_the_advice_for_the_members_that_are_there():
    machine = build_coordinator(CONFIG, PLAN, RunStart("r"))
    machine.handle(0.0, ev.Started("here:1", 1, ""))
    machine.handle(0.0, ev.Persisted("coordinator_term"))
    assert machine.handle(1.0, ev.Advised(FOUND)) == [FOUND]

    def status(members):
        roster = SimpleNamespace(view=None, members=members, candidates=(), coming=())
        progress = SimpleNamespace(n_committed=0, n_steps=1, checkpoint=0)
        return json.loads(machine._operations.accept(ev.OperatorRequest("status"), roster, progress))["replan"]

    assert status({0, 1, 2}) == FOUND.text
    assert status({0, 1}) == ""


# -------------------------------------------------------------------------------------------------------- the planner


def test_the_seconds_of_a_device_follow_from_those_of_its_stage():
    for peer in PLAN.peers:
        kind = device_kind(CONFIG, PLAN, peer, SECONDS)
        profile = Profile(CONFIG.model, 1, {"": kind})
        lo, hi = PLAN.stages[PLAN.seat(peer)[0]]
        found = stage_seconds(profile, "", lo, hi)
        for name in "FBGU":
            assert found[name] == pytest.approx(SECONDS[peer][name]), (peer, name)
    with pytest.raises(BadInput, match="timings of peer 3 are not known"):
        device_kind(CONFIG, PLAN, 3, {})


def run_to_replan(tmp_path, emulates=True):
    network = networks.load("configs/networks/four_cities.json")
    return RunToReplan(CONFIG, PLAN, network, tmp_path, emulates)


def test_a_new_folder_each_time(tmp_path):
    assert [new_folder(tmp_path / "replan").name for _ in range(3)] == ["1", "2", "3"]


def test_what_the_planner_refuses_is_its_own_line(tmp_path):
    search = ReplanSearch(run_to_replan(tmp_path), frozenset({0}), SECONDS)
    with pytest.raises(BadInput, match="1 devices are left for 2 stages"):
        search.run()


def test_a_search_that_takes_too_long_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(replan_advice, "CHILD_S", 0.01)
    with pytest.raises(BadInput, match="longer than"):
        ReplanSearch(run_to_replan(tmp_path), frozenset({0, 1, 2}), SECONDS).run()


def test_a_cancelled_search_ends(tmp_path):
    search = ReplanSearch(run_to_replan(tmp_path), frozenset({0, 1, 2}), SECONDS)
    search.cancel()
    with pytest.raises(BadInput, match="exit code -9"):
        search.run()


def test_devices_of_another_plan_are_refused(tmp_path):
    network = tmp_path / "network.json"
    network.write_text(json.dumps(networks.to_json(networks.uniform(4, 0.1, 1.0))))
    plan = plans.Plan(**vars(PLAN) | {"devices": ("a", "b", "c", "d")})
    job = SimpleNamespace(config=CONFIG, plan=plan, run_dir=tmp_path)
    with pytest.raises(BadInput, match="differ from those of the run's plan"):
        replan_advice.searches(job, str(network), None)
    assert replan_advice.searches(job, None, None) is None


def test_the_config_names_its_choices():
    with pytest.raises(BadInput, match="wiring.replan: got .always., expected one of off, advise"):
        parse({"model": {"preset": "debug"}, "wiring": {"replan": "always"}}, 256)


def test_the_command_that_takes_a_plan_names_the_run_as_it_is_resumed_and_is_quoted(tmp_path):
    job = tmp_path / "b's two"
    run_dir, folder = job / "run_dir", job / "run_dir/replan/1"
    search = ReplanSearch(SimpleNamespace(run_dir=run_dir, emulates=True), frozenset(), {})
    for names_it in (f"--run_dir={run_dir}", f"--emit={job}"):  # the second one on several hosts
        launch = search._command(folder, False).removeprefix("interrupt the run, then ")
        files = [f"--plan={folder}/plan.json", f"--emulate={folder}/after.json"]
        assert shlex.split(launch) == ["python", "scripts/launch.py", names_it, "--resume", *files]
        job.mkdir(exist_ok=True)
        (job / "coordinator.flags").touch()
