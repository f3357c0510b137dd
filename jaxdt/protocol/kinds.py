"""What a class of the vocabulary is: a message, an event or an action. Each is declared once, beside what it is about,
and is a frozen dataclass.

Message.kinds, Event.kinds and Action.kinds have all that are declared, by name: what a module declares counts as soon
as it is imported.
"""

from dataclasses import field
from typing import Any, ClassVar, dataclass_transform

from jaxdt.run.frozen_dataclass import frozen_dataclass

COORDINATOR = -1  # in the place of a peer id


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class _Vocabulary(type):
    """Makes each class a frozen dataclass with slots. A class that names its slots is left as it is: the bases, and
    what the dataclass has made."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
        made = super().__new__(cls, name, bases, namespace)
        return made if "__slots__" in namespace else frozen_dataclass(made)


class Message(metaclass=_Vocabulary):
    """Travels between peers, under a Header; one that carries a tensor names its key."""

    __slots__ = ()
    kinds: ClassVar[dict[str, type["Message"]]] = {}

    def __init_subclass__(cls):
        super().__init_subclass__()
        Message.kinds[cls.__name__] = cls


class Event(metaclass=_Vocabulary):
    """Goes into a machine: from the driver, or from another machine of the same peer."""

    __slots__ = ()
    kinds: ClassVar[dict[str, type["Event"]]] = {}

    def __init_subclass__(cls):
        super().__init_subclass__()
        Event.kinds[cls.__name__] = cls


class InternalEvent(Event):
    """Goes from one machine of a peer to its others."""

    __slots__ = ()


Event.kinds.clear()  # of classes that are no event themselves


class Action(metaclass=_Vocabulary):
    """Comes out of a machine, for the driver."""

    __slots__ = ()
    kinds: ClassVar[dict[str, type["Action"]]] = {}

    def __init_subclass__(cls):
        super().__init_subclass__()
        Action.kinds[cls.__name__] = cls
