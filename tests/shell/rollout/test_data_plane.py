"""The data plane in this process passes the conformance suite, and broken planes do not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pytest
import torch

from rollsync.shell.rollout.data_plane import (
    DataPlane,
    InProcessDataPlane,
    PinnedRows,
    Row,
    StoredRow,
    Tags,
)
from rollsync.shell.rollout.data_plane.conformance import (
    CONFORMANCE_CHECKS,
    ConformanceCheck,
    ConformanceFailure,
)
from rollsync.shell.rollout.data_plane.write_log import WriteLog
from rollsync.shell.rollout.errors import DataPlaneError


@pytest.mark.asyncio
@pytest.mark.parametrize("check", CONFORMANCE_CHECKS, ids=lambda check: check.__name__)
async def test_the_in_process_plane_conforms(check: ConformanceCheck) -> None:
    plane = InProcessDataPlane()
    await check(plane)
    assert await plane.list_rows("unrelated") == {}


class SharesTensors(InProcessDataPlane):
    async def get(
        self, partition_id: str, keys: Sequence[str], *, fields: Sequence[str] | None = None
    ) -> dict[str, Row]:
        await super().get(partition_id, keys, fields=fields)
        stored = await self.pin(partition_id).get(keys)
        return {
            key: {name: row.fields[name] for name in (fields or row.fields)}
            for key, row in stored.items()
        }


class Replaces(InProcessDataPlane):
    async def put(
        self,
        partition_id: str,
        rows: Mapping[str, Row],
        *,
        tags: Mapping[str, Tags] | None = None,
    ) -> None:
        await self.clear(partition_id, rows)
        await super().put(partition_id, rows, tags=tags)


class OnePartition(InProcessDataPlane):
    async def clear(self, partition_id: str, keys: Iterable[str]) -> None:
        keys = list(keys)
        for partition in list(self._partitions):
            await super().clear(partition, keys)


class PassesOverMissing(InProcessDataPlane):
    async def get(
        self, partition_id: str, keys: Sequence[str], *, fields: Sequence[str] | None = None
    ) -> dict[str, Row]:
        there = await self.list_rows(partition_id)
        return await super().get(partition_id, [key for key in keys if key in there], fields=fields)


class LivePin:
    """Looks at the partition of now instead of that of the pin."""

    def __init__(self, plane: PinsNothing, partition_id: str) -> None:
        self._plane, self._partition_id = plane, partition_id

    @property
    def writes(self) -> int:
        return self._plane.pinned_now(self._partition_id).writes

    def written_since(self, writes: int) -> frozenset[str]:
        return self._plane.pinned_now(self._partition_id).written_since(writes)

    def revisions(self, keys: Iterable[str]) -> dict[str, int]:
        return self._plane.pinned_now(self._partition_id).revisions(keys)

    async def get(self, keys: Sequence[str]) -> dict[str, StoredRow]:
        return await self._plane.pinned_now(self._partition_id).get(keys)

    def release(self) -> None:
        return


class PinsNothing(InProcessDataPlane):
    def pinned_now(self, partition_id: str) -> PinnedRows:
        return super().pin(partition_id)

    def pin(self, partition_id: str) -> PinnedRows:
        return LivePin(self, partition_id)


class OneRevision(InProcessDataPlane):
    def _merge(self, held: StoredRow | None, row: Row, tags: Tags | None) -> StoredRow:
        merged = super()._merge(held, row, tags)
        return StoredRow(merged.fields, merged.tags, 1)


class ForgetsWrites(InProcessDataPlane):
    async def put(
        self,
        partition_id: str,
        rows: Mapping[str, Row],
        *,
        tags: Mapping[str, Tags] | None = None,
    ) -> None:
        await super().put(partition_id, rows, tags=tags)
        self._logs[partition_id] = WriteLog()


class LosesDtype(InProcessDataPlane):
    def _merge(self, held: StoredRow | None, row: Row, tags: Tags | None) -> StoredRow:
        return super()._merge(held, {name: tensor.float() for name, tensor in row.items()}, tags)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "broken",
    [
        SharesTensors,
        Replaces,
        OnePartition,
        PassesOverMissing,
        PinsNothing,
        OneRevision,
        ForgetsWrites,
        LosesDtype,
    ],
)
async def test_a_broken_plane_is_noticed(broken: type[InProcessDataPlane]) -> None:
    failures = []
    for check in CONFORMANCE_CHECKS:
        try:
            await check(broken())
        except (ConformanceFailure, DataPlaneError) as failure:
            failures.append(failure)
    assert failures


@pytest.mark.asyncio
async def test_pinning_costs_the_same_however_many_rows() -> None:
    """No row is looked at: the pin is the very map that the plane holds."""
    plane: DataPlane = InProcessDataPlane()
    for count in (1, 2000):
        await plane.put("p", {str(i): {"x": torch.tensor([i])} for i in range(count)})
    assert isinstance(plane, InProcessDataPlane)
    held = plane._partitions["p"]
    pinned = plane.pin("p")
    assert getattr(pinned, "_rows", None) is held
