"""The source of each value of a run's config: config file, preset, plan, model of --init_from, resume, flag or default.
Needs no jax.

A field that a config file sets to its default counts as default.
"""

import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxdt.cli.config_fields import prefix_of, sections
from jaxdt.cli.option_flags import as_text
from jaxdt.run import codec as codecs
from jaxdt.run import serialize
from jaxdt.run.config import RunConfig
from jaxdt.run.model_spec import ModelSpec
from jaxdt.run.plan import Plan

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FLAG, RESUME, DEFAULT, INIT = "flag", "resume", "default", "init_from"
DERIVED = ("model.facts.", "model.n_equal_layers")  # not for people to set


@dataclass(frozen=True)
class SourcedValue:
    """A field or flag, its value and where the value comes from."""

    name: str
    value: Any
    source: str


def sourced(
    config: RunConfig,
    plan: Plan,
    fields: Mapping[str, Any],
    *,
    by_flag: Collection[str] = (),
    file_source: str,
    plan_source: str | None = None,
) -> list[SourcedValue]:
    """Every field of the config, in the order of the reference. A field that a plan file decides has its value.

    fields: those of the config file, with the flags applied.
    by_flag: names of the fields that flags gave.
    file_source, plan_source: the names under which to show the config file and the plan file, RESUME for those of a run
        that is resumed; `plan_source` is None without a plan file."""
    values = {name: value for name, value in flat(serialize.write(config)) if not name.startswith(DERIVED)}
    own = dict(flat(fields))
    of_plan = _of_plan(plan) if plan_source else {}
    found: list[SourcedValue] = []
    for name in _in_order(values):
        if config.init.digest and name.startswith(("model.", "init.")):
            found.append(SourcedValue(name, values[name], RESUME if file_source == RESUME else INIT))
        elif plan_source and name in of_plan:
            found.append(SourcedValue(name, of_plan[name], plan_source))
        else:
            source = FLAG if name in by_flag else _source(name, values[name], own, file_source, config.model)
            found.append(SourcedValue(name, values[name], source))
    return found


def sourced_flags(options: "DataclassInstance", resumed: Mapping[str, str]) -> list[SourcedValue]:
    """The flags of the options that are not at their defaults. `resumed`: texts of those that a resumed run keeps."""
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    changed = {name: getattr(options, name) for name in defaults if getattr(options, name) != defaults[name]}
    source = lambda name: RESUME if resumed.get(name) == as_text(changed[name]) else FLAG  # noqa: E731
    return [SourcedValue(f"--{name}", value, source(name)) for name, value in changed.items()]


def table(values: Sequence[SourcedValue]) -> str:
    """One line for each value."""
    shown = [(one.name, json.dumps(one.value), one.source) for one in values]
    widths = [max(len(row[column]) for row in shown) for column in (0, 1)]
    return "\n".join(f"{name:{widths[0]}}  {value:{widths[1]}}  {source}" for name, value, source in shown)


def flat(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The fields of nested objects by their dotted names."""
    for name, value in fields.items():
        if serialize.is_object(value):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _in_order(names: Collection[str]) -> list[str]:
    order = [prefix_of(section) for section in sections()]
    return sorted(names, key=lambda name: order.index(name.rpartition(".")[0]))


def _source(name: str, value: Any, own: Mapping[str, Any], file_source: str, model: ModelSpec) -> str:
    if file_source == RESUME:
        return RESUME
    section, _, field = name.rpartition(".")
    if section == "model":
        return _model_source(field, value, own, file_source, model)
    return DEFAULT if name not in own or value == _default(section, field) else file_source


def _model_source(field: str, value: Any, own: Mapping[str, Any], file_source: str, model: ModelSpec) -> str:
    if field == "vocab_size" and own.get("model.vocab_size") is None:
        return "token file"
    if serialize.write(own.get(f"model.{field}")) == value:
        return file_source
    if field == "source":
        return "files of the module"
    preset = str(own.get("model.preset", "debug"))
    shape = model.presets[preset]
    if field == "family" or serialize.write(shape.get(field)) == value:
        return f"preset {preset}"
    if field.startswith("compression") and codecs.split_compression(own.get("codec", codecs.NONE))[0] != codecs.NONE:
        return "codec"
    return f"{shape['d_ff'] / shape['d_model']:g} model.d_model" if field == "d_ff" else DEFAULT


def _default(section: str, field: str) -> Any:
    default = next(one.default for one in dataclasses.fields(sections()[section]) if one.name == field)
    return serialize.write(default)


def _of_plan(plan: Plan) -> dict[str, Any]:
    """The fields of the config that a plan decides, as a config writes them."""
    fields: dict[str, Any] = {
        "plan.stages": plan.n_stages,
        "plan.pipelines": plan.n_pipelines,
        "plan.layers": ",".join(str(hi - lo) for lo, hi in plan.stages),
        "plan.schedule": plan.schedule,
        "plan.microbatches": plan.n_microbatches,
        "plan.in_flight": ",".join(map(str, plan.in_flight or ())),
    }
    if len(set(plan.codec)) > 1:
        fields["codec"] = " ".join(plan.codec)
    return fields
