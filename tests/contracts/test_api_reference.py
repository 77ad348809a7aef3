"""The API reference is generated from docstrings, and every name on it can be imported as the page spells it."""

import importlib
from pathlib import Path

import pytest

from tests.contracts.api_reference import OBJECTS, reference

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "api.md"


def test_the_page_is_up_to_date():
    command = "python tests/contracts/api_reference.py > docs/reference/api.md"
    assert PAGE.read_text() == reference(), f"run: {command}"


@pytest.mark.parametrize("path", OBJECTS)
def test_every_entry_can_be_imported_under_its_name(path):
    module, _, name = path.rpartition(".")
    assert getattr(importlib.import_module(module), name).__doc__
