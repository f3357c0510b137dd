"""codec auto: link by link, none or int8, decided once before a run from a known network.

A tensor that is not compressed keeps a link busy for none_bytes / bandwidth. With int8 that is int8_bytes / bandwidth,
and the sender's device encodes, the receiver's decodes. int8 is taken where that is less in all.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

from jaxdt.spec import codec
from jaxdt.spec.config import RunConfig, check_plan
from jaxdt.spec.errors import BadInput
from jaxdt.spec.network import Network
from jaxdt.spec.plan import Plan
from jaxdt.spec.profile import CodecTimes, Profile
from jaxdt.spec.sizes import boundary_bytes


@dataclass(frozen=True)
class Choice:
    """The codec of one link, or of all links between two stages, and the seconds per tensor behind it, summed over
    them: on the wire without and with int8, and of encoding and decoding."""

    links: tuple[tuple[int, int], ...]
    codec: str
    none_s: float
    int8_s: float
    codec_s: float

    def __str__(self) -> str:
        none, int8, coding = (f"{1e3 * s / len(self.links):.3g} ms" for s in (self.none_s, self.int8_s, self.codec_s))
        names = ", ".join(f"{src}->{dst}" for src, dst in self.links[:4]) + (", ..." if len(self.links) > 4 else "")
        return (
            f"link{'s' if len(self.links) > 1 else ''} {names}: codec {self.codec}: a tensor takes {none} without, "
            f"{int8} with int8 and {coding} to encode and decode it"
        )


def undecided(config: RunConfig, plan: Plan) -> bool:
    """Whether the plan, or a config whose plan says nothing, asks for auto."""
    asks = any(codec.AUTO in entry for entry in plan.codec)
    silent = all(entry == codec.NONE for entry in plan.codec)
    return asks or (silent and config.codec == codec.AUTO and plan.n_stages > 1)


def choose(
    config: RunConfig, plan: Plan, network: Network, times: Callable[[int, int], CodecTimes]
) -> tuple[Plan, list[Choice]]:
    """The plan with names in place of auto, and why; `times(peer, layer)`: seconds of int8 on that peer's device for
    the boundary tensor at a layer. Where the wiring picks the receiver, all links between two stages get one codec."""
    if all(entry == codec.NONE for entry in plan.codec):
        plan = replace(plan, codec=(codec.AUTO,) * (plan.n_stages - 1))
    choices: list[Choice] = []
    entries = []
    for boundary, entry in enumerate(plan.codec):
        lanes = [(p,) for p in range(plan.n_pipelines)]
        if config.wiring.kind != "fixed":
            check_plan(config, plan)
            lanes = [tuple(range(plan.n_pipelines))]
        names: list[tuple[str, str]] = []
        for lane in lanes:
            pair = []
            for forward in (True, False):
                name = codec.of_link(entry, lane[0], forward)
                if name == codec.AUTO:
                    choices.append(_choice(config, plan, network, times, boundary, lane, forward))
                    name = choices[-1].codec
                pair.append(name)
            names.append((pair[0], pair[1]))
        entries.append(codec.entry_of(names))
    return replace(plan, codec=tuple(entries)), choices


def profiled(config: RunConfig, network: Network, profile: Profile) -> Callable[[int, int], CodecTimes]:
    """`times` from a profile, whose seconds are for a tensor of the full width."""

    def times(peer: int, layer: int) -> CodecTimes:
        kind = network.devices[peer].kind
        whole = profile.kind(kind).codecs.get(codec.INT8)
        if whole is None:
            raise BadInput(f"profile.kinds: kind {kind!r} has no seconds of int8, expected them under codecs")
        share = config.model.boundary_width(layer) / config.model.d_model
        return CodecTimes(whole.encode_s * share, whole.decode_s * share)

    return times


def _choice(config, plan, network, times, boundary: int, lane: tuple[int, ...], forward: bool) -> Choice:
    """For the pipelines of a lane, each of whose peers sends to each."""
    stages = (boundary, boundary + 1) if forward else (boundary + 1, boundary)
    links = tuple(itertools.product(*([plan.placement[stage][p] for p in lane] for stage in stages)))
    layer = plan.stages[boundary][1]

    def wire_s(name: str) -> float:
        named = replace(plan, codec=(name,) * (plan.n_stages - 1))
        n_bytes = boundary_bytes(config, named, boundary, lane[0], forward)
        return sum(network.link(src, dst).occupied_s(n_bytes) for src, dst in links)

    none_s, int8_s = wire_s(codec.NONE), wire_s(codec.INT8)
    codec_s = sum(times(src, layer).encode_s + times(dst, layer).decode_s for src, dst in links)
    return Choice(links, codec.INT8 if int8_s + codec_s < none_s else codec.NONE, none_s, int8_s, codec_s)
