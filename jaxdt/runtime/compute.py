"""The compute thread of a peer: it prepares the stage, then does the Work that the loop hands it, one at a time."""

import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

from jaxdt.protocol import events as ev
from jaxdt.run.work import REPLACES_STATE, TIMED_AS
from jaxdt.runtime.loop import CheckpointWriter, Loop
from jaxdt.sim.stragglers.stalls import PeerStalls

NO_MEMORY = "RESOURCE_EXHAUSTED"  # begins the text of XLA's error


def compute(
    loop: Loop,
    prepare: Callable[[], ev.Event],
    checkpointer: CheckpointWriter | None = None,
    work_s_min: Mapping[str, float] = MappingProxyType({}),
    stalls: PeerStalls | None = None,
) -> None:
    """Run this as a thread. `prepare` makes the loop's tensors and returns the event that tells the machine so. After
    that, this takes actions from the loop's `work` until None comes, and posts one event for each but for a Free.

    A Work that replaces the state waits until the checkpointer has copied it. A Work of a kind takes at least
    work_s_min[kind], which emulates a slower device, and `stalls` makes some Work begin late, which emulates a
    straggler. An exception is posted too, and ends the process: one of XLA for want of memory as a MemoryError."""
    try:
        loop.post(prepare())
        while (action := loop.work.get()) is not None:
            started_s = time.monotonic()
            if isinstance(action, ev.Restore):
                loop.tensors.restore(action)
                loop.post(ev.Restored(action.version))
            elif isinstance(action, ev.Install):
                loop.post(loop.tensors.install(action))
            elif isinstance(action, ev.Free):
                loop.tensors.drop_results(action.step)
            elif isinstance(action, ev.DigestState):
                loop.post(ev.Digested(action.version, action.generation, *loop.tensors.digest()))
            else:
                kind = action.work.kind
                if kind in REPLACES_STATE and checkpointer:
                    checkpointer.wait()
                loop.running = action.work
                stall_s = stalls.before_s(action.work) if stalls else 0.0
                if stalls:
                    time.sleep(stall_s)
                values = loop.tensors.run(action.work, action.scale, action.rounds)
                if seconds_min := work_s_min.get(TIMED_AS.get(kind, kind)):
                    time.sleep(max(0.0, started_s + stall_s + seconds_min - time.monotonic()))
                loop.running = None
                loop.post(ev.Ran(action.work, started_s, time.monotonic() - started_s, values))
    except BaseException as error:
        loop.post(MemoryError(str(error)) if str(error).startswith(NO_MEMORY) else error)
