"""Rows in TransferQueue, the distributed data plane over Ray: for runs over many machines.

TransferQueue stores columns for a batch of keys; rows here may each have their own fields, dtypes
and shapes. So a row travels as one value of bytes (safetensors), and comes back exactly.

Rules kept here:

1. All writes to a partition go through one `TransferQueueDataPlane`: it knows the revision of each
   row, which is what lets `pin` cost nothing and be no remote call. Each row carries a stamp of its
   writer and revision, so that a row that anybody else has written is an error and not data.
2. TransferQueue has no copy on write, so writes to rows that a pin holds wait for its release. Rows
   that came after the pin are not held up.
3. Every answer has a deadline. After one that was missed it is not known what the queue holds; then
   the stamps tell what became of a row, and a resume starts from what was saved.
4. TransferQueue itself waits on for an actor that has died. While an answer is waited for, it is
   asked whether the actors are there; when one is not, the rows are lost, and that is the error.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager

import transfer_queue
from msgspec import Struct
from rpds import HashTrieMap
from tensordict import NonTensorStack, TensorDict

from rollsync.shell.rollout.data_plane.protocol import PinnedRows, Row, StoredRow, Tags
from rollsync.shell.rollout.data_plane.refusals import check_held, check_tags, field_of, some
from rollsync.shell.rollout.data_plane.stamped_rows import (
    RowStamps,
    payloads_of,
    rows_of_payloads,
    stamp_of,
)
from rollsync.shell.rollout.data_plane.write_log import PinnedLog, WriteLog
from rollsync.shell.rollout.errors import DataPlaneError, DataPlaneLost

_FIELD = "rollsync_row"
_STAMP_TAG = "rollsync_stamp"
"""A tag that every row has: it names the row's write, and TransferQueue lists a key by its tags."""
_DEADLINE_S = 60.0
_LOOK_S = 1.0
"""An answer that takes longer makes one ask whether the actors are there."""


async def _nothing() -> tuple[str, ...]:
    return ()


class _Known(Struct, frozen=True):
    """What this side knows of a row."""

    tags: Tags
    revision: int
    stamp: str
    """Of the write that made it; see `stamped_rows`."""


class TransferQueueDataPlane:
    """A `DataPlane` over an initialized TransferQueue (`transfer_queue.init()`).

    Args:
        deadline_s: longest wait for one answer of the queue.
        gone: the queue's actors that are gone, by name.
    """

    def __init__(
        self,
        *,
        deadline_s: float = _DEADLINE_S,
        gone: Callable[[], Awaitable[tuple[str, ...]]] = _nothing,
    ) -> None:
        self._deadline_s = deadline_s
        self._gone = gone
        self._stamps = RowStamps()
        self._known: dict[str, HashTrieMap[str, _Known]] = {}
        self._logs: dict[str, WriteLog] = {}
        self._revisions = itertools.count(1)
        self._pins: set[_HeldRows] = set()
        self._released = asyncio.Event()
        self._turns: dict[str, asyncio.Lock] = {}

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
        if not rows:
            return
        async with self._turn(partition_id, rows):
            known = self._rows(partition_id)
            there = [key for key in rows if key in known]
            held = await self._read(partition_id, there, known, exact=True)
            merged = {key: {**held.get(key, {}), **row} for key, row in rows.items()}
            after = {
                key: self._stamped(
                    {**(known[key].tags if key in known else {}), **tags.get(key, {})}
                )
                for key in rows
            }
            await self._write(partition_id, merged, after)
            after_write = known.update(after)
            self._known[partition_id] = after_write
            self._log(partition_id).note(after, held=after_write)

    async def get(
        self, partition_id: str, keys: Sequence[str], *, fields: Sequence[str] | None = None
    ) -> dict[str, Row]:
        """See `DataPlane.get`."""
        known = self._rows(partition_id)
        check_held(partition_id, known, keys)
        # A put of this plane may come between, so any of its writes will do.
        rows = await self._read(partition_id, keys, known, exact=False)
        if fields is None:
            return rows
        return {
            key: {name: field_of(row, name, key, partition_id) for name in fields}
            for key, row in rows.items()
        }

    async def list_rows(self, partition_id: str) -> dict[str, Tags]:
        """See `DataPlane.list_rows`. Rows that an earlier process has left are known from here.

        Raises:
            DataPlaneError: somebody else has written to a row of this plane.
        """
        known = self._rows(partition_id)
        async with self._answering(partition_id):
            listed = (await transfer_queue.async_kv_list(partition_id)).get(partition_id, {})
        for key in known:
            if key in listed:
                found = str(listed[key].get(_STAMP_TAG, ""))
                self._check(partition_id, key, found, known[key], exact=False)
        known = self._rows(partition_id)
        left = {
            key: _Known(_own_tags(tags), next(self._revisions), str(tags.get(_STAMP_TAG, "")))
            for key, tags in listed.items()
            if key not in known
        }
        all_known = known.update(left)
        self._known[partition_id] = all_known
        self._log(partition_id).note(left, held=all_known)
        return {key: dict(row.tags) for key, row in self._rows(partition_id).items()}

    async def clear(self, partition_id: str, keys: Iterable[str]) -> None:
        """See `DataPlane.clear`."""
        wanted = tuple(dict.fromkeys(keys))
        async with self._turn(partition_id, wanted):
            known = self._rows(partition_id)
            there = [key for key in wanted if key in known]
            if not there:
                return
            async with self._answering(partition_id):
                await transfer_queue.async_kv_clear(there, partition_id)
            for key in there:
                known = known.discard(key)
            self._known[partition_id] = known

    def pin(self, partition_id: str) -> PinnedRows:
        """See `DataPlane.pin`.

        Raises:
            DataPlaneError: a write is under way: pin inside the barrier's cut, where none is.
        """
        if self._turns.setdefault(partition_id, asyncio.Lock()).locked():
            raise DataPlaneError(
                f"partition {partition_id}: a write is under way",
                remedy="write rows inside barrier sections, and pin inside the cut",
            )
        held = _HeldRows(
            self, partition_id, self._rows(partition_id), self._log(partition_id).pin()
        )
        self._pins.add(held)
        return held

    def unpin(self, held: _HeldRows) -> None:
        """Let writes go on that waited for `held`."""
        self._pins.discard(held)
        self._released.set()
        self._released = asyncio.Event()

    async def read_held(
        self, partition_id: str, keys: Sequence[str], held: HashTrieMap[str, _Known]
    ) -> dict[str, Row]:
        """Rows that a pin holds, exactly as they are known to it."""
        return await self._read(partition_id, keys, held, exact=True)

    def _rows(self, partition_id: str) -> HashTrieMap[str, _Known]:
        nothing: HashTrieMap[str, _Known] = HashTrieMap()
        return self._known.get(partition_id, nothing)

    def _stamped(self, tags: Tags) -> _Known:
        revision = next(self._revisions)
        return _Known(tags, revision, self._stamps.stamp(revision))

    @asynccontextmanager
    async def _answering(self, partition_id: str) -> AsyncIterator[None]:
        """TransferQueue raises whatever its sockets and actors raise, or waits; here it is one
        family of errors."""
        try:
            async with asyncio.timeout(self._deadline_s) as deadline:
                looking = asyncio.create_task(self._end_when_lost(deadline))
                try:
                    yield
                finally:
                    looking.cancel()
        except TimeoutError as error:
            await self._raise_if_lost(partition_id, error)
            raise DataPlaneError(
                f"partition {partition_id}: TransferQueue has not answered within "
                f"{self._deadline_s:g} s",
                remedy="see Ray's logs of its controller and storage units, or set a longer "
                "data_plane.deadline_s. The run can be resumed",
            ) from error
        except Exception as error:
            await self._raise_if_lost(partition_id, error)
            raise DataPlaneError(
                f"partition {partition_id}: TransferQueue failed: {type(error).__name__}: {error}",
                remedy="see Ray's logs of its controller and storage units; the run can be resumed",
            ) from error

    async def _end_when_lost(self, deadline: asyncio.Timeout) -> None:
        """Have `deadline` end now when there is nobody left to answer."""
        while True:
            await asyncio.sleep(_LOOK_S)
            if await self._gone() and not deadline.expired():
                deadline.reschedule(asyncio.get_running_loop().time())

    async def _raise_if_lost(self, partition_id: str, cause: Exception) -> None:
        gone = await self._gone()
        if gone:
            raise DataPlaneLost(
                f"partition {partition_id}: {some(gone)} of TransferQueue died, and the rows that "
                "were there are lost",
                remedy="see Ray's logs of it; the same command goes on from the last save",
            ) from cause

    def _log(self, partition_id: str) -> WriteLog:
        return self._logs.setdefault(partition_id, WriteLog())

    @asynccontextmanager
    async def _turn(self, partition_id: str, keys: Iterable[str]) -> AsyncIterator[None]:
        """The right to write these keys: nobody else writes, and no pin holds any of them."""
        wanted = tuple(keys)
        turn = self._turns.setdefault(partition_id, asyncio.Lock())
        while True:
            while any(pin.holds(partition_id, wanted) for pin in self._pins):
                await self._released.wait()
            async with turn:
                if not any(pin.holds(partition_id, wanted) for pin in self._pins):
                    yield
                    return

    async def _write(
        self, partition_id: str, rows: Mapping[str, Row], known: Mapping[str, _Known]
    ) -> None:
        stamps = {key: known[key].stamp for key in rows}
        payloads = await asyncio.to_thread(payloads_of, rows, stamps)
        async with self._answering(partition_id):
            await transfer_queue.async_kv_batch_put(
                keys=list(rows),
                partition_id=partition_id,
                fields=TensorDict({_FIELD: NonTensorStack(*payloads)}, batch_size=[len(payloads)]),
                tags=[{**known[key].tags, _STAMP_TAG: stamps[key]} for key in rows],
            )

    async def _read(
        self,
        partition_id: str,
        keys: Sequence[str],
        known: HashTrieMap[str, _Known],
        *,
        exact: bool,
    ) -> dict[str, Row]:
        if not keys:
            return {}
        async with self._answering(partition_id):
            got = await transfer_queue.async_kv_batch_get(
                list(keys), partition_id, select_fields=[_FIELD]
            )
        payloads: list[bytes] = got[_FIELD].tolist()
        for key, payload in zip(keys, payloads, strict=True):
            self._check(partition_id, key, stamp_of(payload), known[key], exact=exact)
        return await asyncio.to_thread(rows_of_payloads, keys, payloads)

    def _check(
        self, partition_id: str, key: str, found: str, known: _Known, *, exact: bool
    ) -> None:
        where = f"partition {partition_id}: row {key}"
        self._stamps.check(found, known.stamp, where, exact=exact)


class _HeldRows:
    """Rows of a moment: writes to them wait until they are released."""

    def __init__(
        self,
        plane: TransferQueueDataPlane,
        partition_id: str,
        known: HashTrieMap[str, _Known],
        log: PinnedLog,
    ) -> None:
        self._plane = plane
        self._partition_id = partition_id
        self._known: HashTrieMap[str, _Known] | None = known
        self._log = log

    @property
    def writes(self) -> int:
        return self._log.writes

    def written_since(self, writes: int) -> frozenset[str]:
        return self._log.since(writes)

    def holds(self, partition_id: str, keys: Iterable[str]) -> bool:
        known = self._known
        return (
            known is not None
            and partition_id == self._partition_id
            and any(key in known for key in keys)
        )

    def revisions(self, keys: Iterable[str]) -> dict[str, int]:
        known = self._held()
        return {key: known[key].revision for key in keys if key in known}

    async def get(self, keys: Sequence[str]) -> dict[str, StoredRow]:
        known = self._held()
        check_held(self._partition_id, known, keys)
        rows = await self._plane.read_held(self._partition_id, keys, known)
        return {
            key: StoredRow(row, known[key].tags, known[key].revision) for key, row in rows.items()
        }

    def release(self) -> None:
        if self._known is not None:
            self._known = None
            self._plane.unpin(self)

    def _held(self) -> HashTrieMap[str, _Known]:
        if self._known is None:
            raise DataPlaneError(
                f"partition {self._partition_id}: the pin is released",
                remedy="read pinned rows before releasing them",
            )
        return self._known


def _own_tags(tags: Mapping[str, object]) -> Tags:
    return {
        name: value
        for name, value in tags.items()
        if name != _STAMP_TAG and isinstance(value, (str, int, float, bool))
    }
