"""The sync graph of a stage: do its latest averaging groups connect all its replicas? (SDPipe, Assumption 1)

The edges of the graph join the members of each group. Where it is connected, what one replica has learned has reached
all others. Replicas that have gone may still connect others: both have averaged with them.

There are two ways to say which groups are the latest. Sliding (the paper's): any `n_groups` groups in a row, so every
group is checked. Tumbling (that of the paper's public code): the groups since the graph was last connected, checked
once after every `n_groups` arrivals for each replica.
"""

from collections.abc import Collection, Iterable, Mapping

Clique = tuple[int, ...]


def connects(replicas: Collection[int], cliques: Iterable[Collection[int]]) -> bool:
    """Whether one component of these cliques holds all replicas."""
    components: list[set[int]] = []
    for clique in cliques:
        merged = set(clique)
        apart: list[set[int]] = []
        for component in components:
            if component & merged:
                merged |= component
            else:
                apart.append(component)
        components = [*apart, merged]
    return len(replicas) < 2 or any(component.issuperset(replicas) for component in components)


class Groups:
    """The latest groups of a stage by their number, and an edge from each newcomer to its donor, which counts as part
    of the newest group at that time: the newcomer knows what the donor knows. One that has been here before does not
    know any more what it knew, so in earlier groups it has another name, below 0."""

    def __init__(self):
        self.n_closed = 0
        self._cliques: dict[int, Clique] = {}
        self._joins: list[tuple[int, Clique]] = []
        self._n_joined = 0

    @property
    def cliques(self) -> list[Clique]:
        return [*self._cliques.values(), *(edge for _, edge in self._joins)]

    def add(self, members: Clique) -> None:
        self._cliques[self.n_closed] = members
        self.n_closed += 1

    def join(self, peer: int, donor: int) -> None:
        self._n_joined += 1
        former = {peer: -self._n_joined}
        self._cliques = {number: _renamed(clique, former) for number, clique in self._cliques.items()}
        self._joins = [(number, _renamed(edge, former)) for number, edge in self._joins]
        self._joins.append((self.n_closed - 1, (donor, peer)))

    def replace(self, number: int, members: Clique) -> None:
        if number in self._cliques:
            self._cliques[number] = members

    def keep(self, n_groups: int) -> None:
        """Forget all groups but the newest n_groups."""
        oldest = self.n_closed - n_groups
        self._cliques = {number: clique for number, clique in self._cliques.items() if number >= oldest}
        self._joins = [(number, edge) for number, edge in self._joins if number >= oldest]


def _renamed(clique: Clique, names: Mapping[int, int]) -> Clique:
    return tuple(names.get(member, member) for member in clique)


class SyncGraph:
    """The graph that the scheduler asks. Here no group has to connect anything. `n_kept`: the groups that still count
    when another one forms. `enforces_early`: a stage whose check is due begins to enforce with the first arrival, not
    when its window is over."""

    enforces_early = False

    def __init__(self, n_kept: int = 0):
        self._n_kept = n_kept
        self._groups = Groups()

    @property
    def is_due(self) -> bool:
        """Whether the next group should connect the replicas."""
        return False

    def would_connect(self, replicas: Collection[int], members: Collection[int]) -> bool:
        """Whether the latest groups and a group of these members connect the replicas."""
        return connects(replicas, [*self._groups.cliques, members])

    def on_arrived(self, n_replicas: int) -> None:
        """A replica is ready."""
        return

    def on_closed(self, replicas: Collection[int], members: Clique) -> None:
        """A group has formed."""
        self._groups.add(members)
        self._groups.keep(self._n_kept)

    def on_joined(self, peer: int, donor: int) -> None:
        """A replica has come, with the parameters of `donor`."""
        self._groups.join(peer, donor)

    def replace(self, number: int, members: Clique) -> None:
        """Group `number` of the stage, counted from 0, has averaged only these members."""
        self._groups.replace(number, members)


class Sliding(SyncGraph):
    """Any `n_groups` >= 2 groups in a row: the next group is the last of them. There is no check before so many have
    formed."""

    def __init__(self, n_groups: int):
        super().__init__(n_groups - 1)

    @property
    def is_due(self) -> bool:
        return self._groups.n_closed >= self._n_kept


class Tumbling(SyncGraph):
    """The groups since the graph was last found connected. A check becomes due after every n_groups arrivals for each
    replica, and stays due until a group connects the graph."""

    enforces_early = True

    def __init__(self, n_groups: int):
        super().__init__()
        self._n_groups = n_groups
        self._n_arrived = 0  # since a check became due
        self._is_due = False

    @property
    def is_due(self) -> bool:
        return self._is_due

    def on_arrived(self, n_replicas: int) -> None:
        self._n_arrived += 1
        if self._n_arrived >= self._n_groups * n_replicas:
            self._n_arrived = 0
            self._is_due = True

    def on_closed(self, replicas: Collection[int], members: Clique) -> None:
        found = self.is_due and self.would_connect(replicas, members)
        self._groups.add(members)
        if found:
            self._is_due = False
            self._groups.keep(0)


SYNC_GRAPHS: dict[str, type[Sliding] | type[Tumbling]] = {"sliding": Sliding, "tumbling": Tumbling}
