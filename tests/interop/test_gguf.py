"""GGUF files of the models in tests/fixtures/models, made here as the converter of llama.cpp makes them. A model has
the same parameters whichever file it comes from."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

gguf = pytest.importorskip("gguf", reason="the extra hf is not installed")
pytest.importorskip("safetensors", reason="the extra hf is not installed")
from safetensors.numpy import load_file  # noqa: E402

from jaxdt.interop.gguf_file import GGUFFile, without_pairs  # noqa: E402
from jaxdt.interop.hf_files import HFFolder  # noqa: E402
from jaxdt.interop.import_model import import_model  # noqa: E402
from jaxdt.run.errors import BadInput  # noqa: E402
from jaxdt.runtime.storage.model_folder import open_model  # noqa: E402

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "models"
# model -> general.architecture of its GGUF files
ARCHITECTURES = {
    "gpt2": "gpt2",
    "llama": "llama",
    "mistral": "llama",
    "mistral_sw": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "mixtral": "llama",
    "qwen3moe": "qwen3moe",
}
NAMES = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.gate": "ffn_gate_inp",
}
EXPERTS = {"w1": "gate", "w2": "down", "w3": "up", "gate_proj": "gate", "down_proj": "down", "up_proj": "up"}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if expert := re.fullmatch(r"model\.layers\.(\d+)\.\w+\.experts\.(\w+)", stem):
        return f"blk.{expert[1]}.ffn_{EXPERTS[expert[2]]}_exps.{kind}"
    if block := re.fullmatch(r"(?:transformer\.h|model\.layers)\.(\d+)\.(.+)", stem):
        return f"blk.{block[1]}.{NAMES[block[2]]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def stacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of all experts in one, whose name has no number of an expert."""
    found: dict[str, list[np.ndarray]] = {}
    for name in sorted(tensors, key=lambda name: [int(word) for word in re.findall(r"\d+", name)]):
        found.setdefault(re.sub(r"experts\.\d+", "experts", name), []).append(tensors[name])
    return {name: np.stack(arrays) if ".experts." in name else arrays[0] for name, arrays in found.items()}


def pairs(array: np.ndarray, n_heads: int) -> np.ndarray:
    """Rows of q or k as the converter orders them for the architecture llama."""
    rows = array.reshape(n_heads, 2, array.shape[0] // n_heads // 2, *array.shape[1:])
    return rows.swapaxes(1, 2).reshape(array.shape)


def write(path: Path, name: str, *, kind: str = "F32", rope_freqs=None, **changed) -> Path:
    """The GGUF file of a fixture. `changed`: metadata; None leaves one out."""
    config = json.loads((FIXTURES / name / "config.json").read_text())
    architecture = changed.pop("architecture", ARCHITECTURES.get(name, "llama"))
    tensors = stacked(load_file(FIXTURES / name / "model.safetensors"))
    writer = gguf.GGUFWriter(path, architecture)
    first = ("n_layer", "n_embd", "n_head", "n_positions") if name == "gpt2" else None
    keys = first or ("num_hidden_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
    fields = dict(zip(("block_count", "embedding_length", "attention.head_count", "context_length"), keys, strict=True))
    found = {key: config[value] for key, value in fields.items()}
    if name == "gpt2":
        found |= {"feed_forward_length": 4 * config["n_embd"]}
        writer.add_float32("gpt2.attention.layer_norm_epsilon", config["layer_norm_epsilon"])
    else:
        found |= {
            "attention.head_count_kv": config["num_key_value_heads"],
            "feed_forward_length": config["intermediate_size"],
        }
        if "num_local_experts" in config:
            found |= {"expert_count": config["num_local_experts"], "expert_used_count": config["num_experts_per_tok"]}
        if "moe_intermediate_size" in config:
            found["expert_feed_forward_length"] = config["moe_intermediate_size"]
        if config.get("head_dim"):
            found["attention.key_length"] = config["head_dim"]
        if config.get("sliding_window"):
            found["attention.sliding_window"] = config["sliding_window"]
        writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
        writer.add_float32(f"{architecture}.rope.freq_base", config["rope_parameters"]["rope_theta"])
    for key, value in found.items():
        if (kept := changed.pop(key, value)) is not None:
            writer.add_uint32(f"{architecture}.{key}", kept)
    for key, value in changed.items():
        writer.add_string(f"{architecture}.{key}", value)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs.astype(np.float32))
    for tensor, array in tensors.items():
        if re.search(r"c_(attn|proj|fc)\.weight", tensor):
            array = np.ascontiguousarray(array.T)
        if architecture == "llama" and re.search(r"\.(q|k)_proj\.", tensor):
            heads = "num_attention_heads" if ".q_proj." in tensor else "num_key_value_heads"
            array = np.ascontiguousarray(pairs(array, config[heads]))
        in_blocks = array.ndim == 2 and array.shape[1] % 32 == 0
        quantised = getattr(gguf.GGMLQuantizationType, kind if in_blocks else "F32")
        writer.add_tensor(gguf_name(tensor), gguf.quants.quantize(array, quantised), raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def entries(model) -> dict:
    files = (file for file in model.record.files if file.startswith("entries/"))
    return {file: model.record.files[file] for file in files}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_model_has_the_same_parameters_from_either_file(name, tmp_path):
    import_model(HFFolder(FIXTURES / name), tmp_path / "hf")
    import_model(GGUFFile(write(tmp_path / "file.gguf", name)), tmp_path / "gguf")
    hf, other = open_model(tmp_path / "hf"), open_model(tmp_path / "gguf")
    # Those who run the files of Qwen3-MoE scale the weights of a token's experts, which only config.json says.
    assert other.options == (replace(hf.options, norm_topk=True) if name == "qwen3moe" else hf.options)
    assert entries(other) == entries(hf)
    config = json.loads((other.origin / "config.json").read_text())
    assert config["model_type"] == {"mistral": "llama", "mistral_sw": "mistral", "qwen3moe": "qwen3_moe"}.get(
        name, name
    )


def test_numbers_that_were_quantised(tmp_path):
    import_model(GGUFFile(write(tmp_path / "file.gguf", "llama", kind="Q8_0")), tmp_path / "model")
    known = load_file(FIXTURES / "llama" / "model.safetensors")["model.layers.0.mlp.gate_proj.weight"].T
    got = open_model(tmp_path / "model").load("block_000")["gate/kernel"]
    assert got.dtype == np.float32
    assert 0 < np.abs(got - known).max() <= np.abs(known).max() / 127


def test_rows_of_heads_are_put_back():
    rows = np.arange(48.0).reshape(24, 2)
    assert not np.array_equal(pairs(rows, 3), rows)
    assert np.array_equal(without_pairs(pairs(rows, 3), 8), rows)
    assert np.array_equal(without_pairs(pairs(rows[:, 0], 3), 8), rows[:, 0])


def llama3_divisors(factor: float) -> np.ndarray:
    """As the converter computes them from the config of Llama 3.1, for heads of 8 numbers and a base of 500,000."""
    made = []
    for freq in 1.0 / 500000.0 ** (np.arange(0, 8, 2) / 8):
        wavelength = 2 * np.pi / freq
        if wavelength < 8192 / 4.0:
            made.append(1.0)
        elif wavelength > 8192 / 1.0:
            made.append(factor)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            made.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(made)


def test_llama_3_keeps_its_rule_for_longer_texts(tmp_path):
    file = GGUFFile(write(tmp_path / "file.gguf", "llama3", rope_freqs=llama3_divisors(8.0)))
    assert file.options.rope_scaling == (8.0, 1.0, 4.0, 8192.0)
    assert file.options.rope_theta == 500000.0 and file.options.tied_head
    with pytest.raises(BadInput, match=r"rope_freqs\.weight: got other divisors .+ Llama 3 with the factor 8$"):
        GGUFFile(write(tmp_path / "other.gguf", "llama3", rope_freqs=llama3_divisors(8.0) ** 0.5 * 8**0.5))


def test_bad_input_gives_one_line(tmp_path):
    (tmp_path / "no.gguf").write_bytes(b"GGUF")
    with pytest.raises(BadInput, match=r"no\.gguf: is no GGUF file, or truncated \(.*\)$"):
        GGUFFile(tmp_path / "no.gguf")
    with pytest.raises(BadInput, match=r"none\.gguf: cannot be read \(.+\), expected a GGUF file$"):
        GGUFFile(tmp_path / "none.gguf")
    whole = write(tmp_path / "file.gguf", "llama")
    (tmp_path / "short.gguf").write_bytes(whole.read_bytes()[:-500])
    with pytest.raises(BadInput, match=r"short\.gguf: is no GGUF file, or truncated \(.*\)$"):
        GGUFFile(tmp_path / "short.gguf")
    cases = {
        "architecture": (
            {"architecture": "gemma"},
            r"general\.architecture: got 'gemma', expected one of gpt2, llama, qwen2, qwen3, qwen3moe$",
        ),
        "rope": ({"rope.scaling.type": "yarn"}, r"llama\.rope\.scaling\.type: got 'yarn', expected none$"),
        "layers": ({"block_count": 3}, r"lacks blk\.2\.attn_k\.weight, .+ and 5 more; expected the tensors"),
        "a key": ({"block_count": None}, r"num_hidden_layers: missing, expected it for a model of LlamaForCausalLM$"),
    }
    for name, (changed, line) in cases.items():
        with pytest.raises(BadInput, match=line):
            import_model(GGUFFile(write(tmp_path / f"{name}.gguf", "llama", **changed)), tmp_path / "model")
    assert not (tmp_path / "model").exists()
