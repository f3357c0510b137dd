"""The options of a model of one's own: its functions are in a module outside the package (docs/models.md).

The facts of such a model are a part of its options, and so is a digest of its source. They stand in config.json and in
the fingerprint: processes without jax need no module, and a peer whose module is another one is refused.
"""

import ast
import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeGuard

from jaxdt.run import serialize
from jaxdt.run.errors import BadInput, nearest, shell_line
from jaxdt.run.model_facts import UNKNOWN, ModelFacts
from jaxdt.run.model_spec import ADAPTER, MAX_LEN, VOCAB_SIZE, ModelSpec, derived
from jaxdt.run.options import option, require_accepted

PACKAGE, INIT = "jaxdt", "__init__.py"
LIBRARIES = [Path(os.path.abspath(sysconfig.get_path(name))) for name in ("stdlib", "purelib", "platlib")]
NEEDED = ("max_len", "vocab_size")


def is_own(family: Any) -> TypeGuard[str]:
    """Whether the name of a family is that of a function, as in my_models.tiny:build."""
    return isinstance(family, str) and ":" in family


@dataclass(frozen=True)
class OwnModel(ModelSpec):
    """A model that a function of your own builds. `model.family` names the function, as in my_models.tiny:build.
    `options`: what the function gets, as JSON, beside max_len and vocab_size."""

    family: str
    max_len: int = field(metadata=MAX_LEN)
    vocab_size: int = field(metadata=VOCAB_SIZE)
    options: str = option("{}", "what the function gets beside max_len and vocab_size, as JSON")
    adapter: str = field(default="", metadata=ADAPTER)
    n_equal_layers: int = 0  # 0: the blocks as built; n: n copies of the first, for profiles
    source: str = ""  # the digest of the module's files; "" before it is known
    facts: ModelFacts = field(kw_only=True)  # pyright: ignore[reportIncompatibleVariableOverride]

    presets = {"debug": {}}
    has_own_sources = True

    def __post_init__(self) -> None:
        require_accepted(self, "model.")
        try:
            is_object = serialize.is_object(serialize.parse_json(self.options))
        except (TypeError, ValueError):
            is_object = False
        if not is_object:
            raise BadInput(f"model.options: got {self.options!r}, expected a JSON object as text")

    @property
    def family_functions(self) -> str:
        return "jaxdt.model.own_model"

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        return *NEEDED, "options", "adapter"

    @classmethod
    def of(cls, preset: Any, **overrides: Any) -> Self:
        """A preset has nothing to say here. Source and facts are read off the module unless they are given, as those of
        a run are."""
        known = tuple(cls.__dataclass_fields__)
        if preset != "debug":
            raise BadInput(f"model.preset: got {preset!r}, expected none with a family of your own")
        for name in overrides:
            if name not in known:
                raise BadInput(f"model.{name}: unknown field{nearest(name, known)}; known: {', '.join(known)}")
        for name in NEEDED:
            if name not in overrides:
                expected = "expected data.seq_len or this" if name == "max_len" else "expected a number"
                raise BadInput(f"model.{name}: missing, {expected}, since a family of your own has no default")
        facts = serialize.read(ModelFacts, overrides.pop("facts", serialize.write(UNKNOWN)), "model.facts")
        return cls(**overrides, facts=facts)._known()

    def _known(self) -> Self:
        known = self
        if self.facts == UNKNOWN:
            found = replace(self, source=source_of(self.family).digest)
            known = replace(found, facts=derived(found))
        elif self.facts.max_len != self.max_len:
            raise BadInput(
                f"model.max_len: got {self.max_len} beside facts of {self.facts.max_len}, expected that of the facts; "
                "leave out model.facts to have them read off the module"
            )
        if known.facts.vocab_size < self.vocab_size:
            raise BadInput(
                f"model.vocab_size: {self.family} makes logits of {known.facts.vocab_size} tokens, expected at least "
                f"{self.vocab_size}"
            )
        return known

    def with_max_len(self, max_len: int) -> Self:
        return replace(self, max_len=max_len, facts=UNKNOWN)._known()

    def with_equal_layers(self, n_layers: int) -> Self:
        return replace(self, n_equal_layers=n_layers, facts=UNKNOWN)._known()

    def without_adapter(self) -> Self:
        if not self.adapter:
            return self
        fresh = replace(self, adapter="", facts=UNKNOWN)
        return replace(fresh, facts=derived(fresh))

    def untied(self) -> ModelSpec:
        raise BadInput(
            f"--untie: Parts.tied of {self.family} says whether its head is tied, expected a family of the package; "
            "change it in the module"
        )

    @property
    def source_files(self) -> tuple[Path, ...]:
        return source_of(self.family).files

    def check_source(self, *, resumes: bool = False) -> None:
        here = source_of(self.family)
        if here.digest != self.source:
            or_not = f", or go on with this one: --config.model.source={here.digest}" if resumes else ""
            raise BadInput(
                f"model.family: {self.family} has another source here ({here.digest}) than in the run ({self.source}), "
                f"expected the run's; copy {shell_line(*here.files)} from a host that has it{or_not}"
            )


class Source(NamedTuple):
    """The files of a module, that with the function first, and their digest."""

    files: tuple[Path, ...]
    digest: str


def source_of(family: str) -> Source:
    """The file of a module of one's own, and those of the same folder or below that it imports, directly or not.
    Nothing is imported here. BadInput if there is no such module."""
    module = family.partition(":")[0]
    put_current_folder_on_path()
    found = next((file for base in sys.path if (file := _file_of(Path(base), module))), None)
    if found is None:
        raise BadInput(
            f"model.family: {family}: there is no module {module} here, expected {module.replace('.', '/')}.py in the "
            f"folder in which this process was started ({os.getcwd()}), or in one of PYTHONPATH"
        )
    root = found.parent
    base = found.parents[module.count(".") + (found.name == INIT)]
    names = {found: module}
    unread: list[Path] = []
    if root not in LIBRARIES:
        parents = module.split(".")[:-1]
        packages = {".".join(parents[: i + 1]) for i in range(len(parents))}  # Python runs them too
        names |= {file: name for name in sorted(packages) if (file := _file_of(base, name)) and file.name == INIT}
        unread = list(names)
    while unread:
        path = unread.pop()
        for name in _imported(path, names[path]):
            file = _file_of(base, name) if name.partition(".")[0] != PACKAGE else None
            if file and file not in names and file.is_relative_to(root):
                names[file] = name
                unread.append(file)
    digest = hashlib.sha256()
    for path in sorted(names):
        text = path.read_bytes()
        digest.update(f"{path.relative_to(base).as_posix()} {len(text)}\n".encode() + text)
    return Source(tuple(Path(os.path.relpath(path)) for path in names), digest.hexdigest()[:16])


def put_current_folder_on_path() -> None:
    """The current folder comes last among those in which modules are looked for."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def _file_of(base: Path, module: str) -> Path | None:
    """The file of a module below this folder, if it is there."""
    path = base.joinpath(*module.split("."))
    files = (path / INIT, path.with_name(f"{path.name}.py"))
    return next((Path(os.path.abspath(file)) for file in files if file.is_file()), None)


def _imported(path: Path, module: str) -> Iterator[str]:
    """The names of modules that a file may import; those of other things in modules are among them."""
    package = module.split(".") if path.name == INIT else module.split(".")[:-1]
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return  # whoever imports it says what is wrong
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*parents, *filter(None, [node.module])])
            yield from filter(None, [origin, *(f"{origin}.{alias.name}".lstrip(".") for alias in node.names)])
