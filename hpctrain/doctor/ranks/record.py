"""The record of one rank, which says how far it came."""

from __future__ import annotations

import contextlib
from typing import Any

from hpctrain.doctor.folder import DoctorFolder
from hpctrain.files import write_json


class RankRecord:
    """What a rank has found out; it is written at each stage, so that it also tells where a rank hangs.

    Args:
        folder: of the examination.
        rank: in the world.
        known: what is known from the start.
    """

    def __init__(self, folder: DoctorFolder, rank: int, known: dict[str, Any]) -> None:
        self._path = folder.rank(rank)
        self._values: dict[str, Any] = {"rank": rank, "stage": "", **known}

    def enter(self, stage: str, **values: Any) -> None:
        """Begin a stage, and add values of the one before.

        Args:
            stage: what the rank does next, as the end of "it stopped while ...".
            values: of JSON's types.
        """
        self._values |= {"stage": stage, **values}
        self._write()

    def fail(self, error: str, trace: str) -> None:
        """Record the error that ends this rank."""
        self._values |= {"error": error, "traceback": trace}
        self._write()

    def _write(self) -> None:
        # the next stage may still succeed, and the command notices that a record is missing
        with contextlib.suppress(OSError):
            write_json(self._path, self._values, durable=False)
