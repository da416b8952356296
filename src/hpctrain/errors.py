"""Errors that a user can fix, which end a command with one line instead of a traceback."""


class HpctrainError(Exception):
    """A problem that the user can fix; the message is one line that says what is wrong and what to do."""


class UsageError(HpctrainError):
    """An error in the command line. Every rank detects it by itself, so rank 0 alone prints it."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its type if it has no message."""
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
