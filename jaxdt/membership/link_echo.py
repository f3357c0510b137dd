"""A server's side of a worker's measurement of its links: it answers each probe with as much padding as is wanted. The
worker has a temporary id then, and no place yet (jaxdt.membership.worker_places)."""

from jaxdt.protocol import events as ev

PADDING_BYTES_MAX = 1 << 18  # of an answer, whatever is asked for


class LinkEcho:
    """See the module text."""

    READS = frozenset({ev.ProbeLink})

    def handle(self, now_s: float, event: ev.Event) -> ev.Actions:
        match event:
            case ev.Received(header, ev.ProbeLink(number, n_bytes)):
                padding = "." * max(0, min(n_bytes, PADDING_BYTES_MAX))
                return [ev.Send(header.src, ev.LinkProbed(number, padding))]
            case _:
                return []
