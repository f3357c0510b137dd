"""When the held-out loss is measured."""


def n_held_out(evals: tuple[int, int], step: int, n_steps: int) -> int:
    """How many held-out microbatches a step has. `evals`: every how many steps (0: never; also in the last one), and
    how many."""
    every, n = evals
    return n if every and (step % every == 0 or step == n_steps - 1) else 0
