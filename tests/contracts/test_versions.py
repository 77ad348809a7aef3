"""The versions that README calls tested are those with which the tests are run."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "hydra-core", "numpy")


def test_the_table_of_versions_has_the_rows_of_run_versions_and_the_pinned_ones() -> None:
    cells = [line.strip("| ").split(" | ") for line in (ROOT / "README.md").read_text().splitlines()]
    table = {(*row[:4], row[6]) for row in cells if len(row) == 7 and row[0].startswith("3.")}
    rows = re.findall(r"^(3\.\d+) torch==(\S+) hydra-core==(\S+) numpy==([\d.]+)", versions_script(), re.MULTILINE)
    pins = dict(line.split("==") for line in (ROOT / "tests/constraints.txt").read_text().splitlines() if "==" in line)
    pinned = ("3.11", *(pins[name] for name in PACKAGES))
    assert rows
    expected = {(*row, "the same") for row in rows[1:]} | {(*rows[0], "`bash tests/run-versions`")}
    assert {row for row in table if "tests/run`" not in row[4] and "tests/slurm" not in row[4]} == expected
    assert (*pinned, "`bash tests/run`") in table


def test_the_package_admits_them() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    for name in ("hydra-core", "torch"):
        (low,) = re.findall(rf'"{name}>=([\d.]+)', project)
        used = re.findall(rf"{name}==([\d.]+)", versions_script())
        assert min(map(version, used)) >= version(low)
    assert 'requires-python = ">=3.11"' in project


def versions_script() -> str:
    return (ROOT / "tests" / "run-versions").read_text()


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.strip(".").split(".")))
