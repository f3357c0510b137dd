"""The digest of this peer's own state, at the versions at which replicas compare theirs (jaxdt.membership.state_check).

The digest is asked for once the gradient of a step is laid out, so that it is made while the exchange continues. The
state does not change meanwhile: its next update waits for a commit, which waits for this peer's `Prepared`, which waits
for the digest.
"""

from jaxdt.protocol import events as ev


class OwnState:
    """The digest of one peer's state. `every_steps`: versions are compared once in so many steps, 0 for never."""

    def __init__(self, stage: int, every_steps: int):
        self._stage = stage
        self._every_steps = every_steps
        self._asked_for: ev.DigestState | None = None
        self.digest: ev.StateDigest | None = None

    @property
    def is_awaited(self) -> bool:
        """Whether the digest was asked for and is still to come."""
        return self._asked_for is not None and self.digest is None

    def is_compared(self, version: int) -> bool:
        return self._every_steps > 0 and version % self._every_steps == 0

    def on_changed(self) -> None:
        self._asked_for = self.digest = None

    def ask(self, version: int, generation: int) -> list[ev.DigestState]:
        """Ask for the digest of the state at `version`, if replicas compare it and it was not asked for yet."""
        if self._asked_for or not self.is_compared(version):
            return []
        self._asked_for = ev.DigestState(version, generation)
        return [self._asked_for]

    def on_arrived(self, digested: ev.Digested) -> None:
        """The digest is here, unless the state is another one by now."""
        if self._asked_for == ev.DigestState(digested.version, digested.generation):
            self.digest = ev.StateDigest(self._stage, digested.version, digested.digest, digested.norm, digested.sums)
