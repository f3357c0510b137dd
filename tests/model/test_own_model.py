"""Models of one's own: what is read off their parts, and what is refused."""

import functools
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdt.model import facts_process
from jaxdt.model.base import apply_stage, init_stage
from jaxdt.run import config as configs
from jaxdt.run import serialize
from jaxdt.run.errors import BadInput
from jaxdt.run.model import as_fields, options_of, read_options
from jaxdt.run.model_facts import UNKNOWN, ModelFacts
from jaxdt.run.own_model import source_of
from jaxdt.runtime.storage.checkpoint import about_run

NAMES = ("own_nnx", "own_linen")
COUNT = itertools.count()


@functools.cache  # not while the tests are collected, which three processes do
def own(name):
    options = '{"width": 16, "layers": 3, "heads": 2}'
    return options_of(family=f"configs.custom_model.{name}:build", max_len=6, vocab_size=19, options=options)


def test_facts_equal_those_by_hand():
    d, v = 16, 19
    nnx = own("own_nnx").facts
    block = (d + 2 * d) + 3 * d * d + (d * d + d) + (4 * d * d + 4 * d) + (4 * d * d + d)
    assert nnx.n_params == 3 * block + v * d + 2 * d
    assert nnx.flops(0, 1, 6) == 6 * (2 * 12 * d * d + 4 * d * 6)
    assert [(entry.name, entry.layers) for entry in nnx.entries if entry.name != "block_001"] == [
        ("block_000", (0,)),
        ("block_002", (2,)),
        ("embed", (0, 2)),
        ("head", (2,)),
    ]
    linen = own("own_linen").facts
    assert linen.n_params == 3 * (2 * d + 4 * (d * d + d) + (2 * d * d + 2 * d) + (2 * d * d + d)) + 2 * v * d + d
    assert [layer.like for layer in linen.layers] == [0, 0, 0] and linen.shared(0, 1) == []
    assert {leaf.role for entry in linen.entries if entry.name == "embed" for leaf in entry.leaves} == {"table"}


@pytest.mark.parametrize("name", ["own_nnx", "own_linen"])
def test_a_config_is_written_with_the_facts_and_read_without_the_module(name, monkeypatch):
    config = configs.RunConfig(own(name))
    written = serialize.write(config)
    monkeypatch.setattr("jaxdt.run.own_model.derived", None)
    assert configs.parse(written) == config and read_options(written["model"], "file") == config.model
    assert configs.parse(written).fingerprint == config.fingerprint


def test_a_model_of_equal_layers_has_the_first_block_as_often():
    model = own("own_nnx").with_equal_layers(6)
    assert (model.facts.n_layers, model.facts.layers[5]) == (6, model.facts.layers[0])
    params = init_stage(model, 0, 6, 0)
    kernels = [np.asarray(params[f"block_{i:03d}"]["qkv"]["kernel"]) for i in range(6)]
    assert all(not np.array_equal(one, other) for one, other in itertools.combinations(kernels, 2))


@pytest.mark.parametrize("name", ["own_nnx", "own_linen"])
def test_a_module_that_makes_another_model_than_the_run_is_refused(name):
    wide = options_of(family=own(name).family, max_len=6, vocab_size=19, options='{"width": 32, "layers": 3}')
    with pytest.raises(
        BadInput, match=r"here differs in block_000, block_001, block_002 from the run, expected its facts"
    ):
        init_stage(replace(wide, facts=own(name).facts), 0, 1, 0)


HEAD = """
import flax.linen as nn, jax, jax.numpy as jnp
from flax import nnx
from jaxdt.model.own_model import Parts

class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return {block}

class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.inner = {inner}
    def __call__(self, x):
        return x

class Tied(nn.Module):
    @nn.compact
    def __call__(self, x, table=None):
        return nn.Dense(19)(x)

def build(options):
    return {parts}
"""
PARTS = "Parts(nn.Embed(19, 4), [{}], nn.Dense({}), {})"
PLAIN = dict(block="nn.Dense(4)(x)", inner="nnx.Linear(4, 4, rngs=rngs)", parts=PARTS.format("Block()", 19, 19))


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (
            dict(block="x.astype(jnp.bfloat16)"),
            {},
            r"model: block 0 makes bfloat16\[1, 2, 4\] of float32\[1, 2, 4\], exp",
        ),
        (
            dict(block="x[:, :1]"),
            {},
            r"model: block 0 makes float32\[1, 1, 4\] of float32\[1, 2, 4\], expected the same",
        ),
        (
            dict(block="nn.BatchNorm(use_running_average=False)(x)"),
            {},
            r"model: block_000 has state beside its parameters \(batch_stats\), expected none",
        ),
        (
            dict(inner="nnx.BatchNorm(4, rngs=rngs)", parts=PARTS.format("Nnx", 19, 19)),
            {},
            r"model: block_000 has state beside its parameters \(.*mean.*\), expected none",
        ),
        (dict(parts=PARTS.format("Block()", 19, 18)), {}, r"model: the head makes \[1, 2, 19\], expected \[1, 2, 18\]"),
        (
            dict(parts="Parts(nn.Embed(19, 4), [Block()], Tied(), 19, tied='embeddings')"),
            {},
            "model: Parts.tied is 'embeddings', expected the path of a leaf",
        ),
        (
            dict(parts="Parts(lambda rngs: Nnx(rngs), [Block()], nn.Dense(19), 19)"),
            {},
            r"model: the embedding makes \[1, 2\] of \[1, 2\], expected \[B, T, W\]",
        ),
        (dict(block="nn.Dense(4)(x) @ x"), {}, "model: block_000 fails with TypeError: dot_general "),
        (
            dict(inner="rngs.params.no", parts=PARTS.format("Nnx", 19, 19)),
            {},
            "model: block_000 fails with AttributeError: ",
        ),
        (dict(parts="None"), {}, "model.family: .*:build returned NoneType, expected Parts with blocks"),
        (dict(parts="1 / 0"), {}, "model.family: .*:build failed here with ZeroDivisionError: division by zero"),
        (
            dict(parts=PARTS.format("Block()", 19, "19, trained=lambda name: 'kernel'")),
            {},
            "Parts.trained says 'kernel' of",
        ),
        (dict(parts="missing"), {}, "model.family: .*:build failed here with NameError: name 'missing' is not"),
        ({}, dict(vocab_size=20), "model.vocab_size: .*:build makes logits of 19 tokens, expected at least 20"),
        ({}, dict(options="[]"), r"model.options: got '\[\]', expected a JSON object as text"),
        ({}, dict(preset="small"), "model.preset: got 'small', expected none with a family of your own"),
        ({}, dict(d_model=4), "model.d_model: unknown field"),
    ],
)
def test_a_module_that_makes_no_sense_is_refused(tmp_path, monkeypatch, change, options, message):
    monkeypatch.syspath_prepend(tmp_path)
    module = f"own_{next(COUNT)}"
    (tmp_path / f"{module}.py").write_text(HEAD.format(**PLAIN | change))
    with pytest.raises(BadInput, match=message) as caught:
        options_of(**dict(family=f"{module}:build", max_len=6, vocab_size=19) | options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            {"family": "no.such:build"},
            "model.family: no.such:build: there is no module no.such here, expected no/such.py in the folder in which",
        ),
        ({"family": "json:build"}, "model.family: json:build failed here with AttributeError: "),
        ({"family": "json:build", "max_len": 0}, "model.max_len: got 0, expected an integer in 1.."),
    ],
)
def test_a_function_that_is_not_there_is_named(model, message):
    with pytest.raises(BadInput, match=message):
        configs.parse({"model": {"max_len": 4, "vocab_size": 19} | model})


def test_a_length_is_needed():
    with pytest.raises(BadInput, match="model.max_len: missing, expected data.seq_len or this, since"):
        configs.parse({"model": {"family": "json:build"}}, 19)


def test_widths_may_change_and_lists_have_number_keys(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    parts = "Parts(nn.Embed(19, 4), [nn.Dense(8), Nnx, nn.Dense(4)], nn.Dense(19), 19)"
    inner = "nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])"
    (tmp_path / "own_wide.py").write_text(HEAD.format(**PLAIN | dict(inner=inner, parts=parts)))
    model = options_of(family="own_wide:build", max_len=6, vocab_size=19)
    assert [model.facts.boundary_width(layer) for layer in range(4)] == [4, 8, 8, 4]
    params = init_stage(model, 1, 2, 0)
    assert sorted(params["block_001"]["inner"]) == ["0", "1"]
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == model.facts.stage_params(1, 2) == 2 * 72


def own_files(folder, **texts):
    """Files of a package own_pkg in a folder, which is the first of those with modules."""
    for name, text in texts.items():
        path = folder / "own_pkg" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


TINY = "from own_pkg import layers\nfrom .more import WIDTH\n" + HEAD.format(
    **PLAIN | dict(parts="Parts(nn.Embed(19, WIDTH), [layers.block()], nn.Dense(19), 19)")
)
LAYERS = "import flax.linen as nn\n\n\ndef block():\n    return nn.Dense(4, kernel_init=nn.initializers.normal(0.5))\n"
RENAMED = LAYERS.replace("0.5", "0.25")


def test_the_digest_is_of_all_files_of_the_module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    own_files(tmp_path, tiny=TINY, layers=LAYERS, more="WIDTH = 4\n", other="")
    first = source_of("own_pkg.tiny:build")
    assert first.files[0].name == "tiny.py"
    assert sorted(path.name for path in first.files) == ["layers.py", "more.py", "tiny.py"]
    own_files(tmp_path, other="import flax\n")
    assert source_of("own_pkg.tiny:build") == first
    own_files(tmp_path, layers=RENAMED)
    assert source_of("own_pkg.tiny:build").digest != first.digest


def test_a_package_of_the_module_counts_too(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    own_files(tmp_path, __init__="", tiny=TINY, layers=LAYERS, more="WIDTH = 4\n")
    first = source_of("own_pkg.tiny:build")
    assert "__init__.py" in {path.name for path in first.files}
    own_files(tmp_path, __init__="import flax\n")
    assert source_of("own_pkg.tiny:build").digest != first.digest


def test_what_a_module_prints_is_no_answer(tmp_path, monkeypatch):
    """Not of the child process that derives the facts, nor does much of it stop that."""
    monkeypatch.syspath_prepend(tmp_path)
    says = "import sys\nprint('{}')\nprint('x' * 100_000, file=sys.stderr)\n"
    parts = "Parts(nn.Embed(19, 4), [nn.Dense(4)], nn.Dense(19), 19)"
    (tmp_path / "own_chatty.py").write_text(says + HEAD.format(**PLAIN | dict(parts=parts)))
    model = options_of(family="own_chatty:build", max_len=6, vocab_size=19)
    child = facts_process._Child()
    try:
        asked = replace(model, facts=UNKNOWN)
        assert serialize.read(ModelFacts, child.ask(asked), "facts") == model.facts
    finally:
        child.close()


def test_another_source_of_the_same_sizes_is_refused_with_a_remedy(tmp_path, monkeypatch):
    """A resumed run may go on with it, if a person says so."""
    monkeypatch.syspath_prepend(tmp_path)
    own_files(tmp_path, tiny=TINY, layers=LAYERS, more="WIDTH = 4\n")
    model = options_of(family="own_pkg.tiny:build", max_len=6, vocab_size=19)
    model.check_source()
    before = init_stage(model, 0, 1, 0)
    own_files(tmp_path, layers=RENAMED)
    for refused in (model.check_source, lambda: init_stage(replace(model, n_equal_layers=2), 0, 1, 0)):
        with pytest.raises(
            BadInput,
            match=rf"model.family: own_pkg.tiny:build has another source here \(\w+\) than in the run "
            rf"\({model.source}\), expected the run's; copy \S*own_pkg/tiny.py .* from a host that has it$",
        ):
            refused()
    changed = options_of(family="own_pkg.tiny:build", max_len=6, vocab_size=19)
    with pytest.raises(BadInput, match=f", or go on with this one: --config.model.source={changed.source}$"):
        model.check_source(resumes=True)
    assert (changed.facts, changed.source != model.source) == (model.facts, True)
    configs_of = [configs.RunConfig(one) for one in (model, changed)]
    assert configs_of[0].fingerprint != configs_of[1].fingerprint
    assert about_run(configs_of[0], "") == about_run(configs_of[1], "")
    after = init_stage(changed, 0, 1, 0)  # this process has imported the module anew
    ratio = np.std(before["block_000"]["kernel"]) / np.std(after["block_000"]["kernel"])
    assert ratio == pytest.approx(2, rel=1e-6)


def test_facts_that_differ_with_an_equal_source_are_refused():
    """As where another version of a library is installed. Estimates may differ."""
    model = own("own_linen")
    init_stage(replace(model, facts=replace(model.facts, last_flops=1)), 0, 1, 0)
    with pytest.raises(BadInput, match="own_linen:build here computes something else than the run, expected its facts"):
        init_stage(replace(model, facts=replace(model.facts, in_width=1)), 0, 1, 0)


@pytest.mark.parametrize("name", ["own_nnx", "own_linen"])
def test_a_cut_changes_nothing_in_bf16(name):
    """The boundary has the dtype of activations, and each part gets its parameters rounded to it."""
    model, bf16 = own(name), jnp.dtype(jnp.bfloat16)
    params = init_stage(model, 0, 3, 0)
    tokens_BT = np.arange(12).reshape(2, 6) % 19
    whole = apply_stage(model, 0, 3, bf16, params, tokens_BT)
    x = apply_stage(model, 0, 2, bf16, params, tokens_BT)
    assert x.dtype == bf16 and whole.dtype == jnp.float32
    np.testing.assert_array_equal(apply_stage(model, 2, 3, bf16, params, x), whole)
    exact = apply_stage(model, 0, 3, jnp.dtype(jnp.float32), params, tokens_BT)
    assert 0 < np.abs(whole - exact).max() < 0.03 * np.abs(exact).max()


def test_facts_of_a_run_are_of_one_length():
    with pytest.raises(BadInput, match="model.max_len: got 7 beside facts of 6, expected that of the facts"):
        read_options(as_fields(own("own_nnx")) | {"max_len": 7}, "file")
    with pytest.raises(BadInput, match="model.vocab_size: .* makes logits of 19 tokens, expected at least 20"):
        read_options(as_fields(own("own_nnx")) | {"vocab_size": 20}, "file")


def test_a_tied_head_is_untied_in_the_module():
    with pytest.raises(BadInput, match="^--untie: Parts.tied of configs.custom_model.own_nnx:build says whether"):
        own("own_nnx").untied()
