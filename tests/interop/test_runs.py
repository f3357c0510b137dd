"""Runs that begin with a model folder: version 0 is that model, whatever the run's cut, length and kind of sync."""

import json
import shutil
import subprocess
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from fleets import ROOT, Launched, trained_in_one_process, write_config
from fork_server import Forked

from jaxdt.api import launch as api
from jaxdt.api.config import load_config
from jaxdt.model.base import model_of
from jaxdt.model.data import write_tokens
from jaxdt.model.float_vector import FloatVector
from jaxdt.protocol import events as ev
from jaxdt.run import config as configs
from jaxdt.run.errors import BadInput
from jaxdt.run.families.gpt import GPTConfig
from jaxdt.run.families.llama import LlamaConfig
from jaxdt.runtime.run_job import RunJob
from jaxdt.runtime.storage.checkpoint import _check_about, about_run
from jaxdt.runtime.storage.entries import load_entries, split_entries, whole_params, write_entries
from jaxdt.runtime.storage.model_folder import ModelWriter, as_leaves, copy_description, open_model
from jaxdt.runtime.storage.store import Store, stage_functions

MODEL = GPTConfig.of("debug", d_model=32, n_heads=2, d_ff=64, max_len=32, tied_head=True)
LLAMA = LlamaConfig.of("debug", qkv_bias=True, tied_head=True)
N_STEPS = 8


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of three models, and of none."""
    root = tmp_path_factory.mktemp("models")
    for name, (options, seed) in {"a": (MODEL, 7), "b": (MODEL, 8), "llama": (LLAMA, 7)}.items():
        writer = ModelWriter(root / name)
        for entry in options.facts.entries:
            tree = jax.tree.map(np.array, model_of(options).init(options, entry.name, jax.random.key(seed)))
            writer.add(entry.name, as_leaves(tree))
        writer.add_origin("tokenizer.json", b"{}")
        writer.finish(options)
    (root / "empty").mkdir()
    return root


@pytest.fixture
def checked(models, tmp_path):
    """(fields, launch options) -> the run, checked as launch.py checks it."""

    def check(fields=(), **options):
        config = load_config(write_config(tmp_path))
        config.update_from_flattened_dict(dict(fields))
        return api.check(config, api.LaunchOptions(**{"init_from": models / "a", **options}))

    return check


SYNCS = {
    "allreduce": {},
    "groups": {"sync.kind": "groups", "sync.groups.outer": "nesterov", "sync.groups.every_steps": 2},
    "one stage": {"plan.stages": 1},
    "llama": {},
}


@pytest.mark.parametrize(
    ("kind", "untie"), [("allreduce", False), ("groups", True), ("one stage", False), ("llama", True)]
)
def test_version_0_is_the_model(checked, models, tmp_path, kind, untie):
    folder = models / ("llama" if kind == "llama" else "a")
    run, model = checked(SYNCS[kind], init_from=folder, untie=untie), open_model(folder)
    assert run.config.model.family == model.options.family
    job = RunJob(config=run.config, plan=run.plan, data=run.data, run="r", run_dir=tmp_path / "run")
    assert (run.config.seq_len, run.config.model.max_len) == (16, model.options.max_len)
    for stage in range(run.plan.n_stages):
        peer = run.plan.placement[stage][0]
        store = Store(
            run.config, run.plan, peer, run.data, stage_functions(run.config, run.plan, stage), job.load_entries
        )
        store.restore(ev.Restore(0, 0, 0, ()))
        versions = store.parameter_versions
        assert versions.version == 0
        for name, tree in versions.params.items():
            got, known = as_leaves(jax.tree.map(np.array, tree)), model.load(name)
            if name == "head" and untie:
                known["out"] = model.load("tok")[""].T
            assert got.keys() == known.keys()
            assert all(np.array_equal(got[path], known[path]) for path in known), name
        if versions.outer:
            anchor, momentum = versions.outer
            assert np.array_equal(FloatVector(anchor).of(anchor), FloatVector(versions.params).of(versions.params))
            assert not FloatVector(momentum).of(momentum).any()


def test_a_run_continues_only_with_the_model_that_it_began_with(checked, models, tmp_path):
    run = checked()
    assert (run.config.init.path, run.config.init.digest) == (str(models / "a"), open_model(models / "a").digest)
    copy_description(run.config, tmp_path / "job")
    assert sorted(path.name for path in (tmp_path / "job" / "model").rglob("*")) == [
        "model.json",
        "origin",
        "tokenizer.json",
    ]
    again = api.check(run.config, api.LaunchOptions())
    assert again.config == run.config
    moved = shutil.copytree(models / "a", tmp_path / "moved")
    assert api.check(run.config, api.LaunchOptions(init_from=moved)).config.init.path == str(moved)
    with pytest.raises(
        BadInput, match=r"^--init_from: .+ is the model [0-9a-f]{16}, expected [0-9a-f]{16}, with which"
    ):
        api.check(run.config, api.LaunchOptions(init_from=models / "b"))
    (moved / "model.json").write_bytes((models / "b" / "model.json").read_bytes())
    changed = api.check(run.config, api.LaunchOptions(init_from=models / "a")).config
    replaced = configs.parse({**api.fields_of(changed), "init": {"path": str(moved), "digest": changed.init.digest}})
    with pytest.raises(
        BadInput, match=r"^init\.path: .+ is the model [0-9a-f]{16}, this run begins with [0-9a-f]{16}$"
    ):
        api.check(replaced, api.LaunchOptions())
    shutil.rmtree(moved)
    with pytest.raises(
        BadInput, match=r"^init\.path: this run begins with the model .+; copy the folder to this host$"
    ):
        api.check(replaced, api.LaunchOptions())
    assert api.check(replaced, api.LaunchOptions(resume=True)).config == replaced  # its checkpoint has all it needs
    fields = api.fields_of(replaced)
    adapted = configs.parse(fields | {"model": fields["model"] | {"adapter": "lora:2"}})
    with pytest.raises(
        BadInput, match=r"^init\.path: this run begins with the model .+; copy the folder to this host$"
    ):
        api.check(adapted, api.LaunchOptions(resume=True))  # which does not hold what is frozen


def test_a_checkpoint_of_an_adapter_lacks_the_model_and_is_restored_on_another_cut(checked, models, tmp_path):
    """Two stages write what they have trained; one stage that reads the model again has the same parameters."""

    def store_of(stages, stage, load=None):
        run = checked({"plan.stages": stages, "model.adapter": "lora:2:qkv"})
        peer = run.plan.placement[stage][0]
        functions = stage_functions(run.config, run.plan, stage)
        return Store(run.config, run.plan, peer, run.data, functions, load)

    stores = [store_of(2, stage) for stage in range(2)]
    written, params = {}, {}
    for store in stores:
        store.restore(ev.Restore(0, 0, 0, ()))
        versions = store.parameter_versions
        part, *others = jax.tree.map(lambda leaf: np.array(leaf) + 1, versions.state)
        versions.put(3, (part, *others))
        params |= jax.tree.map(np.array, store.parameter_versions.params)
        written |= split_entries(store.state_of(3))
    n_trained = sum(leaf.size for entry in written.values() for leaf in jax.tree.leaves(entry["params"]))
    facts = stores[0]._config.model.facts
    assert n_trained == facts.n_trained < facts.n_params / 10
    assert sum(store.n_words for store in stores) < 3 * n_trained + 10  # with two moments and the counters
    assert written.keys() == {"block_000", "block_001"}
    write_entries(tmp_path / "part", written)

    again = store_of(
        1, 0, lambda _, parts, names: iter([(name, _read_entry(tmp_path / "part", name)) for name in names])
    )
    again.restore(ev.Restore(3, 0))
    jax.tree.map(np.testing.assert_array_equal, again.parameter_versions.params, params)
    table = open_model(models / "a").load("tok")[""]
    assert np.array_equal(again.parameter_versions.params["tok"], table)
    whole = {name: whole_params(again._config, name, written.get(name)) for name in params}
    jax.tree.map(np.testing.assert_array_equal, whole, params)


def _read_entry(part, name):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        tree = dict(reader.metadata(part).item_metadata.tree)
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        return reader.restore(part, args=ocp.args.PyTreeRestore(restore_args=as_numpy))[name]


def test_an_adapter_of_another_base_is_refused(checked, models):
    of_model = about_run(checked({"model.adapter": "lora:2"}).config, "data")
    other = checked({"model.adapter": "lora:2"}, init_from=models / "b").config
    with pytest.raises(BadInput, match=r"made beside the frozen parameters of model [0-9a-f]{16}, this run has those "):
        _check_about(models, of_model, about_run(other, "data"))
    assert about_run(checked().config, "data") == about_run(checked(init_from=models / "b").config, "data")


def test_what_does_not_fit_the_model(checked, models, tmp_path):
    with pytest.raises(BadInput, match=r"^data\.seq_len: got 48, expected 0 \(model\.max_len\) to model\.max_len 32$"):
        checked({"data.seq_len": 48})
    with pytest.raises(BadInput, match=r"empty: holds no model\.json, expected a model folder"):
        checked(init_from=models / "empty")
    with pytest.raises(BadInput, match=r"^--untie: is for the model of --init_from=DIR, expected both$"):
        checked(init_from=None, untie=True)
    tokens = np.arange(2000) % 300
    text = write_tokens(tmp_path / "large.tok", "bytes", 300, tokens[:1000], tokens[1000:]).path
    with pytest.raises(
        BadInput, match=r"^data\.path: .+ is of a vocabulary of 300 tokens, the model of .+ has 256; exp"
    ):
        checked({"data.path": str(text)})
    text = write_tokens(tmp_path / "other.tok", "hf:0123456789ab", 256, tokens[:250], tokens[:250]).path
    found = (
        r"^data\.path: .+other.tok is of the tokenizer hf:0123456789ab, the model of .+ has hf:44136fa355b3; expected "
    )
    with pytest.raises(
        BadInput, match=found + "tokens of that: python scripts/prepare_data.py --tokenizer=.+/a --train"
    ):
        checked({"data.path": str(text)})
    with pytest.raises(BadInput, match=r"^init\.digest: got '' with init\.path 'x', expected both or neither"):
        checked({"init.path": "x"}, init_from=None)


@pytest.mark.slow
def test_a_model_comes_in_trains_in_two_stages_and_leaves(checked, models, tmp_path):
    """As real processes, with a head of its own; the losses are those of one process, and what leaves is the last
    checkpoint. The test above has tied heads, and tests/test_equivalence.py trains them."""
    pytest.importorskip("safetensors", reason="the extra hf is not installed")
    from jaxdt.interop.hf_files import HFFolder
    from jaxdt.interop.import_model import import_model

    fields = {"plan.stages": 2, "plan.pipelines": 1, "train.steps": N_STEPS}
    run = checked(fields, untie=True)
    flags = [f"--config.{name}={value}" for name, value in fields.items()]
    fleet = Launched(tmp_path, *flags, f"--init_from={models / 'a'}", "--untie")
    try:
        assert fleet.ended(timeout_s=280) == 0, fleet.output
    finally:
        fleet.kill()
    assert "--init_from: the run begins with " in fleet.output
    losses, params = trained_in_one_process(run)
    assert fleet.losses() == pytest.approx(losses, abs=1e-6 * max(losses))
    script = [str(ROOT / "scripts/tools/export_model.py"), f"--run_dir={fleet.run_dir}", f"--to={tmp_path / 'out'}"]
    exported = Forked([sys.executable, *script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said = exported.communicate()[0]
    assert exported.returncode == 0, said
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == b"{}"
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["n_positions"], config["tie_word_embeddings"]) == (32, False)
    import_model(HFFolder(tmp_path / "out"), tmp_path / "again")
    again = open_model(tmp_path / "again")
    written = load_entries(fleet.run_dir / "checkpoints" / f"{N_STEPS:08d}")
    for name, entry in written.items():
        known, leaves = as_leaves(entry["params"]), again.load(name)
        assert leaves.keys() == known.keys()
        assert all(np.array_equal(leaves[path], known[path]) for path in known), name
        plain = as_leaves(params[name])
        assert all(np.abs(leaves[path] - plain[path]).max() < 1e-4 for path in known), name
