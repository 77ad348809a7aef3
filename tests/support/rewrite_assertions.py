"""Compile the test modules once, as pytest does when it collects them: with assertions that explain themselves.

    python tests/support/rewrite_assertions.py

Each worker collects all modules, and would compile them all, which takes 5 s of a core: where
PYTHONDONTWRITEBYTECODE is set, none leaves them to the others, and elsewhere all begin at the same time.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from _pytest.assertion import rewrite

TESTS = Path(__file__).parents[1]
STATE = SimpleNamespace(trace=lambda text: None)
"""What pytest's functions report to."""


def main() -> None:
    for file in TESTS.rglob("*.py"):
        if file.name != "conftest.py" and not file.name.startswith("test_"):
            continue
        compiled = rewrite.get_cache_dir(file) / f"{file.stem}{rewrite.PYC_TAIL}"
        if rewrite._read_pyc(file, compiled) is None:
            compiled.parent.mkdir(exist_ok=True)
            status, code = rewrite._rewrite_test(file, None)
            rewrite._write_pyc(STATE, code, status, compiled)


if __name__ == "__main__":
    main()
