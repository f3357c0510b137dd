import math

from jaxdt.protocol import events as ev
from jaxdt.protocol.wake_up import WakeUp


def test_only_an_earlier_waking_is_asked_for():
    wake_up = WakeUp("tag")
    assert wake_up.at(math.inf) == []
    assert wake_up.at(5.0) == [ev.WakeAt(5.0, "tag")]
    assert wake_up.at(5.0) == wake_up.at(6.0) == []
    assert wake_up.at(4.0) == [ev.WakeAt(4.0, "tag")]


def test_a_waking_that_was_asked_for_before_an_earlier_one_is_no_reason_to_ask_again():
    wake_up = WakeUp("tag")
    wake_up.at(5.0)
    wake_up.at(4.0)
    wake_up.woke(4.0)
    assert wake_up.at(8.0) == [ev.WakeAt(8.0, "tag")]
    wake_up.woke(5.0)
    assert wake_up.at(8.0) == []
    wake_up.woke(8.0)
    assert wake_up.at(8.5) == [ev.WakeAt(8.5, "tag")]
