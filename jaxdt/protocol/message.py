"""Messages <-> plain data for the wire; data that do not fit a message's types are refused before a machine sees
them."""

import typing
from typing import Any, TypeGuard

from jaxdt.protocol import events as ev
from jaxdt.run import serialize
from jaxdt.run.errors import BadInput

TensorMessage = ev.Boundary | ev.TaskOutput | ev.Shard | ev.Reduced | ev.State
WITH_TENSOR: frozenset[type] = frozenset(typing.get_args(TensorMessage))


def to_plain(header: ev.Header, body: ev.Message) -> dict[str, Any]:
    """The head of a frame."""
    return {"head": serialize.write(header), "kind": type(body).__name__, "body": serialize.write(body)}


def from_plain(data: Any) -> ev.Received:
    """The event that a frame's head stands for; BadInput for anything else than a message."""
    if not serialize.is_object(data) or set(data) != {"head", "kind", "body"}:
        raise BadInput("message: expected an object with head, kind and body")
    name, kinds = data["kind"], ev.Message.kinds
    if not isinstance(name, str) or name not in kinds:
        raise BadInput(f"message.kind: got {str(name)[:40]!r}, expected one of {', '.join(kinds)}")
    header = serialize.read(ev.Header, data["head"], "message.head")
    return ev.Received(header, serialize.read(kinds[name], data["body"], f"message.{name}"))


def tensor_key(body: ev.Message) -> ev.Key | ev.SliceKey | ev.StateKey | None:
    """The key of the tensor that travels with the message, if one does."""
    return body.key if _has_tensor(body) else None


def _has_tensor(body: ev.Message) -> TypeGuard[TensorMessage]:
    return type(body) in WITH_TENSOR
