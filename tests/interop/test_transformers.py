"""What leaves is what transformers loads: each tensor has its place, and the logits are ours. Where torch and
transformers are not installed, as usual, these tests are skipped."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="only tests use torch, where it is installed")
transformers = pytest.importorskip("transformers", reason="only tests use transformers, where it is installed")

from jaxdt.interop.hf_files import HFFolder, write_adapter, write_folder  # noqa: E402
from jaxdt.interop.import_model import import_model  # noqa: E402
from jaxdt.model.adapter import without_adapter  # noqa: E402
from jaxdt.model.base import apply_stage, init_stage, model_of  # noqa: E402
from jaxdt.run.families.gpt import GPTConfig  # noqa: E402
from jaxdt.run.families.llama import LlamaConfig  # noqa: E402
from jaxdt.run.families.moe import MoeConfig  # noqa: E402
from jaxdt.runtime.storage.model_folder import as_leaves, as_tree, open_model  # noqa: E402

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "models"
TIED = ("gpt2", "llama3", "qwen2")
FRESH = {
    "gpt": GPTConfig.of("debug", tied_head=True),
    "llama": LlamaConfig.of("debug", rope_scaling=(8.0, 1.0, 4.0, 16.0)),
    "llama with biases": LlamaConfig.of("debug", qkv_bias=True, o_bias=True, tied_head=True),
    "qwen2": LlamaConfig.of("debug", qkv_bias=True, window=8),
    "qwen3": LlamaConfig.of("debug", qk_norm=True, d_head=24),
    "mistral": LlamaConfig.of("debug", window=8),
    "mixtral": MoeConfig.of("debug", window=8),
    "qwen3 with experts": MoeConfig.of("debug", qk_norm=True, norm_topk=False, tied_head=True),
}


def check(folder: Path, options, leaves) -> None:
    """That transformers loads all of this folder, and computes as these parameters do here."""
    model, loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(loaded[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), loaded
    ids = np.random.default_rng(0).integers(0, options.vocab_size, (2, min(24, options.max_len)))
    with torch.no_grad():
        known = model(torch.tensor(ids)).logits.numpy()
    params = {name: as_tree(leaves[name]) for name in leaves}
    tokens = jnp.asarray(ids, jnp.int32)
    got = np.asarray(apply_stage(options, 0, options.n_layers, jnp.dtype(jnp.float32), params, tokens))
    assert np.abs(got - known).max() <= 1e-5 * np.abs(known).max()


@pytest.mark.parametrize("untie", [False, True], ids=["as it is", "untied"])
@pytest.mark.parametrize("name", [path.name for path in sorted(FIXTURES.iterdir())])
def test_a_model_that_came_in_leaves(name, untie, tmp_path):
    if untie and name not in TIED:
        pytest.skip("its head is its own")
    import_model(HFFolder(FIXTURES / name), tmp_path / "model")
    model = open_model(tmp_path / "model")
    options = model.options.untied() if untie else model.options
    leaves = {entry.name: as_leaves(model.entry_of(options, entry)) for entry in options.facts.entries}
    origin = {path.name: path.read_bytes() for path in model.origin.iterdir()}
    (tmp_path / "out").mkdir()
    write_folder(tmp_path / "out", options, leaves.__getitem__, origin=origin, shard_bytes=30_000)
    check(tmp_path / "out", options, leaves)


@pytest.mark.parametrize("name", FRESH)
def test_a_model_that_came_from_nowhere_leaves(name, tmp_path):
    options = FRESH[name]
    key, rng = jax.random.key(3), np.random.default_rng(3)
    names = [entry.name for entry in options.facts.entries]
    trees = {entry: jax.tree.map(np.array, model_of(options).init(options, entry, key)) for entry in names}
    # Biases and scales start as zeros and ones, which would hide one in a wrong place.
    trees = jax.tree.map(lambda leaf: leaf + 0.1 * rng.standard_normal(leaf.shape, np.float32), trees)
    leaves = {entry: as_leaves(tree) for entry, tree in trees.items()}
    write_folder(tmp_path, options, leaves.__getitem__, origin={})
    check(tmp_path, options, leaves)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, where peft loads a model
@pytest.mark.parametrize(("name", "adapter"), [("gpt2", "lora:3:qkv,down"), ("llama", "lora:3"), ("qwen3", "lora:3")])
def test_an_adapter_leaves_with_its_model_or_alone(name, adapter, tmp_path):
    """peft computes with the adapter as the run does, and so does the model into which it is written."""
    peft = pytest.importorskip("peft", reason="only tests use peft, where it is installed")
    import_model(HFFolder(FIXTURES / name), tmp_path / "model")
    model = open_model(tmp_path / "model")
    options = replace(model.options, adapter=adapter)
    rng = np.random.default_rng(3)
    fresh = init_stage(options, 0, options.n_layers, 0)
    params = {}
    for entry in model.options.facts.entries:
        params[entry.name] = model.entry_of(model.options, entry)
        if isinstance(fresh[entry.name], dict) and "lora" in fresh[entry.name]:
            adapters = jax.tree.map(
                lambda leaf: 0.2 * rng.standard_normal(leaf.shape, np.float32), fresh[entry.name]["lora"]
            )
            params[entry.name] = params[entry.name] | {"lora": adapters}
    merged = {entry: as_leaves(without_adapter(tree)) for entry, tree in params.items()}
    own = {entry: as_leaves(tree) for entry, tree in params.items()}
    for folder in ("merged", "adapter"):
        (tmp_path / folder).mkdir()
    origin = {path.name: path.read_bytes() for path in model.origin.iterdir()}
    write_folder(tmp_path / "merged", model.options, merged.__getitem__, origin=origin)
    check(tmp_path / "merged", model.options, merged)
    write_adapter(tmp_path / "adapter", options, own.__getitem__, base=str(FIXTURES / name))
    with torch.no_grad():
        base = transformers.AutoModelForCausalLM.from_pretrained(FIXTURES / name)
        tokens = np.arange(12)[None] % options.vocab_size
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
        known = adapted(torch.tensor(tokens)).logits.numpy()
    n_trained = sum(weights.numel() for part, weights in adapted.named_parameters() if "lora_" in part)
    assert n_trained == options.facts.n_trained
    dtype = jnp.dtype(jnp.float32)
    got = np.asarray(apply_stage(options, 0, options.n_layers, dtype, params, jnp.asarray(tokens, jnp.int32)))
    assert np.abs(got - known).max() <= 1e-5 * np.abs(known).max()
