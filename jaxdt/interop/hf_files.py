"""The folder of a model of Hugging Face: config.json, safetensors in one file or several shards, and a tokenizer."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxdt.interop.hf_config import config_of, options_of_config, read_config
from jaxdt.interop.tensor_names import Tensor, tensors_of
from jaxdt.run.adapter import SCALE, parse
from jaxdt.run.errors import BadInput, require_one_of, shortened, why
from jaxdt.run.model_spec import ModelSpec
from jaxdt.run.serialize import is_object
from jaxdt.runtime.storage.model_folder import Leaves

CONFIG = "config.json"
ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"
# What a model brings beside its tensors, and takes with it when it leaves.
ORIGIN = (
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
NUMBERS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # formats of tensors that are read, with their bytes
DTYPES: dict[str, tuple[str, str, Any]] = {  # the name in config.json, that in safetensors, and the numbers
    "fp32": ("float32", "F32", np.float32),
    "bf16": ("bfloat16", "BF16", ml_dtypes.bfloat16),
    "fp16": ("float16", "F16", np.float16),
}
# Buffers of older files, which follow from the config.
NOT_PARAMETERS = re.compile(r"(.*\.)?(h\.\d+\.attn\.(masked_)?bias|rotary_emb\.inv_freq)")
INSTALL = "pip install safetensors tokenizers gguf"  # the extra hf


def extra(module: str) -> Any:
    """A module of the extra hf. BadInput where it is not installed."""
    if find_spec(module.partition(".")[0]) is None:
        raise BadInput(f"got no module {module.partition('.')[0]}, expected those of the extra hf: {INSTALL}")
    return import_module(module)


class HFFolder:
    """A folder with a model of Hugging Face, as a source of a model folder. Its tensors are read one at a time."""

    def __init__(self, folder: Path):
        self.where = str(folder)
        self._folder = folder
        self._open = extra("safetensors").safe_open
        self.config = read_config(folder / CONFIG)
        self.options = options_of_config(self.config, str(folder / CONFIG))
        self._files = self._files_by_tensor()
        self._current: tuple[Path, Any] | None = None

    @property
    def origin(self) -> Iterator[tuple[str, bytes]]:
        """The files that go with the model, with their content."""
        for name in ORIGIN:
            if (self._folder / name).is_file():
                yield name, (self._folder / name).read_bytes()

    @property
    def names(self) -> set[str]:
        """The tensors that are parameters."""
        return {name for name in self._files if not NOT_PARAMETERS.fullmatch(name)}

    def names_of(self, tensor: Tensor) -> list[str]:
        """The names of a tensor here. Files of a model without a head leave out the first word of their names."""
        names = tensor.hf_names
        short = [name.partition(".")[2] for name in names]
        return short if names[0] not in self._files and short[0] in self._files else names

    def shape(self, tensor: Tensor, name: str) -> tuple[int, ...]:
        """The shape of one tensor in the layout of this project. BadInput for numbers of an unknown kind."""
        about = self._file(self._files[name]).get_slice(name)
        if about.get_dtype() not in NUMBERS:
            expected = ", ".join(NUMBERS)
            raise BadInput(f"{self._files[name]}: {name}: got numbers of {about.get_dtype()}, expected {expected}")
        shape = tuple(about.get_shape())
        return shape[::-1] if tensor.is_transposed else shape

    def read(self, tensor: Tensor) -> np.ndarray:
        """A tensor in fp32 and in the layout of this project."""
        arrays: list[np.ndarray] = []
        for name in self.names_of(tensor):
            array = self._file(self._files[name]).get_tensor(name).astype(np.float32)
            arrays.append(np.ascontiguousarray(array.T) if tensor.is_transposed else array)
        return np.stack(arrays) if tensor.n_experts else arrays[0]

    def _file(self, path: Path) -> Any:
        """The open file of this name; one is open at a time."""
        if self._current is None or self._current[0] != path:
            self._current = None
            try:
                self._current = path, self._open(path, "np")
            except OSError as error:
                raise BadInput(f"{path}: cannot be read ({why(error)}), expected a shard of the model") from None
            except Exception as error:  # SafetensorError has no narrower base
                raise BadInput(f"{path}: damaged or truncated ({error}); fetch it again") from None
        return self._current[1]

    def _files_by_tensor(self) -> dict[str, Path]:
        """The file of each tensor. BadInput for a shard that is missing or lacks what the index says it has."""
        index = self._folder / INDEX
        self._current = None
        if not index.exists():
            if not (self._folder / ONE_FILE).exists():
                others = sorted(path.name for path in self._folder.glob("*.bin"))
                has = f"has {others[0]}, which is not read: save the model as safetensors" if others else "has neither"
                raise BadInput(f"{self._folder}: expected {ONE_FILE} or {INDEX}, {has}")
            shards = [ONE_FILE]
            places: Any = None
        else:
            places = read_config(index).get("weight_map")
            if not is_object(places) or not all(isinstance(shard, str) for shard in places.values()):
                raise BadInput(f"{index}: weight_map: missing, expected the shard of each tensor")
            shards = sorted(set(places.values()))
            if absent := [shard for shard in shards if not (self._folder / shard).is_file()]:
                raise BadInput(f"{self._folder}: lacks {shortened(absent)}, expected all shards of {INDEX}")
        found: dict[str, Path] = {}
        for shard in shards:
            path = self._folder / shard
            found |= {name: path for name in self._file(path).keys()}  # noqa: SIM118 (it is no mapping)
        for name, shard in (places or {}).items():
            if found.get(name) != self._folder / shard:
                raise BadInput(f"{self._folder / shard}: lacks {name}, which {INDEX} says is in it; fetch it again")
        return found


def write_folder(
    folder: Path,
    options: ModelSpec,
    load: Callable[[str], Leaves],
    *,
    origin: Mapping[str, bytes],
    dtype: str = "fp32",
    shard_bytes: int = 4 << 30,
) -> int:
    """Write what transformers loads into an empty folder: config.json, safetensors in shards of at most about
    `shard_bytes`, and the files of `origin`. `load` gives the parameters of an entry by the paths of its leaves; one
    entry and one tensor are held at a time. Returns the number of tensors."""
    require_one_of("dtype", dtype, tuple(DTYPES))
    number_bytes = np.dtype(DTYPES[dtype][2]).itemsize
    config = config_of(options, json.loads(origin.get(CONFIG, b"{}")), DTYPES[dtype][0])
    for name, content in origin.items():
        (folder / name).write_bytes(content)
    _write_json(folder / CONFIG, config)
    shards = _shards(options, number_bytes, shard_bytes)
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        path = folder / (ONE_FILE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors")
        _write_tensors(path, shard, load, dtype)
        places |= dict.fromkeys((part.name for part in shard), path.name)
    if len(shards) > 1:
        n_params = options.facts.n_params
        about = {"total_parameters": n_params, "total_size": n_params * number_bytes}
        _write_json(folder / INDEX, {"metadata": about, "weight_map": places})
    return len(places)


def write_adapter(
    folder: Path, options: ModelSpec, load: Callable[[str], Leaves], *, base: str, dtype: str = "fp32"
) -> int:
    """Write the adapter of a model alone, as peft loads it, into an empty folder: adapter_config.json and
    adapter_model.safetensors. `base`: where the model itself is. Returns the number of tensors."""
    adapter, parts, targets, takes_inputs_first = parse(options.adapter), list[_Part](), set[str](), False
    own = options.without_adapter()
    for entry in options.facts.entries:
        tensors = tensors_of(own, entry.name)
        for leaf in (leaf for leaf in entry.leaves if leaf.trained):
            _, *path, half = leaf.path.split("/")
            tensor = tensors["/".join(path)]
            module = tensor.hf.removesuffix(".weight")
            name = f"base_model.model.{module}.lora_{half.upper()}.weight"
            parts.append(_Part(name, entry.name, leaf.path, None, leaf.shape[::-1], True))
            targets.add(".".join(module.split(".")[-2:]))  # GPT-2 has two modules c_proj in a layer
            takes_inputs_first |= tensor.hf_has_inputs_first
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": SCALE * adapter.rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(targets),
        "fan_in_fan_out": takes_inputs_first,
        "inference_mode": True,
    }
    _write_json(folder / ADAPTER_CONFIG, about)
    _write_tensors(folder / ADAPTER_FILE, parts, load, dtype)
    return len(parts)


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _write_tensors(path: Path, parts: Sequence["_Part"], load: Callable[[str], Leaves], dtype: str) -> None:
    """Write one file of safetensors. BadInput for numbers that this dtype cannot hold."""
    dtype_name, code, numbers = DTYPES[dtype]
    header, starts = _header({part.name: part.shape for part in parts}, code, np.dtype(numbers).itemsize)
    known: tuple[str, Leaves] = ("", {})
    with path.open("wb") as file:
        file.write(header)
        for part in parts:
            if known[0] != part.entry:
                known = part.entry, load(part.entry)
            array = known[1][part.leaf]
            array = array if part.expert is None else array[part.expert]
            with np.errstate(over="ignore"):
                array = np.ascontiguousarray(array.T if part.is_transposed else array, numbers)
            if not np.isfinite(array).all():
                raise BadInput(f"{part.name}: has numbers that {dtype_name} cannot hold, expected --dtype=fp32 or bf16")
            file.seek(starts[part.name])
            file.write(array.reshape(-1).view(np.uint8).data)


def _header(shapes: Mapping[str, tuple[int, ...]], code: str, number_bytes: int) -> tuple[bytes, dict[str, int]]:
    """What comes before the tensors in a file of safetensors, and where in the file each of them starts: in the order
    of their names."""
    about: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(shapes):
        start, end = end, end + math.prod(shapes[name]) * number_bytes
        about[name] = {"dtype": code, "shape": list(shapes[name]), "data_offsets": [start, end]}
    text = json.dumps(about, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + about[name]["data_offsets"][0] for name in shapes}


@dataclass(frozen=True)
class _Part:
    """One tensor of a file: a leaf of an entry, or the matrix of one expert in it, and the shape that it has there."""

    name: str
    entry: str
    leaf: str
    expert: int | None
    shape: tuple[int, ...]
    is_transposed: bool


def _shards(options: ModelSpec, number_bytes: int, shard_bytes: int) -> list[list[_Part]]:
    """The tensors of each shard."""
    shards: list[list[_Part]] = [[]]
    size_bytes = 0
    for entry in options.facts.entries:
        tensors = tensors_of(options, entry.name)
        for leaf in entry.leaves:
            tensor = tensors[leaf.path]
            shape = leaf.shape[1:] if tensor.n_experts else leaf.shape
            shape = shape[::-1] if tensor.is_transposed else shape
            tensor_bytes = math.prod(shape) * number_bytes
            for expert, name in enumerate(tensor.hf_names):
                if shards[-1] and size_bytes + tensor_bytes > shard_bytes:
                    shards.append([])
                    size_bytes = 0
                of_expert = expert if tensor.n_experts else None
                shards[-1].append(_Part(name, entry.name, leaf.path, of_expert, shape, tensor.is_transposed))
                size_bytes += tensor_bytes
    return shards
