"""A peer's exchanges by step and group: which are under way, what a new view makes of them, and results that are taken
over from others."""

from collections.abc import Iterable

from jaxdt.protocol.events import BULK, Action, FetchResult, Forget, Round, Send, View
from jaxdt.spec.sizes import Group
from jaxdt.sync.exchange import Bounds, Exchange, round_of

FLOAT_BYTES = 4


class Rounds:
    """Of one peer, which syncs `groups`, in slices of `slice_bytes`."""

    def __init__(self, peer: int, groups: tuple[Group, ...], slice_bytes: int):
        self.groups = groups
        self._peer, self._slice_elements = peer, max(1, slice_bytes // FLOAT_BYTES)
        self._view: View | None = None
        self._exchanges: dict[tuple[int, str], Exchange] = {}

    def of(self, step: int) -> list[Exchange]:
        """Those of all groups, made where there was none."""
        return [self._exchange(step, group) for group in self.groups]

    def known(self, step: int) -> list[Exchange] | None:
        """Those of all groups; None if one is missing."""
        found = [self._exchanges.get((step, group.name)) for group in self.groups]
        return found if all(found) else None

    def find(self, round: Round, steps: range) -> Exchange | None:
        """The exchange that a message belongs to; None for a round that is over, or ahead of `steps`, or not ours."""
        exchange = self._exchanges.get((round.step, round.group))
        if exchange is None:
            group = next((group for group in self.groups if group.name == round.group), None)
            if group is None or round.step not in steps:
                return None
            exchange = self._exchange(round.step, group)
        mine = exchange.round  # of the same step and group, by the look-up
        return exchange if mine.group_view == round.group_view and mine.attempt == round.attempt else None

    def drop(self, steps: Iterable[int]) -> None:
        for step in steps:
            for group in self.groups:
                self._exchanges.pop((step, group.name), None)

    def enter(self, view: View) -> list[Action]:
        """The first view that we are in: take what others hold."""
        self._view = view
        by_name = {group.name: group for group in self.groups}
        held = [(by_name[round.group], (round, holders)) for round, holders in view.results if round.group in by_name]
        return [send for group, result in held for send in self._take(group, result)]

    def adopt(self, view: View) -> list[Action]:
        """A view later on: rounds that are void in it are given up."""
        self._view = view
        held, told = {(round.step, round.group): round for round, _ in view.results}, []
        for step, name in list(self._exchanges):
            if step >= view.n_committed:
                told += self._renew(step, name, held.get((step, name)))
        return told + self.enter(view)

    def give(self, src: int, round: Round) -> list[Action]:
        """Somebody takes our result, if we hold the whole of it."""
        exchange = self._exchanges.get((round.step, round.group))
        if exchange is None or exchange.round != round or not exchange.complete:
            return []
        return self._send_sums(src, exchange, sorted(exchange.sums))

    def _exchange(self, step: int, group: Group) -> Exchange:
        at = (step, group.name)
        if at not in self._exchanges:
            self._exchanges[at] = Exchange(self._peer, group, self._view, step, self._slice_elements)
        return self._exchanges[at]

    def _renew(self, step: int, name: str, held: Round | None) -> list[Action]:
        """Give up an exchange whose round is void in the view; the next look makes a new one."""
        exchange = self._exchanges[step, name]
        good = held or round_of(exchange.group, self._view, step)
        if exchange.round == good:
            return self._catch_up(exchange)
        del self._exchanges[step, name]
        return [Forget(exchange.round)]

    def _catch_up(self, exchange: Exchange) -> list[Action]:
        """Who joins gets what was summed for the step before its view was here."""
        now = Exchange(self._peer, exchange.group, self._view, exchange.round.step, self._slice_elements)
        new, exchange.joining = set(now.joining) - set(exchange.joining), now.joining
        mine = [bounds for bounds in exchange.slices(self._peer) if bounds in exchange.sums]
        return [send for peer in sorted(new - {self._peer}) for send in self._send_sums(peer, exchange, mine)]

    def _take(self, group: Group, held: tuple[Round, tuple[int, ...]]) -> list[Action]:
        """Ask for the result that others hold, unless we hold it too."""
        step = held[0].step
        exchange = self._exchanges.get((step, group.name))
        if exchange and exchange.complete:
            return []
        self._exchanges[step, group.name] = Exchange(self._peer, group, self._view, step, self._slice_elements, held)
        return [Send(held[1][0], FetchResult(held[0]))]

    def _send_sums(self, dst: int, exchange: Exchange, slices: Iterable[Bounds]) -> list[Action]:
        return [Send(dst, exchange.sums[lo, hi], FLOAT_BYTES * (hi - lo), BULK) for lo, hi in slices]
