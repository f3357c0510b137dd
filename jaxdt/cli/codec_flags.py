"""The decision of `codec: auto` for launch.py, from the links between the peers and the measured speed of the codec."""

import functools
from collections.abc import Callable

from absl import flags

from jaxdt import build
from jaxdt.cli import environment, run_flags
from jaxdt.spec import codec, codec_choice
from jaxdt.spec import profile as profiles
from jaxdt.spec.config import RunConfig
from jaxdt.spec.errors import BadInput
from jaxdt.spec.plan import Plan
from jaxdt.spec.profile import CodecTimes

NETWORK = flags.DEFINE_string(
    "network", None, "Measured links, for the prediction, codec auto and wiring.replan; else those of --emulate."
)
PROFILE = flags.DEFINE_string("profile", None, "For codec auto: a profile.json; by default int8 is measured.")


def decided(config: RunConfig, plan: Plan) -> Plan:
    """The plan with a codec for each link where it says auto. The choices and their reasons are printed."""
    if not codec_choice.undecided(config, plan):
        return plan
    network = run_flags.network_of(NETWORK.value, plan) if NETWORK.value else run_flags.emulated(plan)
    if network is None:
        raise BadInput("codec: auto needs to know the links, expected --emulate=NETWORK.json or --network=NETWORK.json")
    if PROFILE.value:
        times = codec_choice.profiled(config, network, profiles.load(PROFILE.value))
    else:
        times = _measured(config)
    plan, choices = codec_choice.choose(config, plan, network, times, build.follows_plan(config))
    for choice in choices:
        print(choice, flush=True)
    return plan


def _measured(config: RunConfig) -> Callable[[int, int], CodecTimes]:
    """Seconds of int8 at (peer, layer), measured on this machine and taken for every peer."""
    from jaxdt.runtime.calibrate.stage_times import time_codec  # imports jax

    environment.keep_off_gpus()

    @functools.cache
    def timed(width: int) -> CodecTimes:
        shape = (config.train.microbatch_size, config.model.seq_len, width)
        return time_codec(codec.parse(codec.INT8), shape, config.dtype)

    return lambda peer, layer: timed(config.model.boundary_width(layer))
