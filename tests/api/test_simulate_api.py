"""`jaxdt.simulate`: what scripts/simulate.py prints and writes, as an object."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import jaxdt
from jaxdt.run.config import default_plan, parse

ROOT = Path(__file__).resolve().parents[2]
NETWORK = ROOT / "configs" / "networks" / "dtfm_debug_8.json"


@pytest.fixture
def config():
    config = jaxdt.base_config("debug")
    config.plan.stages = config.plan.pipelines = 2
    config.plan.microbatches = 8
    return config


def test_a_simulation_has_its_parts_and_prints_and_saves_them(config, tmp_path):
    network = jaxdt.load_network(NETWORK)
    found = jaxdt.simulate(config, jaxdt.profile_of_flops(config, 1e9, network), network)
    assert found.parts.step_s == pytest.approx(found.step_s)
    assert found.tokens_per_s == pytest.approx(8 * 32 / found.step_s)
    assert set(found.utilisation) == set(found.memory_bytes) == {0, 1, 2, 3}
    assert str(found).startswith("2 stages x 2 pipelines, 8 microbatches, 1f1b\nstep ")
    found.save(tmp_path / "new" / "folder", timeline=False)
    written = json.loads((tmp_path / "new" / "folder" / "prediction.json").read_text())
    assert written["step_s"] == found.step_s and "0>1" in written["bytes_per_link"]


def test_links_devices_and_plans_count(config):
    options = jaxdt.SimulateOptions(steps=1)
    free = jaxdt.simulate(config, jaxdt.profile_of_flops(config, 1e9), options=options)
    network = jaxdt.load_network(NETWORK)
    profile = jaxdt.profile_of_flops(config, 1e9, network)
    linked = jaxdt.simulate(config, profile, network, options=options)
    faster = jaxdt.simulate(config, jaxdt.profile_of_flops(config, 1e10, network), network, options=options)
    note = "no network is given: links have latency 0 and no limit"
    assert str(free).splitlines()[-1] == note and note not in str(linked)
    assert free.step_s < linked.step_s and faster.parts.compute_s == pytest.approx(
        linked.parts.compute_s / 10, rel=1e-3
    )
    run_config = parse(config.to_dict())
    gpipe = replace(default_plan(run_config), schedule="gpipe")
    assert str(jaxdt.simulate(run_config, profile, network, gpipe, options)).splitlines()[0].endswith("gpipe")


def test_what_does_not_fit_is_one_line(config):
    with pytest.raises(jaxdt.BadInput, match="--access_gbps: got 0"):
        jaxdt.simulate(config, jaxdt.profile_of_flops(config, 1e9), options=jaxdt.SimulateOptions(access_gbps=0.0))
    profile = jaxdt.profile_of_flops(jaxdt.base_config("small"), 1e9)
    with pytest.raises(jaxdt.BadInput, match="profile: was made for another model"):
        jaxdt.simulate(config, profile)
