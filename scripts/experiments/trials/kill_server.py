"""As kill_workers, with two servers a stage, of which one is killed after half of the steps: a second view follows."""

from dataclasses import replace

from processes import AtShare, Kill, counts_lost_workers, has_losses_of_one, has_parameters_of_one, has_views

from trials import kill_workers

TRIAL = replace(
    kill_workers.TRIAL,
    flags=("--config.plan.pipelines=2",),
    disturbances=(kill_workers.WORKERS, AtShare(0.5, Kill("server"))),
    expected=(counts_lost_workers, has_views(1, 2), has_losses_of_one(1e-5), has_parameters_of_one(1e-4)),
)
