"""The enforcement token: at most one stage of a run waits without a limit of time.

A stage that enforces waits for replicas of certain pipelines. Each of those pipelines is blocked at another stage for
one window at most, since no other stage enforces: it arrives in the end, or leaves. If two stages enforced at once,
each could wait for a replica that the other one holds.
"""


class EnforcementToken:
    """Shared by the matchers of all stages of a run. The holder is a matcher."""

    def __init__(self):
        self.holder: object | None = None

    def take(self, holder: object) -> bool:
        """Whether `holder` has the token now."""
        if self.holder is None:
            self.holder = holder
        return self.holder is holder

    def release(self, holder: object) -> None:
        """Give the token back, if `holder` has it."""
        if self.holder is holder:
            self.holder = None
