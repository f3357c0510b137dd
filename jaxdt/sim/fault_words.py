"""Faults as sentences for people. `str(fault)` is the short form, which the fuzzer prints."""

from collections.abc import Callable

from jaxdt.protocol.events import COORDINATOR, TEMPORARY_IDS
from jaxdt.sim.faults import CLOG, CRASH, CUT, DUPLICATE, JOIN, PAUSE, POWER_OFF, REORDER, SLOW, Fault


def sentence(fault: Fault) -> str:
    """When a fault begins, what it does to whom, and for how long. KeyError for a kind that only the fuzzer plays."""
    duration = f" for {fault.seconds:.3f} s" if fault.seconds else ""
    is_noticed = fault.kind == CUT and fault.seconds > fault.breaks_s
    noticed = f", which both sides notice after {fault.breaks_s:g} s" if is_noticed else ""
    return f"{fault.at_s:.3f} s: {EFFECTS[fault.kind](fault)}{duration}{noticed}"


def _clog(fault: Fault) -> str:
    if fault.factor:
        return f"the link from {_names(fault.peers)} to {_names(fault.others)} has {fault.factor:g} of its bandwidth"
    messages = {"": "messages", "data": "tensors", "control": "messages without a tensor"}[fault.channel]
    return f"{messages} from {_names(fault.peers)} to {_names(fault.others)} are held back"


EFFECTS: dict[str, Callable[[Fault], str]] = {
    CRASH: lambda fault: f"the process of {_names(fault.peers)} is killed",
    POWER_OFF: lambda fault: f"the machine of {_names(fault.peers)} loses power",
    PAUSE: lambda fault: f"{_names(fault.peers)} does nothing",
    SLOW: lambda fault: f"{_names(fault.peers)} takes {fault.factor:g} times as long for its work",
    CLOG: _clog,
    CUT: lambda fault: f"{_names(fault.peers)} cannot reach {_names(fault.others)}, nor the other way round,",
    DUPLICATE: lambda fault: f"some messages from {_names(fault.peers)} to {_names(fault.others)} arrive twice",
    REORDER: lambda fault: f"some messages from {_names(fault.peers)} to {_names(fault.others)} arrive out of order",
    JOIN: lambda fault: f"newcomer {fault.peer} asks to join, on the machine of {_names(fault.others)}",
}


def _names(ends: tuple[int, ...]) -> str:
    """Such as "peers 3, 5 and the coordinator"."""
    peers = [str(end) for end in sorted(ends) if 0 <= end < TEMPORARY_IDS]
    words = [f"peer{'s' * (len(peers) > 1)} {', '.join(peers)}"] if peers else []
    words += [f"newcomer {end - TEMPORARY_IDS}" for end in ends if end >= TEMPORARY_IDS]
    words += ["the coordinator"] * (COORDINATOR in ends)
    return " and ".join(words)
