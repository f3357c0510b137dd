"""The JSON Schemas: current, met by every committed file and by everything that is written, and no laxer than the
readers where those refuse."""

import json
import re
from pathlib import Path

import pytest

from jaxdt.run import network as networks
from jaxdt.run import plan as plans
from jaxdt.run import profile as profiles
from jaxdt.run.config import PlanConfig, RunConfig, default_plan
from jaxdt.run.errors import BadInput
from jaxdt.run.families.gpt import GPTConfig
from jaxdt.run.profile import from_flops
from planner.model.file_schemas import DIALECT, schemas

ROOT = Path(__file__).resolve().parents[2]
KEYWORDS = {"$schema", "$id", "$ref", "$defs", "title", "description", "type", "properties", "required", "const"} | {
    *("additionalProperties", "items", "prefixItems", "minItems", "maxItems", "anyOf", "minimum", "minLength")
}
TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "null": type(None)}


def problems(data, schema, root, where="") -> list[str]:
    """Where data does not meet a schema: the keywords of JSON Schema that ours use, and no others."""
    assert set(schema) <= KEYWORDS, set(schema) - KEYWORDS
    if "$ref" in schema:
        return problems(data, root["$defs"][schema["$ref"].rpartition("/")[2]], root, where)
    if "anyOf" in schema:
        found = [problems(data, option, root, where) for option in schema["anyOf"]]
        return [] if [] in found else [text for texts in found for text in texts]
    if "const" in schema and data != schema["const"]:
        return [f"{where}: {data!r} is not {schema['const']!r}"]
    if not has_type(data, schema.get("type")):
        return [f"{where}: {data!r:.40} is no {schema['type']}"]
    found = []
    if isinstance(data, dict):
        found += [f"{where}: {name} is missing" for name in schema.get("required", ()) if name not in data]
        for name, item in data.items():
            of_name = schema.get("properties", {}).get(name, schema.get("additionalProperties", True))
            if of_name is False:
                found.append(f"{where}.{name}: not known")
            elif of_name is not True:
                found += problems(item, of_name, root, f"{where}.{name}")
    if isinstance(data, list):
        if not schema.get("minItems", 0) <= len(data) <= schema.get("maxItems", len(data)):
            found.append(f"{where}: {len(data)} items")
        kinds = schema.get("prefixItems") or [schema.get("items", {})] * len(data)
        for i, (item, kind) in enumerate(zip(data, kinds, strict=False)):
            found += problems(item, kind, root, f"{where}[{i}]")
    if isinstance(data, str) and len(data) < schema.get("minLength", 0):
        found.append(f"{where}: too short")
    if not isinstance(data, bool) and isinstance(data, int | float) and data < schema.get("minimum", data):
        found.append(f"{where}: too small")
    return found


def has_type(data, name) -> bool:
    if name is None:
        return True
    if name == "number":
        return isinstance(data, int | float) and not isinstance(data, bool)
    return isinstance(data, TYPES[name]) and (name == "boolean" or not isinstance(data, bool))


def kind_of(path: Path) -> str | None:
    """The kind of a committed JSON file, one of three; None for others."""
    data = json.loads(path.read_text())
    if not isinstance(data, dict):
        return None
    kinds = {"network": "bandwidth_gbps" in data and "devices" in data, "plan": data.get("format") == plans.FORMAT}
    kinds["profile"] = data.get("format") == profiles.FORMAT
    return next((name for name, holds in kinds.items() if holds), None)


def committed() -> list[Path]:
    folders = [ROOT / "configs", ROOT / "docs", ROOT / "tests"]
    return [path for folder in folders for path in sorted(folder.rglob("*.json")) if kind_of(path)]


def check(data, kind) -> list[str]:
    schema = schemas()[f"{kind}.schema.json"]
    return problems(json.loads(json.dumps(data)), schema, schema)


@pytest.mark.parametrize("name", schemas())
def test_the_committed_schemas_are_current(name):
    text = (ROOT / "docs" / "reference" / "schemas" / name).read_text()
    assert json.loads(text) == schemas()[name], "python docs/generate.py writes them"
    assert json.loads(text)["$schema"] == DIALECT


def test_every_committed_file_meets_its_schema():
    assert len(committed()) > 15
    for path in committed():
        assert check(json.loads(path.read_text()), kind_of(path)) == [], path


MODEL = GPTConfig.of("small")
WRITTEN = {
    "network": (networks.to_json(networks.uniform(3, 0.01, 1.0)), networks),
    "profile": (profiles.to_json(from_flops(MODEL, 2, {"a": 1e12, "b": 2e12}, 0.5)), profiles),
    "plan": (plans.to_json(default_plan(RunConfig(MODEL, PlanConfig(2, 2, microbatches=4)))), plans),
}


@pytest.mark.parametrize("kind", WRITTEN)
def test_what_is_written_names_its_schema_and_meets_it(kind):
    data, module = WRITTEN[kind]
    assert check(data, kind) == []
    assert data["$schema"] == schemas()[f"{kind}.schema.json"]["$id"] == module.SCHEMA
    assert re.fullmatch(r"urn:[a-z0-9][a-z0-9-]+:[a-z:0-9]+", data["$schema"])
    read = module.parse(json.dumps(data), "file")
    assert module.parse(json.dumps(module.to_json(read)), "file") == read


WRONG = {
    "network": [
        ("unknown", 1),
        ("devices", [{"name": "a", "memory_gb": 1}]),
        ("devices", []),
        ("devices", [{"region": "x"}]),
        ("latency_ms", 3),
        ("bandwidth_gbps", [["fast"]]),
    ],
    "profile": [("kinds", 3), ("microbatch_size", "2"), ("unknown", 1), ("format", "jaxdt-plan-1")],
    "plan": [
        ("stages", [[0, 1, 2]]),
        ("placement", [["a"]]),
        ("unknown", 1),
        ("proved", 1),
        ("cost", 3),
        ("shares", [2.5]),
    ],
}


@pytest.mark.parametrize(("kind", "name", "value"), [(k, *pair) for k, pairs in WRONG.items() for pair in pairs])
def test_schemas_refuse_what_readers_refuse(kind, name, value):
    data, module = WRITTEN[kind]
    assert check({**data, name: value}, kind)
    with pytest.raises(BadInput):
        module.parse(json.dumps({**data, name: value}), "file")
