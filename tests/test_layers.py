"""The import rule and the cheap half of the style, read off the source with ast."""

import ast
import functools
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("sources")  # one process reads each file once

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"
# Declared in pyproject.toml, from the top down: a package may import those below it; packages of one line may not
# import each other. A package of a later table is a part of an earlier one, with an order of its own.
ORDER = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["jaxdt"]["import_order"]
TABLES = [{name: -i for i, line in enumerate(table) for name in line} for table in ORDER.values()]
LEVELS = {name: level for table in TABLES for name, level in table.items()}
BESIDE = {"jaxdt.config_file": {"jaxdt.run", "ml_collections"}}  # top-level modules beside the layers
STANDARD_LIBRARY_ONLY = (
    "jaxdt.run",
    "jaxdt.protocol",
    "jaxdt.membership",
    "jaxdt.wiring",
    "jaxdt.sync",
    "jaxdt.sim",
    "jaxdt.build",
    "jaxdt.testing",
)
WITHOUT_JAX = (*STANDARD_LIBRARY_ONLY, "planner")
ARRAYS = {"jax", "jaxlib", "flax", "optax", "orbax"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources() -> dict[str, Path]:
    folders = ("jaxdt", "planner", "scripts")
    return {module_name(path): path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))}


SOURCES = sources()


@dataclass(frozen=True)
class Source:
    """The facts about a module that the tests ask for. All of them go by one reading of its text.

    functions: name, number of positional parameters without self, lines.
    reads[name]: the attributes of the name that the text mentions, such as those of a module."""

    docstring: str | None
    imports: list[ast.Import]
    imports_from: list[ast.ImportFrom]
    functions: list[tuple[str, int, int]]
    reads: Mapping[str, set[str]]


@functools.cache
def source_of(module: str) -> Source:
    tree = ast.parse(SOURCES[module].read_text())
    source = Source(ast.get_docstring(tree), [], [], [], defaultdict(set))
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                source.imports.append(node)
            case ast.ImportFrom():
                source.imports_from.append(node)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                n_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                source.functions.append((node.name, n_positional(node.args), n_lines))
            case ast.Attribute(value=ast.Name(id=name), attr=attribute):
                source.reads[name].add(attribute)
    return source


def n_positional(arguments: ast.arguments) -> int:
    names = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


@functools.cache
def imports_of(module: str) -> set[str]:
    """Full names of what a module imports anywhere in its text; `from package import module` gives the module."""
    found = {alias.name for node in source_of(module).imports for alias in node.names}
    for node in source_of(module).imports_from:
        assert node.level == 0, f"{module}: relative import"
        whole = {f"{node.module}.{alias.name}" for alias in node.names}
        found |= {name if name in SOURCES else node.module for name in whole}
    return found


def package_of(module: str, levels=TABLES[0]) -> str:
    """The layer that a module belongs to, the innermost where one is in another; '' for others' modules."""
    found = [name for name in levels if module == name or module.startswith(name + ".")]
    return max(found, key=len, default="")


def is_ours(module: str) -> bool:
    return module.split(".")[0] in ("jaxdt", "planner", "scripts")


def in_packages(packages) -> list[str]:
    return [module for module in SOURCES if package_of(module) in packages]


def reachable(module: str) -> set[str]:
    """Everything of other projects that a module's import brings in through ours."""
    seen, found, queue = set(), set(), [module]
    while queue:
        module = queue.pop()
        for name in imports_of(module) if module in SOURCES else ():
            if name not in seen:
                seen.add(name)
                queue.append(name)
                if not is_ours(name):
                    found.add(name)
    return found


def test_every_module_has_a_place():
    strays = [m for m in SOURCES if not package_of(m) and m not in BESIDE and m != "jaxdt"]
    assert not strays, "a new top-level package needs a place in pyproject.toml"


@pytest.mark.parametrize("levels", TABLES, ids=list(ORDER))
def test_imports_only_go_down(levels):
    """`A imports B` for each that goes sideways or up."""
    wrong = []
    for module in SOURCES:
        own = package_of(module, levels)
        for name in filter(is_ours, imports_of(module) if own else ()):
            other = package_of(name, levels)
            if name in BESIDE and own not in ("scripts", "jaxdt.cli"):
                wrong.append(f"{module} imports {name}, which is for scripts and configs")
            elif other and other != own and not levels[other] < levels[own]:
                wrong.append(f"{module} imports {name}")
    assert not wrong, "\n".join(wrong)


def tops(names) -> set[str]:
    return {name.split(".")[0] for name in names}


def test_machines_use_the_standard_library_only():
    others = {m: tops(n for n in imports_of(m) if not is_ours(n)) for m in in_packages(STANDARD_LIBRARY_ONLY)}
    assert not {m: found for m, names in others.items() if (found := names - set(sys.stdlib_module_names))}


def test_no_jax_below_the_runtime():
    assert not {m: found for m in in_packages(WITHOUT_JAX) if (found := tops(reachable(m)) & ARRAYS)}


@pytest.mark.parametrize("module", BESIDE)
def test_modules_beside_the_layers(module):
    allowed = BESIDE[module]
    for name in imports_of(module):
        top = name.split(".")[0]
        known = package_of(name) in allowed or top in allowed or top in sys.stdlib_module_names
        assert known, f"{module} imports {name}"


@pytest.mark.parametrize(
    "module",
    ["jaxdt.sim.predict", "jaxdt.config_file", "jaxdt.runtime.coordinator_process", "jaxdt.runtime.fleet", "launch"],
)
def test_importing_it_leaves_jax_out(module):
    code = f"import sys, {module}; print(sorted(set(sys.modules) & {{'jax', 'jaxlib', 'numpy'}}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT / "scripts", check=True
    )
    assert "jax" not in done.stdout
    if module == "jaxdt.sim.predict":
        assert done.stdout.strip() == "[]"


# ------------------------------------------------------------------------------------------------------------- style


def test_no_star_imports():
    assert not [m for m in SOURCES for node in source_of(m).imports_from if node.names[0].name == "*"]


# Their names import their modules when they are used.
LAZY_INTERFACES = (ROOT / "planner" / "__init__.py", ROOT / "jaxdt" / "__init__.py")


@pytest.mark.parametrize(
    "path", [p for p in SOURCES.values() if p.name == "__init__.py" and p not in LAZY_INTERFACES], ids=str
)
def test_package_files_hold_one_docstring(path):
    body = ast.parse(path.read_text()).body
    assert body and isinstance(body[0], ast.Expr) and isinstance(body[0].value.value, str)
    assert len(body) == 1


PARAMETERS_MAX = 7


def test_functions_take_few_positional_parameters():
    functions = [(m, *function) for m in SOURCES for function in source_of(m).functions]
    assert not [(m, name, n) for m, name, n, _ in functions if n > PARAMETERS_MAX]


def test_every_file_says_what_it_is_for():
    assert not [m for m in SOURCES if not source_of(m).docstring]


FILES, LINES = 19, 60


def test_questions_to_a_person(capsys):
    """No limit: a folder of many files, or a long function, has to be one thing."""
    files = Counter(str(path.parent.relative_to(ROOT)) for path in SOURCES.values())
    large = [f"{folder}: {n} files" for folder, n in files.items() if n > FILES]
    functions = [(m, *function) for m in SOURCES for function in source_of(m).functions]
    large += [f"{m}.{name}: {n} lines" for m, name, _, n in functions if n > LINES]
    with capsys.disabled():
        print("".join(f"\nwhy is it one thing? {line}" for line in large))


def test_the_wall_clock_decides_nothing():
    """It may jump. The dates of certificates, the doctor's look at the clock, and a chat's template, which may ask for
    the date, are all that reads it."""
    readers = {module for module in SOURCES if "datetime" in imports_of(module)}
    assert readers <= {
        "jaxdt.runtime.identity.certificate",
        "jaxdt.runtime.calibrate.doctor",
        "jaxdt.model.chat",
    }
    for module in SOURCES:
        read = source_of(module).reads["time"]
        assert not read & {"time", "time_ns", "gmtime", "localtime"}, f"{module} reads the wall clock"


MACHINES = STANDARD_LIBRARY_ONLY


def test_machines_have_no_clock_socket_thread_or_global_dice():
    banned = {"time", "socket", "threading", "asyncio", "secrets", "uuid", "multiprocessing", "subprocess"}
    modules = in_packages(MACHINES)
    assert not {m: found for m in modules if (found := tops(imports_of(m)) & banned)}
    dice = {m: source_of(m).reads["random"] - {"Random"} for m in modules}
    assert not {m: found for m, found in dice.items() if found}, "chance comes in as a seeded random.Random"
