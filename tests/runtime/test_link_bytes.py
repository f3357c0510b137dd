"""The summary counts the payload of links that are gone."""

from jaxdt.runtime.reporting.link_bytes import LinkBytes


def test_links_of_peers_that_left_or_moved_are_counted():
    links = LinkBytes()
    links.counted(2, {"0": 100, "1": 10})
    links.counted(2, {"0": 250, "1": 30})
    links.counted(2, {})  # it has moved to another stage: its new machine has no links yet
    links.counted(2, {"1": 5})
    links.counted(0, {"2": 40})
    links.counted(0, {"4": 7})  # peer 2 is gone for peer 0
    assert links.totals() == {"2->0": 250, "2->1": 35, "0->2": 40, "0->4": 7}


def test_a_count_that_grows_is_counted_once():
    links = LinkBytes()
    for n_bytes in (1, 5, 9):
        links.counted(0, {"1": n_bytes})
    assert links.totals() == {"0->1": 9}
