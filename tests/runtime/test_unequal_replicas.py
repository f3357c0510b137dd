"""A plan whose stages have unequal numbers of replicas, run by real processes."""

import json

import numpy as np
from fleets import SWARM, Launched

from jaxdt.spec.plan import Plan, to_json

PLAN = Plan(2, ((0, 1), (1, 2)), ((1,), (0, 2)), (4,))  # as many microbatches as the run of one process has


def test_an_unequal_plan_has_the_losses_of_one_process(tmp_path, alone):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(to_json(PLAN)))
    run = Launched(tmp_path, f"--plan={path}", *SWARM)
    assert run.ended() == 0, run.output
    assert len(run.losses()) == 6
    np.testing.assert_allclose(run.losses(), alone.losses()[:6], rtol=1e-5)


def test_wiring_along_pipelines_refuses_it(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(to_json(PLAN)))
    run = Launched(tmp_path, f"--plan={path}")
    assert run.ended() == 2
    assert "got 2 stages of 1, 2 replicas, expected equally many with wiring fixed" in run.output
    assert "Traceback" not in run.output
