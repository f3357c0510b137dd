import pytest

from jaxdt.run import config as configs
from jaxdt.run import serialize
from jaxdt.run.errors import BadInput
from jaxdt.run.families.gpt import GPTConfig
from jaxdt.run.families.llama import LlamaConfig
from jaxdt.run.model import options_of, read_options

SIZES = dict(n_layers=4, d_model=8, n_heads=2, n_kv_heads=1, d_ff=16, max_len=6, vocab_size=10)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_kv_heads": 0}, "model.n_kv_heads: got 0, expected an integer >= 1"),
        ({"n_heads": 4, "n_kv_heads": 3}, "model.n_kv_heads: got 3, expected a divisor of n_heads 4"),
        ({"n_heads": 3}, "model.n_heads: got 3, expected a divisor of d_model 8, or model.d_head > 0"),
        ({"d_head": 3}, "model.d_head: head width 3 is odd, rotary positions need an even one"),
        ({"d_head": -2}, "model.d_head: got -2, expected an integer >= 0"),
        ({"window": True}, "model.window: got True, expected an integer >= 0"),
        ({"rope_theta": 0.0}, "model.rope_theta: got 0.0, expected a finite number > 0"),
        ({"norm_eps": float("nan")}, "model.norm_eps: got nan, expected a finite number > 0"),
        ({"rope_scaling": (8.0, 1.0)}, "model.rope_scaling: got (8.0, 1.0), expected nothing, or factor >= 1"),
        ({"rope_scaling": (8.0, 4.0, 4.0, 9.0)}, "model.rope_scaling: got (8.0, 4.0, 4.0, 9.0), expected nothing"),
        ({"qk_norm": 1}, "model.qk_norm: got 1, expected true or false"),
    ],
)
def test_a_bad_field_is_named(change, message):
    with pytest.raises(BadInput) as caught:
        LlamaConfig(**SIZES | change)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({}, GPTConfig.of("debug")),
        ({"preset": "small", "family": None}, GPTConfig.of("small")),
        ({"family": "llama"}, LlamaConfig.of("debug")),
        ({"family": "llama", "d_model": 128}, LlamaConfig.of("debug", d_model=128, d_ff=384)),
        (
            {"preset": "llama3_8b", "rope_scaling": [8, 1, 4, 8192]},
            options_of("llama3_8b", rope_scaling=(8, 1, 4, 8192)),
        ),
    ],
)
def test_a_file_names_its_family_or_has_the_first_one_with_its_preset(model, expected):
    config = configs.parse({"model": model})
    assert config.model == expected
    written = serialize.write(config)
    assert ("family" in written["model"]) == (expected.family != "gpt")
    assert configs.parse(written) == config and read_options(written["model"], "file") == expected


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"family": "lama"}, r'model.family: got \'lama\', expected one of gpt, llama, moe \(did you mean "llama"\?\)'),
        ({"family": "llama", "preset": "gpt2_124m"}, "model.preset: got 'gpt2_124m', expected one of debug, smollm2"),
        ({"preset": "llama3_8"}, r'model.preset: got .*gpt3, .*\(did you mean "llama3_8b"\?\)'),
        ({"family": "llama", "positions": "rotary"}, "model.positions: unknown field; known: n_layers, "),
        ({"n_kv_heads": 2}, "model.n_kv_heads: unknown field .*known: n_layers, d_model"),
        ({"family": "llama", "rope_theta": "x"}, "model.rope_theta: got 'x', expected float"),
        ({"family": "llama", "compression": "maxout2"}, "model.compression: unknown field"),
    ],
)
def test_what_a_family_does_not_have_is_refused(model, message):
    with pytest.raises(BadInput, match=message):
        configs.parse({"model": model})


def test_compression_layers_are_refused():
    with pytest.raises(BadInput, match="model.compression: got 'maxout2', expected none: llama has no such"):
        configs.parse({"model": {"family": "llama"}, "codec": "maxout2", "plan": {"stages": 2}})
