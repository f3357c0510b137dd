"""How a newcomer learns its peer id and its stage: it asks the coordinator, with the run's credential."""

import secrets
from pathlib import Path
from queue import Empty, SimpleQueue

from jaxdt.protocol.events import COORDINATOR, TEMPORARY_IDS, Ended, Header, Join, Message, Received, Welcome
from jaxdt.protocol.message import from_plain, to_plain
from jaxdt.runtime.net.address import Address, format_address
from jaxdt.runtime.net.credential import load as load_credential
from jaxdt.runtime.net.options import TransportCallbacks, TransportSettings
from jaxdt.runtime.net.transport import Transport
from jaxdt.spec.errors import BadInput

ANSWER_S = 30.0


def ask_to_join(coordinator: Address, credential: Path | None, allow_plaintext: bool = False) -> Welcome:
    """Ask the coordinator for a place in the run. BadInput if it refuses or does not answer."""
    answers: SimpleQueue[Message | str] = SimpleQueue()

    def on_message(src: int, event: Received, leaves: list) -> None:
        answers.put(event.body)

    def on_link(peer: int | None, state: str, reason: str) -> None:
        if state == "refused":
            answers.put(reason)

    temporary_id = TEMPORARY_IDS + secrets.randbelow(TEMPORARY_IDS)
    transport = Transport(
        temporary_id,
        "",
        None,
        load_credential(credential) if credential else None,
        TransportCallbacks(on_message, on_link, expect=lambda src, event, table: None, read=from_plain),
        TransportSettings(allow_plaintext=allow_plaintext),
    )
    where = f"coordinator {format_address(coordinator)}"
    try:
        transport.connect(COORDINATOR, coordinator)
        transport.send(COORDINATOR, to_plain(Header("", 0, 0, temporary_id), Join()))
        answer = answers.get(timeout=ANSWER_S)
    except Empty:
        raise BadInput(f"--join: {where}: no answer within {ANSWER_S:.0f} s") from None
    finally:
        transport.close(0.0)
    if isinstance(answer, Welcome):
        return answer
    raise BadInput(f"--join: {where}: {answer.reason if isinstance(answer, Ended) else answer}")
