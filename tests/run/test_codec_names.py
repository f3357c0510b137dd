"""Names of codecs, where they may stand, and bytes on the wire; and codec auto."""

from dataclasses import replace

import pytest

from jaxdt.build import follows_plan
from jaxdt.run import codec_choice
from jaxdt.run.codec import CodecSpec, entry_of, loses, parse, wire_bytes
from jaxdt.run.config import WiringConfig, check_plan, default_plan, with_codec
from jaxdt.run.config import parse as parse_config
from jaxdt.run.errors import BadInput
from jaxdt.run.network import Network, uniform
from jaxdt.run.plan import Plan
from jaxdt.run.profile import CodecTimes, DeviceKind, PartTimes, Profile
from jaxdt.run.sizes import boundary_bytes

MODEL = {"preset": "debug", "n_layers": 4}
NUMBERS = 2 * 32 * 64  # microbatch of 2, sequence 32, width 64


def config_of(codec="none", model=None, stages=2, pipelines=1, **options):
    plan = {"stages": stages, "pipelines": pipelines, "microbatches": pipelines}
    train = {"microbatch_size": 2}
    return parse_config({"model": MODEL | (model or {}), "codec": codec, "plan": plan, "train": train} | options)


# ------------------------------------------------------------------------------------------------------ names, bytes


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("none", CodecSpec("none")),
        ("bf16", CodecSpec("bf16")),
        ("int8", CodecSpec("int8", 256)),
        ("int8:1024", CodecSpec("int8", 1024)),
        ("int8-dynamic", CodecSpec("int8-dynamic", 4096)),
        ("int8-dynamic:256", CodecSpec("int8-dynamic", 256)),
        ("auto", CodecSpec("auto")),
    ],
)
def test_a_name_and_its_block(text, spec):
    assert parse(text) == spec
    assert str(spec) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("itn8", r"codec: got 'itn8', expected one of none, bf16.*did you mean \"int8\""),
        ("int8:0", "codec: got 'int8:0', expected an integer >= 1 behind the colon"),
        ("int8:", "codec: got 'int8:', expected an integer"),
        ("int8:x", "codec: got 'int8:x', expected an integer"),
        ("bf16:256", "codec: got 'bf16:256', expected one of"),
        ("maxot2+int8", r"codec: got 'maxot2\+int8', expected bottleneckR or maxoutR"),
        ("maxout1", "codec: got 'maxout1', expected one of"),
        ("maxout2+int9", r"codec: got 'int9', expected one of .* mean \"int8\""),
        (8, "codec: got 8, expected a string"),
    ],
)
def test_a_bad_name_is_one_line(text, message):
    with pytest.raises(BadInput, match=message) as caught:
        config_of(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "n", "dtype_bytes", "expected"),
    [
        ("none", 1000, 4, 4000),
        ("none", 1000, 2, 2000),
        ("bf16", 1000, 4, 2000),
        ("int8", 1024, 4, 1024 + 16),
        ("int8", 1025, 4, 1025 + 20),
        ("int8", 1, 4, 5),
        ("int8:1024", 1025, 2, 1025 + 8),
        ("int8-dynamic", 4096, 4, 4096 + 4),
    ],
)
def test_bytes_on_the_wire(text, n, dtype_bytes, expected):
    assert wire_bytes(parse(text), n, dtype_bytes) == expected


def test_bf16_loses_nothing_of_bf16():
    assert [loses(parse(name), 4) for name in ("none", "bf16", "int8")] == [False, True, True]
    assert [loses(parse(name), 2) for name in ("none", "bf16", "int8")] == [False, False, True]


# ------------------------------------------------------------------------------------------------------ config, plan


def test_compression_layers_in_a_codec_move_into_the_model():
    config = config_of("maxout2+int8", stages=3)
    assert (config.model.compression, config.model.compression_after, config.codec) == ("maxout2", (2, 3), "int8")
    assert config_of("bottleneck4").codec == "none"
    assert config_of("maxout2", model={"compression_after": [1, 3]}).model.compression_after == (1, 3)
    with pytest.raises(BadInput, match=r"model.compression_after: got 2, expected layer indices from 1 to 3"):
        config_of("maxout2", model={"compression_after": 2})
    with pytest.raises(BadInput, match=r"model.compression_after: got \(\), expected at least one layer index"):
        config_of("maxout2", stages=1)
    with pytest.raises(BadInput, match="codec: names maxout2, but model.compression is 'bottleneck4'"):
        config_of("maxout2+int8", model={"compression": "bottleneck4", "compression_after": (2,)})


def test_compression_and_int8_multiply():
    """A quarter of the numbers, a byte each."""
    config = config_of("maxout4+int8")
    n = NUMBERS // 4
    assert boundary_bytes(config, default_plan(config), 0, 0, True) == n + 4 * (n // 256)


PLAN = Plan(4, ((0, 2), (2, 4)), ((0, 2), (1, 3)), (1, 1))


def test_a_plan_names_a_codec_per_boundary_pipeline_and_direction():
    plan = replace(PLAN, codec=("none,int8/bf16",))
    check_plan(config_of(), plan)
    named = {(0, 1): "none", (1, 0): "none", (2, 3): "int8", (3, 2): "bf16"}
    assert plan.codec_of_links == named
    got = [boundary_bytes(config_of(), plan, 0, pipeline, forward) for pipeline in (0, 1) for forward in (True, False)]
    assert got == [4 * NUMBERS, 4 * NUMBERS, NUMBERS + NUMBERS // 64, 2 * NUMBERS]
    assert entry_of([("none", "none"), ("int8", "bf16")]) == "none,int8/bf16"
    assert entry_of([("int8", "int8"), ("int8", "int8")]) == "int8"


def test_a_bad_name_in_a_plan_is_refused():
    with pytest.raises(BadInput, match=r"plan.codec\[0\]: got 3 names in 'int8,int8,none', expected 1, or one for"):
        replace(PLAN, codec=("int8,int8,none",))
    with pytest.raises(BadInput, match=r"plan.codec\[0\]: got 'int7', expected one of"):
        check_plan(config_of(), replace(PLAN, codec=("none,int8/int7",)))


def test_a_plan_that_says_none_everywhere_leaves_the_choice_to_the_config():
    assert with_codec(config_of("int8"), PLAN).codec == ("int8",)
    assert with_codec(config_of("int8"), replace(PLAN, codec=("none",))).codec == ("int8",)
    assert with_codec(config_of("int8"), replace(PLAN, codec=("none,bf16",))).codec == ("none,bf16",)
    assert with_codec(config_of("auto"), replace(PLAN, codec=("none",))).codec == ("none",)


# -------------------------------------------------------------------------------------------------------------- auto

TIMES = CodecTimes(1e-3, 2e-3)


def choose(config, plan, network):
    return codec_choice.choose(config, plan, network, lambda peer, layer: TIMES, follows_plan(config))


def test_auto_compresses_where_the_wire_saves_more_than_the_codec_costs():
    """none: 16384 bytes, int8: 4160. At b bit/s the wire saves 97,792 / b seconds; the codec costs 3 ms, so the two
    are even at 32.6 Mb/s."""
    config, plan = config_of("auto"), replace(PLAN, codec=("auto",))
    slow, fast = 0.032, 0.033
    row = (slow, fast, slow, fast)
    network = Network(uniform(4).devices, ((0.1,) * 4,) * 4, (row, row, row, row))
    decided, choices = choose(config, plan, network)
    assert decided.codec_of_links == {(0, 1): "none", (1, 0): "int8", (2, 3): "none", (3, 2): "int8"}
    assert decided.codec == ("none/int8",)
    assert [c.links for c in choices] == [((0, 1),), ((1, 0),), ((2, 3),), ((3, 2),)]
    assert str(choices[1]) == (
        "link 1->0: codec int8: a tensor takes 4.1 ms without, 1.04 ms with int8 and 3 ms to encode and decode it"
    )


def test_auto_leaves_what_a_plan_has_named():
    decided, choices = choose(config_of(), replace(PLAN, codec=("auto/bf16,none",)), uniform(4, 0.0, 1e-3))
    assert decided.codec == ("int8/bf16,none",)
    assert [(c.links, c.codec) for c in choices] == [(((0, 1),), "int8")]


def test_where_the_wiring_picks_the_receiver_all_links_between_two_stages_get_one_codec():
    config = replace(config_of("auto"), wiring=WiringConfig("swarm"))
    decided, choices = choose(config, replace(PLAN, codec=("auto",)), uniform(4, 0.0, 1e-3))
    assert decided.codec == ("int8",)
    assert choices[0].links == ((0, 1), (0, 3), (2, 1), (2, 3))
    assert str(choices[0]).startswith("links 0->1, 0->3, 2->1, 2->3: codec int8: a tensor takes 131 ms without, 33.3")


def test_auto_is_asked_for_by_a_plan_or_by_a_config_whose_plan_is_silent():
    silent, asking = replace(PLAN, codec=("none",)), replace(PLAN, codec=("none,auto",))
    assert codec_choice.undecided(config_of("auto"), silent) and codec_choice.undecided(config_of(), asking)
    assert not codec_choice.undecided(config_of("int8"), silent)
    assert not codec_choice.undecided(config_of("auto"), replace(PLAN, codec=("int8,none",)))
    assert not codec_choice.undecided(config_of("auto", stages=1), default_plan(config_of("auto", stages=1)))


def test_a_run_with_an_undecided_codec_is_refused():
    config = config_of("auto")
    with pytest.raises(BadInput, match="codec: auto is decided when a run is launched with a network"):
        boundary_bytes(config, default_plan(config), 0, 0, True)


def test_seconds_from_a_profile_shrink_with_the_width():
    config = config_of("maxout2+auto")
    profile = Profile(config.model, 2, {"": DeviceKind(PartTimes(), codecs={"int8": TIMES})})
    times = codec_choice.profiled(config, uniform(2), profile)
    assert times(0, 2) == CodecTimes(0.5e-3, 1e-3)
    with pytest.raises(BadInput, match="profile.kinds: kind '' has no seconds of int8"):
        codec_choice.profiled(config, uniform(2), Profile(config.model, 2, {"": DeviceKind(PartTimes())}))(0, 2)
