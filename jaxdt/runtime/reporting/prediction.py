"""The prediction of a run's step time, in a process of its own.

A prediction simulates a few steps, and for a large fleet that takes minutes of processor time. The coordinator's loop
answers heartbeats and must not wait for it, and a thread would take the interpreter away from the loop. So the
simulation runs in a child process of the least priority, and its result reaches the loop as a report.
"""

import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import jaxdt
from jaxdt.protocol.reports import PredictionReport
from jaxdt.run.codec import NONE
from jaxdt.run.config import RunConfig
from jaxdt.run.network import Network
from jaxdt.run.plan import Plan
from jaxdt.sim.predict import Conditions, device_links, predict_step_s
from jaxdt.sim.stragglers.stalls import Stalls

LEAST_PRIORITY = 19
SINGLE_RUN_OFF = 0.31  # the worst single run of 360, where up to four peers shared two cores
OTHERS_FRAC = 0.15  # of the cores: what others use beyond that is felt
N_STEPS, N_STALLED_STEPS = 4, 24  # steps with stalls differ


@dataclass(frozen=True)
class PredictionRequest:
    """The inputs of a prediction: the run, and the facts about its hosts. `network`: the emulated or measured links.
    The other fields are those of Conditions."""

    config: RunConfig
    plan: Plan
    network: Network | None
    seconds: Mapping[int, Mapping[str, float]]
    host_of: Mapping[int, str]
    cores: Mapping[str, float]
    persist_s: float
    stalls: Stalls | None = None


def doubt(n_peers: int, n_cpus: int, n_cores: float, others_cores: float, off: float, is_explained: bool) -> str:
    """The reason why a prediction may be far off on this host; '' if there is no such reason.

    n_cpus, n_cores: how many CPUs the run may use, and how many cores' worth of time on them, which a quota makes less.
    others_cores: how many of these CPUs other programs used meanwhile.
    off: predicted over measured step time, less one. is_explained: by what happened in the run.
    The band is that of configs/prediction/README.md."""
    if others_cores > OTHERS_FRAC * n_cpus and min(n_peers, n_cores) + others_cores > n_cpus:
        return f"other programs used {others_cores:.1f} of the {n_cpus} cores meanwhile"
    who = f"{n_peers} peers share" if n_peers > n_cores else f"{n_peers} peers and the coordinator share"
    shared = f"{who} {n_cores:g} cores: " if n_peers + 1 > n_cores else ""
    if abs(off) <= SINGLE_RUN_OFF:
        return f"{shared}of 360 runs like that the worst was {SINGLE_RUN_OFF:.0%} off" if shared else ""
    slower = "before step 1, while stages are timed," if off > 0 else "in the steps"
    cause = f"as where a machine is slower {slower} than {'later' if off > 0 else 'before, when stages are timed'}"
    return "" if is_explained else f"{shared}further off than the worst of 360 runs, {SINGLE_RUN_OFF:.0%}, {cause}"


class Prediction:
    """The prediction for one run. `report` is None until the prediction is there."""

    def __init__(self):
        self.report: PredictionReport | None = None
        self._thread: threading.Thread | None = None
        self._child: subprocess.Popen | None = None
        self._has_ended = False

    def start(self, request: PredictionRequest, post: Callable[[PredictionReport], None]) -> None:
        """Begin; `post` gets the report, from another thread."""
        self._thread = threading.Thread(target=self._run, args=(request, post), name="prediction", daemon=True)
        self._thread.start()

    def end(self, timeout_s: float) -> PredictionReport | None:
        """Wait for the prediction for at most timeout_s, then give it up."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        self._has_ended = True
        if self._child is not None:
            self._child.kill()
        return self.report

    def _run(self, request: PredictionRequest, post: Callable[[PredictionReport], None]) -> None:
        root = str(Path(jaxdt.__file__).parents[1])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "jaxdt.runtime.reporting.prediction"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
                start_new_session=True,  # a signal for the coordinator is not for this process
            )
            if self._has_ended:
                self._child.kill()
            output, errors = self._child.communicate(pickle.dumps(request))
        except OSError as error:
            output, errors = b"", str(error).encode()
        try:
            report = PredictionReport(**json.loads(output))
        except ValueError:
            report = PredictionReport(problem=(errors.decode(errors="replace").strip().splitlines() or ["killed"])[-1])
        if not self._has_ended:
            self.report = report
            post(report)


def predict(request: PredictionRequest) -> PredictionReport:
    """The step time of the run's plan, and where it has codecs, that of the same plan without them. The latter is a
    little too high: the peers' timings contain encoding and decoding."""
    link = device_links(request.network)
    conditions = Conditions(request.seconds, link, request.host_of, request.cores, request.persist_s)
    plan, n_steps = request.plan, N_STEPS
    if request.stalls:
        conditions, n_steps = replace(conditions, stalls=request.stalls), N_STALLED_STEPS
    step_s = predict_step_s(request.config, plan, conditions, n_steps)
    if all(codec == NONE for codec in plan.codec_of_links.values()):
        return PredictionReport(step_s)
    uncompressed = replace(plan, codec=(NONE,) * (plan.n_stages - 1))
    return PredictionReport(step_s, predict_step_s(request.config, uncompressed, conditions, n_steps))


if __name__ == "__main__":
    os.nice(LEAST_PRIORITY)
    print(json.dumps(predict(pickle.load(sys.stdin.buffer)).fields))
