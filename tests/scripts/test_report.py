"""Traces as pictures: the Perfetto timeline and report.png, from a simulated run."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from forks import run_scripts
from report_fields import report_fields

from jaxdt.cli import plots, run_comparison
from jaxdt.protocol import events as ev
from jaxdt.protocol.perfetto import chrome
from jaxdt.protocol.trace import Trace, read
from jaxdt.run import config as configs
from jaxdt.run import serialize
from jaxdt.run.network import Link
from jaxdt.run.plan import to_json
from jaxdt.runtime.reporting.metrics import Metrics
from jaxdt.runtime.run_end import has_steps
from jaxdt.runtime.storage.durable import FileStore, write_json
from jaxdt.sim.predict import Conditions, simulate

FIELDS = {
    "model": {"preset": "debug"},
    "plan": {"stages": 2, "pipelines": 2, "microbatches": 4},
    "train": {"steps": 4, "eval_every_steps": 2},
}


@pytest.fixture(scope="module")
def simulated():
    return simulation_of("none")


def simulation_of(codec: str):
    """(plan, records, metrics) of a run of two stages."""
    config = configs.parse(FIELDS)
    plan = replace(configs.default_plan(config), codec=(codec,))
    seconds = {peer: {"F": 0.1, "B": 0.2, "E": 0.1, "G": 0.01, "U": 0.01} for peer in plan.peers}
    conditions = Conditions(seconds, lambda a, b: Link(0.05, 0.1), dict.fromkeys(plan.peers, "h"), {"h": 2})
    lines: list[str] = []
    outcome = simulate(config, plan, conditions, Trace(lines.append))
    return plan, read(lines), report_fields(outcome, "step")


def test_the_timeline_has_a_slice_per_work_and_an_arrow_per_message(simulated):
    plan, records, _ = simulated
    events = json.loads(json.dumps(chrome(records, {peer: plan.seat(peer)[0] for peer in plan.peers})))["traceEvents"]
    runs = [record for record in records if record["what"] == "run"]
    sends = [record for record in records if record["what"] == "send"]
    compute = [event for event in events if event["ph"] == "X" and event["tid"] == 2]
    assert len(compute) == len(runs)
    assert sum(event["dur"] for event in compute) == pytest.approx(1e6 * sum(record["s"] for record in runs))
    starts = {event["id"]: event["ts"] for event in events if event["ph"] == "s"}
    ends = {event["id"]: event["ts"] for event in events if event["ph"] == "f"}
    assert len(starts) == len(ends) == len(sends)
    assert all(starts[arrow] < ends[arrow] for arrow in starts)


def test_slices_of_one_send_track_do_not_overlap(simulated):
    _, records, _ = simulated
    tracks: dict = {}
    for event in chrome(records, {})["traceEvents"]:
        if event["ph"] == "X" and event["tid"] >= 3:
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        spans.sort()
        assert all(end <= start + 1e-2 for (_, end), (start, _) in zip(spans[:-1], spans[1:], strict=True))


def test_the_report_is_drawn(simulated, tmp_path):
    _, records, metrics = simulated
    codecs = {"0->1": "int8", "1->0": "none"}
    summary = {"step_s_predicted": 1.0, "step_s_predicted_uncompressed": 3.0, "codec_on_links": codecs}
    plots.report(tmp_path / "report.png", metrics, records, summary)
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_what_was_not_recorded_has_no_panel(simulated, tmp_path, monkeypatch):
    """A run that was resumed after the steps whose Work is recorded."""
    drawn = []
    monkeypatch.setattr(plots.Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    _, records, metrics = simulated
    plots.report(tmp_path / "report.png", metrics, records, {})
    plots.report(tmp_path / "report.png", metrics, [], {"resumed_at": 2, "resumes": [1, 2], "step_s_predicted": 1.0})
    titles = [[axes.get_title().partition(",")[0].partition(" (")[0] for axes in figure.axes] for figure in drawn]
    assert titles == [["Loss", "Pipeline", "Bytes per link in the recorded steps", "Step time"], ["Loss", "Step time"]]
    for axes in drawn[1].axes:
        assert "resumed at steps 1, 2" in [text.get_text() for text in axes.get_legend().get_texts()]
    (predicted,) = [line for line in drawn[1].axes[1].lines if line.get_label() == "predicted 1.000 s"]
    assert list(predicted.get_xdata()) == [3, 4], "the prediction is of the steps since then, counted from 1"


def test_a_run_without_a_step_has_no_picture(simulated, tmp_path):
    plan, _, _ = simulated
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "summary.json").write_text('{"clock_offset_s": {}}')
    (tmp_path / "plan.json").write_text(json.dumps(to_json(plan)))
    script = Path(__file__).resolve().parents[2] / "scripts" / "report.py"
    ((code, _, error),) = run_scripts([(str(script), f"--run_dir={tmp_path}")], tmp_path)
    assert code == 2 and "is of a run that has done no step" in error and error.count("\n") == 1
    assert not (tmp_path / "report.png").exists()
    assert not has_steps(tmp_path), "the coordinator then does not say how to draw the run"
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    assert has_steps(tmp_path)


def test_a_prediction_that_codecs_do_not_change_is_one_line(simulated):
    for predicted_s, n_lines in ((0.999, 1), (0.5, 2)):
        axes = plots.Figure().subplots()
        plots.step_times(axes, [], predicted_s, 1.0)
        lines = [label for line in axes.lines if (label := line.get_label()).startswith("predicted")]
        assert len(lines) == n_lines
        assert ("the same without codecs" in lines[0]) == (n_lines == 1)


def test_the_picture_names_a_peer_that_left_no_record(simulated):
    axes = plots.Figure().subplots()
    recorded = plots.recorded_bytes([record for record in simulated[1] if record["peer"] != 3])
    plots.link_bytes(axes, recorded, {}, "Bytes per link in the recorded steps")
    assert axes.get_title() == "Bytes per link in the recorded steps (without what p3 sent)"


def view_record(members):
    fields = {"view": 1, "members": members, "joining": []}
    return {"what": "report", "peer": -1, "t": 0.5, "kind": "view", "fields": fields}


def test_the_trace_of_a_newcomer_is_merged_and_one_of_an_earlier_run_is_not(simulated, tmp_path):
    plan, records, metrics = simulated
    views = [{0: 0, 1: 1, 2: 0, 3: 1}, {0: 0, 1: 1, 2: 0, 4: 1}]
    said = [view_record(view) for view in views]
    traces = {"coordinator": said} | {f"peer_{i}": [r | {"peer": i} for r in records if r["peer"] == 1] for i in (4, 5)}
    (tmp_path / "trace").mkdir()
    for name, lines in traces.items():
        (tmp_path / "trace" / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in metrics))
    (tmp_path / "summary.json").write_text('{"clock_offset_s": {}}')
    (tmp_path / "plan.json").write_text(json.dumps(to_json(plan)))
    script = Path(__file__).resolve().parents[2] / "scripts" / "report.py"
    ((code, _, error),) = run_scripts([(str(script), f"--run_dir={tmp_path}")], tmp_path)
    assert code == 0, error
    peers = {record["peer"] for record in map(json.loads, (tmp_path / "trace.jsonl").read_text().splitlines())}
    assert peers == {-1, 4}
    assert "peer 4 (stage 1)" in (tmp_path / "timeline.json").read_text()


def test_a_run_on_several_hosts_says_which_traces_are_on_others(simulated, tmp_path):
    plan, records, metrics = simulated
    run_dir = tmp_path / "my run/run_dir"
    view = view_record({0: 0, 1: 1, 4: 0})
    traces = {"coordinator": [view], "peer_0": [r for r in records if r["peer"] == 0]}
    (run_dir / "trace").mkdir(parents=True)
    for name, lines in traces.items():
        (run_dir / "trace" / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in metrics))
    (run_dir / "summary.json").write_text('{"clock_offset_s": {}}')
    (run_dir / "plan.json").write_text(json.dumps(to_json(plan)))
    (run_dir.parent / "coordinator.flags").touch()
    write_json(run_dir.parent / "launch.json", {"hosts": "10.0.0.1,10.0.0.2,10.0.0.2,10.0.0.3"})
    members = (ev.Member(1, 1, 1, "10.0.0.4:7"), ev.Member(4, 0, 1, "10.0.0.5:7"))  # peer 1 was started again elsewhere
    FileStore(run_dir / "coordinator").put("view", serialize.write(ev.View(1, 1, 1, members, (1, 1), 4)))
    script = Path(__file__).resolve().parents[2] / "scripts" / "report.py"
    command = [str(script), "--run_dir=my run"]
    ((code, out, error),) = run_scripts([tuple(command)], tmp_path)
    assert code == 0, error
    told = [line.rpartition(" from ")[2] for line in out.splitlines() if line.startswith("not in this report")]
    newcomer = "10.0.0.5, out of trace/ in the newcomer's own --run_dir"
    wanted = {"10.0.0.2": 2, "10.0.0.3": 3, "10.0.0.4": 1, newcomer: 4}
    assert sorted(told) == [f"{host}: 'my run/run_dir/trace/peer_{peer}.jsonl'" for host, peer in wanted.items()]


def test_a_lost_host_and_a_rollback_are_in_the_picture():
    axes = plots.Figure().subplots()
    found = {"lost": [{"peer": 2}, {"peer": 3}, {"peer": 2}], "rollback": [{"to": 6}], "step": [{"tokens_per_s": 9.0}]}
    reports = [(kind, fields) for kind in found for fields in found[kind]]
    records = [
        {"what": "report", "peer": -1, "t": 10.0 + i, "kind": kind, "fields": fields}
        for i, (kind, fields) in enumerate(reports)
    ]
    plots.throughput(axes, records, 10.0)
    assert axes.get_legend_handles_labels()[1] == ["lost: p2, p3", "back to step 6"]
    assert [line.get_xdata()[0] for line in axes.get_lines()[1:]] == [0.0, 1.0, 2.0, 3.0]


def test_one_step_does_not_flatten_the_throughput_of_the_others():
    axes = plots.Figure().subplots()
    rates = [1000.0] * 9 + [300_000.0]
    records = [
        {"what": "report", "kind": "step", "t": float(i), "fields": {"tokens_per_s": rate}}
        for i, rate in enumerate(rates)
    ]
    plots.throughput(axes, records, 0.0)
    assert axes.get_ylim()[1] == 5000.0 and "(1 step above the picture)" in axes.get_title()


def metrics_of(n_steps, every, step_s, unknown=()):
    """Steps of 1000 tokens; the held-out loss after n of them is 10 - n."""
    return [
        {"step": k, "loss": 11.0 - k, "step_s": step_s, "tokens_per_s": 1000 / step_s}
        | ({"step_s": math.nan, "tokens_per_s": math.nan} if k in unknown else {})
        | ({"eval_loss": 9.0 - k} if (k + 1) % every == 0 else {})
        for k in range(n_steps)
    ]


def compared(name, n_steps, every, step_s, bytes_on_links, unknown=(), **summary):
    fields = {
        "codec_on_links": {"0->1": "int8"},
        "tokens_per_s_overall": 900 / step_s,
        "bytes_on_links": bytes_on_links,
    }
    stage_of = {0: 0, 1: 1, 2: 0, 3: 2}
    return run_comparison.run_of(name, fields | summary, metrics_of(n_steps, every, step_s, unknown), stage_of)


def test_runs_are_compared_at_equal_tokens_at_equal_seconds_and_by_kind_of_link():
    """The first one ends after 10,000 tokens and 20 s, the second one after 16,000 and 8 s."""
    links = {"0->1": 3_000_000, "1->0": 1_000_000, "0->2": 2_000_000, "0->3": 500_000, "9->0": 500_000}
    runs = [compared("slow", 10, 1, 2.0, links), compared("fast", 16, 4, 0.5, {"2->0": 56_000_000}, unknown=(2,))]
    head, slow, fast = (re.split(r" {2,}", line) for line in run_comparison.table(runs).splitlines())
    slow, fast = (dict(zip(head, row, strict=True)) for row in (slow, fast))
    assert slow["held out at 10,000 tokens"] == fast["held out at 10,000 tokens"] == "0.0000"
    assert (slow["held out at 8.0 s"], fast["held out at 8.0 s"]) == ("6.0000", "-6.0000")
    assert [run["tokens/s"] for run in (slow, fast)] == ["450", "1800"]
    assert [run["of the first"] for run in (slow, fast)] == ["1.000", "4.000"]
    assert [slow[f"MB {kind}"] for kind in run_comparison.LINK_KINDS] == ["4.000", "2.000", "1.000"]
    assert [fast[f"MB {kind}"] for kind in run_comparison.LINK_KINDS] == ["0.000", "56.000", "0.000"]
    assert fast["bytes a token, of the first"] == "5.000"  # 3,500 against 700


def test_a_resumed_run_is_compared_by_the_steps_since_then_and_says_so():
    runs = [compared("a", 4, 2, 1.0, {"0->2": 4000}), compared("b", 4, 2, 1.0, {"0->2": 4000}, resumed_at=2)]
    assert [run.bytes_per_token for run in runs] == [1.0, 2.0]
    assert run_comparison.table(runs).splitlines()[-1] == (
        "b: tokens/s and bytes are since step 2, at which it was resumed"
    )


def test_runs_without_evaluations_or_steps_are_compared_by_what_they_have():
    runs = [compared("a", 4, 9, 1.0, {}), compared("b", 0, 9, 1.0, {}, tokens_per_s_overall=None)]
    head, one, other = (re.split(r" {2,}", line) for line in run_comparison.table(runs).splitlines())
    assert head[4:6] == ["held out at equal tokens", "held out at equal seconds"]
    assert one[2:6] == ["900", "1.000", "-", "-"]
    assert other[2:6] == ["-", "-", "-", "-"]


def test_the_picture_of_a_comparison_has_losses_against_tokens_and_time(tmp_path, monkeypatch):
    runs = [compared("a", 8, 2, 2.0, {"0->1": 4000}), compared("b", 8, 4, 0.5, {"0->2": 9000})]
    figures = []
    monkeypatch.setattr(plots.Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    plots.comparison(tmp_path / "comparison.png", runs)
    tokens, seconds, traffic, times = figures[0].axes
    assert [axes.get_xlabel() for axes in (tokens, seconds, times)] == ["tokens", "seconds", "seconds"]
    assert list(tokens.lines[3].get_xdata()) == [4000.0, 8000.0]  # the second run's evaluations
    assert list(seconds.lines[3].get_xdata()) == [2.0, 4.0]
    assert [bar.get_height() for bar in traffic.patches] == [0.004, 0.0, 0.0, 0.0, 0.009, 0.0]
    assert all(map(legend_is_outside, figures[0].axes))


def test_the_legend_of_a_simulated_step_hides_no_bar(simulated, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plots.Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    parts = {f"{name}_s": 0.1 for name in plots.PARTS}
    plots.simulation(tmp_path / "simulation.png", simulated[1], parts, {0: 0.5})
    assert all(map(legend_is_outside, figures[0].axes[:2]))


def legend_is_outside(axes) -> bool:
    axes.figure.draw_without_rendering()
    return not axes.get_legend().get_window_extent().overlaps(axes.get_window_extent())


def test_metrics_of_an_interrupted_run_are_taken_up_to_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    steps = [{"step": k, "loss": 1.5} for k in range(3)]
    lines = "".join(json.dumps(step) + "\n" for step in steps)
    path.write_text(lines + '{"ste')
    with Metrics(path, 2) as metrics:
        assert list(metrics) == steps[:2] and metrics.n_resumed == 2
    for damage in (b"7\n", b"\xff\x00\n", b'{"step": 5, "loss": 1.0}\n', b'{"step": 3}\n', b'["step"]\n'):
        path.write_bytes(lines.encode() + damage + lines.encode())
        with Metrics(path, 9) as metrics:
            assert list(metrics) == steps
    with Metrics(tmp_path / "new" / "metrics.jsonl", 2) as metrics:
        assert list(metrics) == [] and metrics.n_resumed == 0


def test_a_step_that_is_reported_again_has_one_line(tmp_path):
    """A coordinator that was started again reports its last step, whether or not the one before had written it."""
    steps = [{"step": k, "loss": 1.5} for k in range(4)]
    with Metrics(tmp_path / "metrics.jsonl", 0) as metrics:
        assert all(metrics.add(step) for step in steps[:2])
    for last in (1, 2):
        with Metrics(tmp_path / "metrics.jsonl", last + 1) as metrics:
            assert metrics.add(steps[last]) == (last == 2)
            assert list(metrics) == steps[: last + 1]


def test_metrics_stay_on_the_disk(tmp_path):
    path = tmp_path / "metrics.jsonl"
    steps = [{"step": k, "loss": 1.5} for k in range(9)]
    with Metrics(path, 0) as metrics:
        for step in steps[:5]:
            metrics.add(step)
        metrics.cut(3)
        for step in steps[3:]:
            metrics.add(step)
        assert list(metrics) == steps and metrics.n_resumed == 0
        held = [value for value in vars(metrics).values() if isinstance(value, list | dict)]
        assert not held
    with Metrics(path, 8) as metrics:
        assert metrics.n_resumed == 8
    assert path.read_text() == "".join(json.dumps(step) + "\n" for step in steps[:8])
