"""How every script runs: bad input is one line on standard error and exit code 2. Needs no jax."""

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Collection

from absl import app, flags, logging

from jaxdt.runtime.storage.durable import refusal
from jaxdt.spec.errors import BadInput, nearest

FLAGS = flags.FLAGS


def run(main: Callable[..., int], commands: Collection[str] = ()) -> None:
    """Run a script: bad input is one line on standard error and exit code 2. With `commands`, main is given the one
    that stands on the command line."""

    def guarded(argv: list[str]):
        logging.set_verbosity(logging.FATAL)  # Orbax tells a story per checkpoint, and what is wrong we say
        try:
            words = argv[1:]
            if commands and (len(words) != 1 or words[0] not in commands):
                got = f"{' '.join(words) or 'none'}{nearest(' '.join(words), commands)}"
                raise BadInput(f"command: got {got}, expected one of {', '.join(commands)}")
            if words and not commands:
                raise BadInput(f"argument: got {words[0]!r}, expected flags only")
            sys.exit(main(*words))
        except BadInput as error:
            _refuse(str(error))
        except OSError as error:  # a disk that is full or a folder that may not be written
            if not (reason := refusal(error, _run_dir() or "disk")):
                raise
            _refuse(reason)

    app.run(guarded, flags_parser=_parse)


def _run_dir() -> str | None:
    return FLAGS.run_dir if "run_dir" in FLAGS else None


def _refuse(reason: str) -> None:
    with contextlib.suppress(OSError):  # the log may be on the disk that is full
        sys.stdout.flush()
        print(reason, file=sys.stderr, flush=True)
    os._exit(2)  # another thread may be inside XLA, where the interpreter's own exit would abort it


def _parse(argv: list[str]) -> list[str]:
    """The words that are no flags; a flag that is wrong is one line and exit code 2, like all bad input."""
    logging.get_absl_logger().setLevel("ERROR")  # what a config file makes the flags' own library say, we say
    try:
        app.define_help_flags()
        return FLAGS(argv)
    except (flags.Error, KeyError, AttributeError, OSError) as error:
        unknown = isinstance(error, KeyError | AttributeError)  # what ml_collections raises for --config.NO_SUCH_FIELD
        while error.args and isinstance(error.args[0], Exception):
            error = error.args[0]
        reason = " ".join(str(error.args[-1] if error.args else error).split())
        if "has no attribute 'get_config'" in reason:
            _refuse("--config: the file has no function get_config(), expected one that returns a ConfigDict")
        _refuse(f"--config: unknown field {reason}" if unknown else reason)
    except Exception as error:  # a config file is a program, which may raise anything
        at = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{at.filename}:{at.lineno}"
        if isinstance(error, SyntaxError):
            file = next((word.partition("=")[2] for word in argv if word.startswith("--config=")), "")
            where = f"{error.filename or file}:{error.lineno or 1}"
        _refuse(f"--config: {where}: {type(error).__name__}: {' '.join(str(error).split())}")
