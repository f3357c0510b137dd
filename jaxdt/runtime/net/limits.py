"""What a transport allows: sizes that a frame may claim, and how long a connection may make others wait."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Sizes are checked before anything of that size is allocated.

    `chunk_bytes` is what this side writes between two looks at its queue: smaller lets an urgent message overtake
    sooner, below about 256 KB costs throughput. `partial_max` bounds the messages of one stream that have begun and
    not ended; a sender has at most one for each priority in use.
    """

    head_bytes_max: int = 1 << 20
    table_bytes_max: int = 1 << 20
    n_leaves_max: int = 1 << 14
    n_dims_max: int = 16
    payload_bytes_max: int = 1 << 34
    chunk_bytes: int = 1 << 20
    chunk_bytes_max: int = 1 << 22
    partial_max: int = 1024

    connect_s: float = 3.0  # until a host answers at all; the system sends again what was lost after 1 s
    handshake_s: float = 10.0  # from the first packet to the end of the greeting
    idle_s: float = 30.0  # a frame that has begun and does not advance
    dead_link_s: float = 6.0  # unanswered keepalives or unacknowledged bytes
    backoff_s_min: float = 0.05
    backoff_s_max: float = 5.0
    n_greeting_max: int = 32  # accepted connections that have not said yet who they are
