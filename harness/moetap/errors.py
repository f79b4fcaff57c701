"""Errors that a user can act on.

Knows the two kinds of failure that moetap reports and their exit codes. Knows nothing about what
failed: the code that raises writes one clear line that says what, where and what to do;
`moetap.cli` is the one place that turns an error into an exit code.
"""

from __future__ import annotations


class MoetapError(Exception):
    """Something failed for a reason outside the command line: a file, a model, a machine. Exit code
    1.
    """

    exit_code = 1


class UsageError(MoetapError):
    """The command line, or the arguments of a call, ask for something that makes no sense. Exit
    code 2.
    """

    exit_code = 2


def first_line(error: BaseException) -> str:
    """Kind and first line of another library's error, for a message of ours of one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
