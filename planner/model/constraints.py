"""Constraints on who sits where: from a file, by names; and for one problem, by indices.

A seat is a stage and a pipeline. The file is an object with any of these fields:

    {"pin": [{"device": "a", "stage": 0}, {"device": "b", "pipeline": 1}],
     "forbid": [{"device": "c", "stage": 0}, {"device": "d"}],
     "same_stage": [["a", "b"]], "same_pipeline": [["c", "e"]],
     "at_most": [{"region": "eu", "most": 2}]}

`pin` gives a device a stage, a pipeline or both; `forbid` keeps it out of a stage, a pipeline, one seat, or of the
plan; devices of one `same_` list share it, as far as they are used; `at_most` limits the devices of a region in any one
stage, "*" those of every region (spread over failure domains: a region's loss then leaves replicas of each stage).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxdt.run import serialize
from jaxdt.run.errors import BadInput, nearest, read_text, require_printable
from jaxdt.run.network import Network

EVERY_REGION = "*"


@dataclass(frozen=True)
class SeatRule:
    """A device and a stage, a pipeline, or both; None stands for any."""

    device: str
    stage: int | None = None
    pipeline: int | None = None

    def __str__(self) -> str:
        places = [f"{name} {value}" for name, value in (("stage", self.stage), ("pipeline", self.pipeline))]
        named = [text for text in places if not text.endswith("None")]
        return f"{self.device} {' '.join(named)}".strip()


@dataclass(frozen=True)
class RegionLimit:
    """At most so many devices of a region in one stage."""

    region: str
    most: int

    def __str__(self) -> str:
        return f"{self.most} of {'every region' if self.region == EVERY_REGION else self.region} in a stage"


@dataclass(frozen=True)
class Constraints:
    """See the module text."""

    pin: tuple[SeatRule, ...] = ()
    forbid: tuple[SeatRule, ...] = ()
    same_stage: tuple[tuple[str, ...], ...] = ()
    same_pipeline: tuple[tuple[str, ...], ...] = ()
    at_most: tuple[RegionLimit, ...] = ()

    @property
    def empty(self) -> bool:
        return not (self.pin or self.forbid or self.same_stage or self.same_pipeline or self.at_most)

    def named(self) -> list[Rule]:
        """Every constraint with its text, in the order of the fields."""
        rules: list[Rule] = []
        for name in ("pin", "forbid", "same_stage", "same_pipeline", "at_most"):
            for value in getattr(self, name):
                text = " and ".join(value) if isinstance(value, tuple) else str(value)
                rules.append(Rule(name, value, f"{name}: {text}"))
        return rules

    @classmethod
    def of(cls, named: Sequence[Rule]) -> Constraints:
        """The constraints of such a list."""
        values: dict[str, tuple[Any, ...]] = {}
        for rule in named:
            values[rule.kind] = (*values.get(rule.kind, ()), rule.value)
        return cls(**values)

    def without(self, devices: Sequence[str]) -> Constraints:
        """The constraints that are left when devices are gone."""
        gone = set(devices)
        return Constraints(
            pin=tuple(rule for rule in self.pin if rule.device not in gone),
            forbid=tuple(rule for rule in self.forbid if rule.device not in gone),
            same_stage=_without(self.same_stage, gone),
            same_pipeline=_without(self.same_pipeline, gone),
            at_most=self.at_most,
        )


def _without(lists: tuple[tuple[str, ...], ...], gone: set[str]) -> tuple[tuple[str, ...], ...]:
    left = (tuple(name for name in names if name not in gone) for names in lists)
    return tuple(names for names in left if len(names) > 1)


@dataclass(frozen=True)
class Rule:
    """One constraint: the field that it stands in, its value, and a text that names it."""

    kind: str
    value: SeatRule | RegionLimit | tuple[str, ...]
    text: str


def load_constraints(path: str | Path) -> Constraints:
    """Read a constraints.json."""
    try:
        data = serialize.parse_json(read_text(path), keys_once=True)
    except ValueError as error:
        raise BadInput(f"{path}: not JSON ({error})") from None
    try:
        require_printable(data, "constraints")
        return serialize.read(Constraints, data, "constraints")
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None


@dataclass(frozen=True, eq=False)
class Rules:
    """Constraints of one network and shape, by indices of devices. `limits` pairs the devices of a region with the most
    of them in a stage."""

    n_stages: int
    n_pipelines: int
    pin: tuple[tuple[int, int | None, int | None], ...]
    forbid: tuple[tuple[int, int | None, int | None], ...]
    same_stage: tuple[tuple[int, ...], ...]
    same_pipeline: tuple[tuple[int, ...], ...]
    limits: tuple[tuple[tuple[int, ...], int], ...]
    constraints: Constraints = field(default_factory=Constraints)

    @property
    def about_pipelines(self) -> bool:
        """Whether a constraint is about pipelines, so that devices of two stages cannot be paired freely."""
        seats = (*self.pin, *self.forbid)
        return bool(self.same_pipeline) or any(pipeline is not None for _, _, pipeline in seats)

    def violated(self, placement: Sequence[Sequence[int]]) -> list[str]:
        """The constraints that a placement [S][P] violates, in words; empty if it violates none."""
        seat = {d: (s, p) for s, row in enumerate(placement) for p, d in enumerate(row)}
        lines = []
        for d, s, p in self.pin:
            if d not in seat or s not in (None, seat[d][0]) or p not in (None, seat[d][1]):
                lines.append(f"pin of device {d}")
        for d, s, p in self.forbid:
            if d in seat and s in (None, seat[d][0]) and p in (None, seat[d][1]):
                lines.append(f"forbid of device {d}")
        for k, lists in enumerate((self.same_stage, self.same_pipeline)):
            for group in lists:
                if len({seat[d][k] for d in group if d in seat}) > 1:
                    lines.append(f"same {('stage', 'pipeline')[k]} of devices {list(group)}")
        for members, most in self.limits:
            for s, row in enumerate(placement):
                if len(set(row) & set(members)) > most:
                    lines.append(f"at most {most} of devices {list(members)} in stage {s}")
        return lines


def rules_of(constraints: Constraints, network: Network, n_stages: int, n_pipelines: int) -> Rules:
    """The constraints by indices; BadInput for a name, a stage or a pipeline that does not exist."""
    index = {device.name: d for d, device in enumerate(network.devices)}
    regions: dict[str, list[int]] = {}
    for d, device in enumerate(network.devices):
        regions.setdefault(device.region, []).append(d)

    def index_of(name: str, where: str) -> int:
        if name not in index:
            raise BadInput(f"constraints.{where}: no device {name!r}{nearest(name, index)}")
        return index[name]

    def seats(where: str, rules: tuple[SeatRule, ...]):
        for rule in rules:
            for what, value, n in (("stage", rule.stage, n_stages), ("pipeline", rule.pipeline, n_pipelines)):
                if value is not None and not 0 <= value < n:
                    raise BadInput(f"constraints.{where}: {rule.device}: {what}: got {value}, expected 0 to {n - 1}")
            if where == "pin" and rule.stage is None and rule.pipeline is None:
                raise BadInput(f"constraints.pin: {rule.device}: expected a stage, a pipeline, or both")
            yield index_of(rule.device, where), rule.stage, rule.pipeline

    def groups(where: str, lists: tuple[tuple[str, ...], ...]):
        return tuple(tuple(dict.fromkeys(index_of(name, where) for name in names)) for names in lists)

    limits: list[tuple[tuple[int, ...], int]] = []
    for limit in constraints.at_most:
        if limit.most < 0:
            raise BadInput(f"constraints.at_most: {limit.region}: got {limit.most}, expected an integer >= 0")
        if limit.region != EVERY_REGION and limit.region not in regions:
            raise BadInput(f"constraints.at_most: no region {limit.region!r}{nearest(limit.region, regions)}")
        chosen = regions.values() if limit.region == EVERY_REGION else [regions[limit.region]]
        limits += [(tuple(members), limit.most) for members in chosen]
    return Rules(
        n_stages=n_stages,
        n_pipelines=n_pipelines,
        pin=tuple(seats("pin", constraints.pin)),
        forbid=tuple(seats("forbid", constraints.forbid)),
        same_stage=groups("same_stage", constraints.same_stage),
        same_pipeline=groups("same_pipeline", constraints.same_pipeline),
        limits=tuple(limits),
        constraints=constraints,
    )
