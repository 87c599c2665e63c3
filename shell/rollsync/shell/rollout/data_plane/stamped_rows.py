"""Rows as bytes that say which write they are from.

A queue that many processes can reach keeps no record of who wrote what. Rule kept here: a row's
bytes begin with the stamp of its write, so that a row which somebody else has written, or a write
that had been given up, is noticed when it is read.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from safetensors.torch import load, save

from rollsync.shell.rollout.data_plane.protocol import Row
from rollsync.shell.rollout.errors import DataPlaneError

_WRITER_BYTES = _REVISION_BYTES = 8
_STAMP_BYTES = _WRITER_BYTES + _REVISION_BYTES


class RowStamps:
    """The stamps of one writer. A stamp is hexadecimal text: the writer, then the revision."""

    def __init__(self) -> None:
        self._writer = secrets.token_hex(_WRITER_BYTES)

    def stamp(self, revision: int) -> str:
        """Of the write that made this revision."""
        return self._writer + revision.to_bytes(_REVISION_BYTES, "big").hex()

    def check(self, found: str, expected: str, where: str, *, exact: bool) -> None:
        """A row has to be of the expected write.

        Args:
            where: partition and row, for the error.
            exact: False also takes another write of this writer, which may have come meanwhile.

        Raises:
            DataPlaneError: it is of another.
        """
        if found == expected or (not exact and found.startswith(self._writer)):
            return
        raise DataPlaneError(
            f"{where} is not as this run has written it: another process writes to the partition, "
            "or a write that was given up has come through",
            remedy="end what else writes to this queue; the run can be resumed",
        )


def payloads_of(rows: Mapping[str, Row], stamps: Mapping[str, str]) -> list[bytes]:
    """The bytes of each row, in their order. Blocks."""
    return [
        bytes.fromhex(stamps[key])
        + save({name: tensor.detach().to("cpu").contiguous() for name, tensor in row.items()})
        for key, row in rows.items()
    ]


def stamp_of(payload: bytes) -> str:
    """The stamp that a row's bytes begin with."""
    return payload[:_STAMP_BYTES].hex()


def rows_of_payloads(keys: Sequence[str], payloads: Sequence[bytes]) -> dict[str, Row]:
    """The rows of the keys; their tensors are nobody else's. Blocks."""
    return {key: load(payload[_STAMP_BYTES:]) for key, payload in zip(keys, payloads, strict=True)}
