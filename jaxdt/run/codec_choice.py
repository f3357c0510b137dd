"""codec auto: link by link, none or int8, decided once before a run from a known network.

A tensor that is not compressed keeps a link busy for none_bytes / bandwidth. With int8 that is int8_bytes / bandwidth,
and the sender's device encodes, the receiver's decodes. int8 is chosen where its total is smaller.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

from jaxdt.run import codec
from jaxdt.run.config import RunConfig
from jaxdt.run.errors import BadInput
from jaxdt.run.network import Network
from jaxdt.run.plan import Plan
from jaxdt.run.profile import CodecTimes, Profile
from jaxdt.run.sizes import boundary_bytes

N_LINKS_PRINTED = 4
Times = Callable[[int, int], CodecTimes]


@dataclass(frozen=True)
class CodecChoice:
    """The codec chosen for one link, or for all links between two stages, and the seconds per tensor behind the choice,
    summed over the links: on the wire without and with int8, and of encoding and decoding."""

    links: tuple[tuple[int, int], ...]
    codec: str
    none_s: float
    int8_s: float
    codec_s: float

    def __str__(self) -> str:
        none, int8, coding = (f"{1e3 * s / len(self.links):.3g} ms" for s in (self.none_s, self.int8_s, self.codec_s))
        names = ", ".join(f"{src}->{dst}" for src, dst in self.links[:N_LINKS_PRINTED])
        names += ", ..." if len(self.links) > N_LINKS_PRINTED else ""
        return (
            f"link{'s' if len(self.links) > 1 else ''} {names}: codec {self.codec}: a tensor takes {none} without, "
            f"{int8} with int8 and {coding} to encode and decode it"
        )


def undecided(config: RunConfig, plan: Plan) -> bool:
    """Whether the plan, or a config whose plan names no codec, asks for auto."""
    plan_asks = any(codec.AUTO in entry for entry in plan.codec)
    plan_is_silent = all(entry == codec.NONE for entry in plan.codec)
    return plan_asks or (plan_is_silent and config.codec == codec.AUTO and plan.n_stages > 1)


def choose(
    config: RunConfig, plan: Plan, network: Network, times: Times, codec_per_pipeline: bool
) -> tuple[Plan, list[CodecChoice]]:
    """The plan with names in place of auto, and the reasons. `times(peer, layer)`: seconds of int8 on the device of a
    peer for the boundary tensor at a layer. Without `codec_per_pipeline` each peer of a stage may send to each peer of
    the next, and all links between two stages get one codec."""
    every_pipeline = tuple(range(plan.n_pipelines))
    pipeline_sets = [(pipeline,) for pipeline in every_pipeline] if codec_per_pipeline else [every_pipeline]
    if all(entry == codec.NONE for entry in plan.codec):
        plan = replace(plan, codec=(codec.AUTO,) * (plan.n_stages - 1))
    chooser = _Chooser(config, plan, network, times)
    choices: list[CodecChoice] = []
    entries: list[str] = []
    for boundary, entry in enumerate(plan.codec):
        pairs: list[tuple[str, str]] = []
        for pipelines in pipeline_sets:
            names: list[str] = []
            for forward in (True, False):
                name = codec.of_link(entry, pipelines[0], forward)
                if name == codec.AUTO:
                    choices.append(chooser.choice(boundary, pipelines, forward))
                    name = choices[-1].codec
                names.append(name)
            pairs.append((names[0], names[1]))
        entries.append(codec.entry_of(pairs))
    return replace(plan, codec=tuple(entries)), choices


def profiled(config: RunConfig, network: Network, profile: Profile) -> Times:
    """`times` from a profile, whose seconds are for a tensor of the full width."""

    def times(peer: int, layer: int) -> CodecTimes:
        kind = network.devices[peer].kind
        full_width = profile.kind(kind).codecs.get(codec.INT8)
        if full_width is None:
            raise BadInput(f"profile.kinds: kind {kind!r} has no seconds of int8, expected them under codecs")
        share = config.model.facts.boundary_width(layer) / config.model.facts.in_width
        return CodecTimes(full_width.encode_s * share, full_width.decode_s * share)

    return times


@dataclass(frozen=True)
class _Chooser:
    config: RunConfig
    plan: Plan
    network: Network
    times: Times

    def choice(self, boundary: int, pipelines: tuple[int, ...], forward: bool) -> CodecChoice:
        """The choice for pipelines whose peers may send to any peer of them at the next stage."""
        senders, receivers = (boundary, boundary + 1) if forward else (boundary + 1, boundary)
        sources, targets = self.plan.placement[senders], self.plan.placement[receivers]
        if self.plan.is_even:
            sources, targets = ([row[p] for p in pipelines] for row in (sources, targets))
        links = tuple(itertools.product(sources, targets))
        layer = self.plan.stages[boundary][1]

        def wire_s(name: str) -> float:
            encoded = replace(self.plan, codec=(name,) * (self.plan.n_stages - 1))
            n_bytes = boundary_bytes(self.config, encoded, boundary, pipelines[0], forward)
            return sum(self.network.link(src, dst).occupied_s(n_bytes) for src, dst in links)

        none_s = wire_s(codec.NONE)
        int8_s = wire_s(codec.INT8)
        codec_s = sum(self.times(src, layer).encode_s + self.times(dst, layer).decode_s for src, dst in links)
        name = codec.INT8 if int8_s + codec_s < none_s else codec.NONE
        return CodecChoice(links, name, none_s, int8_s, codec_s)
