"""The options of a model, as a family or a model of one's own has them: what a config file may set, and how its facts
(jaxdt.run.model_facts) are found."""

import dataclasses
import functools
import sys
import typing
from abc import ABC, abstractmethod
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Self

from jaxdt.run import serialize
from jaxdt.run.adapter import SYNTAX, adapted, parse
from jaxdt.run.errors import BadInput, nearest
from jaxdt.run.model_facts import ModelFacts
from jaxdt.run.options import Accepts, about, in_range

# Options that several families have.
LAYERS_MAX, WIDTH_MAX, TOKENS_MAX = 10_000, 1_000_000, 1_000_000_000  # no model has as many
N_LAYERS = about("transformer layers", in_range(1, LAYERS_MAX))
D_MODEL = about("width", in_range(1, WIDTH_MAX))
N_HEADS = about("attention heads", in_range(1, WIDTH_MAX))
D_FF = about("width inside the feed-forward part of a layer", in_range(1, WIDTH_MAX))
MAX_LEN = about(
    "most tokens that a sample may have, and positions that are learned; unset: data.seq_len", in_range(1, TOKENS_MAX)
)
VOCAB_SIZE = about("tokens of the vocabulary; unset: that of the token file", in_range(1, TOKENS_MAX))
TIED_HEAD = about("the head uses the table of the embedding")
ADAPTER = about(
    "trained matrices beside the frozen ones of the model; empty: all of the model is trained",
    Accepts(
        "nothing, lora:RANK or lora:RANK:NAME,... with names in the paths of matrices",
        lambda value: isinstance(value, str) and (not value or bool(SYNTAX.fullmatch(value))),
    ),
)


class ModelSpec(ABC):
    """The options of a model: a frozen dataclass of a family, with the fields that a config file may set. Equal options
    have equal facts. `max_len`: the most tokens that a sample may have. `presets`: options by name, one is "debug". A
    family whose options have the field `family` is named in files; the other one is that of files without it."""

    family: str
    presets: ClassVar[dict[str, dict[str, Any]]]
    # (entry, leaf, table): the head's own matrix is this leaf, which models with a tied head lack; they use the
    # transposed table in its place. None for a family without tied heads.
    own_head: ClassVar[tuple[str, str, str] | None] = None
    has_own_sources: ClassVar[bool] = False  # functions outside the package, whose facts no file of caches may keep
    max_len: int
    adapter: str

    @property
    def functions(self) -> str:
        """The module whose MODEL has the functions of the model."""
        return "jaxdt.model.adapter" if self.adapter else self.family_functions

    @property
    def family_functions(self) -> str:
        """The module whose MODEL has the functions of the family."""
        return f"jaxdt.model.families.{self.family}"

    def without_adapter(self) -> Self:
        """The options of the model itself."""
        options: Any = self
        return dataclasses.replace(options, adapter="") if self.adapter else self

    @classmethod
    def of(cls, preset: Any, **overrides: Any) -> Self:
        """The preset with the given fields replaced; a changed d_model moves an unset d_ff in proportion. Values are
        checked here, since they may come straight from a file."""
        if not isinstance(preset, str) or preset not in cls.presets:
            known = ", ".join(cls.presets)
            raise BadInput(f"model.preset: got {preset!r}, expected one of {known}{nearest(str(preset), cls.presets)}")
        kinds = {name: typing.get_type_hints(cls)[name] for name in cls.field_names()}
        for name in overrides:
            if name not in kinds:
                raise BadInput(f"model.{name}: unknown field{nearest(name, kinds)}; known: {', '.join(kinds)}")
        shape = cls.presets[preset]
        values = shape | overrides
        if "d_model" in overrides and "d_ff" not in overrides and isinstance(values["d_model"], int):
            values["d_ff"] = shape["d_ff"] * values["d_model"] // shape["d_model"]
        for name, value in values.items():
            if float in (kinds[name], *typing.get_args(kinds[name])):
                values[name] = serialize.read(kinds[name], value, f"model.{name}")
            elif serialize.is_list(value):
                values[name] = tuple(value)
        return cls(**values)

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """The options that a config file may set."""
        return tuple(field.name for field in dataclasses.fields(cls) if field.init)  # pyright: ignore[reportArgumentType]

    @property
    def depth_field(self) -> str:
        """The field that says how many stages the model can have at most."""
        return "n_layers"

    def with_compression(self, compression: str, after: Any) -> "ModelSpec":
        """The same model with pairs of such layers behind these layers, or with "none". BadInput for a family that has
        no pairs, as this one."""
        del after
        if compression == "none":
            return self
        raise BadInput(f"model.compression: got {compression!r}, expected none: {self.family} has no such layers")

    def with_max_len(self, max_len: int) -> Self:
        """The options of the same model for samples of at most so many tokens."""
        options: Any = self
        return dataclasses.replace(options, max_len=max_len)

    @property
    def source_files(self) -> tuple[Path, ...]:
        """The files outside the package that have the functions."""
        return ()

    def check_source(self, *, resumes: bool = False) -> None:
        """BadInput if functions outside the package are not those of the run whose config has these options, which the
        caller may resume."""
        del resumes

    def untied(self) -> "ModelSpec":
        """The options of the same model with a head of its own. BadInput for a model that has one."""
        raise BadInput("--untie: the head of the model is its own, expected one that is tied to the embedding")

    @abstractmethod
    def with_equal_layers(self, n_layers: int) -> "ModelSpec":
        """The options of a model of so many layers that are alike, each with parameters of its own."""

    @cached_property
    def facts(self) -> ModelFacts:
        return derived(self)


@functools.cache
def derived(model: ModelSpec) -> ModelFacts:
    """The facts that follow from a model's functions."""
    if model.adapter:
        return adapted(model.without_adapter().facts, parse(model.adapter))
    source = "jaxdt.model.derive" if sys.modules.get("jax") else "jaxdt.model.facts_process"
    return import_module(source).facts(model)
