"""Restoring: every refusal names file, field and remedy, and nothing is changed before."""

from __future__ import annotations

import gc
import os
import pickle
import shutil
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import pytest
import torch
from msgspec.structs import replace

from rollsync.codecs import decode, encode
from rollsync.pure.rollout.account import account
from rollsync.pure.rollout.checkpointing import (
    CheckpointKind,
    DataPlaneCheckpointMetadata,
    TQReplayMetadataState,
)
from rollsync.pure.rollout.checkpointing import RolloutTraceKind as Kind
from rollsync.pure.rollout.decisions import TrainBatch, Wait
from rollsync.pure.rollout.events import GroupsClaimed
from rollsync.pure.rollout.sampler import (
    InOrderSampler,
    ReadyFirstSampler,
    WeightFifoSampler,
    WindowedSampler,
)
from rollsync.pure.rollout.state import Dropped, PromptPlace
from rollsync.shell.errors import RollsyncError
from rollsync.shell.rollout import segments
from rollsync.shell.rollout.archive import STATE_FILE
from rollsync.shell.rollout.captured import DATA_PLANE_FILE, REPLAY_METADATA_FILE
from rollsync.shell.rollout.data_plane import InProcessDataPlane, PinnedRows, Row, StoredRow, Tags
from rollsync.shell.rollout.errors import DataPlaneError
from rollsync.shell.rollout.restore import RolloutRestorer
from rollsync.shell.rollout.segments import SegmentError, decode_segment
from tests.pure.rollout.events_kit import admit, dispatch, reserve
from tests.shell.rollout.cancelling import is_free
from tests.shell.rollout.world import (
    PARTITION,
    BuiltinSampler,
    PlainBundle,
    World,
    assert_same_rows,
    row_of,
)

ReadSegment = Callable[[PlainBundle, str], bytes]


async def saved(root: Path) -> World:
    """Two ready groups, two unfinished ones with a sealed sibling, one reserved."""
    world = World(root)
    await world.ready(0, 1)
    await world.admit(2, 3)
    await world.seal("e0p2", 0)
    await world.do(reserve(4))
    assert (await world.snapshotter.save_rollout_snapshot()).saved
    return world


def newest_bundle(world: World) -> PlainBundle:
    return PlainBundle(world.archive.bundles()[-1])


def newest_link(world: World) -> Path:
    """The last segment of the newest bundle's state."""
    return newest_bundle(world).newest_link


def files_under(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


async def check_refused(world: World, match: str) -> RollsyncError:
    """The restore is refused, with a file and a remedy, and neither the run nor the disk has
    changed."""
    before, on_disk = world.state, files_under(world.archive.root)
    await world.plane.put(PARTITION, {"left/0": row_of("left/0")})
    with pytest.raises(RollsyncError, match=match) as caught:
        await world.restore()
    assert world.state is before
    assert set(await world.plane.list_rows(PARTITION)) == {"left/0"}
    assert files_under(world.archive.root) == on_disk
    assert str(world.archive.root) in caught.value.message, "it names the file"
    assert caught.value.remedy
    return caught.value


class NotingPuts(InProcessDataPlane):
    """A data plane that tells of the rows of each put before it takes them."""

    def __init__(self, note: Callable[[Mapping[str, Row]], None]) -> None:
        super().__init__()
        self._note = note

    async def put(
        self,
        partition_id: str,
        rows: Mapping[str, Row],
        *,
        tags: Mapping[str, Tags] | None = None,
    ) -> None:
        self._note(rows)
        await super().put(partition_id, rows, tags=tags)


@pytest.mark.asyncio
async def test_a_changed_sample_is_named(tmp_path: Path) -> None:
    await saved(tmp_path)
    after = World(tmp_path)
    after.samples.contents["s2"] = "something else"
    del after.samples.contents["s4"]
    error = await check_refused(after, r"2 prompts in flight.*s2 \(other content\)")
    assert "s4 (missing)" in str(error)
    assert f"state segment {newest_link(after).name}" in str(error)
    assert "dataset" in error.remedy


@pytest.mark.asyncio
async def test_a_sample_of_another_task_is_named(tmp_path: Path) -> None:
    await saved(tmp_path)
    after = World(tmp_path)
    after.samples.task = "product"
    await check_refused(after, r"5 prompts in flight.*s0 \(task product, was sum\)")


@pytest.mark.asyncio
async def test_another_dataset_is_refused_even_if_the_prompts_in_flight_are_the_same(
    tmp_path: Path,
) -> None:
    await saved(tmp_path)
    after = World(tmp_path)
    after.samples.digest = "d1"
    error = await check_refused(after, "dataset_digest is d0, this run's dataset is d1")
    assert "position" in error.remedy


@pytest.mark.asyncio
async def test_a_smaller_buffer_says_what_to_raise(tmp_path: Path) -> None:
    await saved(tmp_path)
    await check_refused(
        World(tmp_path, buffer_capacity=3), "raise the buffer capacity to at least 4"
    )


@pytest.mark.asyncio
async def test_another_batch_size_is_refused(tmp_path: Path) -> None:
    world = World(tmp_path, sampler=ReadyFirstSampler())
    await world.admit(0, 1)
    assert (await world.snapshotter.save_rollout_snapshot()).saved
    after = World(tmp_path, sampler=ReadyFirstSampler(), num_prompts_per_step=3)
    await check_refused(after, "num_prompts_per_step")


@pytest.mark.asyncio
async def test_a_sampler_of_another_kind_is_refused(tmp_path: Path) -> None:
    await saved(tmp_path)
    await check_refused(World(tmp_path, sampler=InOrderSampler()), "does not stamp target steps")


@pytest.mark.asyncio
@pytest.mark.parametrize("damage", [b"", b"garbage", b"half"])
async def test_a_state_file_that_cannot_be_read_is_named(tmp_path: Path, damage: bytes) -> None:
    world = await saved(tmp_path)
    path = newest_link(world)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] if damage == b"half" else damage)
    await check_refused(World(tmp_path), f"state segment {path.name}")


@pytest.mark.asyncio
async def test_a_state_in_a_file_of_its_own_is_read_and_named(tmp_path: Path) -> None:
    """As bundles of layout 1 have it."""
    world = await saved(tmp_path)
    bundle = newest_bundle(world)
    facts = replace(bundle.facts, state_segments=())
    (bundle.path / "manifest").write_bytes(msgspec.json.encode(facts))
    (bundle.path / STATE_FILE).write_bytes(encode(world.state))
    after = World(tmp_path)
    assert await after.restore() is not None
    assert after.state.replay == world.state.replay
    changed = World(tmp_path)
    del changed.samples.contents["s0"]
    await check_refused(changed, f"{bundle.path / STATE_FILE}: 1 prompts in flight")
    (bundle.path / STATE_FILE).write_bytes(b"garbage")
    await check_refused(World(tmp_path), f"{bundle.path / STATE_FILE}: ")


@pytest.mark.asyncio
async def test_a_state_file_of_another_save_is_refused(tmp_path: Path) -> None:
    world = await saved(tmp_path)
    await world.admit(5, 6)
    newest_link(world).write_bytes(encode(world.state))
    await check_refused(World(tmp_path), "field sampler_dispatch_index of the manifest is 1")


@pytest.mark.parametrize(
    "field", ["base_train_step", "trainer_version", "current_epoch", "sampler_dispatch_index"]
)
@pytest.mark.asyncio
async def test_a_manifest_of_another_save_is_refused(tmp_path: Path, field: str) -> None:
    world = await saved(tmp_path)
    bundle = newest_bundle(world)
    facts = replace(bundle.facts, **{field: getattr(bundle.facts, field) + 1})
    (bundle.path / "manifest").write_bytes(msgspec.json.encode(facts))
    await check_refused(World(tmp_path), f"field {field} of the manifest is")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mode", CheckpointKind.TRAINER_CHECKPOINT),
        ("train_steps", 1),
        ("trainer_version", 1),
        ("current_epoch", 1),
        ("replay_digest", "0" * 64),
        ("replay_group_count", 1),
        ("ledger_group_count", 1),
        ("ledger_digest", "0" * 64),
    ],
)
@pytest.mark.asyncio
async def test_metadata_that_differ_from_the_state_are_refused(
    tmp_path: Path, field: str, value: object
) -> None:
    path = newest_bundle(await saved(tmp_path)).path / DATA_PLANE_FILE
    metadata = decode(path.read_bytes(), DataPlaneCheckpointMetadata).unwrap()
    path.write_bytes(encode(replace(metadata, **{field: value})))
    await check_refused(World(tmp_path), f"field {field}: .*they are of two saves")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("name", "field"),
    [(REPLAY_METADATA_FILE, "replay_digest"), (DATA_PLANE_FILE, "replay_digest")],
)
async def test_a_metadata_file_of_another_save_is_refused(
    tmp_path: Path, name: str, field: str
) -> None:
    world = await saved(tmp_path / "a")
    other = World(tmp_path / "b")
    await other.ready(0, 1)
    await other.plane.put(PARTITION, {"e0p0/0": {"advantages": row_of("x")["logprobs"]}})
    await other.admit(2, 3)
    await other.seal("e0p2", 0)
    await other.do(reserve(4))
    assert (await other.snapshotter.save_rollout_snapshot()).saved
    (mine,), (theirs,) = world.archive.bundles(), other.archive.bundles()
    (mine / name).write_bytes((theirs / name).read_bytes())
    error = await check_refused(World(tmp_path / "a"), f"field {field}")
    assert DATA_PLANE_FILE in str(error)


@pytest.mark.asyncio
async def test_the_ledger_of_another_save_is_refused(tmp_path: Path) -> None:
    world = await saved(tmp_path)
    await world.do(dispatch("e0p3", 0))
    newest_link(world).write_bytes(encode(world.state))
    await check_refused(World(tmp_path), "field ledger_digest")


@pytest.mark.asyncio
async def test_the_metadata_says_what_was_saved(tmp_path: Path) -> None:
    world = await saved(tmp_path)
    (bundle,) = world.archive.bundles()
    replay = decode((bundle / REPLAY_METADATA_FILE).read_bytes(), TQReplayMetadataState).unwrap()
    assert [group.group_id for group in replay.groups] == ["e0p0", "e0p1"]
    assert replay.groups[0].sample_ids == ("e0p0/0", "e0p0/1")
    assert replay.groups[0].fields == ("logprobs", "tokens")
    after = World(tmp_path)
    restored = await after.restore()
    assert restored is not None
    metadata = restored.source.data_plane_metadata
    assert metadata is not None
    assert metadata.sampler_name == "windowed"
    assert (metadata.replay_group_count, metadata.ledger_group_count) == (2, 3)
    assert (await after.snapshotter.save_rollout_snapshot()).saved
    again = after.archive.bundles()[1] / REPLAY_METADATA_FILE
    assert again.read_bytes() == (bundle / REPLAY_METADATA_FILE).read_bytes(), (
        "what a resume has read is described as it was"
    )


@pytest.mark.asyncio
async def test_a_missing_or_damaged_segment_is_named(tmp_path: Path) -> None:
    world = await saved(tmp_path)
    (segment,) = newest_bundle(world).row_segments
    data = segment.read_bytes()
    segment.write_bytes(data[:100])
    error = await check_refused(World(tmp_path), segment.name)
    assert isinstance(error, SegmentError)
    segment.unlink()
    await check_refused(World(tmp_path), segment.name)


@pytest.mark.asyncio
async def test_rows_that_the_segments_lack_are_named(tmp_path: Path) -> None:
    world = await saved(tmp_path)
    (bundle,) = world.archive.bundles()
    facts = PlainBundle(bundle).facts
    assert facts.segments
    (bundle / "manifest").write_bytes(msgspec.json.encode(replace(facts, segments=())))
    await check_refused(World(tmp_path), "group e0p0 owns rows that are not there: e0p0/0")


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self._marker),)


@pytest.mark.asyncio
@pytest.mark.parametrize("target", ["state", "metadata", "segment"])
async def test_loading_executes_nothing(tmp_path: Path, target: str) -> None:
    """A file made by an attacker, who can also give it the right digest, is refused unread."""
    world = await saved(tmp_path / "run")
    (bundle,) = world.archive.bundles()
    (segment,) = newest_bundle(world).row_segments
    attacked = {
        "state": newest_link(world),
        "metadata": bundle / REPLAY_METADATA_FILE,
        "segment": segment,
    }[target]
    bomb = pickle.dumps(Bomb(tmp_path / "boom"))
    torch.save({"x": Bomb(tmp_path / "boom")}, tmp_path / "bomb.pt")
    for data in (bomb, (tmp_path / "bomb.pt").read_bytes()):
        attacked.write_bytes(data)
        await check_refused(World(tmp_path / "run"), attacked.name)
    assert not (tmp_path / "boom").exists()
    pickle.loads(bomb)
    assert (tmp_path / "boom").exists(), "the bomb is a real one"


@pytest.mark.asyncio
async def test_a_copied_run_directory_is_as_good(tmp_path: Path) -> None:
    world = await saved(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b" / "c")
    after = World(tmp_path / "b" / "c")
    restored = await after.restore()
    assert restored is not None
    assert after.state.replay == world.state.replay


class FailsAt(InProcessDataPlane):
    """Fails in its nth put, as a process that is killed there would end."""

    def __init__(self, puts: int) -> None:
        super().__init__()
        self.puts_left = puts

    async def put(
        self,
        partition_id: str,
        rows: Mapping[str, Row],
        *,
        tags: Mapping[str, Tags] | None = None,
    ) -> None:
        if self.puts_left == 0:
            raise KeyboardInterrupt
        self.puts_left -= 1
        await super().put(partition_id, rows, tags=tags)


@pytest.mark.asyncio
async def test_a_restore_that_died_twice_succeeds_the_third_time(tmp_path: Path) -> None:
    """Over the same plane, which outlives the process, as a distributed one does."""
    await saved(tmp_path)
    plane = FailsAt(0)
    on_disk = files_under(tmp_path)
    for _ in range(2):
        died = World(tmp_path, plane=plane)
        with pytest.raises(KeyboardInterrupt):
            await died.restore()
        assert await is_free(died.barrier)
        await InProcessDataPlane.put(
            plane, PARTITION, {"e0p0/0": {"tokens": row_of("x")["tokens"]}}
        )
    plane.puts_left = 100
    after = World(tmp_path, plane=plane)
    assert await after.restore() is not None
    owned = ("e0p0/0", "e0p0/1", "e0p1/0", "e0p1/1", "e0p2/0/attempt-0")
    assert_same_rows(await after.rows(), {key: row_of(key) for key in owned})
    assert files_under(tmp_path) == on_disk, "a resume writes nothing"


@pytest.mark.asyncio
async def test_rows_are_validated_and_loaded_one_segment_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    for position in range(3):
        await world.ready(position)
        assert (await world.snapshotter.save_rollout_snapshot()).saved
    names = list(newest_bundle(world).facts.segments)
    assert len(names) == 3
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    calls: list[str] = []

    def read(bundle: PlainBundle, name: str, read: ReadSegment = PlainBundle.read_segment) -> bytes:
        ends_s = time.monotonic() + 30
        while alive and time.monotonic() < ends_s:
            gc.collect()
            time.sleep(0.001)  # The thread that read them may not have let go of them yet.
        assert not alive, "rows of another segment are still in memory"
        if name in names:
            calls.append(name)
        return read(bundle, name)

    def decoded(data: bytes, name: str) -> dict[str, StoredRow]:
        rows = decode_segment(data, name)
        alive.update(tensor for row in rows.values() for tensor in row.fields.values())
        return rows

    monkeypatch.setattr(PlainBundle, "read_segment", read)
    monkeypatch.setattr(segments, "decode_segment", decoded)
    resumed = World(tmp_path, plane=NotingPuts(lambda rows: calls.append("put")))
    await resumed.restore()
    assert calls == [*names, *(each for name in reversed(names) for each in (name, "put"))]
    rows = await resumed.rows()
    assert {f"e0p{position}/{index}" for position in range(3) for index in range(2)} <= set(rows)
    assert_same_rows(rows, {key: row_of(key) for key in rows})


@pytest.mark.parametrize("rows_per_put", [1, 3, 4, 5])
@pytest.mark.asyncio
async def test_rows_are_put_in_portions_with_their_tags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_per_put: int
) -> None:
    world = World(tmp_path)
    await world.ready(0, 1)
    tagged = {"e0p1/0": row_of("e0p1/0")}
    await world.plane.put(PARTITION, tagged, tags={"e0p1/0": {"rollout": "7"}})
    tags = {key: dict(tags) for key, tags in (await world.plane.list_rows(PARTITION)).items()}
    assert (await world.snapshotter.save_rollout_snapshot()).saved
    monkeypatch.setattr("rollsync.shell.rollout.restore._ROWS_PER_PUT", rows_per_put)
    portions: list[int] = []

    after = World(tmp_path, plane=NotingPuts(lambda rows: portions.append(len(rows))))
    await after.restore()
    assert_same_rows(
        await after.rows(), {f"e0p{n}/{i}": row_of(f"e0p{n}/{i}") for n in (0, 1) for i in (0, 1)}
    )
    listed = await after.plane.list_rows(PARTITION)
    assert {key: dict(listed[key]) for key in listed} == {key: tags[key] for key in listed}
    assert sum(portions) == 4
    assert max(portions) <= rows_per_put
    assert after.metrics[-1] == {
        "rollout_checkpoint/loaded_rows": 4.0,
        "rollout_checkpoint/planned_groups": 2.0,
        "rollout_checkpoint/continued_episodes": 0.0,
    }


@pytest.mark.asyncio
async def test_a_restore_holds_back_no_write_once_it_is_done(tmp_path: Path) -> None:
    class Plane(InProcessDataPlane):
        def __init__(self) -> None:
            super().__init__()
            self.pins: list[PinnedRows] = []

        def pin(self, partition_id: str) -> PinnedRows:
            self.pins.append(super().pin(partition_id))
            return self.pins[-1]

    await saved(tmp_path)
    plane = Plane()
    await World(tmp_path, plane=plane).restore()
    assert plane.pins
    for pinned in plane.pins:
        with pytest.raises(DataPlaneError, match="the pin is released"):
            pinned.revisions(())


@pytest.mark.asyncio
async def test_of_a_row_that_is_in_several_segments_the_newest_is_loaded(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.ready(0, 1)
    assert (await world.snapshotter.save_rollout_snapshot()).saved
    await world.buffer.write_back({"e0p0/0": {"logprobs": torch.full((5,), 7.0)}})
    assert (await world.snapshotter.save_rollout_snapshot()).saved
    assert len(newest_bundle(world).facts.segments) == 2
    after = World(tmp_path)
    await after.restore()
    rows = await after.rows()
    assert torch.equal(rows["e0p0/0"]["logprobs"], torch.full((5,), 7.0))
    assert torch.equal(rows["e0p0/1"]["logprobs"], row_of("e0p0/1")["logprobs"])


@pytest.mark.asyncio
async def test_a_segment_of_which_no_row_is_loaded_is_only_validated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    await world.ready(0)
    assert (await world.snapshotter.save_rollout_snapshot()).saved
    await world.admit(1)
    await world.seal("e0p1", 0)
    assert (await world.snapshotter.save_rollout_snapshot()).saved
    ready, staged = newest_bundle(world).facts.segments
    reads: list[str] = []

    def read(bundle: PlainBundle, name: str, read: ReadSegment = PlainBundle.read_segment) -> bytes:
        reads.append(name)
        return read(bundle, name)

    monkeypatch.setattr(PlainBundle, "read_segment", read)
    resumed = World(tmp_path)
    await resumed.restore(resumed.policy(load_buffer=False))
    assert (reads.count(ready), reads.count(staged)) == (1, 2)
    assert set(await resumed.rows()) == {"e0p1/0/attempt-0"}


@pytest.mark.asyncio
async def test_a_restore_needs_no_writer(tmp_path: Path) -> None:
    world, after = await saved(tmp_path), World(tmp_path)
    restorer = RolloutRestorer(after.parts, archive=after.archive, policy=after.policy())
    assert await restorer.restore() is not None
    assert after.state.replay == world.state.replay


@pytest.mark.asyncio
async def test_restoring_twice_is_restoring_once(tmp_path: Path) -> None:
    await saved(tmp_path)
    after = World(tmp_path)
    first = await after.restore()
    state, rows = after.state, await after.rows()
    second = await after.restore()
    assert first is not None
    assert second is not None
    assert (after.state, second.plan) == (state, first.plan)
    assert_same_rows(await after.rows(), rows)


@pytest.mark.asyncio
async def test_without_the_buffer_its_prompts_are_generated_again(tmp_path: Path) -> None:
    await saved(tmp_path)
    after = World(tmp_path)
    restored = await after.restore(after.policy(load_buffer=False))
    assert restored is not None
    assert len(after.state.replay) == 0
    assert {each.group_id for each in restored.plan.dispatches} == {"e0p0", "e0p1", "e0p2", "e0p3"}
    assert set(await after.rows()) == {"e0p2/0/attempt-0"}


@pytest.mark.asyncio
async def test_a_poison_prompt_is_dropped_after_bounded_resumes(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.admit(0, 1)
    resumes = 0
    while "e0p0" in world.state.ledger.groups:
        await world.do(dispatch("e0p0", 0, resumes))
        assert (await world.snapshotter.save_rollout_snapshot()).saved
        world = World(tmp_path)
        assert await world.restore(world.policy(max_recoveries=3)) is not None
        resumes += 1
    assert resumes == 4
    assert isinstance(world.state.outcomes["e0p0"], Dropped)
    counts = dict(account(world.state).by_place)
    assert counts[PromptPlace.DROPPED] == 1, "its batch mate was never found running"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "sampler", [WindowedSampler(), ReadyFirstSampler(), WeightFifoSampler(), InOrderSampler()]
)
async def test_every_sampler_resumes_from_every_state_of_a_step(
    tmp_path: Path, sampler: BuiltinSampler
) -> None:
    """Saves at each point of a step's life; each resume owns every prompt exactly once."""
    world = World(tmp_path, sampler=sampler)
    seen: list[dict[PromptPlace, int]] = []

    async def save_and_resume() -> None:
        assert (await world.snapshotter.save_rollout_snapshot(force=True)).saved
        after = World(tmp_path, sampler=sampler)
        assert await after.restore() is not None
        counted = account(after.state)
        assert counted.in_two_places == ()
        assert counted.handed_out == account(world.state).handed_out
        assert after.state.sampler_dispatch_index == world.state.sampler_dispatch_index
        seen.append(dict(counted.by_place))

    await save_and_resume()
    await world.do(reserve(0, 1))
    await save_and_resume()
    await world.do(admit(world.state, 0, 1))
    await save_and_resume()
    await world.seal("e0p0", 0)
    await save_and_resume()
    await world.finish("e0p0")
    await save_and_resume()
    await world.finish("e0p1")
    await save_and_resume()
    await world.do(GroupsClaimed(step=1, group_ids=("e0p0", "e0p1")))
    await save_and_resume()
    assert [places[PromptPlace.READY] for places in seen] == [0, 0, 0, 0, 1, 2, 2]
    assert all(places[PromptPlace.CLAIMED] == 0 for places in seen)


@pytest.mark.asyncio
async def test_the_trace_tells_what_a_resume_did(tmp_path: Path) -> None:
    await saved(tmp_path)
    after = World(tmp_path)
    await after.restore()
    events = after.trace.trace.events
    kinds = list(dict.fromkeys(event.kind for event in events))
    assert kinds == [
        Kind.RESUME_CHOSEN,
        Kind.VALIDATED,
        Kind.ROWS_LOADED,
        Kind.GROUP_PLANNED,
        Kind.RESTORED,
    ]
    planned = {event.subject: event.detail for event in events if event.kind is Kind.GROUP_PLANNED}
    assert planned["e0p0"] == "KeptReady"
    assert planned["e0p2"] == "SiblingsResumed"
    assert planned["e0p4"] == "Readmitted"


@pytest.mark.parametrize("sampler", [InOrderSampler(), WindowedSampler()], ids=["order", "window"])
@pytest.mark.asyncio
async def test_a_half_filled_batch_is_filled_and_trained_whole(
    sampler: InOrderSampler | WindowedSampler, tmp_path: Path
) -> None:
    """One of two groups was ready when the process died: the other one is generated, and nobody
    trains half a batch or waits for a new one."""
    before = World(tmp_path, sampler=sampler)
    await before.admit(0, 1)
    await before.finish("e0p0")
    assert (await before.snapshotter.save_rollout_snapshot()).saved
    after = World(tmp_path, sampler=sampler)
    restored = await after.restore()
    assert restored is not None
    limits = after.policy().limits
    assert isinstance(sampler.select(after.state, limits), Wait)
    assert [each.group_id for each in restored.plan.dispatches] == ["e0p1", "e0p1"]
    await after.finish("e0p1")
    selected = sampler.select(after.state, limits)
    assert isinstance(selected, TrainBatch)
    assert sorted(selected.event.group_ids) == ["e0p0", "e0p1"]
