"""Versions of what a run needs: `python -m hpctrain.doctor.versions` prints those of this Python as one JSON object."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys

from hpctrain.startup import __version__

PACKAGES = ("torch", "submitit", "hydra-core", "omegaconf", "numpy")
"""Packages whose versions are reported."""


def versions() -> dict[str, str]:
    """The versions of Python, hpctrain and its packages; empty for one that isn't installed. Nothing is imported."""
    found = {"python": platform.python_version(), "hpctrain": __version__}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(versions()) + "\n")
