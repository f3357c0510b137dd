import pytest

from jaxdt.run.errors import BadInput
from jaxdt.run.families.gpt import PRESETS, GPTConfig

SIZES = dict(n_layers=4, d_model=8, n_heads=2, d_ff=16, max_len=6, vocab_size=10)


def pairs(compression="bottleneck2", after=(2,)):
    return {"compression": compression, "compression_after": after}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_layers": 0}, "model.n_layers: got 0, expected an integer in 1..10000"),
        ({"n_layers": 10**12}, "model.n_layers: got 1000000000000, expected an integer in 1..10000"),
        ({"d_model": 10**21}, "model.d_model: got 1000000000000000000000, expected an integer in 1.."),
        ({"d_model": 8.0}, "model.d_model: got 8.0, expected an integer in 1.."),
        ({"max_len": True}, "model.max_len: got True, expected an integer in 1.."),
        ({"vocab_size": "10"}, "model.vocab_size: got '10', expected an integer in 1.."),
        ({"n_heads": 3}, "model.n_heads: got 3, expected a divisor of d_model 8"),
        ({"n_heads": 8, "positions": "rotary"}, "model.n_heads: head width 1 is odd, rotary needs an even one"),
        ({"positions": "alibi"}, "model.positions: got 'alibi', expected one of learned, rotary"),
        ({"activation": "relu"}, "model.activation: got 'relu', expected one of gelu, geglu"),
        ({"tied_head": 1}, "model.tied_head: got 1, expected true or false"),
        ({"n_shared_blocks": 3}, "model.n_shared_blocks: got 3, expected 0 or a divisor of n_layers 4"),
        ({"n_shared_blocks": -1}, "model.n_shared_blocks: got -1, expected 0 or a divisor"),
        ({"compression": "maxout"}, "model.compression: got 'maxout', expected none, or bottleneckR or maxoutR"),
        ({"compression": "maxout3"}, "model.compression: got 'maxout3', expected none, or bottleneckR or maxoutR"),
        ({"compression": "maxout8"}, "model.compression: got 'maxout8', expected none, or bottleneckR or maxoutR"),
        ({"compression": "maxout02"}, "model.compression: got 'maxout02', expected none, or bottleneckR or maxoutR"),
        ({"compression": 2}, "model.compression: got 2, expected none, or bottleneckR or maxoutR"),
        (pairs(after=()), "model.compression_after: got (), expected at least one layer index with compression"),
        (pairs("none", (1,)), "model.compression_after: got (1,), expected none with compression 'none'"),
        (pairs(after=(0,)), "model.compression_after: got (0,), expected layer indices from 1 to 3"),
        (pairs(after=(4,)), "model.compression_after: got (4,), expected layer indices from 1 to 3"),
        (pairs(after=(True,)), "model.compression_after: got (True,), expected layer indices from 1 to 3"),
        (pairs(after=(2, 1)), "model.compression_after: got (2, 1), expected each layer index larger than the last"),
        (pairs(after=(2, 2)), "model.compression_after: got (2, 2), expected each layer index larger than the last"),
    ],
)
def test_a_bad_field_is_named(change, message):
    with pytest.raises(BadInput) as caught:
        GPTConfig(**SIZES | change)
    assert str(caught.value).startswith(message)


def test_a_preset_and_what_replaces_it():
    assert GPTConfig.of("debug").n_layers == PRESETS["debug"]["n_layers"]
    assert GPTConfig.of("debug", n_layers=7).n_layers == 7
    assert GPTConfig.of("debug", d_model=32).d_ff == 128
    assert GPTConfig.of("debug", d_model=32, d_ff=40).d_ff == 40


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_valid(name):
    assert GPTConfig.of(name).facts.n_params > 0


def test_unknown_names_point_to_the_nearest():
    with pytest.raises(BadInput, match=r'model.preset: got \'smal\', .*\(did you mean "small"\?\)'):
        GPTConfig.of("smal")
    with pytest.raises(BadInput, match=r'model.n_layer: unknown field \(did you mean "n_layers"\?\); known: '):
        GPTConfig.of("debug", n_layer=3)


@pytest.mark.parametrize(
    "config",
    [
        GPTConfig(**SIZES),
        GPTConfig(**SIZES, tied_head=True),
        GPTConfig(**SIZES, positions="rotary", activation="geglu"),
        GPTConfig(**SIZES, n_shared_blocks=2),
        GPTConfig(**SIZES, **pairs()),
        GPTConfig(**SIZES, **pairs("maxout4", (1, 3))),
    ],
    ids=["plain", "tied", "rotary_geglu", "shared", "bottleneck", "maxout"],
)
def test_parameters_of_the_stages_add_up(config):
    """Counted by hand for one config, and by consistency for the others: a tied table is held twice when cut."""
    twice = config.facts.n_logit_params if config.tied_head else 0
    for cut in (2,):
        assert config.facts.stage_params(0, cut) + config.facts.stage_params(cut, 4) == config.facts.n_params + twice
    assert config.facts.boundary_numbers(3 * 6) == 3 * 6 * 8


def test_parameters_by_hand():
    """Per block: 2 LayerNorms, qkv 8x24+24, proj 8x8+8, up 8x16+16, down 16x8+8; tables 10x8, 6x8; head 16 + 8x10."""
    block = 2 * 16 + (192 + 24) + (64 + 8) + (128 + 16) + (128 + 8)
    config = GPTConfig(**SIZES)
    assert config.facts.layers[0].n_params == block
    assert config.facts.n_params == 4 * block + 80 + 48 + 16 + 80
    assert GPTConfig(**SIZES, activation="geglu").facts.layers[0].n_params == block + 128 + 16
    assert GPTConfig(**SIZES, n_shared_blocks=2).facts.n_params == 2 * block + 80 + 48 + 16 + 80
    assert config.facts.train_flops(10) == 60.0 * (4 * block + 80)


def test_compression_by_hand():
    """Bottleneck 8 -> 4: LayerNorms 16 + 8, W_c 8x4+4, W_d 4x8+8. Maxout 8 -> 2: LayerNorms 16 + 4, W_d 2x8+8."""
    plain, block = GPTConfig(**SIZES), GPTConfig(**SIZES).facts.layers[0].n_params
    bottleneck, maxout = GPTConfig(**SIZES, **pairs()), GPTConfig(**SIZES, **pairs("maxout4", (1, 3)))
    assert bottleneck.facts.stage_params(1, 2) == block + 16 + 36 + 8
    assert bottleneck.facts.stage_params(2, 3) == block + 40
    assert maxout.facts.stage_params(1, 3) == 2 * block + (16 + 4) + (16 + 8)
    assert maxout.facts.n_params == plain.facts.n_params + 2 * (20 + 24)
    assert bottleneck.facts.train_flops(10) - plain.facts.train_flops(10) == 60.0 * 100


def test_a_pair_narrows_the_boundary_behind_its_layer_only():
    config = GPTConfig(**SIZES, **pairs("maxout4", (1, 3)))
    assert [config.facts.boundary_width(layer) for layer in (1, 2, 3)] == [2, 8, 2]
    assert [config.facts.boundary_numbers(3 * 6, layer) for layer in (1, 2)] == [3 * 6 * 2, 3 * 6 * 8]
    assert config.facts.boundary_numbers(3 * 6) == 3 * 6 * 8
    assert (config.compression_kind, config.compression_ratio) == ("maxout", 4)
    assert [entry.name for entry in config.facts.entries_in(0, 1) if "00" in entry.name] == ["block_000", "sender_001"]
    names = [entry.name for entry in config.facts.entries_in(1, 3)]
    assert names == ["block_001", "block_002", "receiver_001", "sender_003"]


def test_the_blocks_that_layers_apply():
    assert [GPTConfig(**SIZES).block_of(layer) for layer in range(4)] == [0, 1, 2, 3]
    shared = GPTConfig(**SIZES, n_shared_blocks=2)
    assert [shared.block_of(layer) for layer in range(4)] == [0, 0, 2, 2]
    assert [entry.name for entry in shared.facts.entries_in(1, 3)] == ["block_000", "block_002"]


def test_the_published_sizes():
    """GPT-2 small has 124 M parameters, GPT-3 XL 1.3 G, GPT-3 175 G."""
    assert GPTConfig.of("gpt2_124m").facts.n_params == pytest.approx(124e6, rel=0.01)
    assert GPTConfig.of("gpt3_1p3b").facts.n_params == pytest.approx(1.3e9, rel=0.02)
    assert GPTConfig.of("gpt3").facts.n_params == pytest.approx(175e9, rel=0.01)
