"""The fleet on a terminal: one live table, a progress bar and the time left; plain lines where there is none, or where
it is shared with other processes."""

import contextlib
import math
import time
from collections.abc import Collection, Mapping

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import HeartbeatReport, StepReport
from jaxdt.run.plan import Plan
from jaxdt.runtime.reporting.console import has_own_terminal, no_echo_of_interrupts, print_line
from jaxdt.runtime.reporting.counts import aggregation_frac, expert_lines, summary_lines

PLAIN_EVERY_S = 2.0
TABLE_EVERY_S = 0.25  # drawing a table of hundreds of peers takes tens of milliseconds
SILENT_HEARTBEATS = 6  # so many are missing of a peer that is shown as silent
RATES = ("busy_s", "bytes_out", "bytes_in")  # counters of a peer's heartbeats that are shown as rates


class Display:
    """Shows the run's progress. With `live`, and on a terminal of its own, this is a table; otherwise it is
    lines."""

    def __init__(self, plan: Plan, n_steps: int, live: bool, heartbeat_s: float):
        self._n_steps = n_steps
        self._silent_s = SILENT_HEARTBEATS * heartbeat_s
        self._stages = {peer: plan.seat(peer)[0] for peer in plan.peers}
        self._heartbeats: dict[int, Mapping[str, float]] = {}  # the latest of each peer
        self._heard_s: dict[int, float] = {}  # when it came
        self._rate_starts: dict[int, tuple[float, Mapping[str, float]]] = {}  # where a peer's next rates count from
        self._rates: dict[int, dict[str, float]] = {}  # per second
        self._arriving: dict[int, tuple[int, str]] = {}  # peers that are no members yet: stage, and what they do
        self._until_s: dict[int, float] = {}  # after which one of them is not shown any more
        self._fetching: frozenset[int] = frozenset()  # members that lack their stage's state
        self._is_over = False
        self._standstill = ""  # what peers do while no step is computed, in a word
        self._latest_step: StepReport | None = None
        self._printed_s = 0.0
        self._drawn_s = 0.0
        self._live: Live | None = None
        self._while_live = contextlib.ExitStack()
        columns = (TextColumn("steps"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns)
        self._task = self._progress.add_task("steps", total=n_steps)
        self._draws = live and has_own_terminal()

    def close(self) -> None:
        if self._live:
            with contextlib.suppress(OSError):
                self._live.update(self._table())
                self._live.stop()
            self._live = None
        self._while_live.close()
        self._draws = False

    def ended(self) -> None:
        """The run is over: no peer trains any more, and none comes."""
        self._is_over = True
        self._arriving.clear()

    def standstill(self, word: str) -> None:
        """No step is committed from now on. `word` says what the peers do: paused, waiting; '' ends it."""
        self._standstill = word
        self._refresh()

    def print(self, line: str) -> None:
        """Print one line, above the table if there is one."""
        if self._live:
            with contextlib.suppress(OSError):  # the terminal may be gone, which must not end the run
                self._live.console.print(line, highlight=False)
        else:
            print_line(line)

    def arriving(self, peer: int, stage: int, what: str, for_s: float = math.inf) -> None:
        """Show a peer that is here and no member yet, and what it does; no longer than `for_s`."""
        self._arriving[peer] = (stage, what)
        self._until_s[peer] = time.monotonic() + for_s
        self._refresh()

    def ready(self, peer: int) -> None:
        """A peer that was arriving can compute."""
        if peer in self._arriving:
            self.arriving(peer, self._arriving[peer][0], "ready")

    def gone(self, peer: int) -> None:
        """A peer that was arriving does not come."""
        self._arriving.pop(peer, None)
        self._refresh()

    def members(self, stages: Mapping[int, int], fetching: Collection[int] = ()) -> None:
        """Show these members of the run: peer -> stage. `fetching`: those that lack their stage's state."""
        self._stages = dict(stages)
        self._fetching = frozenset(fetching)
        self._arriving = {peer: state for peer, state in self._arriving.items() if peer not in stages}
        for by_peer in (self._heartbeats, self._heard_s, self._rate_starts, self._rates):
            for peer in by_peer.keys() - stages.keys():
                del by_peer[peer]
        self._refresh()

    def heartbeat(self, report: HeartbeatReport) -> None:
        """Show a peer's heartbeat, which has its counters; a process that took its place counts from zero."""
        peer, status = report.peer, report.status
        if ev.WORKERS in status and status.get("step", 0) >= self._n_steps:  # its workers end before it does
            status = {**status, ev.WORKERS: self._heartbeats.get(peer, status).get(ev.WORKERS, 0.0)}
        now_s = self._heard_s[peer] = time.monotonic()
        before_s, before = self._rate_starts.get(peer, (now_s, status))
        if any(status.get(name, 0) < before.get(name, 0) for name in RATES):
            self._rates.pop(peer, None)
            self._rate_starts.pop(peer, None)
            before_s, before = now_s, status
        if now_s - before_s >= 1.0 or peer not in self._rate_starts:
            span_s = now_s - before_s
            if span_s > 0:
                self._rates[peer] = {name: (status.get(name, 0) - before.get(name, 0)) / span_s for name in RATES}
            self._rate_starts[peer] = (now_s, status)
        self._heartbeats[peer] = status
        self._refresh()

    def step(self, report: StepReport, held_out_by_source: Mapping[str, float] | None = None) -> None:
        """Show a committed step, and the held-out loss of each source of a mixture."""
        self._latest_step = report
        self._standstill = ""
        self._fetching = frozenset()  # a step is committed only once all members have their state
        if self._live:
            self._progress.update(self._task, completed=report.step + 1)
            self._refresh()
            if report.verdict == "skip":
                self.print(self._line(report, held_out_by_source))
            return
        last = report.step + 1 == self._n_steps
        notable = report.eval_loss is not None or report.verdict == "skip"
        if last or notable or time.monotonic() - self._printed_s > PLAIN_EVERY_S:
            self._printed_s = time.monotonic()
            self.print(self._line(report, held_out_by_source))

    def summary(self, summary: dict) -> None:
        """Show the summary of the run, and nothing after it."""
        self.close()
        print_line("\n".join(_summary_lines(summary)))

    def _line(self, report: StepReport, held_out_by_source: Mapping[str, float] | None = None) -> str:
        held_out = "" if report.eval_loss is None else f"  held-out {report.eval_loss:.4f}"
        if held_out_by_source:
            held_out += f" ({', '.join(f'{name} {loss:.4f}' for name, loss in held_out_by_source.items())})"
        took = f"{report.step_s:.3f} s  {report.tokens_per_s:.0f} tokens/s"
        took = "in an unknown time" if math.isnan(report.step_s) or math.isnan(report.tokens_per_s) else took
        skipped = "  skipped: its gradient is not finite" if report.verdict == "skip" else ""
        return f"step {report.step + 1:>5}/{self._n_steps}  loss {report.loss:.4f}  {took}{held_out}{skipped}"

    def _refresh(self) -> None:
        """Draw the table, unless it was drawn a moment ago: heartbeats come all the time."""
        now_s = time.monotonic()
        if self._draws and not self._live:  # not before: the launcher prints a line first, which would go amiss
            self._while_live.enter_context(no_echo_of_interrupts())
            self._live = Live(self._table(), console=Console(), refresh_per_second=4)
            self._live.start()
        if self._live and now_s - self._drawn_s >= TABLE_EVERY_S:
            self._drawn_s = now_s
            with contextlib.suppress(OSError):
                self._live.update(self._table())

    def _table(self) -> Group:
        table = Table("peer", "stage", "state", "step", "out MB/s", "in MB/s", "waiting")
        now_s = time.monotonic()
        self._arriving = {peer: state for peer, state in self._arriving.items() if now_s < self._until_s[peer]}
        arriving = {peer: stage for peer, (stage, _) in self._arriving.items()}
        for peer, stage in sorted((self._stages | arriving).items()):
            rates = {} if self._silence_s(peer) else self._rates.get(peer, {})
            table.add_row(
                str(peer),
                str(stage),
                self._state(peer),
                f"{self._steps_of(peer):.0f}",
                f"{rates['bytes_out'] / 1e6:.2f}" if rates else "",
                f"{rates['bytes_in'] / 1e6:.2f}" if rates else "",
                f"{max(0.0, 1 - rates['busy_s']):.0%}" if rates else "",
            )
        servers = {peer: counts for peer, counts in sorted(self._heartbeats.items()) if ev.WORKERS in counts}
        tables = [table, _served(servers)] if servers else [table]
        return Group(*tables, self._line(self._latest_step) if self._latest_step else "starting", self._progress)

    def _steps_of(self, peer: int) -> float:
        """The steps that a peer has done, by its last heartbeat. In the end they are those of the run: a member whose
        last heartbeat was before the last step has done it too."""
        if self._is_over and self._latest_step and peer in self._heartbeats:
            return self._latest_step.step + 1
        return self._heartbeats.get(peer, {}).get("step", 0)

    def _state(self, peer: int) -> str:
        """The activity of a peer, in a word or two."""
        if self._is_over:
            return "ended"
        if peer in self._arriving:
            return self._arriving[peer][1]
        if peer in self._fetching:
            return "fetching state"
        if peer not in self._heartbeats:
            return "absent"
        if silence_s := self._silence_s(peer):
            return f"silent {silence_s:.0f} s"
        return self._standstill or ("training" if self._latest_step else "ready")

    def _silence_s(self, peer: int) -> float:
        """For how long a peer has been silent that should have been heard; 0 if it is in time."""
        silence_s = time.monotonic() - self._heard_s.get(peer, math.inf)
        return silence_s if silence_s > self._silent_s else 0.0


def _served(servers: Mapping[int, Mapping[str, float]]) -> Table:
    """A table of the work that a pool's workers do for each server."""
    table = Table("server", "workers", "leases", "done by them", "again", "gradients", "aggregating")
    for server, counts in servers.items():
        share = aggregation_frac(counts)
        table.add_row(
            str(server),
            f"{counts[ev.WORKERS]:.0f}",
            f"{counts['leases']:.0f}",
            f"{counts['by_workers']:.0f} of {counts['microbatches']:.0f}",
            f"{counts['redone']:.0f}",
            f"{counts['contribution_bytes'] / 1e6:.1f} MB",
            "" if share is None else f"{share:.0%}",
        )
    return table


def _summary_lines(summary: dict) -> list[str]:
    lines = [summary["reason"]]
    if not summary["steps"]:
        return lines
    lines.append(f"loss           {summary['loss_first']:.4f} -> {summary['loss_last']:.4f}")
    if summary["eval_loss_last"] is not None:
        step = summary["eval_loss_step"]
        lines.append(f"held-out loss  {summary['eval_loss_last']:.4f}, measured at step {step} of {summary['steps']}")
        by_source = summary["eval_losses_last"] or {}
        lines += [f"               {loss:.4f} of {name}" for name, loss in by_source.items()]
    if n_skipped := summary["n_steps_skipped"]:
        lines.append(f"skipped        {n_skipped} step{'s' * (n_skipped > 1)}, with a gradient that was not finite")
    since = f" since step {summary['resumed_at']}" if summary["resumed_at"] else ""
    measured_s = summary["step_s_measured"]
    predicted_s = summary["step_s_predicted"]
    if measured_s:
        predicted = "none predicted before the run ended"
        if predicted_s:
            predicted = f"{predicted_s:.3f} s predicted ({100 * (predicted_s / measured_s - 1):+.1f} %)"
        lines.append(f"step           {measured_s:.3f} s measured, {predicted}")
        if predicted_s and summary["prediction_doubt"]:
            lines += [f"               ({reason})" for reason in summary["prediction_doubt"].split("; ")]
        overall_per_s = summary["tokens_per_s_overall"]
        overall = f", {overall_per_s:.0f} over the whole time{since}" if overall_per_s else ""
        lines.append(f"throughput     {summary['tokens_per_s']:.0f} tokens/s{overall}")
    else:
        lines.append("step           no time is known; the first two steps and those with an evaluation do not count")
    if interruptions := _interruptions(summary):
        lines.append(f"interruptions  {interruptions}{since}")
    if total := sum(summary["bytes_on_links"].values()):
        lines.append(f"on the links   {total / 1e6:.1f} MB{since}")
    return lines + expert_lines(summary["experts"]) + summary_lines(summary["pool"])


def _interruptions(summary: dict) -> str:
    """A text that says how often the run went back and how long it stood still; '' if it did neither."""
    parts: list[str] = []
    if n_rollbacks := summary["n_rollbacks"]:
        times = {1: "once", 2: "twice"}.get(n_rollbacks, f"{n_rollbacks} times")
        n_again = summary["n_steps_again"]
        parts.append(f"went back {times}, {n_again} step{'s' * (n_again != 1)} computed again")
    if summary["stood_still_s"]:
        parts.append(f"stood still for {summary['stood_still_s']:.1f} s")
    return "; ".join(parts)
