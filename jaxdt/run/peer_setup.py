"""The values that the machines of one peer are built from: the run's config and plan, and the peer's place in them."""

from dataclasses import dataclass

from jaxdt.run.config import RunConfig
from jaxdt.run.plan import Plan


@dataclass(frozen=True)
class PeerSetup:
    """`peer` holds `stage`; a newcomer has no place in the plan. `fingerprint`: what peers compare to know that they
    run the same thing. `replicas_may_differ`: whether each pipeline does steps of its own (jaxdt.sync.base)."""

    config: RunConfig
    plan: Plan
    peer: int
    stage: int
    fingerprint: str = ""
    replicas_may_differ: bool = False
