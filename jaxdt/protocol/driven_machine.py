"""What a driver drives."""

from typing import Protocol

from jaxdt.protocol.events import Action, Event


class DrivenMachine(Protocol):
    """All machines of one process, as the runtime and the simulator see them: a peer (jaxdt.membership.peer.Peer) or
    the coordinator."""

    def handle(self, now_s: float, event: Event) -> list[Action]: ...
