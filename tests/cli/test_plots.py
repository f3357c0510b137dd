"""Panels of report.png: what can be read in them."""

import itertools

from matplotlib.figure import Figure

from jaxdt.cli import plots


def panel():
    """As large as in report.png."""
    return Figure(figsize=(7, 4.5), layout="constrained").subplots()


def steps(*seconds):
    return [{"step": step, "loss": 1.0, "step_s": step_s} for step, step_s in enumerate(seconds)]


def test_a_long_step_is_marked_at_the_edge_and_does_not_flatten_the_others():
    axes = panel()
    plots.step_times(axes, steps(*[0.25] * 60, 22.0, *[0.26] * 60, 0.3), 0.24, None)
    assert 0.3 < axes.get_ylim()[1] < 1.0
    (marked,) = [line for line in axes.lines if line.get_label() == "longer: 1, up to 22.0 s"]
    assert list(marked.get_xdata()) == [61] and list(marked.get_ydata()) == [axes.get_ylim()[1]]


def test_step_times_that_merely_differ_are_all_in_the_picture():
    for seconds, predicted_s in (([0.2, 0.3, 0.5, 0.4], None), ([0.2, 0.9], 0.4), ([float("nan"), 0.2], 0.3)):
        axes = panel()
        plots.step_times(axes, steps(*seconds), predicted_s, None)
        top = axes.get_ylim()[1]
        assert all(not step_s > top for step_s in seconds) and (predicted_s or 0.0) <= top
        assert not any(line.get_label().startswith("longer") for line in axes.lines)


def test_the_names_of_many_links_do_not_overlap():
    links = [f"{a}->{b}" for a, b in itertools.permutations((0, 1, 2, 300002, 300003), 2)][:18]
    many = [f"{a}->{b}" for a, b in itertools.permutations(range(12), 2)]
    for names, codec in ((links, "int8-dynamic"), (links[:2], "none"), (many, "none")):
        axes = panel()
        plots.link_bytes(axes, {name: 1000 * i for i, name in enumerate(names)}, dict.fromkeys(names, codec), "Bytes")
        axes.figure.draw_without_rendering()
        for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
            boxes = [label.get_window_extent() for label in labels if label.get_text()]
            assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    assert axes.get_title() == "Bytes (30 of 132 links)" and len(axes.patches) == 30
    assert max(bar.get_width() for bar in axes.patches) == 0.131


def test_stages_with_as_many_peers_are_two_lines_and_a_lost_stage_falls_to_0():
    axes = panel()
    plots.per_stage(axes, "peers", [(1.0, {0: 1, 1: 1}), (5.0, {0: 1, 1: 0}), (48.0, {0: 1, 1: 1})], 50.0)
    first, second = (list(line.get_ydata()) for line in axes.lines)
    assert first == [1, 1, 1, 1] and [round(y) for y in second] == [1, 0, 1, 1]
    assert all(abs(one - other) > 0.01 for one, other in zip(first, second, strict=True))
    assert list(axes.lines[0].get_xdata()) == [0.0, 4.0, 47.0, 49.0]


def test_lines_of_peers_that_never_change_lie_below_the_frame():
    axes = panel()
    plots.per_stage(axes, "peers", [(0.0, {0: 3, 1: 3})], 3.0)
    bottom, top = axes.get_ylim()
    assert top - max(axes.lines[1].get_ydata()) > 0.01 * (top - bottom), "the frame would cover the line"
