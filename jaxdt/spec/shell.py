"""Commands that people paste into a shell."""

import shlex


def shell_line(*words: object) -> str:
    """One line that a POSIX shell reads as these words, whatever blanks and quotes are in them."""
    return shlex.join(map(str, words))
