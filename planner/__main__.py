"""Command line of the planner: solve, replan, pareto, explain, plot, compare, verify, network, devices.
`python -m planner COMMAND --help`.

The flags are here, so that --help imports little; the module of a command is imported when the command runs.
"""

import argparse
import importlib
import re
import sys
from typing import NoReturn

from jaxdt.run.errors import BadInput, nearest, print_what_cannot_be_shown_as_escapes, why
from planner.model.pool import EQ3, STOPS
from planner.report.export import TARGETS
from planner.search.base import POOL_SOLVERS, SOLVERS

OBJECTIVES = ("comm_cost", "step_time", "cost_per_step")
# module with run(flags)
COMMANDS = {
    "solve": "planner.commands.solve",
    "replan": "planner.commands.replan",
    "pareto": "planner.commands.pareto",
    "explain": "planner.report.explain",
    "plot": "planner.report.plot",
    "compare": "planner.report.compare",
    "verify": "planner.report.verify",
    "network": "planner.commands.network",
    "devices": "planner.commands.devices",
}


class OneLineParser(argparse.ArgumentParser):
    """Refuses a wrong command line in one line, with the nearest known word, and the command whose help says what is
    right. A word that no command knows is refused by the command that it stands behind, and before any flag is missed
    whose name may be misspelt."""

    def parse_known_args(self, args=None, namespace=None):
        words = sys.argv[1:] if args is None else list(args)
        if self._subparsers is None:
            self._refuse_unknown([word.partition("=")[0] for word in words if word.startswith("--")])
        found, rest = super().parse_known_args(words, namespace)
        self._refuse_unknown(rest)
        return found, rest

    def _refuse_unknown(self, words: list[str]):
        """Refuse words that begin no flag of this parser."""
        known = list(self._option_string_actions)
        unknown = [word for word in words if not any(flag.startswith(word) for flag in known)]
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{nearest(unknown[0], known)}")

    def error(self, message: str) -> NoReturn:
        choice = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        hint = nearest(choice[1], re.findall(r"[\w-]+", choice[2])) if choice else ""
        self.exit(2, f"error: {message}{hint}; see {self.prog} --help\n")


def parser() -> argparse.ArgumentParser:
    top = OneLineParser(prog="python -m planner", description="Decide which device holds which stage.")
    commands = top.add_subparsers(dest="command", required=True)
    _solve(commands.add_parser("solve", help="find a plan and say how far from the best possible it is"))
    _replan(commands.add_parser("replan", help="a plan for a network that has changed, near the plan that runs"))
    _pareto(commands.add_parser("pareto", help="plans between the shortest step and the cheapest one"))
    explain = commands.add_parser("explain", help="say in words what a plan's cost comes from and what would help")
    explain.add_argument("plan")
    _percentile(explain, "the plan's")
    explain.add_argument(
        "--suggest", action="store_true", help="try every swap, and search other shapes for some seconds each"
    )
    plot = commands.add_parser("plot", help="draw a plan: devices by stage, pipelines as paths, costs as bars")
    plot.add_argument("plan")
    plot.add_argument("--out", help="a .png file (default: beside the plan)")
    compare = commands.add_parser("compare", help="two plans side by side, on the second one's network and sizes")
    compare.add_argument("a")
    compare.add_argument("b")
    verify = commands.add_parser("verify", help="check a plan's cost and bound; exit code 1 if a claim is false")
    verify.add_argument("plan")
    for command in (explain, plot, compare, verify):
        command.add_argument("--network", help="network file, where it is not the one that the plan names")
    _network(commands.add_parser("network", help="generate a network, or import measurements"))
    commands.add_parser("devices", help="the catalogue of devices, whose kinds need no profile")
    return top


def _solve(solve: argparse.ArgumentParser):
    solve.add_argument("--network", required=True, help="network.json")
    _percentile(solve, "the network's plain bandwidths")
    _job(solve)
    solve.add_argument(
        "--replicas",
        choices=("equal", "unequal"),
        default="equal",
        help="unequal: each stage may have replicas of its own number, by step time, for wiring.kind=swarm",
    )
    solve.add_argument("--solver", choices=(*SOLVERS, *POOL_SOLVERS), default="auto")
    solve.add_argument("--time_limit_s", type=float, help="default 30, or none with --evaluations")
    solve.add_argument("--evaluations", type=int, help="plans to score; alone, it makes the plan reproducible")
    solve.add_argument("--constraints", help="a constraints.json: who may sit where")
    solve.add_argument("--budget_per_hour", type=float, help="by step time: what the devices of a plan may cost in all")
    solve.add_argument("--eq3", choices=EQ3, help="cluster: how it estimates a stage (default: paper)")
    solve.add_argument("--stop", choices=STOPS, help="cluster: where its search ends (default: first_rise)")
    solve.add_argument(
        "--minibatches", type=int, help="cluster: parts of a step (default: a unit for every device each)"
    )
    solve.add_argument("--seed", type=int, default=0)
    solve.add_argument("--out", help="where to write plan.json")
    solve.add_argument(
        "--export", choices=TARGETS, help="also give cut and placement as settings of that trainer, beside --out"
    )


def _replan(replan: argparse.ArgumentParser):
    replan.add_argument("--from", dest="plan", help="plan.json of the plan that runs")
    replan.add_argument(
        "--run_dir",
        help="instead: a run's folder, whose plan, members, links and timings count; the plan is by step time",
    )
    replan.add_argument("--network", help="its network, where it is not the one that the plan, or the run, names")
    _percentile(replan, "the plan's")
    replan.add_argument("--without", help="names of the devices that left, separated by commas")
    replan.add_argument("--with", dest="added", help="network.json with the devices that came, and their links")
    replan.add_argument(
        "--horizon_steps", type=float, default=1000.0, help="steps over which the seconds of moving are to pay off"
    )
    replan.add_argument(
        "--unchanged",
        action="store_true",
        help="also say what it costs to go on without a new plan",
    )
    replan.add_argument(
        "--config",
        help="a configs/*.py file of the run; needed, or --model or --model_config, for plans by step time",
    )
    _sizes(replan)
    _step(replan)
    replan.add_argument("--time_limit_s", type=float, help="default 1.5, or none with --evaluations")
    replan.add_argument("--evaluations", type=int, help="plans to score; alone, it makes the plan reproducible")
    replan.add_argument("--constraints", help="a constraints.json: who may sit where")
    replan.add_argument("--out", help="where to write plan.json")
    replan.add_argument("--out_network", help="where to write the changed network.json, with --out")


def _pareto(pareto: argparse.ArgumentParser):
    pareto.add_argument("--network", required=True, help="network.json with prices")
    _job(pareto)
    pareto.add_argument("--points", type=int, default=8, help="searches, which give at most so many plans")
    pareto.add_argument("--time_limit_s", type=float, help="of all searches together; default 30")
    pareto.add_argument("--evaluations", type=int, help="plans to score; alone, it makes the plans reproducible")
    pareto.add_argument("--budget_per_hour", type=float, help="what the devices of a plan may cost in all")
    pareto.add_argument("--seed", type=int, default=0)
    pareto.add_argument("--out", required=True, help="folder for front.md, front.png and the plans")


def _percentile(command: argparse.ArgumentParser, default: str):
    command.add_argument(
        "--percentile", type=int, help=f"which of the network's bandwidth_percentiles to go by (default: {default})"
    )


def _job(command: argparse.ArgumentParser):
    """The flags of a job (planner.commands.flags_job)."""
    command.add_argument("--config", help="a configs/*.py file, which gives sizes, memory and options of its run")
    command.add_argument("--stages", type=_count, help="a number, or auto (by step time); default: the config's")
    command.add_argument("--pipelines", type=_count, help="a number, or auto, the default with --stages auto")
    _sizes(command)
    _step(command)


def _sizes(command: argparse.ArgumentParser):
    command.add_argument("--c_dp_bytes", type=float, help="bytes of gradients of one stage")
    command.add_argument("--c_pp_bytes", type=float, help="bytes one pipeline sends over one boundary in a step")
    command.add_argument(
        "--layers", type=int, help="layers to cut when sizes are given in bytes (default: 24, or --stages if more)"
    )
    command.add_argument(
        "--microbatches", type=int, help="microbatches of a step when sizes are given in bytes (default: 8 a pipeline)"
    )
    command.add_argument("--model", help="a preset such as gpt3_1p3b, instead of byte counts")
    command.add_argument(
        "--model_config",
        help="instead: a config.json of Hugging Face (no weights); by step time and in any shape, unless flags say so",
    )
    command.add_argument("--global_batch", type=int, help="sequences of a step (default: 1024)")
    command.add_argument(
        "--sequence",
        type=int,
        help="tokens of a sequence (default: the preset's; with --model_config 2048, or the model's most if fewer)",
    )
    command.add_argument("--microbatch_size", type=int, help="sequences of a microbatch (default: the profile's, or 1)")
    command.add_argument("--dtype", help="of the computation: bfloat16 or float32 (default: the profile's or bfloat16)")
    command.add_argument("--remat", help="recompute or dots, for memory limits (default: the profile's, or recompute)")


def _step(solve: argparse.ArgumentParser):
    solve.add_argument(
        "--objective",
        choices=OBJECTIVES,
        help="comm_cost: Eq. 1-4 (default); step_time: what the simulator says; cost_per_step: its price",
    )
    solve.add_argument("--profile", help="profile.json with the seconds of each kind of device (default: `devices`)")
    solve.add_argument("--flops", help="without a profile: peak FLOP/s, as 125e12 or V100=125e12,T4=65e12")
    solve.add_argument("--efficiency", type=float, default=0.35, help="share of peak FLOP/s that the maths reaches")
    solve.add_argument("--codec", help="what crosses a boundary: none (default), bf16, int8, ...")
    solve.add_argument("--schedule", choices=("1f1b", "gpipe"), help="default: 1f1b")


def _count(text: str) -> int | str:
    """A number, or the word auto."""
    if text != "auto" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number, or auto")
    return text if text == "auto" else int(text)


def _network(network: argparse.ArgumentParser):
    sources = network.add_subparsers(dest="source", required=True)
    generate = sources.add_parser("generate", help="a network from a seed")
    generate.add_argument("--kind", required=True, help="homogeneous, datacenter, spot, multi_dc, regional, ...")
    generate.add_argument("--devices", type=int, required=True)
    generate.add_argument("--seed", type=int, default=0)
    measured = sources.add_parser("import", help="rows of src,dst,latency_ms,bandwidth_gbps with a header line")
    measured.add_argument("--csv", required=True)
    for source in (generate, measured):
        source.add_argument("--out", required=True, help="where to write network.json")


def main(arguments: list[str] | None = None) -> int:
    """Run one command, and return its exit code. Bad input gives one line and code 2. An interrupted search ends with
    its best plan and code 0; any other interrupted command ends with 130."""
    print_what_cannot_be_shown_as_escapes()
    flags = parser().parse_args(arguments)
    try:
        return importlib.import_module(COMMANDS[flags.command]).run(flags)
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] in ("jaxdt", "planner"):
            raise  # ours, and so a mistake of ours
        hint = "expected the environment of this repository: source .venv/bin/activate"
        print(f"error: this Python ({sys.executable}) has no {error.name}, {hint}", file=sys.stderr)
        return 2
    except (OSError, MemoryError) as error:
        where = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
        print(f"error: {where}{type(error).__name__}: {why(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
