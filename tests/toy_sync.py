"""Gossip on a ring, a sync in one file: after every few local steps each replica averages with a neighbour.

In one turn each replica in an even place averages with its right neighbour, in the next one with its left neighbour.
Whoever's neighbour is gone, or has gone further, goes on alone.
"""

from dataclasses import replace

from jaxdt.sync import groups
from jaxdt.sync.held_out import HeldOutWork, held_out_place
from jaxdt.sync.matching.base import AveragingGroup
from jaxdt.sync.replica import IndependentReplica, replica_options, replica_place
from jaxdt.sync.scheduling.group_book import GroupBook

EVERY_STEPS = 2


class RingReplica(IndependentReplica):
    def _after_step(self, version):
        return self._begin() if version % EVERY_STEPS else self._ask_for_group(version)


class RingScheduler(GroupBook):
    def _ready(self, now_s, src, stage, fragment):
        return self._form(stage)

    def _on_left(self, now_s, stage, replicas):
        return self._form(stage)

    def _form(self, stage):
        """The groups of all who need not wait any longer."""
        ring = self._plan.placement[stage]
        actions = []
        for peer in sorted(self._waiting.keys() & set(ring)):
            if peer in self._waiting and (members := self._members(ring, peer)):
                actions += self._on_formed(stage, 0, AveragingGroup(members, "step"))
        return actions

    def _members(self, ring, peer):
        """The group of a replica that waits; () if its neighbour is still to come."""
        step = self._waiting[peer]
        mate = self._neighbour(ring, peer, step)
        if self._neighbour(ring, mate, step) != peer or not self._pipelines.has(mate) or mate in self._finished:
            return (peer,)
        if mate not in self._waiting:
            return ()
        return tuple(sorted((peer, mate))) if self._waiting[mate] == step else (peer,) * (self._waiting[mate] > step)

    def _neighbour(self, ring, peer, step):
        place = ring.index(peer)
        is_right = (place + step // EVERY_STEPS) % 2 == 0
        return ring[(place + (1 if is_right else -1)) % len(ring)]


ENTRY = replace(
    groups.ENTRY,
    build=lambda setup: RingReplica(
        setup.plan, replica_place(setup), replica_options(setup), HeldOutWork(held_out_place(setup))
    ),
    build_agreement=RingScheduler,
)
