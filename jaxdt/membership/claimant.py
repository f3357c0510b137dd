"""A process that asks whether it may be a peer: the process's side. The coordinator's is jaxdt.membership.admission."""

from jaxdt.protocol import events as ev
from jaxdt.protocol.deadline import FIRST_CONTACT_S
from jaxdt.protocol.reports import UnreachedReport
from jaxdt.run.exit_codes import ExitCode

SAID_S = 2.0  # a process that has not reached the coordinator by then says so, and again after waits that double


class Claimant:
    """A machine that stops with code 0 once the process may be the peer, and else with the reason.
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
