"""The frame in which every script runs: bad input is one line on standard error and exit code 2. Needs no jax."""

import contextlib
import difflib
import faulthandler
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NoReturn

from absl import app, command_name, flags, logging

from jaxdt.run.config import REMOVED
from jaxdt.run.errors import (
    BadInput,
    ThreadDied,
    nearest,
    print_what_cannot_be_shown_as_escapes,
    require_text,
    unreadable,
)
from jaxdt.run.exit_codes import ExitCode
from jaxdt.runtime.net.descriptor_limit import raise_descriptor_limit
from jaxdt.runtime.storage.durable import refusal

FLAGS = flags.FLAGS
HELP = frozenset(("--help", "-help", "-h", "-?", "--helpshort"))
LONG_HELP = frozenset(("--helpfull", "-helpfull", "--helpxml", "-helpxml"))
UNKNOWN_FIELD = re.compile(
    r"""['"](?P<name>\w+)['"](?: Did you mean "(?P<known>\w+)" instead of .*)?$"""
)  # ml_collections
CONFIG_FILE_RAISED = "Error whilst parsing config file"  # ml_collections
# The messages of the parsers of values, and the values that they expect.
WRONG_VALUE = re.compile(r"flag (?P<flag>--[\w.]+)=(?P<got>.*?): (?P<why>.*)$")
EXPECTED = {
    "invalid literal for int()": "an integer",
    "could not convert string to float": "a number",
    "Non-boolean argument to boolean flag": "true or false",
}
# absl.app defines these flags for app.run, which `run` replaces here. They would do nothing, so they are refused.
APP_RUN_FLAGS = (
    "only_check_args",
    "pdb",
    "pdb_post_mortem",
    "profile_file",
    "run_with_pdb",
    "run_with_profiling",
    "use_cprofile_for_profiling",
)


def run(
    main: Callable[..., int],
    commands: Collection[str] = (),
    takes_words: bool = False,
    complete: Callable[[list[str]], list[str]] | None = None,
    help_text: Callable[[], str] | None = None,
) -> None:
    """Run a script and exit with the code that `main` returns. Bad input is one line on standard error and exit code 2.
    With `commands`, one of them must stand on the command line, and is passed to `main`. With `takes_words`, other
    words may follow it. `complete` may change the command line before its flags are read. `help_text` is what --help
    prints, instead of the docstring and the flags of the script alone."""
    raise_descriptor_limit()
    _restart_in_utf8()
    print_what_cannot_be_shown_as_escapes()
    try:
        for word in sys.argv:
            require_text("argument", word)
        require_text("current folder", os.getcwd())
        if help_text and HELP.intersection(sys.argv[1:]):
            print(help_text(), flush=True)
            sys.exit(0)
        if complete:
            sys.argv = complete(sys.argv)
        words = _parse_flags(sys.argv)
        if commands and (not words or words[0] not in commands or (len(words) > 1 and not takes_words)):
            got = f"{' '.join(words) or 'none'}{nearest(' '.join(words), commands)}"
            raise BadInput(f"command: got {got}, expected one of {', '.join(commands)}")
        if words and not commands:
            raise BadInput(f"argument: got {words[0]!r}, expected flags only{_flag_for(words[0])}")
        code = main(*words)
    except BadInput as error:
        _refuse(str(error))
    except ThreadDied as error:
        _refuse(str(error), ExitCode.BUG)
    except BrokenPipeError:  # the reader has closed the pipe, as in `script | head`
        os._exit(ExitCode.STDOUT_CLOSED)
    except (OSError, MemoryError) as error:  # a disk that is full, or a folder that may not be written
        run_dir = FLAGS.run_dir if "run_dir" in FLAGS else None
        _refuse(refusal(error, run_dir or "the system"))
    try:
        sys.stdout.flush()
    except OSError:  # the log may be on a disk that is full; the code is that of the run all the same
        os._exit(code)
    sys.exit(code)


def _restart_in_utf8() -> None:
    """Start this process again in Python's UTF-8 mode where its locale has another encoding: paths, prompts and files
    are UTF-8 here, and so are those of the processes that it starts."""
    if sys.getfilesystemencoding() != "utf-8":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def _refuse(reason: str, code: int = ExitCode.BAD_INPUT) -> None:
    with contextlib.suppress(OSError):  # the log may be on the disk that is full
        sys.stdout.flush()
        print(reason, file=sys.stderr, flush=True)
    os._exit(code)  # another thread may be inside XLA, where the interpreter's own exit would abort it


def _parse_flags(argv: list[str]) -> list[str]:
    """Parse the flags and return the other words. A wrong flag is bad input: one line."""
    command_name.make_process_name_useful()
    with contextlib.suppress(OSError, RuntimeError):  # standard error may be closed
        faulthandler.enable()
    logging.use_absl_handler()
    logging.get_absl_logger().setLevel("ERROR")  # absl logs errors of a config file, which we print ourselves
    app.define_help_flags()
    for name in APP_RUN_FLAGS:
        if name in FLAGS:
            delattr(FLAGS, name)
    try:
        words = FLAGS(argv)[1:]
    except BrokenPipeError:  # of whoever reads --help
        raise
    except SystemExit:  # absl has printed the help, and would end with 1
        if not (HELP | LONG_HELP).intersection(word.partition("=")[0] for word in argv):
            raise
        sys.stdout.flush()
        sys.exit(0)
    except (flags.Error, KeyError, AttributeError, OSError) as error:
        _refuse(_flag_refusal(error, argv))
    except Exception as error:  # a config file is a program, which may raise anything
        _refuse(_config_refusal(error, argv))
    require_numbers(FLAGS)
    logging.set_verbosity(logging.FATAL)  # Orbax logs many lines for each checkpoint, and we print what is wrong
    return words


def require_numbers(values: flags.FlagValues) -> None:
    """BadInput for a flag whose number is NaN, which passes a flag's bounds: it is neither below nor above any."""
    for name in values:
        if type(value := values[name].value) is float and math.isnan(value):
            raise BadInput(f"--{name}: got nan, expected a number ({values[name].help.rstrip('.')})")


def required(name: str) -> Any:
    """The value of a flag; BadInput if it was not given."""
    flag = FLAGS[name]
    if flag.value is None:
        where = "".join(f"; {file} does not give it: is it another script's?" for file in flag_files(sys.argv))
        raise BadInput(f"--{name}: missing, expected --{name}=..., see --help ({flag.help.rstrip('.')}){where}")
    return flag.value


def refuse_flag_file(error: flags.CantOpenFlagFileError) -> NoReturn:
    """End a script whose flag of the config reads the command line, and a flag file that it names, before `run`."""
    print(_flag_file_refusal(error), file=sys.stderr)
    sys.exit(ExitCode.BAD_INPUT)


def _flag_file_refusal(error: flags.CantOpenFlagFileError) -> str:
    written = "launch.py --emit=DIR writes flag files"
    match error.__context__:
        case FileNotFoundError(filename=path):
            return f"--flagfile: {path} is not there, expected a file of flags; {written}"
        case IsADirectoryError(filename=path):
            return f"--flagfile: {path} is a folder, expected a file of flags; {written}"
        case OSError(filename=path, strerror=reason):
            return f"--flagfile: {path} cannot be read ({reason}), expected a file of flags"
    return f"--flagfile: {error}"


def config_file_refusal(error: OSError) -> str:
    """One line for the error that ml_collections raised for a config file that it could not read."""
    reason = str(error).strip().splitlines()[-1].strip()
    path = reason.rpartition("'")[0].rpartition("'")[2]
    try:
        Path(path).open().close()
    except OSError as cause:
        return f"--config: {unreadable(path, cause)}"
    return f"--config: {reason}"


def _flag_refusal(error: Exception, argv: list[str]) -> str:
    """One line for an error that absl or ml_collections raised for a flag."""
    if isinstance(error, flags.CantOpenFlagFileError):
        return _flag_file_refusal(error)
    if isinstance(error, flags.UnrecognizedFlagError) and (fields := _fields_named(error.flagname)):
        return f"--{error.flagname}: unknown flag (did you mean {' or '.join(f'--config.{name}' for name in fields)}?)"
    if isinstance(error, flags.UnrecognizedFlagError) and not any(f"-{error.flagname}" in word for word in argv):
        return f"--{error.flagname}: unknown flag, given by {' or '.join(flag_files(argv))}: is it another script's?"
    if isinstance(error, flags.UnrecognizedFlagError):
        return f"--{error.flagname}: unknown flag{_flag_for(error.flagname) or ', see --help'}"
    if isinstance(error, OSError):
        return config_file_refusal(error)
    told = error.__context__  # by ml_collections, as an error whose text is the traceback of what the file raised
    if told and str(told).startswith(CONFIG_FILE_RAISED) and isinstance(told.__context__, Exception):
        return _config_refusal(told.__context__, argv)
    is_unknown_field = isinstance(error, KeyError | AttributeError)  # of ml_collections, for --config.NO_SUCH_FIELD
    while error.args and isinstance(error.args[0], Exception):
        error = error.args[0]
    reason = " ".join(str(error.args[-1] if error.args else error).split())
    if "has no attribute 'get_config'" in reason:
        return "--config: the file has no function get_config(), expected one that returns a ConfigDict"
    if is_unknown_field and (found := UNKNOWN_FIELD.match(reason)):
        return _unknown_field(found["name"], found["known"], argv)
    if wrong := WRONG_VALUE.match(reason):
        expected = next((what for words, what in EXPECTED.items() if words in wrong["why"]), None)
        return f"{wrong['flag']}: got {wrong['got']!r}, expected {expected}" if expected else reason
    return f"--config: {reason}" if is_unknown_field else reason


def _flag_for(word: str) -> str:
    """' (did you mean "--NAME"?)' for a word that is no flag, or ''."""
    if word == "run_dir" and "out" in FLAGS:  # a script whose results are not those of a run
        return ' (did you mean "--out"?)'
    if "run_dir" in FLAGS and Path(word).is_dir():
        return f' (did you mean "--run_dir={word}"?)'
    modules = FLAGS.flags_by_module_dict()
    names = [flag.name for module in modules if not module.startswith("absl.") for flag in modules[module]]
    close = difflib.get_close_matches(word, names, n=1)  # without the dashes, which would make short names similar
    return f' (did you mean "--{close[0]}"?)' if close else ""


def flag_files(argv: list[str]) -> list[str]:
    """The flag files that a command line names."""
    named = [word.partition("=") for word in argv if word.lstrip("-").startswith("flagfile")]
    return [path or argv[argv.index(word) + 1] for word, _, path in named if path or argv[-1] != word]


def _unknown_field(name: str, known: str | None, argv: list[str]) -> str:
    """One line for a field that a config does not have; `known`: the most similar one that it has."""
    typed = [word.partition("=")[0] for word in argv if word.startswith("--config.")]
    flag = next((word for word in typed if name in word.split(".")), None)
    for field, (_, way_now) in REMOVED.items():
        if flag == f"--config.{field}" or (not flag and field.endswith(f".{name}")):
            return f"{flag or '--config'}: the config has no field {field} any more; {way_now}"
    elsewhere = [f"--config.{field}" for field in _fields_named(name)]
    known = " or ".join(elsewhere) or (known and f'"{known}"')  # the same name in another section comes first
    hint = f" (did you mean {known}?)" if known else ""
    return f"{flag}: unknown field{hint}" if flag else f"--config: unknown field {name}{hint}"


def _fields_named(flag: str) -> list[str]:
    """The fields of the config whose names end so, for a script that has a config."""
    from jaxdt.cli.config_fields import all_names

    return [name for name in all_names() if name.rpartition(".")[2] == flag] if "config" in FLAGS else []


def _config_refusal(error: Exception, argv: list[str]) -> str:
    """One line for what a config file has raised."""
    return f"--config: {_place_of(error, argv)}: {type(error).__name__}: {' '.join(str(error).split())}"


def _place_of(error: Exception, argv: list[str]) -> str:
    """FILE:LINE of an error in a config file."""
    if isinstance(error, SyntaxError):
        file = next((word.partition("=")[2] for word in argv if word.startswith("--config=")), "")
        return f"{error.filename or file}:{error.lineno or 1}"
    raised_at = traceback.extract_tb(error.__traceback__)[-1]
    return f"{raised_at.filename}:{raised_at.lineno}"
