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
