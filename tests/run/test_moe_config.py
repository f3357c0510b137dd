import pytest

from jaxdt.run import config as configs
from jaxdt.run.errors import BadInput
from jaxdt.run.families.moe import MoeConfig

SIZES = dict(n_layers=4, d_model=8, n_heads=2, n_kv_heads=1, d_ff=16, max_len=6, vocab_size=10)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_experts": 0}, "model.n_experts: got 0, expected an integer >= 1"),
        ({"n_experts_per_token": 0}, "model.n_experts_per_token: got 0, expected an integer >= 1"),
        ({"n_experts_per_token": 9}, "model.n_experts_per_token: got 9, expected at most n_experts 8"),
        ({"norm_topk": 1}, "model.norm_topk: got 1, expected true or false"),
        ({"router_aux_coef": -0.1}, "model.router_aux_coef: got -0.1, expected a finite number >= 0"),
        ({"router_aux_coef": float("inf")}, "model.router_aux_coef: got inf, expected a finite number >= 0"),
        ({"n_kv_heads": 0}, "model.n_kv_heads: got 0, expected an integer >= 1"),
    ],
)
def test_a_bad_field_is_named(change, message):
    with pytest.raises(BadInput) as caught:
        MoeConfig(**SIZES | change)
    assert str(caught.value).startswith(message)


def test_a_file_names_the_family_or_a_preset():
    assert configs.parse({"model": {"family": "moe", "n_layers": 3}}).model == MoeConfig.of("debug", n_layers=3)
    assert configs.parse({"model": {"preset": "mixtral_8x7b"}}).model == MoeConfig.of("mixtral_8x7b")
    with pytest.raises(BadInput, match="model.positions: unknown field; known: n_layers, "):
        configs.parse({"model": {"family": "moe", "positions": "rotary"}})


def test_other_numbers_of_layers_are_the_same_kind_of_model():
    model = MoeConfig.of("debug", router_aux_coef=0.5)
    assert model.with_equal_layers(7) == MoeConfig.of("debug", router_aux_coef=0.5, n_layers=7)
    assert MoeConfig.of("debug", tied_head=True).untied() == MoeConfig.of("debug")
