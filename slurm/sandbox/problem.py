"""The error that the sandbox raises for its user."""

from __future__ import annotations


class SandboxError(Exception):
    """A message for the user, with what to do next, and the exit code.

    Exit code 2 is a wrong request or a machine that lacks something; 1 is everything else.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code
