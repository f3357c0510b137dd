"""JSON Schemas (draft 2020-12) of the files network.json, profile.json and plan.json, from their dataclasses.

`python docs/generate.py` writes them to docs/reference/schemas. A file that we write names its schema in `$schema`, by
a URN, since a file is read far from this repository; readers take files without it too.
"""

import dataclasses
import types
import typing
from typing import Any

from jaxdt.run import network, plan, profile
from jaxdt.run.model import option_classes
from jaxdt.run.model_spec import ModelSpec

DIALECT = "https://json-schema.org/draft/2020-12/schema"
SCALARS: dict[Any, str] = {int: "integer", float: "number", str: "string", bool: "boolean", types.NoneType: "null"}
Schema = dict[str, Any]


def schemas() -> dict[str, Schema]:
    """File name -> schema."""
    return {
        "network.schema.json": network_schema(),
        "plan.schema.json": plan_schema(),
        "profile.schema.json": profile_schema(),
    }


def plan_schema() -> Schema:
    """The schema of plan.json: the plan's own fields and, beside them, those of its solver."""
    body = _Definitions().file(plan.Plan, plan.SCHEMA, plan.FORMAT)
    solver = _Definitions().file(plan.SolverResult, "", "")
    body["properties"] |= solver["properties"] | {"microbatches": {"type": "integer", "minimum": 1}}
    body["$defs"] = body.get("$defs", {}) | solver.get("$defs", {})
    # Older plans may have null here, which reads as no codec.
    body["properties"]["codec"] = {"anyOf": [body["properties"]["codec"], {"type": "null"}]}
    return body


def profile_schema() -> Schema:
    """The schema of profile.json."""
    return _Definitions().file(profile.Profile, profile.SCHEMA, profile.FORMAT)


def network_schema() -> Schema:
    """The schema of network.json. The file has latencies in milliseconds, and may have notes about its origin."""
    body = _Definitions().file(network.Network, network.SCHEMA, "")
    properties = body["properties"]
    properties["latency_ms"] = properties.pop("latency_s")
    body["required"] = ["devices", "latency_ms", "bandwidth_gbps"]
    properties |= dict.fromkeys(network.NOTES, {})
    device = body["$defs"]["Device"]
    device["properties"]["name"]["minLength"] = 1
    properties["devices"]["minItems"] = 1
    return body


class _Definitions:
    """Schemas of types; those of dataclasses below the top stand in `$defs`."""

    def __init__(self):
        self.definitions: dict[str, Schema] = {}

    def file(self, kind: type[Any], urn: str, file_format: str) -> Schema:
        """The schema of a file that holds one value of the dataclass `kind` at its top."""
        body = self._object(kind)
        properties = {"$schema": {"type": "string"}}
        if file_format:
            properties["format"] = {"const": file_format}  # pyright: ignore[reportArgumentType]
            body["required"] = ["format", *body["required"]]
        body["properties"] = properties | body["properties"]
        head = {"$schema": DIALECT, "$id": urn, "title": kind.__name__}
        return head | body | ({"$defs": self.definitions} if self.definitions else {})

    def _object(self, kind: type[Any]) -> Schema:
        kinds = typing.get_type_hints(kind)
        missing = dataclasses.MISSING
        required: list[str] = []
        properties: dict[str, Schema] = {}
        for field in dataclasses.fields(kind):
            is_constant = not field.init  # such as the name of a family
            if is_constant or (field.default is missing and field.default_factory is missing):
                required.append(field.name)
            properties[field.name] = {"const": field.default} if is_constant else self.of(kinds[field.name])
        return {
            "type": "object",
            "description": " ".join((kind.__doc__ or "").split()),
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }

    def of(self, kind: Any) -> Schema:
        """The schema of a type."""
        origin = typing.get_origin(kind)
        arguments = typing.get_args(kind)
        if dataclasses.is_dataclass(kind):
            name = typing.cast(type[Any], kind).__name__
            if name not in self.definitions:
                self.definitions[name] = {}  # a type inside itself finds its name
                self.definitions[name] = self._object(typing.cast(type[Any], kind))
            return {"$ref": f"#/$defs/{name}"}
        if kind is ModelSpec:
            return {"anyOf": [self.of(options) for options in option_classes().values()]}
        if origin in (types.UnionType, typing.Union):
            return {"anyOf": [self.of(argument) for argument in arguments]}
        if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
            return {"type": "array", "items": self.of(arguments[0])}
        if origin is tuple:
            items = [self.of(argument) for argument in arguments]
            return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
        if origin is dict:
            return {"type": "object", "additionalProperties": self.of(arguments[1])}
        return {} if kind is Any else {"type": SCALARS[kind]}
