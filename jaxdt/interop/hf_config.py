"""config.json of Hugging Face <-> the options of a model.

One table of keys for each model_type is read in both directions. What the tables do not say is in `options_of_config`.
`config_of` reads back what it wrote, so options that no model_type has are refused there, whichever they are.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxdt.run.errors import BadInput, nearest, why
from jaxdt.run.model import read_options
from jaxdt.run.model_spec import ModelSpec
from jaxdt.run.serialize import is_list, is_object, parse_json, write

Config = Mapping[str, Any]
NAMED_AS_LLAMA = ("llama",)  # families whose modules have the names of Llama's in other projects


@dataclass(frozen=True)
class ModelType:
    """How one model_type says the options of a family.

    keys: option -> its key.
    defaults: values of keys that a file may leave out.
    accepted: keys that are no options, with the values that are computed here; the first is that of a file which
        leaves the key out.
    max_positions: the key with the greatest length. `is_table`: the parameters have a row for each of its positions.
    other_names: key -> the name that it has in some files."""

    architecture: str
    family: str
    keys: Mapping[str, str]
    defaults: Mapping[str, Any]
    accepted: Mapping[str, tuple[Any, ...]]
    max_positions: str
    is_table: bool = False
    other_names: Mapping[str, str] = field(default_factory=dict[str, str])

    def key_in(self, config: Config, key: str) -> str:
        """The name of a key in this file."""
        other = self.other_names.get(key, key)
        return other if other in config and key not in config else key


GPT2 = ModelType(
    architecture="GPT2LMHeadModel",
    family="gpt",
    keys={
        "n_layers": "n_layer",
        "d_model": "n_embd",
        "n_heads": "n_head",
        "d_ff": "n_inner",
        "vocab_size": "vocab_size",
        "tied_head": "tie_word_embeddings",
    },
    defaults={"n_inner": None, "tie_word_embeddings": True},
    accepted={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "layer_norm_epsilon": (1e-5,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    max_positions="n_positions",
    is_table=True,
)
LLAMA_KEYS = {
    "n_layers": "num_hidden_layers",
    "d_model": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "d_ff": "intermediate_size",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
    "tied_head": "tie_word_embeddings",
    "d_head": "head_dim",
}
LLAMA_DEFAULTS = {
    "num_key_value_heads": None,  # as many as attention heads
    "head_dim": None,  # hidden_size / num_attention_heads
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
}
LLAMA_ACCEPTED = {"hidden_act": ("silu",), "mlp_bias": (False,), "partial_rotary_factor": (1.0,)}


EXPERT_KEYS = {
    "n_experts": "num_local_experts",
    "n_experts_per_token": "num_experts_per_tok",
    "router_aux_coef": "router_aux_loss_coef",
}


def _like_llama(architecture: str, **defaults: Any) -> ModelType:
    all_defaults = LLAMA_DEFAULTS | defaults
    return ModelType(architecture, "llama", LLAMA_KEYS, all_defaults, LLAMA_ACCEPTED, "max_position_embeddings")


MODEL_TYPES = {
    "gpt2": GPT2,
    "llama": _like_llama("LlamaForCausalLM"),
    "mistral": _like_llama("MistralForCausalLM", max_position_embeddings=131072, num_key_value_heads=8),
    "qwen2": _like_llama("Qwen2ForCausalLM", max_position_embeddings=32768, num_key_value_heads=32),
    "qwen3": _like_llama("Qwen3ForCausalLM", max_position_embeddings=32768, num_key_value_heads=32, head_dim=128),
    "mixtral": ModelType(
        architecture="MixtralForCausalLM",
        family="moe",
        keys=LLAMA_KEYS | EXPERT_KEYS,
        defaults=LLAMA_DEFAULTS
        | dict(num_key_value_heads=8, rms_norm_eps=1e-5, max_position_embeddings=131072, rope_theta=1e6)
        | dict(num_local_experts=8, num_experts_per_tok=2, router_aux_loss_coef=0.001),
        accepted=LLAMA_ACCEPTED | {"router_jitter_noise": (0.0,)},
        max_positions="max_position_embeddings",
    ),
    "qwen3_moe": ModelType(
        architecture="Qwen3MoeForCausalLM",
        family="moe",
        keys=LLAMA_KEYS
        | EXPERT_KEYS
        | dict(d_ff="moe_intermediate_size", n_experts="num_experts", norm_topk="norm_topk_prob"),
        defaults=LLAMA_DEFAULTS
        | dict(num_key_value_heads=4, max_position_embeddings=32768, moe_intermediate_size=768, norm_topk_prob=False)
        | dict(num_experts=128, num_experts_per_tok=8, router_aux_loss_coef=0.001),
        accepted=LLAMA_ACCEPTED | {"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
        max_positions="max_position_embeddings",
        other_names={"num_experts": "num_local_experts"},
    ),
}
LLAMA3_ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def read_config(path: Path) -> dict[str, Any]:
    """The object in a file of JSON."""
    try:
        content = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: cannot be read ({why(error)}), expected that of a model") from None
    if not is_object(content):
        raise BadInput(f"{path}: got {content!r:.40}, expected an object")
    return content


def options_of_config(config: Config, where: str) -> ModelSpec:
    """The options that a config.json describes, of the greatest length for which it was made. `where` names the file in
    errors. BadInput for a model that this project would compute otherwise."""
    name = config.get("model_type")
    if name not in MODEL_TYPES:
        hint = nearest(str(name), MODEL_TYPES)
        raise BadInput(f"{where}: model_type: got {name!r}, expected one of {', '.join(MODEL_TYPES)}{hint}")
    kind = MODEL_TYPES[name]
    for key, values in kind.accepted.items():
        if config.get(key, values[0]) not in values:
            expected = " or ".join(repr(value) for value in values)
            raise BadInput(f"{where}: {key}: got {config[key]!r}, expected {expected}: others are not computed here")
    values = {option: _value(config, key, kind, where) for option, key in kind.keys.items()}
    values["max_len"] = _value(config, kind.max_positions, kind, where)
    if kind.family == "gpt":
        values["d_ff"] = values["d_ff"] or 4 * int(values["d_model"])
    else:
        values |= _of_llama(config, str(name), values, where)
    return read_options({"family": kind.family, **values}, where)


def _value(config: Config, key: str, kind: ModelType, where: str) -> Any:
    key = kind.key_in(config, key)
    if key not in config and key not in kind.defaults:
        raise BadInput(f"{where}: {key}: missing, expected it for a model of {kind.architecture}")
    return config.get(key, kind.defaults.get(key))


def _of_llama(config: Config, name: str, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The options of Llama-like models that no single key says."""
    has_bias = bool(config.get("attention_bias")) and name in ("llama", "qwen3", "qwen3_moe")
    found: dict[str, Any] = {
        "n_kv_heads": values["n_kv_heads"] or values["n_heads"],
        "d_head": 0 if _has_usual_heads(values) else values["d_head"],
        "norm_eps": float(values["norm_eps"]),
        "qkv_bias": has_bias or name == "qwen2",
        "o_bias": has_bias,
        "qk_norm": name in ("qwen3", "qwen3_moe"),
    }
    if "router_aux_coef" in values:
        found["router_aux_coef"] = float(values["router_aux_coef"])
    window, is_on_all_layers = _window(config, name, int(values["n_layers"]), where)
    if is_on_all_layers:
        found["window"] = window
    elif window:  # on some layers: none of them does anything for shorter samples
        found["max_len"] = min(int(values["max_len"]), window)
    return found | _rope(config, MODEL_TYPES[name].defaults.get("rope_theta", 10000.0), where)


def _window(config: Config, name: str, n_layers: int, where: str) -> tuple[int, bool]:
    """The sliding window, 0 without one, and whether all layers have it."""
    window = config.get("sliding_window")
    is_usual = name in ("mistral", "mixtral")
    if name == "llama" or not window or not config.get("use_sliding_window", is_usual):
        return 0, False
    if type(window) is not int or window < 1:
        raise BadInput(f"{where}: sliding_window: got {window!r}, expected null or an integer >= 1")
    layers = config.get("layer_types")
    if not is_list(layers):
        first = 0 if is_usual or name == "qwen3_moe" else int(config.get("max_window_layers", 28))
        layers = ["full_attention"] * min(first, n_layers) + ["sliding_attention"] * max(0, n_layers - first)
    n_sliding = layers.count("sliding_attention")
    return (window if n_sliding else 0), n_sliding == n_layers


def _rope(config: Config, usual_theta: float, where: str) -> dict[str, Any]:
    """Rotary positions: rope_parameters of newer files, rope_theta and rope_scaling of older ones."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(key) or {}
    if not is_object(rope):
        raise BadInput(f"{where}: {key}: got {rope!r:.40}, expected an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise BadInput(f"{where}: {key}: got the type {kind!r}, expected default or llama3")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise BadInput(f"{where}: {key}: got partial_rotary_factor {rope['partial_rotary_factor']!r}, expected 1.0")
    theta = rope.get("rope_theta", config.get("rope_theta", usual_theta))
    scaling: list[Any] = [rope.get(name) for name in LLAMA3_ROPE] if kind == "llama3" else []
    if None in scaling:
        raise BadInput(f"{where}: {key}: {LLAMA3_ROPE[scaling.index(None)]}: missing, expected it for the type llama3")
    try:
        return {"rope_theta": float(theta), "rope_scaling": tuple(map(float, scaling))}
    except (TypeError, ValueError):
        raise BadInput(f"{where}: {key}: got {rope!r:.60}, expected numbers") from None


def config_of(options: ModelSpec, origin: Config, dtype: str) -> dict[str, Any]:
    """The config.json of a model with these options and tensors of this dtype. What it says beside them, such as the
    numbers of special tokens, comes from `origin`, the config.json with which the model came, which may be empty.
    BadInput for options that no model_type has."""
    fields: dict[str, Any] = dict(write(options))
    if "d_head" in fields and _has_usual_heads(fields):
        fields["d_head"] = 0
    kind = MODEL_TYPES.get(str(origin.get("model_type")))
    is_known = kind is not None and kind.family == options.family
    name = str(origin["model_type"]) if is_known else _model_type(options.family, fields)
    if name not in MODEL_TYPES:
        raise BadInput(f"model: no model_type of Hugging Face has the family {options.family}")
    kind = MODEL_TYPES[name]
    written: dict[str, Any] = dict(origin) if is_known else {"model_type": name, **_rope_keys(fields)}
    written |= {kind.key_in(origin, key): fields[option] for option, key in kind.keys.items()}
    if written.get("head_dim") == 0:
        written["head_dim"] = fields["d_model"] // fields["n_heads"]
    if kind.is_table or written.get(kind.max_positions, 0) < options.max_len:
        written[kind.max_positions] = options.max_len
    if not is_known and kind.family != "gpt":
        window = {"sliding_window": fields["window"] or None}
        of_qwen = {"use_sliding_window": bool(fields["window"]), "max_window_layers": 0}
        written |= (
            window if name in ("mistral", "mixtral") else {**window, **of_qwen} if name.startswith("qwen") else {}
        )
        written |= {"attention_bias": fields["o_bias"], "hidden_act": "silu"}
    written |= {"architectures": [kind.architecture], "dtype" if "dtype" in origin else "torch_dtype": dtype}
    read_back = options_of_config(written, "config.json").with_max_len(options.max_len)
    got = write(read_back)
    wrong = [field for field, value in fields.items() if got.get(field) != value]
    if wrong:
        raise BadInput(f"model.{wrong[0]}: got {fields[wrong[0]]!r}, which no model of Hugging Face's {name} has")
    return written


def _has_usual_heads(options: Config) -> bool:
    """Whether the heads divide the width among them, which options may say in either way."""
    return not options["d_head"] or options["d_head"] * options["n_heads"] == options["d_model"]


def _model_type(family: str, fields: Config) -> str:
    """The model_type of a model that came from nowhere."""
    if family == "moe":
        return "qwen3_moe" if fields["qk_norm"] else "mixtral"
    if family != "llama":
        return {"gpt": "gpt2"}.get(family, "")
    if fields["qk_norm"]:
        return "qwen3"
    if fields["qkv_bias"] and not fields["o_bias"]:
        return "qwen2"
    return "mistral" if fields["window"] else "llama"


def _rope_keys(fields: Config) -> dict[str, Any]:
    """As older files say rotary positions, which newer programs read too."""
    if "rope_theta" not in fields:
        return {}
    scaling = None
    if fields["rope_scaling"]:
        *numbers, original_len = fields["rope_scaling"]
        scaling = {"rope_type": "llama3", **dict(zip(LLAMA3_ROPE, (*numbers, int(original_len)), strict=True))}
    return {"rope_theta": fields["rope_theta"], "rope_scaling": scaling}
