"""Which process may be a peer of the run, when two of them say that they are: one that answers keeps its place.

A process that is started with a peer's id does not know whether another process has that id already: its flag file may
have been started twice, or its earlier process may have died. So it first asks, under a temporary id, and the
coordinator lets it wait until it knows. It is refused if the process that has the id is heard again, and admitted once
that process is lost, which a broken connection shows soon. So a second process never disturbs a living one.
"""

from dataclasses import dataclass

from jaxdt.membership.liveness.leases import Leases
from jaxdt.protocol import events as ev
from jaxdt.protocol.deadline import FIRST_CONTACT_S
from jaxdt.protocol.reports import UnreachedReport
from jaxdt.run.exit_codes import ExitCode

GRANTED_S = 20.0  # an admitted process loads jax and says hello within it
SAID_S = 2.0  # a process that has not reached the coordinator by then says so, and again after waits that double
HEARD_HEARTBEATS = 2.0  # what arrives later than so many heartbeats after a question was said after the question


@dataclass(frozen=True)
class Claim:
    """A process that waits for its answer. `where`: what people are told of it. `is_new`: it does not know the run."""

    temporary_id: int
    peer: int
    where: str
    since_s: float
    is_new: bool


class Claims:
    """The coordinator's side. Time comes in as an argument."""

    def __init__(self, heartbeat_s: float):
        self._heard_s = HEARD_HEARTBEATS * heartbeat_s
        self._waiting: dict[int, Claim] = {}
        self._granted: dict[int, float] = {}  # peers whose admitted process has yet to say hello, and until when

    def ask(self, now_s: float, temporary_id: int, join: ev.Join) -> None:
        """A process asks whether it may be a peer. A repeated question is one."""
        assert join.peer is not None
        claim = Claim(temporary_id, join.peer, join.where, now_s, join.is_new)
        self._waiting.setdefault(temporary_id, claim)

    def grant(self, now_s: float, peer: int) -> None:
        """This process may be the peer, and is expected to say hello soon."""
        self._granted[peer] = now_s + GRANTED_S

    def is_granted(self, peer: int) -> bool:
        """Whether an admitted process of this peer has yet to say hello."""
        return peer in self._granted

    def on_hello(self, peer: int) -> None:
        """The peer's admitted process has said hello."""
        self._granted.pop(peer, None)

    def withdraw(self, temporary_id: int) -> None:
        """The connection of a process that asked is gone."""
        self._waiting.pop(temporary_id, None)

    def settle(self, now_s: float, leases: Leases) -> list[tuple[Claim, bool]]:
        """The claims that can be answered now, and whether each is granted."""
        self._granted = {peer: until_s for peer, until_s in self._granted.items() if until_s > now_s}
        answered: list[tuple[Claim, bool]] = []
        for claim in sorted(self._waiting.values(), key=lambda claim: (claim.since_s, claim.temporary_id)):
            if claim.peer in leases:
                if leases.heard_s(claim.peer, now_s) >= claim.since_s + self._heard_s:
                    answered.append((claim, False))
            elif claim.peer not in self._granted:
                self.grant(now_s, claim.peer)
                answered.append((claim, True))
        for claim, _ in answered:
            del self._waiting[claim.temporary_id]
        return answered


class Claimant:
    """The process's side: a machine that stops with code 0 once the process may be the peer, and else with the reason.
    It asks again whenever it reaches the coordinator again, which may have been started again."""

    def __init__(self, run: str, peer: int, temporary_id: int, where: str):
        self._question = ev.Join(peer, where)
        self._header = ev.Header(run, 0, 0, temporary_id)
        self._is_up = False
        self._was_up = False
        self._say_s = SAID_S  # the wait before the next line
        self._give_up_s = FIRST_CONTACT_S

    def handle(self, now_s: float, event: ev.Event) -> list[ev.Action]:
        match event:
            case ev.Started():
                self._give_up_s = now_s + FIRST_CONTACT_S
                return [self._ask(), ev.WakeAt(now_s + SAID_S, "say"), ev.WakeAt(self._give_up_s, "claim")]
            case ev.LinkChanged(_, up):
                asks_again = up and self._was_up
                self._is_up, self._was_up = up, self._was_up or up
                return [self._ask()] if asks_again else []
            case ev.Received(_, ev.Welcome()):
                return [ev.Stop(ExitCode.DONE, "")]
            case ev.Received(_, ev.Ended(code, reason)) | ev.Interrupted(code, reason):
                return [ev.Stop(code, reason)]
            case ev.Refused(_, reason):
                return [ev.Stop(ExitCode.BAD_INPUT, f"coordinator: {reason}")]
            case ev.Leave():
                return [ev.Stop(ExitCode.DONE, "left before it was admitted")]
            case ev.Woke("say") if self._was_up:
                return []
            case ev.Woke("say"):
                self._say_s *= 2
                return [UnreachedReport(round(self._give_up_s - now_s, 1)), ev.WakeAt(now_s + self._say_s, "say")]
            case ev.Woke() if self._is_up:
                return [ev.WakeAt(now_s + FIRST_CONTACT_S, "claim")]
            case ev.Woke():
                return [ev.Stop(ExitCode.LOST, f"coordinator: not reached within {FIRST_CONTACT_S:.0f} s")]
            case _:
                return []

    def _ask(self) -> ev.Send:
        return ev.Send(ev.COORDINATOR, self._question, header=self._header)
