"""The summary counts the payload of links that are gone, and names the codec of every link between stages."""

from jaxdt.run.plan import Plan
from jaxdt.runtime.reporting.counts import LinkCodecs, Totals, link_bytes


def test_links_of_peers_that_left_or_moved_are_counted():
    links = Totals()
    links.counted(2, link_bytes(2, {"0": 100, "1": 10}))
    links.counted(2, link_bytes(2, {"0": 250, "1": 30}))
    links.counted(2, link_bytes(2, {}))  # it has moved to another stage: its new machine has no links yet
    links.counted(2, link_bytes(2, {"1": 5}))
    links.counted(0, link_bytes(0, {"2": 40}))
    links.counted(0, link_bytes(0, {"4": 7}))  # peer 2 is gone for peer 0
    assert links.by_name() == {"2->0": 250, "2->1": 35, "0->2": 40, "0->4": 7}


def test_a_count_that_grows_is_counted_once():
    links = Totals()
    for n_bytes in (1, 5, 9):
        links.counted(0, link_bytes(0, {"1": n_bytes}))
    assert links.by_name() == {"0->1": 9}


def test_a_server_counts_for_its_workers_who_do_not_speak_with_the_coordinator():
    links = Totals()
    links.counted(0, link_bytes(0, {"1": 5, "4": 70}, {"4": 30}))
    links.counted(0, link_bytes(0, {"1": 6, "4": 90}, {"4": 50}))
    links.counted(0, link_bytes(0, {"1": 7}, {"4": 50}))  # worker 4 was lost, and what it had sent stays known
    links.counted(0, link_bytes(0, {"1": 8, "4": 2}, {"4": 55}))  # it came back
    assert links.by_name() == {"0->1": 8, "0->4": 92, "4->0": 55}


def test_links_that_the_plan_does_not_name_have_the_codec_of_their_boundary():
    plan = Plan(2, ((0, 1), (1, 2)), ((0, 2), (1, 3)), (1, 1), codec=("int8",))
    codecs = LinkCodecs(plan)
    planned = dict.fromkeys(("0->1", "1->0", "2->3", "3->2"), "int8")
    assert codecs.on(()) == planned
    codecs.view({0: 0, 1: 1, 2: 0, 3: 1})
    codecs.view({0: 0, 1: 1, 2: 0, 4: 1})
    others = dict.fromkeys(("0->3", "1->2", "0->4", "4->2"), "int8")
    assert codecs.on([*planned, *others, "0->2", "1->4"]) == planned | others


def test_pipelines_with_two_codecs_share_a_link():
    codecs = LinkCodecs(Plan(2, ((0, 1), (1, 2)), ((0, 2), (1, 3)), (1, 1), codec=("int8,none",)))
    codecs.view({0: 0, 1: 1, 2: 0, 3: 1})
    assert codecs.on(["0->3"])["0->3"] == "int8,none"
