"""A server's side of a worker's measurement of its links: it answers each probe with as much padding as is wanted. The
worker has a temporary id then, and no place yet (jaxdt.membership.worker_places)."""

from jaxdt.protocol.events import Action, Event, LinkProbed, ProbeLink, Received, Send

PADDING_BYTES_MAX = 1 << 18  # of an answer, whatever is asked for


class LinkEcho:
    """See the module text."""

    READS = frozenset({ProbeLink})

    def handle(self, now_s: float, event: Event) -> list[Action | Event]:
        match event:
            case Received(header, ProbeLink(number, n_bytes)):
                padding = "." * max(0, min(n_bytes, PADDING_BYTES_MAX))
                return [Send(header.src, LinkProbed(number, padding))]
            case _:
                return []
