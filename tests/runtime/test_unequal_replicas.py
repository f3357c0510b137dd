"""A plan whose stages have unequal numbers of replicas; test_rebalance_run.py runs one with real processes."""

import json

from fleets import Launched

from jaxdt.run.plan import Plan, to_json

PLAN = Plan(2, ((0, 1), (1, 2)), ((1,), (0, 2)), (4,))


def test_wiring_along_pipelines_refuses_it(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(to_json(PLAN)))
    run = Launched(tmp_path, f"--plan={path}")
    assert run.ended() == 2
    assert "got 2 stages of 1, 2 replicas, expected equally many with wiring fixed" in run.output
    assert "Traceback" not in run.output
