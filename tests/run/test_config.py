import json
from dataclasses import replace

import pytest

from jaxdt.config_file import base_config
from jaxdt.run import serialize
from jaxdt.run.config import check_plan, default_plan, parse
from jaxdt.run.errors import BadInput

# The names that config files and --config.* flags of users rely on: a change here breaks files that people hold.
STABLE_NAMES = {
    "model": {
        "preset", "n_layers", "d_model", "n_heads", "d_ff", "max_len", "vocab_size", "positions", "activation",
        "tied_head", "n_shared_blocks", "compression", "compression_after", "family", "n_kv_heads", "d_head",
        "rope_theta", "rope_scaling", "norm_eps", "qkv_bias", "o_bias", "qk_norm", "window", "options",
        "n_experts", "n_experts_per_token", "norm_topk", "router_aux_coef", "adapter",
    },
    "plan": {"stages", "pipelines", "layers", "schedule", "microbatches", "in_flight", "servers", "workers"},
    "data": {"path", "seq_len", "seq_start", "seq_growth_steps", "borders"},
    "train": {
        "steps", "seed", "microbatch_size", "eval_every_steps", "eval_microbatches", "checkpoint_every_steps",
        "keep_checkpoints", "checkpoint_copies", "checkpoint_on_stop", "on_nonfinite",
    },
    "optim": {
        "name", "lr", "b1", "b2", "eps", "gradient_frac", "weight_decay", "momentum", "warmup_steps",
        "decay_steps", "lr_schedule", "final_lr_frac", "clip_norm", "second_moment",
    },
    "wiring": {
        "kind", "routers", "window", "on_stage_lost", "stage_grace_s", "retain_bytes", "rebalance_s", "rebalance_moves",
        "rebalance_rule", "join_rule",
    },
    "sync": {"kind", "delay", "delay_after_steps", "slice_bytes", "check_every_steps", "codec", "groups", "server"},
    "init": {"path", "digest"},
    "net": {"heartbeat_s", "deadline_floor_s", "outage_s", "copies_gbps"},
    "codec": None,
    "error_feedback": None,
    "dtype": None,
    "remat": None,
    "platform": None,
}  # fmt: skip


def config_with(path, value):
    """The base config as plain data with one field, named as in --config.<path>, replaced."""
    data = base_config().to_dict()
    *groups, name = path.split(".")
    inner = data
    for group in groups:
        inner = inner[group]
    inner[name] = value
    return data


def test_stable_names():
    fields = base_config().to_dict()
    assert {name: set(value) if isinstance(value, dict) else None for name, value in fields.items()} == STABLE_NAMES


def test_the_base_config_is_valid_and_all_defaults():
    config = parse(base_config().to_dict())
    assert config == parse({"model": {"preset": "debug"}})
    assert config.train.steps == 100 and config.model.d_model == 64


def test_the_vocabulary_comes_from_the_token_file_unless_set():
    assert parse({"model": {"preset": "debug"}}, vocab_size=77).model.vocab_size == 77
    assert parse({"model": {"preset": "debug", "vocab_size": 80}}, vocab_size=77).model.vocab_size == 80
    with pytest.raises(BadInput, match="model.vocab_size: got 70, expected at least the token file's 77"):
        parse({"model": {"preset": "debug", "vocab_size": 70}}, vocab_size=77)


def test_a_sample_has_as_many_tokens_as_the_model_takes_unless_set():
    """Learned positions are as many as a sample has tokens, unless the model says its own number."""
    lengths = {
        "of the preset": ({}, {}, (32, 32)),
        "of the data": ({}, {"seq_len": 48}, (48, 48)),
        "of both": ({"max_len": 96}, {"seq_len": 48}, (48, 96)),
    }
    for name, (model, data, expected) in lengths.items():
        config = parse({"model": {"preset": "debug"} | model, "data": data})
        assert (config.seq_len, config.model.max_len) == expected, name
    with pytest.raises(BadInput, match=r"data.seq_len: got 33, expected 0 .model.max_len. to model.max_len 32"):
        parse({"model": {"preset": "debug", "max_len": 32}, "data": {"seq_len": 33}})


def test_the_length_of_samples_was_once_an_option_of_the_model():
    """What an earlier program recorded is read as it was meant; a person is told the new names."""
    config = parse({"model": {"preset": "debug"}})
    recorded = serialize.write(config)
    recorded["model"]["seq_len"] = recorded["model"].pop("max_len")
    del recorded["data"]["seq_len"]
    assert parse(recorded) == config
    with pytest.warns(FutureWarning) as warned:
        written = parse({"model": {"preset": "debug", "seq_len": 64}})
        over_a_base = parse({"model": {"preset": "debug", "seq_len": 64}, "data": {"seq_len": 16}})
    assert (written.seq_len, written.model.max_len) == (64, 64)
    assert over_a_base == written
    said = {str(warning.message).partition(":")[0] for warning in warned}
    assert said == {"model.seq_len is an old name", "data.seq_len 16 is not read"}
    with pytest.raises(BadInput, match="model.seq_len: got 64 beside model.max_len, expected data.seq_len for the"):
        parse({"model": {"preset": "debug", "seq_len": 64, "max_len": 64}})


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("model.preset", "debgu", "model.preset: got 'debgu', expected one of"),
        ("model.n_heads", 5, "model.n_heads: got 5, expected a divisor of d_model 64"),
        ("plan.stages", 0, "plan.stages: got 0, expected an integer in 1..4096"),
        ("plan.stages", "two", "plan.stages: got 'two', expected int"),
        ("plan.stages", 1.0, "plan.stages: got 1.0, expected int"),
        ("plan.stages", True, "plan.stages: got True, expected int"),
        ("plan.pipelines", 0, "plan.pipelines: got 0, expected an integer in 1..4096"),
        ("plan.microbatches", 0, "plan.microbatches: got 0, expected an integer in 1..1000000"),
        ("plan.schedule", "gpip", "plan.schedule: got 'gpip', expected one of 1f1b, gpipe"),
        ("plan.layers", 3, "plan.layers: got 3, expected str"),
        ("data.path", None, "data.path: got None, expected str"),
        ("data.seq_start", -1, "data.seq_start: got -1, expected 0 (no growth) to data.seq_len 32"),
        ("data.seq_start", 33, "data.seq_start: got 33, expected 0 (no growth) to data.seq_len 32"),
        ("data.seq_start", 8, "data.seq_growth_steps: got 0, expected an integer >= 1 with data.seq_start 8"),
        ("data.seq_growth_steps", 9, "data.seq_growth_steps: got 9, expected 0 with data.seq_start 0"),
        ("data.seq_growth_steps", -1, "data.seq_growth_steps: got -1, expected 0 with data.seq_start 0"),
        ("data.seq_strat", 8, 'data.seq_strat: unknown field (did you mean "seq_start"?)'),
        ("model.positions", "rotari", "model.positions: got 'rotari', expected one of learned, rotary (did you mean"),
        ("model.activation", "geglo", "model.activation: got 'geglo', expected one of gelu, geglu (did you mean"),
        ("model.n_shared_blocks", True, "model.n_shared_blocks: got True, expected"),
        ("train.steps", 0, "train.steps: got 0, expected an integer >= 1"),
        ("train.steps", -1, "train.steps: got -1, expected an integer >= 1"),
        ("train.microbatch_size", 0, "train.microbatch_size: got 0, expected an integer in 1..1000000"),
        ("train.eval_microbatches", 0, "train.eval_microbatches: got 0, expected an integer in 1..1000000"),
        ("train.keep_checkpoints", 0, "train.keep_checkpoints: got 0, expected an integer >= 1"),
        ("train.seed", -1, "train.seed: got -1, expected an integer in 0..9223372036854775807"),
        ("train.seed", 2**63, "train.seed: got 9223372036854775808, expected an integer in 0.."),
        ("plan.workers", 10**9, "plan.workers: got 1000000000, expected an integer in 0..4096"),
        ("train.eval_every_steps", -1, "train.eval_every_steps: got -1, expected an integer >= 0"),
        ("train.checkpoint_every_steps", -1, "train.checkpoint_every_steps: got -1, expected an integer >= 0"),
        ("train.on_nonfinite", "halt", "train.on_nonfinite: got 'halt', expected one of stop, skip, rollback"),
        ("optim.name", "adam", "optim.name: got 'adam', expected one of adamw, lamb, muon, sgd"),
        ("optim.lr", 0.0, "optim.lr: got 0.0, expected a finite number > 0"),
        ("optim.lr", float("nan"), "optim.lr: got nan, expected a finite number > 0"),
        ("optim.lr", "1e-3", "optim.lr: got '1e-3', expected float"),
        ("optim.eps", -1e-8, "optim.eps: got -1e-08, expected a finite number > 0"),
        ("optim.b1", 1.0, "optim.b1: got 1.0, expected a number in [0, 1)"),
        ("optim.b2", -0.1, "optim.b2: got -0.1, expected a number in [0, 1)"),
        ("optim.momentum", 1.5, "optim.momentum: got 1.5, expected a number in [0, 1)"),
        ("optim.weight_decay", -1.0, "optim.weight_decay: got -1.0, expected a finite number >= 0"),
        ("optim.clip_norm", float("inf"), "optim.clip_norm: got inf, expected a finite number >= 0"),
        ("optim.final_lr_frac", 1.1, "optim.final_lr_frac: got 1.1, expected a number in [0, 1]"),
        ("optim.warmup_steps", -1, "optim.warmup_steps: got -1, expected an integer >= 0"),
        ("optim.decay_steps", 2.5, "optim.decay_steps: got 2.5, expected int"),
        ("optim.lr_schedule", "cosin", "optim.lr_schedule: got 'cosin', expected one of constant, cosine, linear"),
        ("optim.lr_schedule", "cosine", "optim.decay_steps: got 0, the cosine schedule needs more than"),
        ("sync.delay", 2, "sync.delay: got 2, expected one of 0, 1"),
        ("sync.slice_bytes", 3, "sync.slice_bytes: got 3, expected an integer >= 4"),
        ("net.heartbeat_s", 0.0, "net.heartbeat_s: got 0.0, expected seconds from 0.001 to 1e+07"),
        ("net.heartbeat_s", 1e-300, "net.heartbeat_s: got 1e-300, expected seconds from 0.001 to 1e+07"),
        ("net.deadline_floor_s", 1e300, "net.deadline_floor_s: got 1e+300, expected at least two heartbeats, 1.0, and"),
        ("net.outage_s", 1e300, "net.outage_s: got 1e+300, expected seconds from 0.001 to 1e+07, or inf"),
        ("net.copies_gbps", 1e-300, "net.copies_gbps: got 1e-300, expected 0, or a number from 1e-06 to inf"),
        ("wiring.stage_grace_s", 1e300, "wiring.stage_grace_s: got 1e+300, expected seconds from 0 to 1e+07"),
        ("wiring.rebalance_s", float("nan"), "wiring.rebalance_s: got nan, expected seconds from 0 to 1e+07"),
        ("sync.groups.window_s", 1e300, "sync.groups.window_s: got 1e+300, expected seconds from 0 to 1e+07, or inf"),
        ("net.heartbeat_s", float("nan"), "net.heartbeat_s: got nan, expected seconds from 0.001 to 1e+07"),
        ("net.heartbeat_s", 10.0, "net.deadline_floor_s: got 4.0, expected at least two heartbeats, 20.0"),
        ("net.heartbeat_s", float("inf"), "net.heartbeat_s: got inf, expected seconds from 0.001 to 1e+07"),
        ("model.preset", 5, "model.preset: got 5, expected one of debug"),
        ("net.deadline_floor_s", -4.0, "net.deadline_floor_s: got -4.0, expected at least two heartbeats"),
        ("net.outage_s", -1.0, "net.outage_s: got -1.0, expected seconds from 0.001 to 1e+07, or inf"),
        ("codec", "zip", "codec: got 'zip', expected one of none"),
        ("dtype", "float16", "dtype: got 'float16', expected one of float32, bfloat16"),
        ("remat", "dot", "remat: got 'dot', expected one of recompute, dots"),
        ("platform", "cuda", "platform: got 'cuda', expected one of any, cpu, gpu, tpu"),
        ("train", None, "train: got None, expected an object with the fields of TrainConfig"),
        ("model", [], "model: got [], expected an object with a preset, or with all fields of a family"),
    ],
)  # fmt: skip
def test_a_bad_value_names_its_field_in_one_line(path, value, message):
    with pytest.raises(BadInput) as caught:
        parse(config_with(path, value))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "known"),
    [
        ("trian", "train"),
        ("train.step", "steps"),
        ("plan.pipeline", "pipelines"),
        ("model.d_mdel", "d_model"),
        ("optim.clipnorm", "clip_norm"),
    ],
)
def test_an_unknown_name_points_to_the_nearest(path, known):
    with pytest.raises(BadInput) as caught:
        parse(config_with(path, 1))
    assert str(caught.value).startswith(f'{path}: unknown field (did you mean "{known}"?)')


@pytest.mark.parametrize(
    ("path", "neutral", "other", "way_now"),
    [
        ("wiring.replan", "off", "advise", "python -m planner replan --run_dir=DIR"),
        ("net.queue_bytes", 64 << 20, 100, "64 MiB"),
    ],
)
def test_a_field_of_before_is_read_where_it_asks_for_nothing_else_the_way_now_is_named(path, neutral, other, way_now):
    assert parse(config_with(path, neutral)) == parse(base_config().to_dict())
    with pytest.raises(BadInput) as caught:
        parse(config_with(path, other))
    assert str(caught.value).startswith(f"{path}: got {other!r}, expected no such field, or {neutral!r}; ")
    assert way_now in str(caught.value) and "\n" not in str(caught.value)


def test_the_model_may_not_be_left_out():
    with pytest.raises(BadInput, match="model: got None, expected an object with a preset"):
        parse({})


def test_fingerprints_agree_iff_configs_do():
    config = parse(base_config().to_dict())
    assert config.fingerprint == parse(json.loads(json.dumps(base_config().to_dict()))).fingerprint
    others = [parse(config_with(*change)).fingerprint for change in (("train.seed", 1), ("optim.lr", 0.1))]
    assert len({config.fingerprint, *others}) == 3


# --------------------------------------------------------------------------------------------------- the default plan


def config_of(n_layers=8, **plan):
    return parse({"model": {"preset": "debug", "n_layers": n_layers}, "plan": plan})


def test_the_default_plan_seats_pipelines_as_consecutive_peers():
    plan = default_plan(config_of(stages=3, pipelines=2, microbatches=5))
    assert plan.stages == ((0, 3), (3, 6), (6, 8))
    assert plan.placement == ((0, 3), (1, 4), (2, 5))
    assert plan.shares == (3, 2)
    assert (plan.schedule, plan.in_flight, plan.codec) == ("1f1b", None, ("none", "none"))


def test_layers_per_stage():
    assert default_plan(config_of(stages=3, layers="3,2,3")).stages == ((0, 3), (3, 5), (5, 8))
    assert default_plan(config_of(stages=1)).stages == ((0, 8),)
    assert default_plan(config_of(stages=2, in_flight="4,2")).in_flight == (4, 2)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (dict(stages=3, layers="3,2,2"), "plan.layers: 3,2,2 covers 7 layers, expected 8"),
        (dict(stages=3, layers="4,4"), 'plan.layers: got "4,4", expected 3 integers >= 1, one per stage'),
        (dict(stages=2, layers="8,0"), 'plan.layers: got "8,0", expected 2 integers >= 1'),
        (dict(stages=2, layers="4;4"), 'plan.layers: got "4;4", expected integers separated by commas'),
        (dict(stages=9), "plan.stages: got 9, expected at most n_layers 8"),
        (dict(stages=2, in_flight="4"), 'plan.in_flight: got "4", expected 2 integers >= 1'),
        (dict(stages=2, in_flight="1,2"), "plan.in_flight: stage 0 has 1, expected at least the 2 of stage 1"),
    ],
)
def test_a_bad_cut_is_refused(plan, message):
    with pytest.raises(BadInput) as caught:
        default_plan(config_of(**plan))
    assert str(caught.value).startswith(message)


def test_more_pipelines_than_microbatches_are_refused():
    with pytest.raises(BadInput, match="plan.microbatches: got 1, expected an integer >= 2"):
        config_of(pipelines=2, microbatches=1)


def test_a_plan_for_another_model_is_refused():
    config, other = config_of(), config_of(n_layers=6)
    check_plan(config, default_plan(config))
    with pytest.raises(BadInput, match="plan: made for 6 layers, the model has 8"):
        check_plan(config, default_plan(other))
    with pytest.raises(BadInput, match=r"plan.codec\[0\]: got 'int7', expected one of none"):
        check_plan(config, replace(default_plan(config_of(stages=2)), codec=("int7",)))


def test_a_plan_may_not_cut_a_run_of_shared_layers():
    model = {"preset": "debug", "n_layers": 8, "n_shared_blocks": 2}
    config = parse({"model": model, "plan": {"stages": 2, "layers": "3,5"}})
    with pytest.raises(BadInput, match=r"plan.stages\[1\]: starts at layer 3, inside a run of 4 layers"):
        check_plan(config, default_plan(config))


def test_a_config_survives_as_plain_data():
    config = config_of(stages=2, layers="3,5")
    assert parse(json.loads(json.dumps(serialize.write(config)))) == config
