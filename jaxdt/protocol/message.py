"""Messages <-> plain data for the wire; what does not fit a message's types is refused before anyone sees it."""

import typing

from jaxdt.protocol import events
from jaxdt.protocol.events import Header, Message, Received
from jaxdt.spec import serialize
from jaxdt.spec.errors import BadInput

WITH_TENSOR = frozenset({events.Boundary, events.Shard, events.Reduced, events.State})
MESSAGES = {kind.__name__: kind for kind in typing.get_args(Message)}


def to_plain(header: Header, body: Message) -> dict:
    """The head of a frame."""
    return {"head": serialize.write(header), "kind": type(body).__name__, "body": serialize.write(body)}


def from_plain(data: dict) -> Received:
    """The event that a frame's head stands for; BadInput for anything else than a message."""
    if not isinstance(data, dict) or set(data) != {"head", "kind", "body"}:
        raise BadInput("message: expected an object with head, kind and body")
    if not isinstance(data["kind"], str) or data["kind"] not in MESSAGES:
        raise BadInput(f"message.kind: got {str(data['kind'])[:40]!r}, expected one of {', '.join(MESSAGES)}")
    header = serialize.read(Header, data["head"], "message.head")
    return Received(header, serialize.read(MESSAGES[data["kind"]], data["body"], f"message.{data['kind']}"))


def tensor_key(body: Message) -> events.Key | events.SliceKey | events.StateKey | None:
    """The key of the tensor that travels with the message, if one does."""
    return body.key if type(body) in WITH_TENSOR else None
