"""The catalogue of devices, and plans of kinds that nobody has measured."""

import json
from dataclasses import replace

import numpy as np
import pytest

import planner
from jaxdt.run import plan as plans
from jaxdt.run import profile as profiles
from jaxdt.run.families.gpt import GPTConfig
from jaxdt.run.network import Host, to_json
from jaxdt.run.profile import from_flops
from jaxdt.run.work import WorkKind
from jaxdt.wiring.base import PeerLoad
from planner.__main__ import main
from planner.model.devices import CATALOGUE, UTILISATION, profile_of_catalogue, spec_of
from planner.model.generate import generate

MODEL = GPTConfig.of("small")
RUN = planner.run_of_model("small", planner.StepOptions(global_batch=16))


def of_kinds(*kinds):
    network = generate("homogeneous", len(kinds), 0)
    devices = tuple(replace(device, kind=kind) for device, kind in zip(network.devices, kinds, strict=True))
    return replace(network, devices=devices)


def test_every_device_has_a_source_and_rates_that_grow_as_formats_shrink():
    assert {"T4", "V100", "A10", "L4", "L40S", "A100", "A100-80GB", "H100", "H200", "B200"} < set(CATALOGUE)
    for kind, spec in CATALOGUE.items():
        assert spec.kind == kind
        assert spec.source
        rates = [spec.float32_flops, spec.tensorfloat32_flops, spec.bfloat16_flops]
        known = [rate for rate in rates if rate is not None]
        assert known == sorted(known)
        assert 1e12 < known[0] < 1e16
        assert 5e9 < spec.memory_bytes < 1e12
        assert 5e10 < spec.memory_bytes_per_s < 1e13


def test_the_rate_is_the_one_in_which_jax_computes():
    assert spec_of("A100").peak_flops("bfloat16") == 312e12
    assert spec_of("A100").peak_flops("float32") == 156e12  # TF32
    assert spec_of("V100").peak_flops("bfloat16") == spec_of("V100").peak_flops("float32") == 15.7e12
    assert spec_of("TPU-v4").peak_flops("float32") == 275e12


def test_seconds_are_flops_over_the_reached_rate_and_updates_go_by_memory():
    kind = profile_of_catalogue(RUN, {"A100"}).kinds["A100"]
    forward_flops = 2.0 * MODEL.facts.layers[0].n_params * MODEL.seq_len
    assert kind.layer.forward_s == pytest.approx(forward_flops / (UTILISATION * 312e12))
    assert kind.layer.update_s == pytest.approx(
        MODEL.facts.layers[0].n_params * profiles.UPDATE_BYTES_PER_NUMBER / 1555e9
    )
    assert kind.memory_bytes == 40960 << 20  # what the driver reports
    assert kind.accelerator
    half = profile_of_catalogue(RUN, {"A100"}, UTILISATION / 2).kinds["A100"]
    assert half.layer.forward_s == pytest.approx(2 * kind.layer.forward_s)


def test_a_measured_kind_stands_and_the_catalogue_fills_the_rest():
    measured = from_flops(MODEL, 1, {"T4": 1e12}, 1.0, dtype="bfloat16")
    merged = planner.profile_of_kinds(RUN, of_kinds("T4", "L4"), measured)
    assert merged.kinds["T4"] == measured.kinds["T4"]
    assert merged.kinds["L4"] == profile_of_catalogue(RUN, {"L4"}).kinds["L4"]
    assert planner.profile_of_kinds(RUN, of_kinds("T4"), measured) is measured
    with pytest.raises(planner.BadInput, match="no device of the catalogue.*'L40'.*L40S"):
        planner.profile_of_kinds(RUN, of_kinds("T4", "L40"))


def test_kinds_of_the_catalogue_are_planned_without_a_measurement(tmp_path, capsys):
    path, out = tmp_path / "network.json", tmp_path / "plan.json"
    path.write_text(json.dumps(to_json(of_kinds("H100", "T4", "H100", "H100"))))
    flags = ["--network", str(path), "--stages", "4", "--pipelines", "1", "--model", "small", "--global_batch", "16"]
    solve = ["solve", *flags, "--objective", "step_time", "--evaluations", "500", "--out", str(out)]
    assert main(solve) == 0
    plan = plans.load(out)
    assert "catalogue" in plan.found["profile"]
    sizes = {plan.devices[d]: hi - lo for (d,), (lo, hi) in zip(plan.placement, plan.stages, strict=True)}
    assert sizes["site-1"] == min(sizes.values())  # the T4
    capsys.readouterr()
    path.write_text(json.dumps(to_json(of_kinds("H100", "V10", "H100", "H100"))))
    assert main(solve) == 2
    assert 'did you mean "V100"' in capsys.readouterr().err


def test_the_table_shows_every_kind(capsys):
    assert main(["devices"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n{kind} " in text for kind in CATALOGUE)
    assert "dense" in text


def test_the_memory_of_a_network_file_wins_over_the_catalogue():
    """Also where it is more, as on a card of the same kind with more memory."""
    network = of_kinds("T4", "T4", "RTX4090")
    said = (None, 8_000_000_000, 48_000_000_000)
    devices = [replace(device, memory_bytes=n) for device, n in zip(network.devices, said, strict=True)]
    network = replace(network, devices=tuple(devices))
    job = planner.Job(RUN, 3, 1, planner.profile_of_kinds(RUN, network))
    from planner.api.by_step import workload_of

    assert workload_of(job, network).memory_bytes == [15360 << 20, 8e9, 48e9]
    assert spec_of("RTX4090").memory_bytes == 24564 << 20
    assert workload_of(job, network).seconds("T4", 0, 1)[WorkKind.BACKWARD] > 0


def test_what_lies_on_the_host_does_not_count_against_a_card():
    """Copies for an exchange, and retained tensors; a host's own memory limits them, and not what is on its cards."""
    from planner.api.by_step import workload_of

    cards, laptops = (planner.profile_of_kinds(RUN, of_kinds(kind)) for kind in ("T4", "M1"))
    load = PeerLoad(2, 16)
    memory = []
    for profile, kind in ((cards, "T4"), (laptops, "M1")):
        workload = workload_of(planner.Job(RUN, 1, 1, profile), of_kinds(kind))
        memory.append(workload.stage_bytes(1, 3, load))
        rule = workload.stage_memory(1, 3, load)
        assert rule.total == rule.on_device + rule.on_host and rule.on_host > 0
    assert memory[0] < memory[1] == rule.total
    hosted = replace(of_kinds("T4", "T4"), hosts=(Host("box", memory_bytes=10**6),))
    hosted = replace(hosted, devices=tuple(replace(device, host="box") for device in hosted.devices))
    workload = workload_of(planner.Job(RUN, 2, 1, cards), hosted)
    assert workload.memory_bytes == [15360 << 20] * 2
    assert not workload.may_hold(np.array([0]), 1, 3, load)
