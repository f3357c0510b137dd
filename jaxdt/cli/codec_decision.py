"""The decision of `codec: auto`, from the links between the peers and the measured speed of the codec."""

import functools
from collections.abc import Callable

from jaxdt import build
from jaxdt.cli import environment
from jaxdt.run import codec, codec_choice
from jaxdt.run import profile as profiles
from jaxdt.run.config import RunConfig
from jaxdt.run.errors import BadInput
from jaxdt.run.network import Network
from jaxdt.run.plan import Plan
from jaxdt.run.profile import CodecTimes


def decided(config: RunConfig, plan: Plan, network: Network | None, profile: str | None) -> tuple[Plan, list[str]]:
    """The plan with a codec for each link where it says auto, and a line for each choice with its reason. Without a
    profile.json int8 is measured on this machine."""
    if not codec_choice.undecided(config, plan):
        return plan, []
    if network is None:
        raise BadInput("codec: auto needs to know the links, expected --emulate=NETWORK.json or --network=NETWORK.json")
    if profile:
        times = codec_choice.profiled(config, network, profiles.load(profile))
    else:
        times = _measured(config)
    plan, choices = codec_choice.choose(config, plan, network, times, build.follows_plan(config))
    return plan, [str(choice) for choice in choices]


def _measured(config: RunConfig) -> Callable[[int, int], CodecTimes]:
    """Seconds of int8 at (peer, layer), measured on this machine and taken for every peer."""
    from jaxdt.runtime.calibrate.stage_times import time_codec  # imports jax

    environment.keep_off_gpus()

    @functools.cache
    def timed(width: int) -> CodecTimes:
        shape = (*config.microbatch_shape, width)
        return time_codec(codec.parse(codec.INT8), shape, config.dtype)

    return lambda peer, layer: timed(config.model.facts.boundary_width(layer))
