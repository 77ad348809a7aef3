"""The arguments that are read from a source, against those that Python reports."""

import configparser
import http.cookiejar
import inspect
import logging.handlers
import zipfile
from types import ModuleType

import pytest
import torch

from hpctrain.config.source import UnknownError, find_definition, find_module, signature_of

UNNAMED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@pytest.mark.parametrize("module", [torch.optim, configparser, http.cookiejar, logging.handlers, zipfile])
def test_what_is_read_agrees_with_what_python_finds(module: ModuleType) -> None:
    found = find_module(module.__name__)
    assert found is not None
    source, _ = found
    compared = 0
    for name, one in inspect.getmembers(module, inspect.isclass):
        try:
            read = signature_of(*find_definition(source, name))
            taken = inspect.signature(one).parameters.values()
        except (UnknownError, ValueError):
            continue
        named = {each.name: each.default is not each.empty for each in taken if each.kind not in UNNAMED}
        assert dict(read.arguments) == named, name
        compared += 1
    assert compared
