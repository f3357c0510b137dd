"""One transfer: a peer gets named, versioned state in slices from other peers, and gives what it has.

    something is wanted       -> its donors are asked for slices, a few at a time each, below a rate
    a slice comes             -> it is kept if its donor was asked for it, and the next slices are asked for
    a donor is gone, or sends damaged slices -> the others are asked for what it owes; slices that are here stay
    all slices are here       -> the driver does with them what the policy wanted them for
    they cannot be installed  -> they are fetched again
    a peer asks for a slice   -> it gets it, now or once it may, or it is refused

A key names what is transferred: a version of the stage's state, or a part of a checkpoint by its digest. The engine
knows nothing else about it. The policy, which is the machine of a kind of transfer, says what is wanted, who may give
it, who may ask, when it may be given, and what happens once it is whole.
"""

# A machine matches the few events that it reads and answers [] to all others.
# pyright: reportMatchNotExhaustive=false

import enum
import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import DownloadReport, RefusedReport
from jaxdt.protocol.wake_up import WakeUp

WORD_BYTES = 4
IN_FLIGHT = 2  # slices asked of one donor at a time
STATE = ""  # in the place of a part's digest: the state of the peer's stage


class MayGive(enum.Enum):
    NOW = enum.auto()
    LATER = enum.auto()  # the request waits for `give_waiting`
    NEVER = enum.auto()


class Rate:
    """A limit of bytes per second over all downloads that share it. `free_s`: the time when the next one may begin."""

    def __init__(self, bytes_per_s: float):
        self.free_s = -math.inf
        self._bytes_per_s = bytes_per_s

    def spend(self, now_s: float, n_bytes: int) -> None:
        self.free_s = max(now_s, self.free_s) + n_bytes / self._bytes_per_s


@dataclass
class Download:
    """A download of all words of `whole`, with which the driver then does `then`. `left`: the slices not yet requested,
    the last of them first."""

    whole: ev.StateKey
    then: ev.Action
    began_s: float
    rate: Rate
    left: list[ev.StateKey]
    _requested_slices: dict[ev.StateKey, int] = field(default_factory=dict[ev.StateKey, int])  # slice -> its donor

    def __post_init__(self):
        self._n_here = self.whole.hi - _n_words(self.left)

    @property
    def is_done(self) -> bool:
        return not self.left and not self._requested_slices

    @property
    def progress(self) -> ev.Fetching:
        """The progress of the download, for the coordinator. A state without words is here at once."""
        n_words = (self._n_here, _n_words(self._requested_slices), self.whole.hi)
        return ev.Fetching(*(WORD_BYTES * n for n in n_words))

    def report(self, now_s: float, donors: Sequence[int]) -> DownloadReport:
        """The download is over."""
        return DownloadReport(self.whole.version, WORD_BYTES * self.whole.hi, now_s - self.began_s, list(donors))

    def waits(self, now_s: float) -> bool:
        """Whether only the rate keeps the download from asking for more."""
        return bool(self.left) and now_s < self.rate.free_s

    def ask(self, now_s: float, donors: Sequence[int]) -> list[ev.Send]:
        """Ask for what can be asked for now. Slices that a donor owed when it left are asked of the others."""
        self.ask_again(set(self._requested_slices.values()).difference(donors))
        sends: list[ev.Send] = []
        load = Counter(self._requested_slices.values())
        for _ in range(IN_FLIGHT):
            for donor in donors:
                if self.left and load[donor] < IN_FLIGHT and now_s >= self.rate.free_s:
                    key = self.left.pop()
                    self._requested_slices[key] = donor
                    load[donor] += 1
                    self.rate.spend(now_s, WORD_BYTES * (key.hi - key.lo))
                    sends.append(ev.Send(donor, ev.Fetch(key)))
        return sends

    def on_arrived(self, src: int, key: ev.StateKey) -> bool:
        """A slice is here; False if this donor was not asked for it."""
        if self._requested_slices.get(key) != src:
            return False
        del self._requested_slices[key]
        self._n_here += key.hi - key.lo
        return True

    def ask_again(self, donors: Collection[int]) -> None:
        """All that these donors still owe is asked for again."""
        for key in [key for key, donor in self._requested_slices.items() if donor in donors]:
            del self._requested_slices[key]
            self.left.append(key)


def _n_words(slices: Iterable[ev.StateKey]) -> int:
    return sum(key.hi - key.lo for key in slices)


class TransferPolicy:
    """What a kind of transfer says about it. By default a peer gives nothing."""

    def donors(self, whole: ev.StateKey) -> Sequence[int]:
        """Who may be asked for it now."""
        raise NotImplementedError

    def on_installed(self, now_s: float, download: Download) -> ev.Actions:
        """The state that was fetched is this peer's own."""
        raise NotImplementedError

    def may_give(self, src: int, key: ev.StateKey) -> MayGive | str:
        """Whether this peer gives a slice to one that asks for it; or why such a request is refused."""
        return MayGive.NEVER

    def refuse(self, src: int, key: ev.StateKey, problem: str) -> ev.Actions:
        """No peer of this stage would give that. The step waits for the one that asks, and would wait for ever."""
        suspects = [ev.Send(dst, ev.Suspect(src, problem)) for dst in (ev.COORDINATOR, src)]
        return [RefusedReport(f"peer {src}: {problem}"), *suspects]


class TransferEngine:
    """What one peer wants and gives, of one policy. `slice_bytes` is the size of a slice. The policy says when its
    donors have changed (`ask`), and when it may give more (`give_waiting`)."""

    READS = frozenset({ev.Fetch, ev.State, ev.Refused, ev.Installed, ev.NotInstalled, ev.Woke})

    def __init__(self, slice_bytes: int, policy: TransferPolicy):
        self._slice_words = max(1, slice_bytes // WORD_BYTES)
        self._policy = policy
        self._downloads: dict[str, Download] = {}  # under way, by digest of a part, or STATE
        self._installing: Download | None = None  # the state that is wanted, which is whole
        self._n_installing = 0  # states that were fetched; the last one is `_installing`, if that is still wanted
        self._requests: dict[tuple[int, ev.StateKey], None] = {}  # that wait, in order
        self._wake_up = WakeUp("transfer")

    def handle(self, now_s: float, event: ev.Event) -> ev.Actions:
        match event:
            case ev.Received(header, ev.Fetch(key)):
                return self.give(header.src, key)
            case ev.Received(header, ev.State(key)):
                download = self._downloads.get(key.part)
                if download is None or not download.on_arrived(header.src, key):
                    return []
                # The driver keeps slices of parts, which have a digest.
                is_kept = event.tensor is not None and key.part == STATE
                kept = [ev.StoreTensor(header.src, event.body, event.tensor)] if is_kept else []
                return [*kept, *self.ask(now_s)]
            case ev.Refused(peer, _) if peer is not None:
                for download in self._downloads.values():
                    download.ask_again((peer,))
                return self.ask(now_s)
            case ev.Installed():
                return self.on_installed(now_s)
            case ev.NotInstalled(_, reason):
                failed = self._pop_answered()
                again = self.want(now_s, failed.whole, failed.then, began_s=failed.began_s) if failed else []
                return [RefusedReport(f"{reason}; it is fetched again"), *again]
            case ev.Woke("transfer"):
                self._wake_up.woke(now_s)
                return self.ask(now_s)
        return []

    # ------------------------------------------------------------------------------------------------ what is wanted

    def want(
        self,
        now_s: float,
        whole: ev.StateKey,
        then: ev.Action,
        *,
        rate: Rate | None = None,
        here: Collection[tuple[int, int]] = (),
        began_s: float | None = None,
    ) -> ev.Actions:
        """Fetch this, but for the slices that are `here`, and let the driver do `then`. What was wanted before under
        the same name is void: it was another version, or of other donors."""
        self.drop(whole.part)
        bounds = [(lo, min(lo + self._slice_words, whole.hi)) for lo in range(0, whole.hi, self._slice_words)]
        left = [ev.StateKey(whole.version, *of, whole.part) for of in reversed(bounds) if of not in here]
        began_s = now_s if began_s is None else began_s
        self._downloads[whole.part] = Download(whole, then, began_s, rate or Rate(math.inf), left)
        begins = [ev.Discard(whole)] if whole.part == STATE and left else []
        return [*begins, *self.ask(now_s)]

    def drop(self, name: str = STATE) -> None:
        """This is not wanted any more."""
        self._downloads.pop(name, None)
        if name == STATE:
            self._installing = None

    def forget(self) -> None:
        """Nothing is wanted any more, and no request waits."""
        self.drop()
        self._downloads.clear()
        self._requests.clear()

    def ask(self, now_s: float) -> ev.Actions:
        """Ask for slices of what is wanted, and hand over what is whole."""
        actions: ev.Actions = []
        for name, download in list(self._downloads.items()):
            actions += download.ask(now_s, self._policy.donors(download.whole))
            if name == STATE:
                actions.append(download.progress)
            if download.waits(now_s):
                actions += self._wake_up.at(download.rate.free_s)
            if download.is_done:
                del self._downloads[name]
                if name == STATE:
                    self._installing = download
                    self._n_installing += 1
                actions.append(download.then)
        return actions

    def on_installed(self, now_s: float) -> ev.Actions:
        """The driver has installed a state. That of a download that is void is not reported."""
        download = self._pop_answered()
        return self._policy.on_installed(now_s, download) if download else []

    def _pop_answered(self) -> Download | None:
        """The download whose state the driver has tried to install; None if it is void. The driver does so in the order
        in which they became whole, so an earlier one's answer is not taken for that of the last."""
        self._n_installing -= 1
        if self._n_installing:
            return None
        download, self._installing = self._installing, None
        return download

    # ------------------------------------------------------------------------------------------------- what is given

    def problem(self, key: ev.StateKey, n_words: int) -> str:
        """'' if the key is a slice of a state of `n_words`."""
        size = self._slice_words
        is_slice = 0 <= key.lo < n_words and key.lo % size == 0 and key.hi == min(key.lo + size, n_words)
        where = f"words {key.lo}..{key.hi} of a state that has {n_words} in slices of {size}"
        return "" if is_slice else f"asks for {where}"

    def give(self, src: int, key: ev.StateKey) -> ev.Actions:
        answer = self._policy.may_give(src, key)
        if isinstance(answer, str):
            return self._policy.refuse(src, key, answer)
        if answer is MayGive.LATER:
            self._requests[src, key] = None
        n_bytes = WORD_BYTES * (key.hi - key.lo + 1)  # with the checksum
        return [ev.Send(src, ev.State(key), n_bytes, ev.BULK)] if answer is MayGive.NOW else []

    def give_waiting(self) -> ev.Actions:
        """More may be given now."""
        waiting, self._requests = self._requests, {}
        return [action for src, key in waiting for action in self.give(src, key)]

    def forget_requests(self, name: str) -> None:
        """What was asked for under this name is not given."""
        self._requests = {request: None for request in self._requests if request[1].part != name}


# --------------------------------------------------------------------------------------------- what a driver keeps

Slices = list[tuple[ev.StateKey, Any]]


class FetchedStates:
    """The states that downloads bring to a peer, for the compute thread that installs them. `n_words`: words of one.

    That thread may be busy for any time, while slices of the next version arrive. So the slices of each download lie
    apart, and a state that is whole belongs to the Install that its last slice makes the machine ask for: nothing is
    added to it any more. Installs take their states in the order in which these became whole. The driver's loop calls
    `begin` and `put`, the compute thread calls `take`."""

    def __init__(self, n_words: int):
        self._n_words = n_words
        self._slices: dict[ev.StateKey, Any] = {}  # of the download under way
        self._n_missing = n_words
        self._whole: deque[tuple[int, Slices]] = deque()  # with their versions: those of the compute thread

    def begin(self) -> None:
        """A download begins. What the one before has brought is of no use, unless it is whole."""
        self._slices, self._n_missing = {}, self._n_words

    def put(self, key: ev.StateKey, words: Any) -> None:
        """Hold a slice, which its download asked for. The caller no longer writes into `words`."""
        if self._slices and next(iter(self._slices)).version != key.version:
            self.begin()
        self._n_missing -= 0 if key in self._slices else key.hi - key.lo
        self._slices[key] = words
        if not self._n_missing:
            self._whole.append((key.version, sorted(self._slices.items())))
            self.begin()

    def take(self, version: int) -> Slices:
        """The slices of the state that an Install of `version` makes this peer's own, in order."""
        found, slices = self._whole.popleft() if self._whole else (None, [])
        if found != version:
            raise RuntimeError(f"installs the state of {version} steps: the one that is whole is of {found}")
        return slices
