"""The greeting of a connection: who speaks, for which run and lane, and what has arrived already.

With a credential it begins with TLS, in which each side gives its share of the keys; the greeting is the first that is
said under those. Without one the greeting is the first of all.

The dialling side sends a GREETING, the other a WELCOME or a REFUSED with its reason. Either may be the one that will
send messages (`sends`): a peer that cannot be dialled opens the connections for both directions itself. The sender
names its stream (`session`) and the oldest message it still holds; the receiver says what it has of that stream.
"""

import contextlib
import random
import secrets
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from jaxdt.protocol.events import COORDINATOR, TEMPORARY_IDS
from jaxdt.runtime.net import frame
from jaxdt.runtime.net.aead_records import SHARE_BYTES, AeadRecords
from jaxdt.runtime.net.connection import Address, Connection, connect
from jaxdt.runtime.net.frame import FrameError
from jaxdt.runtime.net.limits import Limits
from jaxdt.runtime.net.link_state import Link
from jaxdt.runtime.net.self_pipe import SelfPipe

LANES = ("data", "control")
N_RANGES = 256  # more would not fit a greeting; the rest is sent again and dropped there
_SMALL = Limits(head_bytes_max=1 << 14, table_bytes_max=0, payload_bytes_max=0, n_leaves_max=2 * N_RANGES)


class Refused(Exception):
    """One line: why the two sides of a connection do not belong together."""


@dataclass(frozen=True)
class Hello:
    """What each side says. `have` lists received messages of `session` as inclusive ranges of sequences."""

    run: str
    me: int
    to: int
    lane: str
    sends: bool
    session: int
    oldest: int = 0
    have: Sequence[Sequence[int]] = ()


def hello_from(head: dict) -> Hello:
    """The checked content of a GREETING or WELCOME frame; FrameError."""
    kinds = {"run": str, "me": int, "to": int, "lane": str, "sends": bool, "session": int, "oldest": int, "have": list}
    for name, kind in kinds.items():
        if type(head.get(name)) is not kind:
            raise FrameError(f"greeting: {name}: got {head.get(name)!r:.40}, expected {kind.__name__}")
    if not all(isinstance(pair, list) and len(pair) == 2 and {type(n) for n in pair} == {int} for pair in head["have"]):
        raise FrameError("greeting: have: expected pairs of integers")
    return Hello(**{name: head[name] for name in kinds})


def name_of(peer: int) -> str:
    """What people call it."""
    return "coordinator" if peer == COORDINATOR else f"peer {peer}"


def check(theirs: Hello, run: str, me: int) -> None:
    """Refused unless it is meant for this peer of this run. The coordinator hears newcomers too, who cannot know it."""
    asks = me == COORDINATOR and theirs.me >= TEMPORARY_IDS and theirs.run == ""
    if theirs.run != run and not asks:
        raise Refused(f"run: {name_of(theirs.me)} is of run {theirs.run!r:.120}, {name_of(me)} of {run!r}")
    if theirs.to != me:
        raise Refused(f"peer: {name_of(theirs.me)} wants {name_of(theirs.to)}, this is {name_of(me)}")
    if theirs.lane not in LANES:
        raise Refused(f"lane: got {theirs.lane!r:.40}, expected one of {', '.join(LANES)}")


def secure(wire: Connection, context: ssl.SSLContext, dialled: bool) -> None:
    """Mutual TLS 1.3, a share of the keys from each side in it, then no more TLS; Refused, FrameError or OSError.

    The dialling side gives its share first and greets after it has the other's. So each side has read all that the
    other says in TLS before that one sends a record, whatever the library reads ahead.
    """
    wire.enter_tls(context, server_side=not dialled)
    mine = secrets.token_bytes(SHARE_BYTES)
    if dialled:
        _say_share(wire, mine)
        theirs = _hear_share(wire)
    else:
        theirs = _hear_share(wire)
        _say_share(wire, mine)
    wire.leave_tls(AeadRecords(mine, theirs, dialled))


def _say_share(wire: Connection, share: bytes) -> None:
    wire.write(frame.pack(frame.KEYS, frame.pack_head({"share": share}, _SMALL)))


def _hear_share(wire: Connection) -> bytes:
    share = _answer(wire, frame.KEYS).head.get("share")
    if type(share) is not bytes or len(share) != SHARE_BYTES:
        raise FrameError(f"share of the keys: expected {SHARE_BYTES} bytes")
    return share


def say(wire: Connection, kind: int, hello: Hello) -> None:
    """Write a GREETING or a WELCOME."""
    wire.write(frame.pack(kind, frame.pack_head(asdict(hello), _SMALL)))


def refuse(wire: Connection, reason: str) -> None:
    """Write a REFUSED; that the other side does not wait for it changes nothing."""
    with contextlib.suppress(OSError):
        wire.write(frame.pack(frame.REFUSED, frame.pack_head({"reason": reason}, _SMALL)))


def hear(wire: Connection, kinds: Sequence[int]) -> frame.Frame:
    """The next frame of a handshake, which must be small; FrameError or OSError."""
    got: list[frame.Frame] = []
    for buffer, _ in frame.parse(_SMALL, kinds, place=lambda _: (), done=got.append):
        if got:
            break
        wire.fill(buffer)
    return got[0]


def greet(wire: Connection, mine: Hello) -> Hello:
    """The dialling side: say who we are, hear who they are; Refused, FrameError or OSError."""
    say(wire, frame.GREETING, mine)
    theirs = hello_from(_answer(wire, frame.WELCOME).head)
    check(theirs, mine.run or theirs.run, mine.me)
    if theirs.me != mine.to:
        raise Refused(f"peer: its address answers as {name_of(theirs.me)}, expected {name_of(mine.to)}")
    return theirs


def _answer(wire: Connection, kind: int) -> frame.Frame:
    answer = hear(wire, (kind, frame.REFUSED))
    if answer.kind == frame.REFUSED:
        raise Refused(" ".join(str(answer.head.get("reason")).split())[:300])
    return answer


class Dialler:
    """Reaches one peer for one lane and direction, again and again, each failure doubling the pause.

    `link` hears of failures. `waker` ends a pause or a connect early, for a new address or the end.
    """

    def __init__(self, context: ssl.SSLContext | None, link: Link, limits: Limits, waker: SelfPipe):
        self._context = context
        self._link = link
        self._limits = limits
        self._waker = waker
        self._pause_s = limits.backoff_s_min
        self._random = random.Random()
        self._wire: Connection | None = None

    def attempt(self, address: Address, mine: Hello) -> tuple[Connection, Hello] | None:
        """One try; None after a failure and its pause."""
        now_s = time.monotonic()
        try:
            self._wire = Connection(connect(address, now_s + self._limits.connect_s, self._waker), self._limits)
            self._wire.deadline_s = now_s + self._limits.handshake_s
            if self._context is not None:
                secure(self._wire, self._context, dialled=True)
            return self._wire, greet(self._wire, mine)
        except InterruptedError:
            return None
        except ssl.SSLEOFError as error:  # closed meanwhile, as a peer does that ends
            self._fail(self._link.unreachable, f"{address[0]}:{address[1]}: {error}", self._pause_s)
        except (Refused, FrameError, ssl.SSLError) as error:
            self._fail(self._link.refused, error, self._limits.backoff_s_max)
        except OSError as error:
            self._fail(self._link.unreachable, f"{address[0]}:{address[1]}: {error}", self._pause_s)
        return None

    def cut(self) -> None:
        """End a handshake in progress, from any thread."""
        if self._wire is not None:
            self._wire.cut()

    def reset(self) -> None:
        """The connection has proved good: the next failure starts with a short pause again."""
        self._pause_s = self._limits.backoff_s_min

    def pause(self) -> None:
        """Wait before the next try; a little random, so that peers do not come back in step."""
        self._waker.wait(self._pause_s * self._random.uniform(0.7, 1.3))
        self._pause_s = min(2 * self._pause_s, self._limits.backoff_s_max)

    def _fail(self, report: Callable[[str], None], reason: object, pause_s: float) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None
        report(str(reason))
        self._pause_s = pause_s
        self.pause()
