"""Checks that any `DataPlane` has to pass, for the tests of an adapter.

Rule kept here: a check needs nothing but the protocol, works in a partition of its own, and says in
words which promise was broken. It raises instead of asserting, so that `python -O` keeps it.

Use, with pytest::

    @pytest.mark.parametrize("check", CONFORMANCE_CHECKS, ids=lambda check: check.__name__)
    async def test_it_is_a_data_plane(check: ConformanceCheck) -> None:
        await check(MyDataPlane())
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import torch

from rollsync.shell.rollout.data_plane.protocol import DataPlane, Row
from rollsync.shell.rollout.errors import DataPlaneError

ConformanceCheck = Callable[[DataPlane], Awaitable[None]]

_WAIT_S = 0.05
"""How long a put or clear that may wait for a pin gets before the pin is released."""


class ConformanceFailure(AssertionError):
    """The plane breaks a promise of the protocol."""


def _demand(holds: bool, promise: str) -> None:
    if not holds:
        raise ConformanceFailure(promise)


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and torch.equal(left.contiguous().view(-1), right.contiguous().view(-1))
    )


def _same_row(left: Row, right: Row) -> bool:
    return set(left) == set(right) and all(_same(left[name], right[name]) for name in left)


async def rows_come_back_as_they_were_put(plane: DataPlane) -> None:
    """Shapes, dtypes and values survive, also odd ones."""
    row = {
        "tokens": torch.arange(7),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "nothing": torch.empty(0, 4, dtype=torch.bfloat16),
        "mask": torch.tensor([True, False]),
        "transposed": torch.arange(6, dtype=torch.float32).view(2, 3).t(),
        "sliced": torch.arange(20, dtype=torch.int32)[1::3],
    }
    await plane.put("came-back", {"a/0": row, "größe/1": {"tokens": torch.tensor([1])}})
    got = await plane.get("came-back", ["größe/1", "a/0"])
    _demand(list(got) == ["größe/1", "a/0"], "get returns rows in the order of the keys")
    _demand(_same_row(got["a/0"], row), "a row comes back with its dtypes, shapes and values")
    some = await plane.get("came-back", ["a/0"], fields=["mask"])
    _demand(list(some["a/0"]) == ["mask"], "get returns only the named fields")


async def stored_rows_are_the_planes_own(plane: DataPlane) -> None:
    """Writing to a tensor that was put, or that was got, changes nothing in the plane."""
    tensor = torch.tensor([1, 2, 3])
    await plane.put("own", {"a": {"x": tensor}})
    tensor[0] = 9
    first = await plane.get("own", ["a"])
    _demand(_same(first["a"]["x"], torch.tensor([1, 2, 3])), "put copies what it is given")
    first["a"]["x"][0] = 8
    second = await plane.get("own", ["a"])
    _demand(_same(second["a"]["x"], torch.tensor([1, 2, 3])), "get returns a copy")


async def put_merges_into_a_row(plane: DataPlane) -> None:
    """Named fields and tags are replaced, the others stay."""
    await plane.put(
        "merge",
        {"a": {"x": torch.tensor([1]), "y": torch.tensor([2])}},
        tags={"a": {"step": 1, "kind": "k"}},
    )
    await plane.put("merge", {"a": {"y": torch.tensor([3, 4])}}, tags={"a": {"step": 2}})
    got = (await plane.get("merge", ["a"]))["a"]
    _demand(
        _same_row(got, {"x": torch.tensor([1]), "y": torch.tensor([3, 4])}),
        "put replaces the named fields and keeps the others",
    )
    tags = (await plane.list_rows("merge"))["a"]
    _demand(dict(tags) == {"step": 2, "kind": "k"}, "put replaces the named tags, keeps the others")


async def partitions_are_apart(plane: DataPlane) -> None:
    """The same key in two partitions is two rows; an unknown partition is empty."""
    await plane.put("apart-1", {"a": {"x": torch.tensor([1])}})
    await plane.put("apart-2", {"a": {"x": torch.tensor([2])}})
    await plane.clear("apart-1", ["a"])
    _demand(await plane.list_rows("apart-1") == {}, "clear empties the partition it names")
    got = await plane.get("apart-2", ["a"])
    _demand(_same(got["a"]["x"], torch.tensor([2])), "clear leaves other partitions alone")
    _demand(await plane.list_rows("apart-3") == {}, "a partition nobody wrote to is empty")


async def missing_rows_are_errors_for_get_only(plane: DataPlane) -> None:
    """A missing key or field is named; clearing what is not there does nothing."""
    await plane.put("missing", {"a": {"x": torch.tensor([1])}})
    await _demand_error(plane, ["a", "b"], None, "b")
    await _demand_error(plane, ["a"], ["x", "nope"], "nope")
    await plane.clear("missing", ["b"])
    await plane.clear("missing", ["a"])
    await plane.clear("missing", ["a"])
    await plane.clear("never-written", ["a"])
    _demand(await plane.list_rows("missing") == {}, "a cleared row is gone")
    try:
        await plane.put("missing", {"a": {"x": torch.tensor([1])}}, tags={"c": {"t": 1}})
    except DataPlaneError:
        return
    raise ConformanceFailure("put refuses tags of a key that it does not put")


async def _demand_error(
    plane: DataPlane, keys: list[str], fields: list[str] | None, named: str
) -> None:
    try:
        await plane.get("missing", keys, fields=fields)
    except DataPlaneError as error:
        _demand(named in str(error), f"the error names what is missing ({named}): {error}")
        return
    raise ConformanceFailure(f"get of {keys} with fields {fields} raises DataPlaneError")


async def a_pin_holds_the_rows_of_its_moment(plane: DataPlane) -> None:
    """Later puts and clears either leave pinned rows alone or wait for the release."""
    await plane.put("pin", {"a": {"x": torch.tensor([1])}, "b": {"x": torch.tensor([2])}})
    await plane.put("pin", {"a": {"y": torch.tensor([5])}}, tags={"a": {"t": 1}})
    pinned = plane.pin("pin")
    later = [
        asyncio.ensure_future(
            plane.put("pin", {"a": {"x": torch.tensor([7])}}, tags={"a": {"t": 2}})
        ),
        asyncio.ensure_future(plane.clear("pin", ["b"])),
        asyncio.ensure_future(plane.put("pin", {"c": {"x": torch.tensor([3])}})),
    ]
    await asyncio.wait(later, timeout=_WAIT_S)
    held = await pinned.get(["b", "a"])
    _demand(list(held) == ["b", "a"], "pinned rows come in the order of the keys")
    _demand(
        _same_row(held["a"].fields, {"x": torch.tensor([1]), "y": torch.tensor([5])})
        and _same_row(held["b"].fields, {"x": torch.tensor([2])}),
        "a pinned row keeps its fields through later puts and clears",
    )
    _demand(dict(held["a"].tags) == {"t": 1}, "a pinned row keeps its tags")
    try:
        await pinned.get(["c"])
    except DataPlaneError:
        pinned.release()
    else:
        raise ConformanceFailure("a row put after the pin is not among the pinned rows")
    await asyncio.gather(*later)
    _demand(set(await plane.list_rows("pin")) == {"a", "c"}, "puts and clears happen in the end")
    got = await plane.get("pin", ["a"])
    _demand(_same(got["a"]["x"], torch.tensor([7])), "a put that waited for a pin happens")


async def revisions_tell_changed_rows(plane: DataPlane) -> None:
    """Equal revisions mean equal contents; a put changes the revision, a read does not."""
    await plane.put("revisions", {"a": {"x": torch.tensor([1])}, "b": {"x": torch.tensor([1])}})
    before = _revisions(plane)
    await plane.get("revisions", ["a"])
    _demand(_revisions(plane) == before, "reading leaves the revision")
    await plane.put("revisions", {"a": {"x": torch.tensor([2])}})
    after = _revisions(plane)
    _demand(after["a"] != before["a"] and after["b"] == before["b"], "a put changes the revision")
    await plane.clear("revisions", ["b"])
    await plane.put("revisions", {"b": {"x": torch.tensor([3])}})
    _demand(_revisions(plane)["b"] != before["b"], "a key used again has a new revision")
    _demand(set(before) == {"a", "b"}, "revisions leave absent keys out")


def _revisions(plane: DataPlane) -> dict[str, int]:
    pinned = plane.pin("revisions")
    try:
        return pinned.revisions(["a", "b", "absent"])
    finally:
        pinned.release()


async def a_pin_tells_what_was_written_since(plane: DataPlane) -> None:
    """Every row that was put after a pin is among what a later pin says was written since."""
    await plane.put("since", {"a": {"x": torch.tensor([1])}, "b": {"x": torch.tensor([1])}})
    first = plane.pin("since")
    _demand(first.written_since(0) >= {"a", "b"}, "everything was written since the beginning")
    before = first.writes
    _demand(not first.written_since(before), "nothing was written since a pin by its own account")
    first.release()
    await plane.put("since", {"b": {"y": torch.tensor([2])}, "c": {"x": torch.tensor([1])}})
    second = plane.pin("since")
    _demand(second.written_since(before) >= {"b", "c"}, "later puts are named")
    _demand("a" not in second.written_since(before), "what was not put again is not named")
    second.release()


async def a_released_pin_is_of_no_use(plane: DataPlane) -> None:
    """Releasing twice is releasing once, two pins are independent, reading after it is an error."""
    await plane.put("released", {"a": {"x": torch.tensor([1])}})
    first, second = plane.pin("released"), plane.pin("released")
    first.release()
    first.release()
    held = await second.get(["a"])
    _demand(_same(held["a"].fields["x"], torch.tensor([1])), "pins are independent of one another")
    second.release()
    await plane.clear("released", ["a"])
    try:
        await first.get(["a"])
    except DataPlaneError:
        return
    raise ConformanceFailure("reading a released pin raises DataPlaneError")


CONFORMANCE_CHECKS: tuple[ConformanceCheck, ...] = (
    rows_come_back_as_they_were_put,
    stored_rows_are_the_planes_own,
    put_merges_into_a_row,
    partitions_are_apart,
    missing_rows_are_errors_for_get_only,
    a_pin_holds_the_rows_of_its_moment,
    revisions_tell_changed_rows,
    a_pin_tells_what_was_written_since,
    a_released_pin_is_of_no_use,
)
