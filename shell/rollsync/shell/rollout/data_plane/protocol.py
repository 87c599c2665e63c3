"""What a data plane promises: rows of tensors, and a cheap way to hold the rows of a moment.

A row is a mapping from field name to tensor, stored under a key in a partition, with small tags
beside it. Rules of the protocol, each checked by `conformance`:

1. A row keeps what was put: changing the tensors afterwards, or those that `get` returned, changes
   nothing in the plane.
2. `put` on a key that exists merges: named fields and tags are replaced, the others stay.
3. Missing is an error for `get`, and nothing for `clear`: clearing twice is clearing once.
4. `pin` costs the same however many rows there are. What it holds does not change: later puts and
   clears either leave the held rows alone (copy on write) or wait for the release.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

Row = Mapping[str, torch.Tensor]
"""Field name -> tensor, of any shape and dtype."""

TagValue = str | int | float | bool
Tags = Mapping[str, TagValue]
"""Small values beside a row, readable without its tensors."""


@dataclass(frozen=True)
class StoredRow:
    """A row as the plane holds it. Its tensors are the plane's own: read, never written."""

    fields: Row
    tags: Tags = field(default_factory=dict)
    revision: int = 0
    """Grows with every `put` to the key: equal revisions of a key have equal contents."""


class PinnedRows(Protocol):
    """The rows that a partition held at the moment of `DataPlane.pin`, until released.

    `revisions` and `written_since` may be called in any thread.
    """

    @property
    def writes(self) -> int:
        """How many writes of rows the partition had seen. Only for `written_since`."""
        ...

    def written_since(self, writes: int) -> frozenset[str]:
        """Keys of at least the rows that were there and were put after so many writes: all that
        may have another revision than they had then. Costs what was put, not what there is."""
        ...

    def revisions(self, keys: Iterable[str]) -> dict[str, int]:
        """Revision of each key that was there, without reading rows; absent keys are left out."""
        ...

    async def get(self, keys: Sequence[str]) -> dict[str, StoredRow]:
        """The rows of `keys`, in that order.

        Raises:
            DataPlaneError: a key was not there at the moment of the pin, or the pin is released.
        """
        ...

    def release(self) -> None:
        """Let go of the rows. Releasing again does nothing."""
        ...


class DataPlane(Protocol):
    """Rows by partition and key. Keys and partition ids are any non-empty strings."""

    async def put(
        self,
        partition_id: str,
        rows: Mapping[str, Row],
        *,
        tags: Mapping[str, Tags] | None = None,
    ) -> None:
        """Store rows, or replace the named fields and tags of rows that exist.

        Raises:
            DataPlaneError: `tags` names a key that `rows` does not.
        """
        ...

    async def get(
        self, partition_id: str, keys: Sequence[str], *, fields: Sequence[str] | None = None
    ) -> dict[str, Row]:
        """Rows by key, in the order of `keys`; all fields, or the named ones.

        Raises:
            DataPlaneError: a key, or a named field of a row, is not there.
        """
        ...

    async def list_rows(self, partition_id: str) -> dict[str, Tags]:
        """Tags of every row of the partition, by key. Empty for a partition nobody wrote to."""
        ...

    async def clear(self, partition_id: str, keys: Iterable[str]) -> None:
        """Remove rows. Keys that are not there are passed over."""
        ...

    def pin(self, partition_id: str) -> PinnedRows:
        """Hold the partition's rows as they are now. Not a coroutine: nothing can run between.

        Writes to these rows may have to wait for the release, so a save holds them only until they
        are in segments, and not for the trainer's files or the publication.
        """
        ...
