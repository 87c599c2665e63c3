"""The data plane of a run in one process: rows in host memory.

Rule kept here: the rows of a partition are one persistent map and a stored row is never changed, so
a pin is a reference to the map, and neither puts nor clears wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from rpds import HashTrieMap

from rollsync.shell.rollout.data_plane.protocol import PinnedRows, Row, StoredRow, Tags
from rollsync.shell.rollout.data_plane.refusals import check_held, check_tags, field_of
from rollsync.shell.rollout.data_plane.write_log import PinnedLog, WriteLog
from rollsync.shell.rollout.errors import DataPlaneError

_NO_TAGS: Tags = {}


class InProcessDataPlane:
    """A `DataPlane` in this process's memory. For one event loop."""

    def __init__(self) -> None:
        self._partitions: dict[str, HashTrieMap[str, StoredRow]] = {}
        self._logs: dict[str, WriteLog] = {}
        self._next_revision = 1

    async def put(
        self,
        partition_id: str,
        rows: Mapping[str, Row],
        *,
        tags: Mapping[str, Tags] | None = None,
    ) -> None:
        """See `DataPlane.put`."""
        tags = tags or {}
        check_tags(partition_id, rows, tags)
        held = self._rows(partition_id)
        merged = {key: self._merge(held.get(key), row, tags.get(key)) for key, row in rows.items()}
        after = held.update(merged)
        self._partitions[partition_id] = after
        self._log(partition_id).note(merged, held=after)

    async def get(
        self, partition_id: str, keys: Sequence[str], *, fields: Sequence[str] | None = None
    ) -> dict[str, Row]:
        """See `DataPlane.get`."""
        stored = _select(self._rows(partition_id), partition_id, keys)
        return {
            key: {
                name: field_of(row.fields, name, key, partition_id).clone()
                for name in (row.fields if fields is None else fields)
            }
            for key, row in stored.items()
        }

    async def list_rows(self, partition_id: str) -> dict[str, Tags]:
        """See `DataPlane.list_rows`."""
        return {key: dict(row.tags) for key, row in self._rows(partition_id).items()}

    async def clear(self, partition_id: str, keys: Iterable[str]) -> None:
        """See `DataPlane.clear`."""
        held = self._rows(partition_id)
        for key in keys:
            held = held.discard(key)
        self._partitions[partition_id] = held

    def pin(self, partition_id: str) -> PinnedRows:
        """See `DataPlane.pin`."""
        return _PinnedMap(partition_id, self._rows(partition_id), self._log(partition_id).pin())

    def _log(self, partition_id: str) -> WriteLog:
        return self._logs.setdefault(partition_id, WriteLog())

    def _rows(self, partition_id: str) -> HashTrieMap[str, StoredRow]:
        nothing: HashTrieMap[str, StoredRow] = HashTrieMap()
        return self._partitions.get(partition_id, nothing)

    def _merge(self, held: StoredRow | None, row: Row, tags: Tags | None) -> StoredRow:
        fields = {name: _own_copy(tensor) for name, tensor in row.items()}
        revision, self._next_revision = self._next_revision, self._next_revision + 1
        if held is None:
            return StoredRow(fields, dict(tags or _NO_TAGS), revision)
        return StoredRow({**held.fields, **fields}, {**held.tags, **(tags or _NO_TAGS)}, revision)


class _PinnedMap:
    """Rows of a moment: the map of that moment."""

    def __init__(
        self, partition_id: str, rows: HashTrieMap[str, StoredRow], log: PinnedLog
    ) -> None:
        self._partition_id = partition_id
        self._rows: HashTrieMap[str, StoredRow] | None = rows
        self._log = log

    @property
    def writes(self) -> int:
        return self._log.writes

    def written_since(self, writes: int) -> frozenset[str]:
        return self._log.since(writes)

    def revisions(self, keys: Iterable[str]) -> dict[str, int]:
        held = self._held()
        return {key: held[key].revision for key in keys if key in held}

    async def get(self, keys: Sequence[str]) -> dict[str, StoredRow]:
        return _select(self._held(), self._partition_id, keys)

    def release(self) -> None:
        self._rows = None

    def _held(self) -> HashTrieMap[str, StoredRow]:
        if self._rows is None:
            raise DataPlaneError(
                f"partition {self._partition_id}: the pin is released",
                remedy="read pinned rows before releasing them",
            )
        return self._rows


def _own_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _select(
    rows: HashTrieMap[str, StoredRow], partition_id: str, keys: Sequence[str]
) -> dict[str, StoredRow]:
    check_held(partition_id, rows, keys)
    return {key: rows[key] for key in keys}
