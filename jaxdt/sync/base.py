"""A sync decides how the replicas of a stage agree. Here: its interface, and the table of the syncs that exist.

A sync has a machine at each peer, which averages what the wiring has accumulated and asks for updates, and an agreement
at the coordinator, which decides when a step is done. A new sync is one file and one entry of SYNCS.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from jaxdt.membership.agreement import Agreement
from jaxdt.membership.coordinator_config import CoordinatorConfig
from jaxdt.membership.peer import Machine
from jaxdt.run.config import RunConfig
from jaxdt.run.errors import BadInput, nearest
from jaxdt.run.memory import ReplicaCopies
from jaxdt.run.peer_setup import PeerSetup
from jaxdt.run.plan import Plan

# Name of a kind -> the module that holds its `ENTRY`, imported when the kind is used.
SYNCS: dict[str, str] = {
    "allreduce": "jaxdt.sync.allreduce",
    "groups": "jaxdt.sync.groups",
    "server": "jaxdt.sync.server",
}


@dataclass(frozen=True)
class Period:
    """The course of steps repeats every `n_steps`, once `n_before` steps are done."""

    n_steps: int = 1
    n_before: int = 1


class Sync(Machine, Protocol):
    """One peer's side.

    It is told: ViewChanged and Evicted by the membership; Accumulated, Evaluated and Drained by the wiring; Joined by
    the state transfer; messages of other peers' syncs and of the agreement; and Ran and Summed for what it asked for.
    It answers with Run (Work that gathers and updates), Sum, Free, Forget, messages, and Updated once the parameters
    have seen another update."""


@dataclass(frozen=True)
class SyncEntry:
    """The answers of a kind of sync to the rest of jaxdt.

    build                a peer's machine
    build_agreement      the coordinator's part
    check                '' if config and plan make sense with it, else a line that names the field and the reason
    replicas_may_differ  whether a replica continues with its own steps while others have done fewer. Then each pipeline
                         runs by itself: its sync says Stepped when its next step may begin, and StepsEnd which is the
                         last; no tensor is sent twice, and messages of a step outlive views. Else a step begins for all
                         replicas at once, with Updated
    outlives_views       messages of peers that count also in a view after the one in which they were sent
    plan_roles           the fields of plan.roles that the sync uses
    settings             the group of fields of config.sync that is for this kind, "" if there is none
    begins_anew          whether a peer that was evicted continues with new machines in its own place
    server_vectors       the vectors of one number a parameter that a server of the plan holds for its workers at most
    copies               the bytes that a replica holds beside its state, for a config and the layers lo..hi-1; None
                         where replicas are equal
    period               after how many steps their course repeats, so that a mean over so many is that of a run
    exchanges_per_step   how many times a step the replicas of a stage exchange their vector, in the mean
    """

    build: Callable[[PeerSetup], Sync]
    build_agreement: Callable[[CoordinatorConfig, RunConfig, Plan], Agreement]
    check: Callable[[RunConfig, Plan], str]
    replicas_may_differ: bool = False
    outlives_views: frozenset[type] = frozenset()
    plan_roles: frozenset[str] = frozenset()
    settings: str = ""
    begins_anew: bool = False
    server_vectors: Callable[[Plan], int] = lambda plan: 0
    copies: Callable[[RunConfig, int, int], ReplicaCopies | None] = lambda config, lo, hi: None
    period: Callable[[RunConfig, Plan], Period] = lambda config, plan: Period()
    exchanges_per_step: Callable[[RunConfig], float] = lambda config: 1.0


def sync_entry(kind: str) -> SyncEntry:
    """The entry of a kind; BadInput for one that does not exist."""
    if kind not in SYNCS:
        raise BadInput(f"sync.kind: got {kind!r}, expected one of {', '.join(SYNCS)}{nearest(kind, SYNCS)}")
    return importlib.import_module(SYNCS[kind]).ENTRY
