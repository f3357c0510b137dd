"""What the coordinator writes down and shows: metrics.jsonl, summary.json, complete checkpoints, the fleet table."""

import json
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from jaxdt.membership.coordinator import Coordinator
from jaxdt.protocol.events import Report
from jaxdt.runtime.display import Display
from jaxdt.runtime.metrics import Metrics
from jaxdt.runtime.storage.durable import FileStore, write_durably
from jaxdt.sim.predict import Conditions, predict_step_s
from jaxdt.spec.codec import NONE
from jaxdt.spec.config import RunConfig
from jaxdt.spec.network import Link
from jaxdt.spec.plan import Plan

WARM_UP_STEPS = 2
SAVES_MAX = 1000  # of the last checkpoints, for the summary
LOOPBACK = ("127.", "localhost", "::1", "[::1]")


class Journal:
    """`report` takes what the coordinator machine reports, on the loop's thread. A context manager. `began_s`: when the
    launcher began, on this host's monotonic clock."""

    def __init__(
        self,
        run_dir: Path,
        config: RunConfig,
        plan: Plan,
        machine: Coordinator,
        durable: FileStore,
        link: Callable[[int, int], Link],
        live: bool,
        began_s: float | None = None,
    ):
        self._run_dir, self._config, self._plan = run_dir, config, plan
        self._machine, self._durable, self._link = machine, durable, link
        self._metrics = Metrics(run_dir / "metrics.jsonl", machine.n_committed)
        self._predicted_s: float | None = None
        self._uncompressed_s: float | None = None
        self._start_s: float | None = None
        self._save_s: deque[float] = deque(maxlen=SAVES_MAX)
        self._bytes: dict[str, int] = {}
        self._clocks: dict[str, float] = {}
        self._started_s = time.monotonic()
        self._began_s = self._started_s if began_s is None else began_s
        self._display = Display(plan, config.train.steps, live)

    def __enter__(self):
        self._metrics.__enter__()
        return self

    def __exit__(self, *_):
        self._display.close()
        self._metrics.__exit__()

    def report(self, report: Report) -> None:
        fields = report.fields
        match report.kind:
            case "step":
                self._step(fields)
            case "view" if fields["view"] == 1:
                self._start_s = time.monotonic() - self._began_s
                self._predicted_s = self._predict(self._plan)
                if self._compresses:
                    plain = replace(self._plan, codec=(NONE,) * (self._plan.n_stages - 1))
                    self._uncompressed_s = self._predict(plain)
                self._display.say(f"all {len(fields['members'])} peers are ready")
                self._display.say(f"predicted step time {self._predicted_s:.3f} s")
            case "view":
                self._display.members(fields["members"])
                joining = "".join(f", {peer} joins" for peer in fields["joining"])
                self._display.say(f"view {fields['view']}: peers {sorted(fields['members'])}{joining}")
            case "lost":
                self._display.say(fields["reason"])
            case "leaving":
                stays = (
                    "; it is the last of its stage, and stays until another joins"
                    if fields["last_of_its_stage"]
                    else ""
                )
                self._display.say(f"peer {fields['peer']}: wants to leave{stays}")
            case "vacant":
                self._vacant(fields)
            case "rollback":
                self._roll_back(fields)
            case "checkpoint":
                self._save_s.append(fields["save_s"])
                self._display.say(f"checkpoint of {fields['version']} steps is complete")
            case "done":
                peer = fields["peer"]
                self._bytes |= {f"{peer}->{dst}": n_bytes for dst, n_bytes in fields["bytes_to"].items()}
                self._clocks[str(peer)] = fields["clock_offset_s"]
            case "ended":
                self._end(fields["code"], fields["reason"])
            case "heartbeat":
                self._display.beat(fields)
            case _:
                self._display.say(f"{report.kind}: " + ", ".join(f"{k} {v}" for k, v in fields.items()))

    def _step(self, fields: dict) -> None:
        self._metrics.add(fields)
        self._display.step(fields)

    def _roll_back(self, fields: dict) -> None:
        """The steps since the checkpoint are undone, so their metrics go too."""
        self._metrics.cut(fields["to"])
        lost = f"lost steps {fields['again']}" if fields["again"] else "no step is lost"
        self._display.say(f"back from step {fields['step']} to the checkpoint of {fields['to']} steps; {lost}")

    def _vacant(self, fields: dict) -> None:
        self._display.say(
            f"stage {fields['stage']} has lost all its peers; the run waits for another, and will go back to the "
            f"checkpoint of {fields['checkpoint']} steps"
        )

    @property
    def _compresses(self) -> bool:
        return any(codec != NONE for codec in self._plan.codec_of_links.values())

    def _predict(self, plan: Plan) -> float:
        """The step that a plan should take, from the peers' own timings, on the emulated links. Of a plan without the
        codecs it is a little too much: the timings hold their encoding and decoding."""
        host_of = {m.peer: host_name(m.address) for m in self._machine.view.members}
        cores = {host: os.cpu_count() if host == "here" else math.inf for host in host_of.values()}
        conditions = Conditions(self._machine.profiles, self._link, host_of, cores, self._durable.put_s)
        return predict_step_s(self._config, plan, conditions)

    def _end(self, code: int, reason: str) -> None:
        steps, lengths = list(self._metrics), self._config.seq_lengths
        longest = lengths.at(len(steps) - 1)  # a step is predicted at the full length
        fair = [s for s in steps[self._metrics.n_resumed + WARM_UP_STEPS :] if lengths.at(s["step"]) == longest]
        timed = [s["step_s"] for s in fair if "eval_loss" not in s]
        measured_s = statistics.median(timed) if timed else None
        tokens = self._plan.n_microbatches * self._config.train.microbatch_size * longest
        evals = [s["eval_loss"] for s in steps if "eval_loss" in s]
        summary = {
            "code": code,
            "reason": reason,
            "steps": len(steps),
            "loss_first": steps[0]["loss"] if steps else None,
            "loss_last": steps[-1]["loss"] if steps else None,
            "eval_loss_last": evals[-1] if evals else None,
            "step_s_predicted": self._predicted_s,
            "step_s_predicted_uncompressed": self._uncompressed_s,
            "step_s_measured": measured_s,
            "tokens_per_s": tokens / measured_s if measured_s else None,
            "bytes_on_links": self._bytes,
            "codec_on_links": {f"{src}->{dst}": name for (src, dst), name in self._plan.codec_of_links.items()},
            "start_s": self._start_s,
            "save_s_p50": statistics.median(self._save_s) if self._save_s else None,
            "save_s_max": max(self._save_s, default=None),
            "wall_s": time.monotonic() - self._started_s,
            "clock_offset_s": self._clocks,
        }
        write_durably(self._run_dir / "summary.json", (json.dumps(summary, indent=1) + "\n").encode())
        self._display.summary(summary)


def host_name(address: str) -> str:
    """Peers with one host name share its cores; loopback addresses are on the coordinator's own host."""
    host = address.rpartition(":")[0]
    return "here" if host.startswith(LOOPBACK) else host
