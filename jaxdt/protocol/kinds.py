"""What a class of the vocabulary is: a message, an event or an action. Each is declared once, beside what it is about.

Message.kinds, Event.kinds and Action.kinds have all that are declared, by name: what a module declares counts as soon
as it is imported.
"""

from typing import ClassVar

COORDINATOR = -1  # in the place of a peer id


class Message:
    """Travels between peers, under a Header; one that carries a tensor names its key."""

    __slots__ = ()
    kinds: ClassVar[dict[str, type["Message"]]] = {}

    def __init_subclass__(cls):
        super().__init_subclass__()
        Message.kinds[cls.__name__] = cls


class Event:
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


class Action:
    """Comes out of a machine, for the driver."""

    __slots__ = ()
    kinds: ClassVar[dict[str, type["Action"]]] = {}

    def __init_subclass__(cls):
        super().__init_subclass__()
        Action.kinds[cls.__name__] = cls
