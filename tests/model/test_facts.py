"""Facts that are read off a family's functions, against the sizes of a GPT by hand."""

import functools
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpt_formulae as by_hand
import llama_reference
import moe_reference
import pytest
from gpt_reference import CONFIGS

from jaxdt.model import derive, facts_process
from jaxdt.run import serialize
from jaxdt.run.errors import BadInput
from jaxdt.run.families.gpt import PRESETS, GPTConfig
from jaxdt.run.families.llama import LlamaConfig
from jaxdt.run.families.moe import MoeConfig
from jaxdt.run.model import FAMILIES, options_class
from jaxdt.run.model_facts import MATRIX, TABLE, VECTOR, ModelFacts
from jaxdt.run.model_spec import ModelSpec

facts = functools.cache(derive.facts)  # a derivation takes half a second
MODELS = {name: GPTConfig.of(name) for name in PRESETS} | CONFIGS
PLAIN = [name for name, model in MODELS.items() if not model.compression_after]


def ranges(found: ModelFacts):
    return itertools.combinations(found.cuts, 2)


@pytest.mark.parametrize("name", MODELS)
def test_sizes_of_each_cut_equal_those_by_hand(name):
    model = MODELS[name]
    found = facts(model)
    assert (found.n_layers, found.in_width) == (model.n_layers, model.d_model)
    assert (found.vocab_size, found.max_len) == (model.vocab_size, model.max_len)
    assert found.cuts == (*range(0, model.n_layers, model.layers_per_block), model.n_layers)
    for lo, hi in ranges(found):
        assert found.stage_params(lo, hi) == found.stage_trained(lo, hi) == by_hand.stage_params(model, lo, hi)
        assert found.boundary_width(lo) == by_hand.boundary_width(model, lo)
        assert found.n_runs(lo, hi) == len(by_hand.blocks_in(model, lo, hi))
        is_tied = model.tied_head and (lo == 0) != (hi == model.n_layers)
        assert [entry.name for entry in found.shared(lo, hi)] == (["tok"] if is_tied else [])


@pytest.mark.parametrize("name", PLAIN)
def test_costs_of_each_cut_equal_those_by_hand(name):
    model = MODELS[name]
    found = facts(model)
    for lo, hi in ranges(found):
        assert found.flops(lo, hi, model.max_len) == by_hand.flops(model, lo, hi, model.max_len)
        assert found.saved(lo, hi) == by_hand.saved(model, lo, hi)
        assert found.working(lo, hi, model.max_len) == pytest.approx(by_hand.working(model, lo, hi), rel=1e-12)


LLAMAS = {
    **{name: (llama_reference, model) for name, model in llama_reference.CONFIGS.items()},
    **{f"llama {name}": (llama_reference, LlamaConfig.of(name)) for name in LlamaConfig.presets},
    **{name: (moe_reference, model) for name, model in moe_reference.CONFIGS.items()},
    **{f"moe {name}": (moe_reference, MoeConfig.of(name)) for name in MoeConfig.presets},
}
PUBLISHED = {
    "llama smollm2_135m": 134_515_008,
    "llama llama2_7b": 6_738_415_616,
    "llama llama3_8b": 8_030_261_248,
    "llama qwen2_0p5b": 494_032_768,
    "llama qwen3_0p6b": 596_049_920,
    "llama mistral_7b": 7_241_732_096,
    "moe mixtral_8x7b": 46_702_792_704,
    "moe qwen3_30b_a3b": 30_532_122_624,
}


@pytest.mark.parametrize("name", LLAMAS)
def test_sizes_and_costs_of_a_llama_equal_those_by_hand(name):
    """A table of keys and values that heads share is small; each head of queries has its own scores all the same. All
    experts take memory, and those to which a token is sent take time."""
    by_hand, model = LLAMAS[name]
    found, n, t = facts(model), model.n_layers, model.max_len
    table, block = model.vocab_size * model.d_model, by_hand.block_params(model)
    used = by_hand.used_params(model)
    assert (found.n_layers, found.in_width, found.cuts) == (n, model.d_model, tuple(range(n + 1)))
    assert (found.vocab_size, found.max_len) == (model.vocab_size, t)
    for lo, hi in ranges(found) if n < 4 else ((0, 1), (1, n), (0, n)):
        n_tables = (lo == 0) + (hi == n) - (model.tied_head and hi - lo == n)
        assert found.stage_params(lo, hi) == (hi - lo) * block + n_tables * table + (hi == n) * model.d_model
        of_head = 2 * table * (hi == n)
        assert found.flops(lo, hi, t) == t * ((hi - lo) * by_hand.layer_flops(model, t) + of_head)
        assert found.n_used_params(lo, hi) == (hi - lo) * used + table * (hi == n)
        # The results of experts are read by the gradient of their weights.
        n_unread = 0 if by_hand is moe_reference else model.d_model
        assert found.saved(lo, hi) == (hi - lo) * by_hand.saved(model) - n_unread
        working = (hi - lo) * (2 * by_hand.saved(model) + 4 / 3 * model.n_heads * t)
        assert found.working(lo, hi, t) == pytest.approx(working, rel=1e-12)
        assert [entry.name for entry in found.shared(lo, hi)] == ["tok"] * (
            model.tied_head and hi - lo < n and n_tables
        )
    assert found.alike() == {0: (n, n)}
    assert {layer.n_experts for layer in found.layers} == {getattr(model, "n_experts", 0)}
    assert name not in PUBLISHED or found.n_params == PUBLISHED[name]


@pytest.mark.parametrize("name", CONFIGS)
def test_fragments_have_the_numbers_counted_by_hand(name):
    model = MODELS[name]
    found = facts(model)
    for (lo, hi), n in itertools.product(ranges(found), (1, 2, 3)):
        sizes = [sum(entry.n_params for entry in entries) for entries in found.fragments(lo, hi, n)]
        assert sizes == [by_hand.fragment_params(model, lo, hi, fragment, n) for fragment in range(n)]
        assert sum(sizes) == found.owned_trained(lo, hi)


def test_layers_alike_are_those_of_equal_shapes():
    assert [layer.like for layer in facts(CONFIGS["plain"]).layers] == [0, 0, 0]
    assert [layer.like for layer in facts(CONFIGS["shared"]).layers] == [0, 0, 0, 0]
    assert [layer.like for layer in facts(CONFIGS["bottleneck"]).layers] == [0, 1, 2]  # sender, both halves, receiver
    assert facts(CONFIGS["bottleneck"]).alike(0, 2) == {0: (1, 1), 1: (1, 1)}
    assert facts(CONFIGS["shared"]).alike() == {0: (4, 2)}


def test_roles():
    """Matrices and tables decay; biases and scales do not."""
    found = facts(CONFIGS["bottleneck"])
    roles = {f"{entry.name}/{leaf.path}": leaf.role for entry in found.entries for leaf in entry.leaves}
    assert roles["tok/"] == roles["pos/"] == TABLE
    assert roles["head/out"] == roles["block_000/qkv/kernel"] == roles["sender_001/compress/kernel"] == MATRIX
    assert roles["block_002/qkv/bias"] == roles["head/ln/scale"] == VECTOR
    (block,) = (entry for entry in facts(moe_reference.CONFIGS["mixtral"]).entries if entry.name == "block_000")
    assert {leaf.role for leaf in block.leaves if leaf.path in ("router", "gate", "up", "down")} == {MATRIX}


def test_a_cut_through_a_shared_block_is_refused():
    found = facts(CONFIGS["shared"])
    found.check_range(0, 2)
    with pytest.raises(BadInput, match="got a cut at 1, which splits a shared block; expected one of 0, 2, 4"):
        found.check_range(0, 1)
    with pytest.raises(BadInput, match="got 2..5, expected 0 <= lo < hi <= n_layers 4"):
        found.check_range(2, 5)


def test_a_process_without_jax_asks_a_child_once(tmp_path):
    """Facts as text, too, are what they were. Two processes that meet the models at once both keep them; the third one
    finds them on the disk, and starts no child. What stands in the current folder is not what they ask."""
    code = (
        "import json, sys; from jaxdt.run.families.gpt import GPTConfig; from jaxdt.run import serialize\n"
        "models = [GPTConfig.of('debug'), GPTConfig.of('debug', tied_head=True)]\n"
        "found = [serialize.write(model.facts) for model in models]\n"
        "assert 'jax' not in sys.modules; print(json.dumps(found))"
    )
    root = str(facts_process.PACKAGE.parent)
    (tmp_path / "jaxdt").mkdir()
    (tmp_path / "jaxdt/__init__.py").write_text("raise ImportError('of another tree')")

    def start(before: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", before + code],
            stdout=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": root},
        )

    answers = [process.communicate()[0] for process in [start(""), start("")]]
    answers.append(start("from jaxdt.model import facts_process; facts_process._child = None\n").communicate()[0])
    expected = [facts(GPTConfig.of("debug")), facts(GPTConfig.of("debug", tied_head=True))]
    for answer in answers:
        assert [serialize.read(ModelFacts, data, "facts") for data in json.loads(answer)] == expected
    assert sorted(path.suffix for path in (tmp_path / "cache/jaxdt/facts").iterdir()) == [".json", ".json"]


class Child:
    """In the place of a process with jax."""

    def __init__(self) -> None:
        self.n_asked = 0

    def ask(self, model: ModelSpec) -> Any:
        self.n_asked += 1
        return serialize.write(facts(model))


@pytest.fixture
def child(monkeypatch, tmp_path) -> Child:
    child = Child()
    monkeypatch.setattr(facts_process, "_child", lambda pid: child)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return child


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda text: b"",
    "cut": lambda text: text[: len(text) // 2],
    "a number": lambda text: text.replace(b"256", b"255", 1),
    "no text": lambda text: b"\xff" + text,
    "no facts": lambda text: b"[]",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_written_anew(child, tmp_path, damage):
    model = GPTConfig.of("debug")
    for _ in range(2):
        assert facts_process.facts(model) == facts(model)
    assert child.n_asked == 1
    (path,) = tmp_path.rglob("*.json")
    whole = path.read_bytes()
    path.write_bytes(DAMAGES[damage](whole))
    assert path.read_bytes() != whole
    for _ in range(2):
        assert facts_process.facts(model) == facts(model)
    assert child.n_asked == 2 and path.read_bytes() == whole


def test_without_a_folder_that_can_be_written_each_process_asks(child, monkeypatch, tmp_path):
    """A file stands where the folder would be; the file's own place is taken; there is no home."""
    model = GPTConfig.of("debug")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert facts_process.facts(model) == facts(model)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "taken"))
    path = facts_process._path(model)
    assert path
    (path / "taken").mkdir(parents=True)
    assert facts_process.facts(model) == facts(model)
    assert list(path.parent.iterdir()) == [path]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert facts_process.facts(model) == facts(model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "taken"]
    assert child.n_asked == 3


def test_facts_of_other_sources_are_not_found(child, monkeypatch, tmp_path):
    """A change of a byte of what a derivation imports gives another file."""
    package, model = tmp_path / "package", GPTConfig.of("debug")
    for folder in facts_process.SOURCES:
        shutil.copytree(facts_process.PACKAGE / folder, package / folder)
    monkeypatch.setattr(facts_process, "PACKAGE", package)
    monkeypatch.setattr(facts_process, "sources", facts_process.sources.__wrapped__)  # of a process for each
    paths = set()
    for changed in (None, "model/families/gpt.py", "run/model.py"):
        if changed:
            (package / changed).write_text((package / changed).read_text() + "\n")
        facts_process.facts(model)
        paths.add(facts_process._path(model))
    assert len(paths) == child.n_asked == 3


def test_a_derivation_imports_only_what_its_digest_covers():
    code = "import sys, jaxdt.model.derive, jaxdt.model.families.gpt; print(*sys.modules)"
    names = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    folders = {name.split(".")[1] for name in names if name.startswith("jaxdt.")}
    assert folders == set(facts_process.SOURCES)


def test_a_child_that_fails_or_has_other_sources_says_why(monkeypatch):
    monkeypatch.setattr(facts_process, "sources", lambda: "others")
    with pytest.raises(BadInput, match=r"^model: its facts were derived from other sources than those in "):
        facts_process._Child().ask(GPTConfig.of("debug"))
    monkeypatch.setattr(facts_process, "DERIVATION", "jaxdt.model.no_such_module")
    with pytest.raises(BadInput, match=r"^model: its facts could not be derived \(.*No module named jaxdt"):
        facts_process._Child().ask(GPTConfig.of("debug"))


def test_no_file_but_those_of_the_table_names_a_family():
    """A new family is a file of functions, one of its options, and its name in the table. jaxdt/interop knows the files
    of other projects, which name families too; in conversations of ShareGPT a speaker has the name of one."""
    root = Path(facts_process.__file__).parents[2]
    words = {word for name in FAMILIES for word in (name, options_class(name).__name__)}
    names = re.compile(rf"\b({'|'.join(words)})\b")
    sources = {path for folder in ("jaxdt", "planner") for path in (root / folder).rglob("*.py")}
    outside = {
        path for path in sources if path.parent.name not in ("families", "interop") and names.search(path.read_text())
    }
    assert {str(path.relative_to(root)) for path in outside} == {"jaxdt/run/model.py", "jaxdt/model/documents.py"}
    for folder in ("jaxdt/run/families", "jaxdt/model/families"):
        assert {path.stem for path in (root / folder).glob("*.py")} == {"__init__", *FAMILIES}
