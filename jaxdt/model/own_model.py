"""The functions of a model of one's own: a row of blocks with an embedding before and a head behind.

    def build(options) -> Parts      in a file outside the package; a config names it: model.family = "pkg.file:build"

A part is a linen module, or a function of nnx.Rngs that makes an nnx module. The entries of the parameters are "embed",
"block_000", ... and "head". Their sizes are read off the parts as those of any family are (jaxdt.model.derive).

B samples, T tokens, W width, V vocabulary."""

import contextlib
import functools
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from jaxdt.model.base import Begins, Boundary, Entries, Logits, Model, Params, Tokens
from jaxdt.model.layers import block_name
from jaxdt.run.errors import BadInput
from jaxdt.run.model_facts import MATRIX, TABLE, UNKNOWN, VECTOR
from jaxdt.run.model_spec import derived
from jaxdt.run.own_model import OwnModel, put_current_folder_on_path

Part = nn.Module | Callable[[nnx.Rngs], nnx.Module]
EMBED, HEAD = "embed", "head"
EXAMPLE_TOKENS = 2


@dataclass(frozen=True)
class Parts:
    """`embed`: tokens [B,T] int32 -> [B,T,W]. Each of `blocks`: [B,T,W] -> [B,T,W], where W may change. `head`: [B,T,W]
    -> logits [B,T,V] with V the `vocab_size`. With `tied`, the path of a leaf of the embedding such as "table", the
    head gets this leaf as its second argument. `trained`: whether a leaf such as "block_000/qkv/kernel" is trained;
    None: all are."""

    embed: Part
    blocks: Sequence[Part]
    head: Part
    vocab_size: int
    tied: str = ""
    trained: Callable[[str], bool] | None = None


class _Functions:
    """A part as pure functions of a tree of arrays."""

    def __init__(self, name: str, part: Part):
        self._name, self._part = name, part
        self._graph: Any = None
        if not isinstance(part, nn.Module):
            module = nnx.eval_shape(lambda: part(nnx.Rngs(0)))
            self._graph, _, rest = nnx.split(module, nnx.Param, ...)
            self._refuse_state("/".join(map(str, path)) for path, _ in nnx.to_flat_state(rest))

    def _refuse_state(self, found: Any) -> None:
        if names := sorted(found):
            raise BadInput(f"model: {self._name} has state beside its parameters ({', '.join(names)}), expected none")

    def init(self, key: jax.Array, *inputs: Any) -> Any:
        part = self._part
        if isinstance(part, nn.Module):
            variables = part.init(key, *inputs)
            self._refuse_state(set(variables) - {"params"})
            return variables.get("params", {})
        return _with_keys(str, nnx.to_pure_dict(nnx.state(part(nnx.Rngs(key)), nnx.Param)))

    def apply(self, params: Any, *inputs: Any) -> Any:
        if isinstance(self._part, nn.Module):
            return self._part.apply({"params": params}, *inputs)
        variables = jax.tree.map(nnx.Param, _with_keys(lambda key: int(key) if key.isdigit() else key, params))
        return nnx.merge(self._graph, nnx.State(variables))(*inputs)


def _with_keys(changed: Callable[[Any], Any], tree: Any) -> Any:
    """The keys of lists in nnx are numbers; those of entries are text."""
    return {changed(key): _with_keys(changed, item) for key, item in tree.items()} if isinstance(tree, dict) else tree


class _Built:
    """What the function built, and an example of the input of each part."""

    def __init__(self, options: OwnModel):
        parts = _build(options)
        blocks = list(parts.blocks)
        if options.n_equal_layers:
            blocks = blocks[:1] * options.n_equal_layers
        self.parts, self.n_layers = parts, len(blocks)
        named = {EMBED: parts.embed} | {block_name(i): block for i, block in enumerate(blocks)} | {HEAD: parts.head}
        self.functions: dict[str, _Functions] = {}
        self.inputs: dict[str, tuple[Any, ...]] = {}
        y: Any = jax.ShapeDtypeStruct((1, EXAMPLE_TOKENS), jnp.int32)
        trees: Any = None
        with _promotion():
            for name, part in named.items():
                with _refused(f"model: {name} fails"):
                    functions = self.functions[name] = _Functions(name, part)
                    inputs = self.inputs[name] = (y, *self._table(trees)) if name == HEAD else (y,)
                    params = jax.eval_shape(functions.init, jax.random.key(0), *inputs)
                    trees = params if name == EMBED else trees
                    y = jax.eval_shape(functions.apply, params, *inputs)
                if not isinstance(y, jax.ShapeDtypeStruct):
                    raise BadInput(f"model: {name} returns {type(y).__name__}, expected one array")

    def _table(self, embedding: Any) -> tuple[Any, ...]:
        """The leaf of the embedding that the head reads too."""
        if not self.parts.tied:
            return ()
        leaf = embedding
        for key in self.parts.tied.split("/"):
            if not isinstance(leaf, dict) or key not in leaf:
                raise BadInput(
                    f"model: Parts.tied is {self.parts.tied!r}, expected the path of a leaf of the embedding"
                )
            leaf = leaf[key]
        return (leaf,)

    def init(self, name: str, key: jax.Array) -> Any:
        number = list(self.functions).index(name)
        examples = [jnp.zeros(x.shape, x.dtype) for x in self.inputs[name]]
        with _promotion():
            return self.functions[name].init(jax.random.fold_in(key, number), *examples)

    def apply(self, name: str, params: Params, x: Any, dtype: jnp.dtype) -> Any:
        """Parameters are rounded to the dtype of activations."""
        trees = jax.tree.map(lambda leaf: leaf.astype(dtype), {key: params[key] for key in self.reads(name)})
        table = self._table(trees[EMBED]) if name == HEAD and self.parts.tied else ()
        with _promotion():
            return self.functions[name].apply(trees[name], x, *table)

    def reads(self, name: str) -> tuple[str, ...]:
        return (HEAD, EMBED) if name == HEAD and self.parts.tied else (name,)


@contextlib.contextmanager
def _refused(what: str) -> Iterator[None]:
    """An error of somebody's code becomes one line."""
    try:
        yield
    except BadInput:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        raise BadInput(f"{what} with {type(error).__name__}: {text:.300}") from error


@contextlib.contextmanager
def _promotion():
    """As in plain jax, whatever this process asks of its own code."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def _build(options: OwnModel) -> Parts:
    """What the function returns."""
    name, _, function = options.family.partition(":")
    given = json.loads(options.options) | {"max_len": options.max_len, "vocab_size": options.vocab_size}
    with _refused(f"model.family: {options.family} failed here"):
        parts = getattr(_module(name, options), function)(given)
    if not isinstance(parts, Parts) or not parts.blocks:
        raise BadInput(f"model.family: {options.family} returned {type(parts).__name__}, expected Parts with blocks")
    return parts


SOURCE_DIGEST = "__jaxdt_source_digest__"  # attribute of a module: the digest of the files from which it was imported


def _module(name: str, options: OwnModel) -> Any:
    """The module, imported again if a file of it has changed since."""
    options.check_source()
    files = [os.path.abspath(path) for path in options.source_files]
    if getattr(sys.modules.get(name), SOURCE_DIGEST, None) != options.source:
        for known, module in list(sys.modules.items()):
            if (file := getattr(module, "__file__", None)) and os.path.abspath(file) in files:
                del sys.modules[known]
                package, _, attribute = known.rpartition(".")
                if package in sys.modules:  # where `from package import attribute` looks first
                    vars(sys.modules[package]).pop(attribute, None)
        importlib.invalidate_caches()
    put_current_folder_on_path()
    module = importlib.import_module(name)
    if (file := os.path.abspath(module.__file__ or "")) != files[0]:
        raise BadInput(
            f"model.family: {options.family}: {name} is {file} here, expected {files[0]}; give it another name"
        )
    setattr(module, SOURCE_DIGEST, options.source)
    return module


@functools.cache
def _built(options: OwnModel) -> _Built:
    """BadInput if this process's module makes another model than that of the run."""
    if options.facts == UNKNOWN:
        return _Built(options)
    fresh = replace(options, facts=UNKNOWN)
    if (found := derived(fresh)).structure != options.facts.structure:
        here = {entry.name: entry for entry in found.entries}
        unlike = [entry.name for entry in options.facts.entries if here.get(entry.name) != entry]
        where = f"differs in {', '.join(unlike[:3])} from" if unlike else "computes something else than"
        raise BadInput(
            f"model.family: {options.family} here {where} the run, expected its facts; compare model.options, "
            "model.vocab_size, the source, jax, flax and what else it imports with a host of the run"
        )
    return _built(fresh)


def entries(options: OwnModel) -> Entries:
    """The entries that each part reads. A tied head reads the whole embedding."""
    built = _built(options)
    return Entries((EMBED,), tuple((block_name(i),) for i in range(built.n_layers)), built.reads(HEAD))


def init_entry(options: OwnModel, name: str, key: jax.Array) -> Any:
    """Fresh fp32 parameters of an entry; `key` is the seed's."""
    return _built(options).init(name, key)


def role(entry: str, path: str, shape: tuple[int, ...]) -> str:
    """By the number of axes: biases and scales have one."""
    del path
    if len(shape) < 2:
        return VECTOR
    return TABLE if entry == EMBED else MATRIX


def is_trained(options: OwnModel, entry: str, path: str) -> bool:
    """What Parts.trained says of a leaf; BadInput unless that is a bool. Copies of one block are not the blocks that it
    knows: they are timed with all leaves."""
    if options.n_equal_layers:
        return True
    chosen = _built(options).parts.trained
    found = chosen is None or chosen(f"{entry}/{path}")
    if type(found) is not bool:
        raise BadInput(f"model: Parts.trained says {found!r:.40} of {entry}/{path}, expected true or false")
    return found


def embed(options: OwnModel, dtype: jnp.dtype, params: Params, tokens_BT: Tokens, begins_BT: Begins = None) -> Boundary:
    """tokens [B,T] int32 -> [B,T,W] in `dtype`. BadInput for another shape."""
    assert begins_BT is None, "the config is refused: parts know no documents"
    x = _built(options).apply(EMBED, params, tokens_BT, dtype)
    if x.ndim != 3 or x.shape[:2] != tokens_BT.shape:
        raise BadInput(f"model: the embedding makes {list(x.shape)} of {list(tokens_BT.shape)}, expected [B, T, W]")
    return x.astype(dtype)


def apply_layer(options: OwnModel, layer: int, params: Params, x: Boundary, begins_BT: Begins = None) -> Boundary:
    """One block. BadInput if the result has another dtype or length."""
    assert begins_BT is None, "the config is refused: parts know no documents"
    y = _built(options).apply(block_name(layer), params, x, x.dtype)
    if y.ndim != 3 or (*y.shape[:2], y.dtype) != (*x.shape[:2], x.dtype):
        raise BadInput(
            f"model: block {layer} makes {y.dtype}{list(y.shape)} of {x.dtype}{list(x.shape)}, expected the same "
            "dtype, samples and tokens"
        )
    return y


def apply_head(options: OwnModel, params: Params, x: Boundary) -> Logits:
    """Logits [B,T,V] in fp32."""
    built = _built(options)
    logits = built.apply(HEAD, params, x, x.dtype)
    wanted = (*x.shape[:2], built.parts.vocab_size)
    if logits.shape != wanted:
        raise BadInput(f"model: the head makes {list(logits.shape)}, expected {list(wanted)}, by Parts.vocab_size")
    return logits.astype(jnp.float32)


MODEL = Model(
    entries=entries,
    init=init_entry,
    role=role,
    embed=embed,
    layer=apply_layer,
    head=apply_head,
    trained=is_trained,
)
