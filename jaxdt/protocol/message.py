"""Messages <-> plain data for the wire; data that do not fit a message's types are refused before a machine sees them.

Fields that are not known are left out: a peer of the next minor version may send some (jaxdt.run.versions).
"""

import typing
from typing import Any, TypeGuard

from jaxdt.protocol import events
from jaxdt.protocol.events import Header, Message, Received
from jaxdt.run import serialize
from jaxdt.run.errors import BadInput

TensorMessage = events.Boundary | events.TaskOutput | events.Shard | events.Reduced | events.State
WITH_TENSOR: frozenset[type] = frozenset(typing.get_args(TensorMessage))
MESSAGES = {kind.__name__: kind for kind in typing.get_args(Message)}


def to_plain(header: Header, body: Message) -> dict[str, Any]:
    """The head of a frame."""
    return {"head": serialize.write(header), "kind": type(body).__name__, "body": serialize.write(body)}


def from_plain(data: Any) -> Received:
    """The event that a frame's head stands for; BadInput for anything else than a message."""
    if not serialize.is_object(data) or set(data) != {"head", "kind", "body"}:
        raise BadInput("message: expected an object with head, kind and body")
    if not isinstance(data["kind"], str) or data["kind"] not in MESSAGES:
        raise BadInput(f"message.kind: got {str(data['kind'])[:40]!r}, expected one of {', '.join(MESSAGES)}")
    header = serialize.read_known(Header, data["head"], "message.head")
    return Received(header, serialize.read_known(MESSAGES[data["kind"]], data["body"], f"message.{data['kind']}"))


def tensor_key(body: Message) -> events.Key | events.SliceKey | events.StateKey | None:
    """The key of the tensor that travels with the message, if one does."""
    return body.key if _has_tensor(body) else None


def _has_tensor(body: Message) -> TypeGuard[TensorMessage]:
    return type(body) in WITH_TENSOR
