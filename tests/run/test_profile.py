"""profile.json: parts add up to stages, a derived profile follows its formula, bad files are refused by name."""

import json

import pytest

from jaxdt.run import profile
from jaxdt.run.errors import BadInput
from jaxdt.run.families.gpt import GPTConfig
from jaxdt.run.profile import CodecTimes, DeviceKind, PartTimes, Profile, codec_times, from_flops, stage_seconds

MODEL = GPTConfig.of("debug", n_layers=4)
KIND = DeviceKind(
    PartTimes(1, 2, 3, 4), PartTimes(10, 20, 30, 40), PartTimes(100, 200, 300, 400), 0.5, {"int8": CodecTimes(7, 8)}
)
PROFILE = Profile(MODEL, 2, {"cpu": KIND})


def test_a_stage_is_the_sum_of_its_parts_and_the_last_forward_is_fused_into_its_backward():
    assert stage_seconds(PROFILE, "", 0, 2) == {"F": 12.5, "B": 24.5, "E": 12.5, "G": 36, "U": 48}
    assert stage_seconds(PROFILE, "cpu", 2, 4) == {"F": 0.5, "B": 306.5, "E": 102.5, "G": 306, "U": 408}


def test_stages_of_any_cut_add_up_to_the_whole_model():
    def total(*cuts):
        stages = [stage_seconds(PROFILE, "", lo, hi) for lo, hi in cuts]
        return sum(s["F"] + s["B"] - 1.0 for s in stages), sum(s["U"] for s in stages)

    assert total((0, 4)) == total((0, 1), (1, 4)) == total((0, 1), (1, 2), (2, 3), (3, 4))


def test_a_file_comes_back_as_it_was_written():
    assert profile.parse(json.dumps(profile.to_json(PROFILE)), "p.json") == PROFILE


def test_a_derived_profile_counts_the_products_of_muons_update():
    """Five times X X^T, its square, and both times X: of four matrices in each block."""
    adamw, muon = (from_flops(MODEL, 2, {"gpu": 1e12}, 0.5, optimizer=name).kinds["gpu"] for name in ("adamw", "muon"))
    kernels = [leaf.shape for leaf in MODEL.facts.entries_in(1, 2)[0].leaves if leaf.path.endswith("kernel")]
    flop = sum(5 * (4 * min(shape) ** 2 * max(shape) + 2 * min(shape) ** 3) for shape in kernels)
    assert len(kernels) == 4 and muon.layer.update_s - adamw.layer.update_s == pytest.approx(flop / 0.5e12)
    assert muon.head == adamw.head


def test_a_derived_profile_counts_six_flop_per_parameter_and_token_and_two_more_for_recomputation():
    n_tokens = 2 * MODEL.max_len
    for remat, per_token in (("dots", 6), ("recompute", 8)):
        layer = from_flops(MODEL, 2, {"gpu": 1e12}, 0.5, remat=remat).kinds["gpu"].layer
        assert layer.forward_s + layer.backward_s == pytest.approx(
            per_token * MODEL.facts.layers[0].n_params * n_tokens / 0.5e12
        )


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda data: data.update(format="x"), 'p.json: format: expected "jaxdt-profile-1"'),
        (lambda data: data.update(kinds={}), "profile.kinds: got none"),
        (
            lambda data: data["kinds"]["cpu"]["layer"].update(forward_s=-1.0),
            "p.json: profile.kinds.cpu.layer.forward_s: got -1.0, expected seconds from 0 to 1e",
        ),
        (lambda data: data["kinds"]["cpu"]["head"].update(update_s=1e300), "p.json: profile.kinds.cpu.head.update_s: "),
        (lambda data: data["kinds"]["cpu"].update(work_s=float("nan")), "p.json: profile.kinds.cpu.work_s: got nan"),
        (
            lambda data: data["kinds"]["cpu"].update(codecs={"int8": {"encode_s": 0.1, "decode_s": 1e300}}),
            "profile.kinds.cpu.codecs.int8.decode_s: got 1e",
        ),
        (lambda data: data.update(dtype="float16"), "p.json: profile.dtype: got 'float16', expected one of float32"),
        (lambda data: data.update(microbatch_size=0), "p.json: profile.microbatch_size: got 0, expected an integer in"),
        (lambda data: data["kinds"]["cpu"].update(layr={}), "layr: unknown field"),
        (lambda data: data["model"].update(n_heads=3), "model.n_heads: got 3"),
    ],
)
def test_a_bad_file_is_refused_by_name(change, message):
    data = json.loads(json.dumps(profile.to_json(PROFILE)))
    change(data)
    with pytest.raises(BadInput, match=message.replace("(", r"\(")):
        profile.parse(json.dumps(data), "p.json")


def test_an_unknown_kind_is_refused_with_the_nearest():
    with pytest.raises(BadInput, match="no kind 'cpv' .did you mean \"cpu\""):
        PROFILE.kind("cpv")


def with_codecs(codecs):
    return Profile(MODEL, 2, {"k": DeviceKind(PartTimes(), codecs=codecs)})


def test_a_codec_takes_its_own_seconds_or_its_familys():
    timed = with_codecs({"int8": CodecTimes(7, 8), "int8:64": CodecTimes(9, 9), "int8-dynamic": CodecTimes(5, 6)})
    found = {name: codec_times(timed, "k", name) for name in ("int8", "int8:256", "int8:64", "int8:1024")}
    assert found["int8"] == found["int8:256"] == found["int8:1024"] == CodecTimes(7, 8)
    assert found["int8:64"] == CodecTimes(9, 9)
    assert codec_times(timed, "k", "int8-dynamic:512") == CodecTimes(5, 6)


def test_a_codec_that_was_not_measured_is_never_free():
    with pytest.raises(BadInput, match=r"codecs: has no seconds of int8:512, .* known: none"):
        codec_times(with_codecs({}), "k", "int8:512")
    assert codec_times(with_codecs({}), "k", "none") == CodecTimes(0, 0)


def test_derived_codecs_are_bound_by_memory():
    """512 numbers of 4 bytes, 1 byte/s: int8 reads them twice and writes 512 + 2 * 4 bytes."""
    model = GPTConfig(2, 32, 2, 128, 16, 64)
    derived = from_flops(model, 1, {"": 1.0}, 0.5, memory_gbps=8e-9)
    assert codec_times(derived, "", "int8") == CodecTimes(2 * 2048 + 520, 2048 + 520)
    assert codec_times(derived, "", "bf16") == CodecTimes(2048 + 1024, 2048 + 1024)
    assert codec_times(from_flops(model, 1, {"": 1.0}, 0.5, dtype="bfloat16"), "", "bf16") == CodecTimes(0, 0)
