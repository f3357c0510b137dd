"""One question to a run's coordinator, from a process that is no peer of the run: a newcomer or an operator."""

import secrets
import time
from queue import Empty, SimpleQueue

from jaxdt.protocol import events as ev
from jaxdt.protocol.message import from_plain, to_plain
from jaxdt.run.errors import BadInput
from jaxdt.runtime.identity.credential import Credential
from jaxdt.runtime.net.address import Address, format_address
from jaxdt.runtime.net.transport import Transport
from jaxdt.runtime.reporting.console import print_line

ANSWER_S = 30.0
SAID_S = 2.0  # who waits for longer is told
NOBODY_LISTENS = "the run has ended, or its coordinator is elsewhere"
MAY_ASK = ": it may have to find out whether an earlier process of this peer still lives"
NO_ANSWER = "is this the address of a coordinator?"


class CoordinatorAway(BadInput):
    """No process answers at the coordinator's address: it may be started again there."""


class OperatorRefused(BadInput):
    """The coordinator has heard an operator's request, and does not carry it out."""


def ask_coordinator(
    name: str,
    own_id: int,
    question: ev.Message,
    coordinator: Address,
    credential: Credential | None,
    allow_plaintext: bool,
    patience_s: float = ANSWER_S,
) -> ev.Message:
    """The coordinator's answer. BadInput, which begins with `name`, if it refuses; CoordinatorAway if it does not
    answer, or cannot be reached for `patience_s`. `own_id`: the temporary id or operator's id under which the question
    is sent."""
    answers: SimpleQueue[ev.Message | BadInput] = SimpleQueue()

    def on_message(src: int, event: ev.Received, leaves: list) -> None:
        answers.put(event.body)

    def on_link(peer: int | None, state: str, reason: str) -> None:
        if state == "refused":
            answers.put(BadInput(reason))
        elif state == "gone":
            answers.put(CoordinatorAway(f"nobody listens there: {NOBODY_LISTENS}"))
        elif state in ("down", "no way"):
            answers.put(CoordinatorAway(f"not reached: {reason}; {NO_ANSWER}"))

    transport = Transport(
        own_id,
        "",
        on_message=on_message,
        on_link=on_link,
        read=from_plain,
        credential=credential,
        allow_plaintext=allow_plaintext,
    )
    where = f"{name}: coordinator {format_address(coordinator)}"
    try:
        transport.connect(ev.COORDINATOR, coordinator)
        transport.send(ev.COORDINATOR, to_plain(ev.Header("", 0, 0, own_id), question))
        answer = _first_answer(answers, patience_s)
    finally:
        transport.close(0.0)
    if isinstance(answer, ev.Ended):
        answer = BadInput(answer.reason)
    if isinstance(answer, BadInput):
        raise type(answer)(f"{where}: {without_address(str(answer), coordinator)}")
    return answer


def ask_as_operator(
    command: str,
    coordinator: Address,
    credential: Credential | None,
    peer: int | None = None,
    allow_plaintext: bool = False,
    patience_s: float = 0.0,
) -> str:
    """The coordinator's answer to an operator's request. BadInput and CoordinatorAway as in ask_coordinator."""
    own_id = ev.OPERATOR_IDS + secrets.randbelow(ev.OPERATOR_IDS)
    request = ev.OperatorRequest(command, peer)
    answer = ask_coordinator(command, own_id, request, coordinator, credential, allow_plaintext, patience_s)
    if not isinstance(answer, ev.OperatorAnswer):
        raise BadInput(f"{command}: got {type(answer).__name__} for an answer, expected OperatorAnswer")
    if not answer.accepted:
        raise OperatorRefused(answer.text)
    return answer.text


def without_address(reason: str, coordinator: Address) -> str:
    """The reason, for a line that has said the coordinator's address."""
    address = format_address(coordinator)
    return reason.removeprefix(f"{address}: ").replace(f" {address}:", ":")


def _first_answer(answers: SimpleQueue[ev.Message | BadInput], patience_s: float) -> ev.Message | BadInput:
    """The coordinator's answer or refusal. Else, when the patience is over, why it was not reached."""
    failure = CoordinatorAway(f"no answer within {ANSWER_S:.0f} s")
    is_failing = False
    deadline_s = time.monotonic() + ANSWER_S
    quiet_s = SAID_S if patience_s >= SAID_S else ANSWER_S  # before a line says that there is no answer yet
    while (left_s := deadline_s - time.monotonic()) > 0:
        try:
            answer = answers.get(timeout=min(left_s, quiet_s))
        except Empty:
            if quiet_s == SAID_S and not is_failing:
                print_line(f"has asked the coordinator, waits for its answer for {ANSWER_S:.0f} s at most{MAY_ASK}")
            quiet_s = ANSWER_S
            continue
        if not isinstance(answer, CoordinatorAway):
            return answer
        failure = answer
        if not is_failing:
            is_failing = True
            deadline_s = min(deadline_s, time.monotonic() + patience_s)
            if patience_s >= SAID_S:
                print_line(f"waiting for the coordinator, for {patience_s:.0f} s at most: {failure}")
    return failure
