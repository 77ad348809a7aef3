"""Runs the programs on docs/reference/checkpoint_format.md."""

from __future__ import annotations

import contextlib
import io
import sys
import warnings

import pytest


def run(text: str, *arguments: object) -> str:
    """Run a program that can't import hpctrain; a process of its own would import torch for a second."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setitem(sys.modules, "hpctrain", None)
        patch.setattr(sys, "argv", ["-c", *map(str, arguments)])
        exec(text, {"__name__": "__main__", "sys": sys})
    return printed.getvalue()
