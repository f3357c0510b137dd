"""Models that transformers saved, in tests/fixtures/models: each with token ids and transformers' logits for them. They
come in, compute the same, and leave as they came. No torch."""

import json
import re
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxdt.interop.hf_config import config_of, options_of_config
from jaxdt.interop.import_model import import_model
from jaxdt.model.base import apply_stage
from jaxdt.run.errors import BadInput
from jaxdt.run.families.gpt import GPTConfig
from jaxdt.run.families.llama import LlamaConfig
from jaxdt.runtime.storage.model_folder import ModelFolder, as_leaves, as_tree, new_folder, open_model

pytest.importorskip("safetensors", reason="the extra hf is not installed")
from safetensors.numpy import load_file, save_file  # noqa: E402

from jaxdt.interop.hf_files import INDEX, ONE_FILE, HFFolder, write_folder  # noqa: E402

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "models"
NAMES = [path.name for path in sorted(FIXTURES.iterdir())]


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """name -> the model folder of that fixture."""
    folder = tmp_path_factory.mktemp("models")
    known: dict[str, ModelFolder] = {}

    def model(name: str) -> ModelFolder:
        if name not in known:
            import_model(HFFolder(FIXTURES / name), folder / name)
            known[name] = open_model(folder / name)
        return known[name]

    return model


def written(model: ModelFolder, folder: Path, **options) -> Path:
    """The folder, with the model as it leaves."""
    origin = {path.name: path.read_bytes() for path in model.origin.iterdir()}
    folder.mkdir()
    write_folder(folder, model.options, model.load, origin=origin, **options)
    return folder


def parameters(model: ModelFolder, options) -> dict:
    return {entry.name: model.entry_of(options, entry) for entry in options.facts.entries}


def logits(options, params, cut, ids):
    """By stages that end at these layers."""
    x, lo, dtype = jnp.asarray(ids, jnp.int32), 0, jnp.dtype(jnp.float32)
    for hi in (*cut, options.facts.n_layers):
        names = [entry.name for entry in options.facts.entries_in(lo, hi)]
        x = apply_stage(options, lo, hi, dtype, {name: params[name] for name in names}, x)
        lo = hi
    return np.asarray(x)


@pytest.mark.parametrize(("cut", "untie"), [((), False), ((1,), True)], ids=["whole", "in two, untied"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(imported, name, cut, untie):
    model = imported(name)
    with np.load(FIXTURES / name / "ref.npz") as reference:
        ids, known = reference["ids"], reference["logits"]
    options = model.options.untied() if untie and model.options.tied_head else model.options
    got = logits(options, parameters(model, options), cut, ids)
    assert np.abs(got - known).max() <= 1e-5 * np.abs(known).max()


@pytest.mark.parametrize("shard_bytes", [1 << 30, 20_000], ids=["one file", "shards"])
@pytest.mark.parametrize("name", NAMES)
def test_a_model_leaves_as_it_came(imported, tmp_path, name, shard_bytes):
    out = written(imported(name), tmp_path / "out", shard_bytes=shard_bytes)
    files = sorted(out.glob("*.safetensors"))
    assert (out / INDEX).exists() == (len(files) > 1) == (shard_bytes == 20_000)
    came = load_file(FIXTURES / name / ONE_FILE)
    left = {key: array for path in files for key, array in load_file(path).items()}
    assert left.keys() == came.keys()
    for path in files:  # the package would write the same bytes
        save_file(load_file(path), tmp_path / "theirs", metadata={"format": "pt"})
        assert path.read_bytes() == (tmp_path / "theirs").read_bytes()
    for key, array in came.items():
        assert left[key].dtype == array.dtype and left[key].tobytes() == array.tobytes(), key
    config = json.loads((FIXTURES / name / "config.json").read_text())
    d_ff = {"n_inner": 4 * config["n_embd"]} if name == "gpt2" else {}
    head = {"head_dim": 8} if name in ("qwen2", "mixtral") else {}  # which transformers computes where it is not said
    assert json.loads((out / "config.json").read_text()) == config | d_ff | head
    assert (out / "generation_config.json").read_bytes() == (FIXTURES / name / "generation_config.json").read_bytes()
    import_model(HFFolder(out), tmp_path / "again")
    again = open_model(tmp_path / "again")
    assert again.options == imported(name).options
    entries = [file for file in again.record.files if file.startswith("entries/")]
    assert {file: imported(name).record.files[file] for file in entries} == {
        file: again.record.files[file] for file in entries
    }


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_one_tensor_is_held_while_a_model_leaves(tmp_path, dtype):
    options = LlamaConfig.of("debug", n_layers=4, d_model=128, d_ff=256, vocab_size=512)
    leaves = {e.name: {leaf.path: np.ones(leaf.shape, np.float32) for leaf in e.leaves} for e in options.facts.entries}
    largest = max(array.nbytes for arrays in leaves.values() for array in arrays.values())
    assert options.facts.n_params * 2 > 3 * largest + (1 << 19)
    tracemalloc.start()
    write_folder(tmp_path, options, leaves.__getitem__, origin={}, dtype=dtype)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 1.5 * largest + (1 << 19)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_narrow_numbers_come_in_as_fp32_and_leave_as_they_came(imported, tmp_path, dtype):
    narrow = written(imported("gpt2"), tmp_path / "narrow", dtype=dtype)
    import_model(HFFolder(narrow), tmp_path / "model")
    model = open_model(tmp_path / "model")
    (whole,), (rounded,) = imported("gpt2").load("tok").values(), model.load("tok").values()
    assert rounded.dtype == np.float32
    assert 0 < np.abs(rounded - whole).max() <= {"bf16": 2**-8, "fp16": 2**-11}[dtype] * np.abs(whole).max()
    again = written(model, tmp_path / "again", dtype=dtype)
    assert (again / ONE_FILE).read_bytes() == (narrow / ONE_FILE).read_bytes()
    assert json.loads((again / "config.json").read_text())["dtype"] == {"bf16": "bfloat16", "fp16": "float16"}[dtype]


def test_names_without_the_first_word_and_buffers_of_older_files(tmp_path):
    """As the files of the first release of GPT-2 are."""
    came = load_file(FIXTURES / "gpt2" / ONE_FILE)
    tensors = {name.removeprefix("transformer."): array for name, array in came.items()}
    tensors |= {f"h.{i}.attn.bias": np.ones((1, 1, 64, 64), np.float32) for i in range(2)}
    tensors["lm_head.weight"] = tensors["wte.weight"]
    shutil.copytree(FIXTURES / "gpt2", tmp_path / "old")
    save_file(tensors, tmp_path / "old" / ONE_FILE)
    import_model(HFFolder(tmp_path / "old"), tmp_path / "model")
    assert np.array_equal(open_model(tmp_path / "model").load("tok")[""], came["transformer.wte.weight"])


def test_a_model_that_came_from_nowhere(tmp_path):
    """config.json says what computes it; options that no model of transformers has are refused by name."""
    options = GPTConfig.of("debug", tied_head=True)
    config = config_of(options, {}, "float32")
    assert options_of_config(config, "config.json") == options
    assert (config["model_type"], config["architectures"]) == ("gpt2", ["GPT2LMHeadModel"])
    for changed in ({"positions": "rotary"}, {"activation": "geglu"}, {"n_shared_blocks": 1}):
        (name, value), *_ = changed.items()
        with pytest.raises(BadInput, match=rf"^model\.{name}: got {value!r}, which no model"):
            config_of(replace(options, **changed), {}, "float32")


def test_the_number_of_experts_has_two_names():
    """Files of Qwen3-MoE before version 5 of transformers say num_experts."""
    config = json.loads((FIXTURES / "qwen3moe" / "config.json").read_text())
    older = {"num_experts" if key == "num_local_experts" else key: value for key, value in config.items()}
    options = options_of_config(older, "config.json")
    assert options == options_of_config(config, "config.json") and older["num_experts"] == 4
    assert config_of(options, older, "float32")["num_experts"] == 4
    assert "num_local_experts" not in config_of(options, older, "float32")


@pytest.mark.parametrize(
    ("name", "changed", "line"),
    [
        ("qwen3moe", {"mlp_only_layers": [0]}, r"mlp_only_layers: got \[0\], expected \[\] or None: others are not"),
        ("qwen3moe", {"decoder_sparse_step": 2}, r"decoder_sparse_step: got 2, expected 1: others are not computed"),
        ("mixtral", {"router_jitter_noise": 0.1}, r"router_jitter_noise: got 0\.1, expected 0\.0: others are not"),
        ("mixtral", {"num_experts_per_tok": 9}, r"n_experts_per_token: got 9, expected at most n_experts 4"),
    ],
)
def test_experts_that_are_not_computed_here(name, changed, line):
    config = json.loads((FIXTURES / name / "config.json").read_text()) | changed
    with pytest.raises(BadInput, match=line):
        options_of_config(config, "config.json")


def test_a_missing_expert_is_named(tmp_path):
    shutil.copytree(FIXTURES / "mixtral", tmp_path / "came")
    experts = "model.layers.1.block_sparse_moe.experts"

    def change(tensors: dict) -> None:
        del tensors[f"{experts}.2.w1.weight"]
        tensors[f"{experts}.3.w2.weight"] = np.zeros((32, 40), np.float32)
        tensors[f"{experts}.4.w1.weight"] = np.zeros((48, 32), np.float32)

    with_tensors(tmp_path / "came", change)
    line = (
        rf"lacks {experts}\.2\.w1\.weight; has no use for {experts}\.4\.w1\.weight; "
        rf"has other shapes: {experts}\.3\.w2\.weight \[40, 32\] instead of \[48, 32\]; expected the tensors of "
    )
    with pytest.raises(BadInput, match=line):
        import_model(HFFolder(tmp_path / "came"), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_trees_and_leaves_by_path():
    tree = {"ln": {"scale": 1, "bias": 2}, "out": 3}
    assert as_leaves(tree) == {"ln/scale": 1, "ln/bias": 2, "out": 3}
    assert as_tree(as_leaves(tree)) == tree
    assert (as_tree({"": 4}), as_leaves(4)) == (4, {"": 4})


# ---------------------------------------------------------------------------------------------------------- bad input


def with_config(folder: Path, **changed) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


def with_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / ONE_FILE)
    change(tensors)
    save_file(tensors, folder / ONE_FILE)


def truncate(folder: Path) -> None:
    path = folder / ONE_FILE
    path.write_bytes(path.read_bytes()[:-100])


def without_a_shard(folder: Path) -> None:
    places = dict.fromkeys(load_file(folder / ONE_FILE), "model-00001-of-00002.safetensors")
    places["transformer.wte.weight"] = "model-00002-of-00002.safetensors"
    (folder / ONE_FILE).rename(folder / "model-00001-of-00002.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))


def with_a_shard_of_another_download(folder: Path) -> None:
    places = dict.fromkeys(load_file(folder / ONE_FILE), ONE_FILE) | {"transformer.h.2.ln_1.weight": ONE_FILE}
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))


def without_layers(tensors: dict) -> None:
    for name in [name for name in tensors if ".h.1." in name]:
        del tensors[name]
    tensors["transformer.h.0.attn.extra"] = np.zeros(3, np.float32)
    tensors["transformer.wpe.weight"] = np.zeros((60, 32), np.float32)


BAD = {
    "truncated": (truncate, r"model\.safetensors: damaged or truncated \(.+\); fetch it again"),
    "a shard is missing": (
        without_a_shard,
        r"lacks model-00002-of-00002\.safetensors, expected all shards of model\.safetensors\.index\.json",
    ),
    "a shard of another download": (
        with_a_shard_of_another_download,
        r"model\.safetensors: lacks transformer\.h\.2\.ln_1\.weight, which .+index\.json says is in it; fetch it again",
    ),
    "tensors": (
        lambda folder: with_tensors(folder, without_layers),
        r"lacks transformer\.h\.1\.attn\.c_attn\.bias, .+ and 8 more; has no use for transformer\.h\.0\.attn\.extra; "
        r"has other shapes: transformer\.wpe\.weight \[60, 32\] instead of \[64, 32\]; expected the tensors of ",
    ),
    "pickled tensors": (
        lambda folder: (folder / ONE_FILE).rename(folder / "pytorch_model.bin"),
        r"expected model\.safetensors or .+, has pytorch_model\.bin, which is not read: save the model as safetensors",
    ),
    "numbers of 8 bits": (
        lambda folder: with_tensors(
            folder, lambda tensors: tensors.update({"transformer.ln_f.bias": np.zeros(32, np.int8)})
        ),
        r"transformer\.ln_f\.bias: got numbers of I8, expected F64, F32, F16, BF16",
    ),
    "model_type": (
        lambda folder: with_config(folder, model_type="gpt3"),
        r"model_type: got 'gpt3', expected one of gpt2, llama, .+\(did you mean \"gpt2\"\?\)",
    ),
    "activation": (
        lambda folder: with_config(folder, activation_function="relu"),
        r"activation_function: got 'relu', expected 'gelu_new' or 'gelu_pytorch_tanh': others are not computed here",
    ),
    "epsilon": (
        lambda folder: with_config(folder, layer_norm_epsilon=1e-6),
        r"layer_norm_epsilon: got 1e-06, expected 1e-05: others are not computed here",
    ),
    "no JSON": (
        lambda folder: (folder / "config.json").write_text("{"),
        r"config\.json: cannot be read \(.+\), expected that of a model",
    ),
    "a missing key": (
        lambda folder: (folder / "config.json").write_text('{"model_type": "gpt2"}'),
        r"config\.json: n_layer: missing, expected it for a model of GPT2LMHeadModel",
    ),
    "a key of another type": (
        lambda folder: with_config(folder, n_layer="two"),
        r"config\.json\.n_layers: got 'two', expected int",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gives_one_line_and_nothing_is_written(tmp_path, case):
    damage, line = BAD[case]
    shutil.copytree(FIXTURES / "gpt2", tmp_path / "came")
    damage(tmp_path / "came")
    with pytest.raises(BadInput) as error:
        import_model(HFFolder(tmp_path / "came"), tmp_path / "model")
    assert re.search(line, str(error.value)), str(error.value)
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["came"]


def test_an_entry_that_changed_since_is_not_read(imported, tmp_path):
    shutil.copytree(imported("gpt2").folder, tmp_path / "model")
    path = tmp_path / "model" / "entries" / "head.npz"
    content = bytearray(path.read_bytes())
    content[-200] ^= 1
    path.write_bytes(content)
    model = open_model(tmp_path / "model")
    assert model.load("tok")
    with pytest.raises(BadInput, match=r"head\.npz: damaged, it has SHA-256 .+; import it again$"):
        model.load("head")
    path.unlink()
    with pytest.raises(BadInput, match=r"head\.npz: cannot be read \(.+\), expected a file of the model$"):
        model.load("head")


def test_what_is_no_model_folder(tmp_path):
    with pytest.raises(
        BadInput, match=r"holds no model\.json, expected a model folder; scripts/tools/import_model\.py"
    ):
        open_model(tmp_path)


def test_a_folder_that_holds_something_is_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "text").write_text("mine")
    with pytest.raises(BadInput, match="mine: is not an empty folder, expected a new name for a model"):
        import_model(HFFolder(FIXTURES / "gpt2"), tmp_path / "mine")
    with pytest.raises(RuntimeError), new_folder(tmp_path / "new", "a model") as folder:
        (folder / "half").write_text("half")
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert (tmp_path / "mine" / "text").read_text() == "mine"


def test_numbers_that_do_not_fit_are_refused(imported, tmp_path):
    model = imported("gpt2")

    def load(name):
        return {path: array * 1e6 for path, array in model.load(name).items()}

    with pytest.raises(BadInput, match="has numbers that float16 cannot hold, expected --dtype=fp32 or bf16"):
        write_folder(tmp_path, model.options, load, origin={}, dtype="fp16")
