"""One question to a run's coordinator, from a process that is no peer of the run: a newcomer or an operator."""

from queue import Empty, SimpleQueue

from jaxdt.protocol.events import COORDINATOR, Ended, Header, Message, Received
from jaxdt.protocol.message import from_plain, to_plain
from jaxdt.runtime.identity.credential import Credential
from jaxdt.runtime.net.address import Address, format_address
from jaxdt.runtime.net.options import TransportCallbacks, TransportSettings
from jaxdt.runtime.net.transport import Transport
from jaxdt.spec.errors import BadInput

ANSWER_S = 30.0


def ask_coordinator(
    name: str,
    own_id: int,
    question: Message,
    coordinator: Address,
    credential: Credential | None,
    allow_plaintext: bool,
) -> Message:
    """The coordinator's answer. BadInput, which begins with `name`, if it refuses, or does not answer. `own_id`: the
    temporary id or operator's id under which the question is sent."""
    answers: SimpleQueue[Message | str] = SimpleQueue()

    def on_message(src: int, event: Received, leaves: list) -> None:
        answers.put(event.body)

    def on_link(peer: int | None, state: str, reason: str) -> None:
        if state == "refused":
            answers.put(reason)

    transport = Transport(
        own_id,
        "",
        None,
        credential,
        TransportCallbacks(on_message, on_link, expect=lambda src, event, table: None, read=from_plain),
        TransportSettings(allow_plaintext=allow_plaintext),
    )
    where = f"{name}: coordinator {format_address(coordinator)}"
    try:
        transport.connect(COORDINATOR, coordinator)
        transport.send(COORDINATOR, to_plain(Header("", 0, 0, own_id), question))
        answer = answers.get(timeout=ANSWER_S)
    except Empty:
        raise BadInput(f"{where}: no answer within {ANSWER_S:.0f} s") from None
    finally:
        transport.close(0.0)
    if isinstance(answer, Ended):
        answer = answer.reason
    if isinstance(answer, str):
        raise BadInput(f"{where}: {answer}")
    return answer
