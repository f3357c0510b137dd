"""The exit codes of all commands, with what each means and who ends with it (docs/reference/exit_codes.md)."""

import enum

RUN = "`launch.py`, `train.py`, `coordinate.py`"


class ExitCode(enum.IntEnum):
    """`meaning` and `who` are Markdown."""

    _value_: int
    meaning: str
    who: str

    def __new__(cls, code: int, meaning: str, who: str = "all commands") -> "ExitCode":
        member = int.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        member.who = who
        return member

    DONE = 0, "done"
    FOUND = (
        1,
        "something was found: a check that failed, something to mend, orders that deadlock",
        "`doctor.py`, `checkpoint.py verify`, `simulate.py --orders`, `fuzz_protocol.py`, `trial.py`, "
        "`averaging.py kill`, `compare.py`",
    )
    BAD_INPUT = (
        2,
        "bad input. One line on standard error says which field or file, what came, and what was expected. Also a disk "
        "or a system that refuses (no room, a network file system that is gone, no memory): the line names the file "
        "and the system's words, and `launch.py` or a coordinator prints the command that continues the run",
    )
    LOST = (
        3,
        "a peer was lost, or asked to leave, before the first step, which needs all peers of the plan; or the "
        "coordinator for longer than `net.outage_s`; or all peers of `launch.py`, with no other on its way; or a whole "
        'stage with `wiring.on_stage_lost = "stop"`; or a worker of the ablation',
        f"{RUN}, `ablate.py`",
    )
    DIVERGED = 4, 'the gradient was not finite, with `train.on_nonfinite = "stop"`', RUN
    SUPERSEDED = (
        5,
        "a coordinator of a later term has taken over: this one has ended itself, and neither the run nor its files. "
        "Do not start it again",
        "`coordinate.py`",
    )
    FORGOTTEN = (
        6,
        "the run does not know this peer any more: it may join as a newcomer. A process with `--join` asks again by "
        "itself",
        "`train.py`",
    )
    NOT_JOINED = 7, "the run was over before this peer had joined it, so it has trained nothing", "`train.py`"
    BUG = 70, "a thread of the process has died by an error of jaxdt itself, whose lines it prints"
    INTERRUPTED = 130, "interrupted", f"{RUN}, `ablate.py`, `python -m planner`"
    STDOUT_CLOSED = 141, r"the reader of standard output has closed it, as in `script \| head`"
    TERMINATED = (
        143,
        "the coordinator got SIGTERM and has ended; the run continues, and its peers wait for a coordinator",
        "`coordinate.py`",
    )
