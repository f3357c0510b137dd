"""Plans of models that people have: a config.json of Hugging Face, devices as drivers name them, settings of other
trainers."""

import json
import re
import shlex
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

import planner
from jaxdt.interop.hf_config import options_of_config
from jaxdt.run import plan as plans
from jaxdt.run import profile as profiles
from jaxdt.run.config import parse
from jaxdt.run.errors import BadInput
from jaxdt.run.network import to_json, uniform
from jaxdt.run.plan import Plan, ranges
from jaxdt.run.profile import from_flops
from planner.__main__ import main
from planner.model.devices import CATALOGUE, PRINTED_NAMES, catalogue_kind, spec_of
from planner.model.generate import generate
from planner.report.export import exported
from planner.step_time.workload import on_accelerators

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "models"
# As published, without what only generation reads.
LLAMA_3_8B = {
    "model_type": "llama",
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
QWEN3_0P6B = {
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
PUBLISHED = {"llama3": (LLAMA_3_8B, 8_030_261_248), "qwen3": (QWEN3_0P6B, 596_049_920)}


def network_of(*kinds):
    network = generate("homogeneous", len(kinds), 0)
    devices = tuple(replace(device, kind=kind) for device, kind in zip(network.devices, kinds, strict=True))
    return replace(network, devices=devices)


@pytest.fixture
def solve(tmp_path):
    """Solves for a config on devices of some kinds; returns the exit code and the file of the plan."""

    def run(config, kinds, *flags):
        network, model, out = (tmp_path / name for name in ("network.json", "config.json", "plan.json"))
        network.write_text(json.dumps(to_json(network_of(*kinds))))
        model.write_text(config if isinstance(config, str) else json.dumps(config))
        fixed = ["--network", str(network), "--model_config", str(model), "--out", str(out)]
        return main(["solve", *fixed, "--time_limit_s", "0.5", *flags]), out

    return run


def stage_params(config, lo, hi):
    """The numbers of a stage, by hand: a shared table counts on both stages that hold it."""
    width, n_heads, kv_heads = (config[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    head = config.get("head_dim") or width // n_heads
    layer = 2 * width * head * (n_heads + kv_heads) + 3 * width * config["intermediate_size"] + 2 * width
    layer += 2 * head if config["model_type"] == "qwen3" else 0
    table, last = config["vocab_size"] * width, config["num_hidden_layers"]
    ends = (lo == 0) + (hi == last) - (config["tie_word_embeddings"] and (lo, hi) == (0, last))
    return (hi - lo) * layer + ends * table + (hi == last) * width


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_has_its_published_size_and_the_memory_of_hand_sums(name, solve, capsys):
    """By hand, for Adam in bfloat16, in bytes a parameter. At the update: parameters, their cast and the new ones are
    10, two moments 8, the accumulator and the mean 8. While computing the new ones and the mean are missing, and there
    are the activations, on the last stage with the logits and their gradient. Two vectors of an exchange are on the
    host."""
    config, n_params = PUBLISHED[name]
    assert stage_params(config, 0, config["num_hidden_layers"]) == n_params
    assert options_of_config(config, "config.json").facts.n_params == n_params
    shape = ("--stages", "4", "--pipelines", "1", "--global_batch", "8")
    code, out = solve(config, ["NVIDIA A100-SXM4-80GB"] * 4, *shape)
    assert code == 0
    plan = plans.load(out)
    memory = plan.found["stage_memory_bytes"]
    text = capsys.readouterr().out
    for stage, ((lo, hi), held) in enumerate(zip(plan.stages, memory, strict=True)):
        n = stage_params(config, lo, hi)
        boundary = ((lo > 0) + (hi < plan.n_layers)) * 2048 * config["hidden_size"] * 2  # of 2,048 tokens
        if held["activations"]:
            expected, on_host = (6 * n, 8 * n, 4 * n), (8 + plan.in_flight[stage]) * boundary
            logits = (hi == plan.n_layers) * 2 * 4 * 2048 * config["vocab_size"]
            assert held["activations"] >= max(8 * n, logits)
        else:
            expected, on_host = (10 * n, 8 * n, 8 * n), 8 * n + 8 * boundary  # 8 microbatches are kept
        assert (held["parameters"], held["moments"], held["gradients"]) == expected
        assert held["on_host"] == on_host
        row = next(line for line in text.splitlines() if line.startswith(f"stage {stage} "))
        assert f"{lo}..{hi - 1}" in row and f"{expected[0] / 1e9:.3f}" in row
    assert main(["explain", str(out)]) == 0
    explained = capsys.readouterr().out
    assert (
        text[text.index("memory, GB") :].splitlines()[:5] == explained[explained.index("memory, GB") :].splitlines()[:5]
    )


def test_the_shape_is_found_by_step_time_and_samples_have_2048_tokens(solve):
    code, out = solve(QWEN3_0P6B, ["Tesla T4"] * 2, "--global_batch", "4")
    assert code == 0
    found = plans.load(out).found
    assert found["objective"] == "step_time" and "catalogue" in found["profile"]
    flags = ("--global_batch", "4", "--objective", "comm_cost", "--stages", "2", "--pipelines", "1")
    for sequence, tokens in ((), 2048), (("--sequence", "512"), 512):
        code, out = solve(QWEN3_0P6B, ["", ""], *flags, *sequence)
        assert code == 0
        assert plans.load(out).found["c_pp_bytes"] == 4 * tokens * 1024 * 2
    gpt2 = json.loads((FIXTURES / "gpt2" / "config.json").read_text())
    code, out = solve(gpt2, ["", ""], *flags)
    assert code == 0
    assert plans.load(out).found["c_pp_bytes"] == 4 * gpt2["n_positions"] * gpt2["n_embd"] * 2


def test_a_profile_of_the_model_counts_though_it_takes_longer_samples(solve, tmp_path, capsys):
    model = options_of_config(QWEN3_0P6B, "config.json").with_max_len(2048)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profiles.to_json(from_flops(model, 1, {"T4": 1e12}, 1.0, seq_len=256))))
    flags = ("--global_batch", "4", "--profile", str(path))
    code, out = solve(QWEN3_0P6B, ["Tesla T4"] * 2, *flags)
    assert code == 0
    assert "catalogue" not in plans.load(out).found["profile"]
    assert solve(QWEN3_0P6B, ["T4"] * 2, *flags, "--sequence", "512")[0] == 2
    assert "--sequence: got 512, expected the 256 of" in capsys.readouterr().err
    assert solve(LLAMA_3_8B, ["T4"] * 2, *flags)[0] == 2
    assert "--model_config: differs from the model of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "flags", "expected"),
    [
        ({"model_type": "lama"}, [], "model_type: got 'lama', expected one of gpt2, llama.*did you mean \"llama\""),
        ({**LLAMA_3_8B, "vocab_size": None}, [], "vocab_size"),
        ({k: v for k, v in LLAMA_3_8B.items() if k != "hidden_size"}, [], "config.json: hidden_size: missing"),
        ("{", [], "config.json: cannot be read"),
        ("[]", [], r"config.json: got \[\], expected an object"),
        (LLAMA_3_8B, ["--model", "small"], "--model_config: got .* and --model small, expected one of them"),
        (LLAMA_3_8B, ["--config", "configs/small.py"], "--model_config: got .* with --config"),
        (LLAMA_3_8B, ["--c_dp_bytes", "1"], "--c_dp_bytes, --c_pp_bytes: step_time derives the sizes"),
        (LLAMA_3_8B, ["--sequence", "9000"], "--sequence: got 9000, expected 1 to 8192"),
        (LLAMA_3_8B, ["--sequence", "0"], "--sequence: got 0, expected 1 to 8192"),
        (LLAMA_3_8B, ["--objective", "comm_cost"], "--stages: missing"),
        (LLAMA_3_8B, ["--model_config", "none.json"], "none.json: cannot be read"),
        (
            LLAMA_3_8B,
            ["--export", "megatron", "--replicas", "unequal"],
            "--export: got megatron with --replicas unequal",
        ),
        (LLAMA_3_8B, ["--export", "megatron", "--solver", "cluster"], "--export: got megatron with --solver cluster"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(config, flags, expected, solve, capsys):
    code, out = solve(config, ["T4", "T4"], *flags)
    error = capsys.readouterr().err
    assert code == 2 and not out.exists()
    assert error.count("\n") == 1
    assert re.search(expected, error)


# ------------------------------------------------------------------------------------------------------------- devices


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("GeForce RTX 3090", "RTX3090"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA L40S", "L40S"),
        ("TPU v4", "TPU-v4"),
        ("TPU v5 lite", "TPU-v5e"),
        ("Apple M1 Max", "M1-Max"),
    ],
)
def test_a_driver_names_a_device_of_the_catalogue(name, kind):
    assert catalogue_kind(name) == kind
    assert spec_of(name) is CATALOGUE[kind]
    network = network_of(name, kind)
    run = planner.run_of_model("small", planner.StepOptions(global_batch=16))
    found = planner.profile_of_kinds(run, network)
    assert found.kinds[name] == found.kinds[kind]
    measured = from_flops(run.model, 1, {kind: 1e12}, 1.0, dtype="bfloat16")
    assert planner.profile_of_kinds(run, network, measured).kinds[name] == measured.kinds[kind]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX4090"),
        ("NVIDIA GeForce RTX 4090 D", "RTX4090"),
        ("NVIDIA H100 PCIe", "H100"),
        ("NVIDIA A10G", "A10"),
    ],
)
def test_a_card_that_differs_in_a_word_is_another_one(name, near):
    assert catalogue_kind(name) is None
    with pytest.raises(BadInput, match=f'no device of the catalogue.*{name}.*did you mean "{near}"'):
        spec_of(name)


def test_every_kind_has_its_own_names():
    names = [name for printed in PRINTED_NAMES.values() for name in printed]
    assert set(PRINTED_NAMES) <= set(CATALOGUE)
    assert all(catalogue_kind(kind) == kind for kind in CATALOGUE)
    assert all(catalogue_kind(name) == kind for kind, printed in PRINTED_NAMES.items() for name in printed)
    assert len(names) == len(set(names))
    assert catalogue_kind("") is None


# -------------------------------------------------------------------------------------------------------------- export


def plan_of(sizes, n_pipelines=1, **fields):
    n_stages = len(sizes)
    rows = [tuple(range(stage * n_pipelines, (stage + 1) * n_pipelines)) for stage in range(n_stages)]
    shares = fields.pop("shares", (4,) * n_pipelines)
    names = tuple(f"host{d}" for d in range(n_stages * n_pipelines))
    return Plan(sum(sizes), ranges(tuple(sizes)), tuple(rows), shares, devices=names, **fields)


def run_of(config=LLAMA_3_8B, size=2):
    model = options_of_config(config, "config.json")
    return planner.run_of_model(model, planner.StepOptions(global_batch=8, microbatch_size=size, seq_len=1024))


def settings(text):
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def flags_of(text):
    """The flags as a shell hands them to a program, by name."""
    words = [word for line in settings(text) for word in shlex.split(line)]
    return dict(word.removeprefix("--").split("=", 1) for word in words)


def megatron_layers(flags):
    """Layers of each stage, by Megatron's rules."""
    n_stages, n_layers = int(flags["pipeline-model-parallel-size"]), int(flags["num-layers"])
    if layout := flags.get("pipeline-model-parallel-layout"):
        assert layout[0] == "E" and layout[-1] == "L"
        stages = layout[1:-1].split("|")
        assert all(stage.startswith("t*") for stage in stages) and len(stages) == n_stages
        return [int(stage[2:]) for stage in stages]
    ends = [flags.get(f"decoder-{end}-pipeline-num-layers") for end in ("first", "last")]
    if None not in ends:
        first, last = map(int, ends)
        rest = n_stages - 2
        assert rest == 0 and first + last == n_layers or rest and (n_layers - first - last) % rest == 0
        return [first, *[(n_layers - first - last) // rest for _ in range(rest)], last]
    assert n_layers % n_stages == 0
    return [n_layers // n_stages] * n_stages


CUTS = [(8, 8, 8, 8), (5, 9, 9, 9), (5, 11, 11, 5), (3, 9, 12, 8), (20, 12), (32,), (10, 11, 11)]


@pytest.mark.parametrize("sizes", CUTS)
@pytest.mark.parametrize("n_pipelines", [1, 2])
def test_both_trainers_get_the_plan_s_layers_and_batches(sizes, n_pipelines):
    plan, run = plan_of(sizes, n_pipelines), run_of()
    flags = flags_of(exported(plan, run, "megatron"))
    assert megatron_layers(flags) == list(sizes)
    assert int(flags["micro-batch-size"]) == 2
    assert int(flags["global-batch-size"]) == 2 * 4 * n_pipelines
    assert int(flags["seq-length"]) == 1024
    text = exported(plan, run, "torchtitan")
    config = tomllib.loads(text)
    parallelism, training = config["parallelism"], config["training"]
    assert parallelism["pipeline_parallel_degree"] == len(sizes)
    assert parallelism["data_parallel_replicate_degree"] == n_pipelines
    assert training == {"local_batch_size": 8, "global_batch_size": 8 * n_pipelines, "seq_len": 1024}
    if len(sizes) > 1:
        parts = parallelism["module_fqns_per_model_part"]
        assert [len([name for name in part if name.startswith("layers.")]) for part in parts] == list(sizes)
        layers = [f"layers.{layer}" for layer in range(32)]
        assert [name for part in parts for name in part] == ["tok_embeddings", *layers, "norm", "lm_head"]
    for n, line in enumerate(line for line in text.splitlines() if line.startswith("# rank")):
        assert line == f"# rank {n}: host{n}"
    assert "not said" not in text


def test_what_they_cannot_say_has_a_line_each():
    plan = plan_of((16, 16), 2, shares=(5, 3), codec=("int8",), in_flight=(3, 1), schedule="1f1b")
    text = exported(plan, run_of(QWEN3_0P6B), "torchtitan")
    unsaid = [line.removeprefix("# not said: ") for line in text.splitlines() if line.startswith("# not said")]
    starts = (
        "microbatches [5, 3]",
        "forwards in flight [3, 1]",
        "codec int8",
        "parameters that the first and the last",
    )
    assert len(unsaid) == 4 and all(line.startswith(start) for line, start in zip(unsaid, starts, strict=True))
    assert tomllib.loads(text)["training"]["global_batch_size"] == 2 * 4 * 2
    gpipe = plan_of((16, 16), schedule="gpipe")
    assert "not said: schedule gpipe" in exported(gpipe, run_of(), "megatron")
    assert (
        tomllib.loads(exported(gpipe, run_of(), "torchtitan"))["parallelism"]["pipeline_parallel_schedule"] == "GPipe"
    )
    bare = exported(plan_of((2, 3)), None, "megatron")
    assert "not said: batch and sequence length" in bare and "micro-batch-size" not in bare
    unequal = Plan(4, ((0, 2), (2, 4)), ((0, 1), (2,)), (8,))
    with pytest.raises(BadInput, match="2 stages of 2, 1 replicas"):
        exported(unequal, run_of(), "megatron")


def test_the_settings_stand_beside_the_plan(solve, capsys):
    flags = ("--stages", "2", "--pipelines", "1", "--global_batch", "4", "--export")
    for target, name in ("megatron", "plan_megatron.args"), ("torchtitan", "plan_torchtitan.toml"):
        code, out = solve(QWEN3_0P6B, ["A100", "T4"], *flags, target)
        assert code == 0
        path = out.parent / name
        assert f"wrote {path}" in capsys.readouterr().out
        network = planner.load_network(out.parent / "network.json")
        run = planner.run_of_model(options_of_config(QWEN3_0P6B, ""), planner.StepOptions(global_batch=4, seq_len=2048))
        assert path.read_text() == exported(plans.load(out), run, target)
        assert all(f": {device.name}\n" in path.read_text() for device in network.devices)


@pytest.mark.parametrize(("kind", "expected"), [("NVIDIA A100-SXM4-80GB", True), ("somebody's card", False)])
def test_a_plan_without_a_profile_asks_the_catalogue_whether_its_devices_are_accelerators(kind, expected):
    config = parse({"model": {"preset": "debug"}})
    network = uniform(2)
    network = replace(network, devices=tuple(replace(device, kind=kind) for device in network.devices))
    assert on_accelerators(network, None, config) == expected
