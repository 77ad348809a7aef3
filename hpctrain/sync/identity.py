"""What identifies a run at every service: a moved run keeps it, and a copy gets its own."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from hpctrain.files import read_json_or_empty, write_json
from hpctrain.run.directory import RunDirectory

DIGEST_CHARS = 16


def identify(directory: RunDirectory) -> str:
    """Return the run's digest, in hexadecimal, and record it in ``sync/identity.json``.

    When a run is first sent, its digest is made from the manifest and the folder's name. A run directory is a copy if
    its record names another directory, and that one still holds a run with the same digest.

    Raises:
        OSError: the file system's error.
    """
    path = identity_path(directory)
    record = read_json_or_empty(path)
    here = str(directory.path)
    digest = record.get("digest")
    if not isinstance(digest, str) or not digest:
        # a run that started over is a new one: the services have later steps of the one before
        before = sorted(path.parent.name for path in directory.earlier.glob(f"*/{directory.sync.name}"))
        digest = _digest([read_json_or_empty(directory.manifest), directory.path.name, *before])
    elif _is_copy(directory, record.get("directory"), digest):
        digest = _digest([digest, here])
    if record != {"digest": digest, "directory": here}:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"digest": digest, "directory": here})
    return digest


def identity_path(directory: RunDirectory) -> Path:
    """The file with the digest of a run, and with the directory in which it was sent last."""
    return directory.sync / "identity.json"


def _is_copy(directory: RunDirectory, recorded: object, digest: str) -> bool:
    if not isinstance(recorded, str) or recorded == str(directory.path):
        return False
    original = RunDirectory.at(recorded)
    if read_json_or_empty(identity_path(original)).get("digest") != digest:
        return False
    # one directory has one inode number under all its paths: links, and mounts whose device numbers differ
    return original.path.stat().st_ino != directory.path.stat().st_ino


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:DIGEST_CHARS]
