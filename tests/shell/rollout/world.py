"""A small run without engines: parts, events that move rows as a controller would, an archive.

The archive here keeps bundles in plain files and promises nothing about crashes; the store's own
tests are about that. It writes down the order of its calls and fails where a test asks it to.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path

import msgspec
import torch

from rollsync.pure.config import (
    CheckpointingConfig,
    DataConfig,
    GenerationConfig,
    GrpoConfig,
    MasterConfig,
    ModelConfig,
    RunConfig,
)
from rollsync.pure.rollout.checkpointing import CheckpointKind
from rollsync.pure.rollout.decisions import SamplerLimits
from rollsync.pure.rollout.events import RolloutEvent
from rollsync.pure.rollout.resume import ResumePolicy
from rollsync.pure.rollout.sampler import (
    InOrderSampler,
    PromptGroupSampler,
    ReadyFirstSampler,
    WeightFifoSampler,
    WindowedSampler,
)
from rollsync.pure.rollout.state import (
    DatumSpec,
    RecoveryGranularity,
    RolloutState,
    TrainingProgress,
)
from rollsync.shell.errors import RollsyncError
from rollsync.shell.files import is_ours
from rollsync.shell.rollout.archive import BundleFacts, Chosen, RefusedBundle
from rollsync.shell.rollout.barrier import CheckpointMutationKind, DataPlaneCheckpointBarrier
from rollsync.shell.rollout.bundle_writer import BundleWriter
from rollsync.shell.rollout.cell import StateCell
from rollsync.shell.rollout.controller import RunArchive
from rollsync.shell.rollout.data_plane import DataPlane, InProcessDataPlane, Row
from rollsync.shell.rollout.environments import EnvironmentCheckpoint, NoEnvironmentCheckpoint
from rollsync.shell.rollout.parts import RolloutParts
from rollsync.shell.rollout.replay_buffer import TQReplayBuffer
from rollsync.shell.rollout.restore import RestoredRollout, RolloutRestorer
from rollsync.shell.rollout.snapshots import RolloutSnapshotter
from rollsync.shell.rollout.trace import RolloutTraceRecorder
from rollsync.shell.store import SnapshotStore
from rollsync.shell.store.filesystem import FileSystem
from tests.pure.rollout.events_kit import admit, dispatch, fresh, reserve, seal

PARTITION = "run"
BuiltinSampler = WindowedSampler | ReadyFirstSampler | WeightFifoSampler | InOrderSampler


class PlainArchive:
    """Bundles as directories with numbers, segments by digest."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.calls: list[str] = []
        self.failing: dict[str, Exception] = {}
        """Call name -> what it raises."""
        self.published: Callable[[], None] = lambda: None
        """Called when a bundle has its name."""
        self.anchors = {0}
        self.row_bytes = 0
        """Of new row segments."""

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.failing:
            raise self.failing[name]

    def has_anchor(self, train_steps: int) -> bool:
        self._called("has_anchor")
        return train_steps in self.anchors

    def put_segment(self, data: bytes) -> str:
        self._called("put_segment")
        name = sha256(data).hexdigest()
        path = self.root / "segments" / name
        path.parent.mkdir(exist_ok=True)
        if not path.exists() and not is_ours(data):
            self.row_bytes += len(data)
        path.write_bytes(data)
        return name

    def begin(self, kind: CheckpointKind, train_steps: int) -> PlainDraft:
        self._called("begin")
        return PlainDraft(self, kind, train_steps)

    def prune(self) -> Sequence[str]:
        self._called("prune")
        return ()

    def bundles(self) -> list[Path]:
        found = [path for path in self.root.glob("bundle-*") if (path / "manifest").exists()]
        return sorted(found, key=lambda path: int(path.name.removeprefix("bundle-")))

    def choose(self) -> Chosen:
        self._called("choose")
        refused: list[RefusedBundle] = []
        for path in reversed(self.bundles()):
            try:
                return Chosen(bundle=PlainBundle(path), refused=tuple(refused))
            except msgspec.MsgspecError as error:
                refused.append(RefusedBundle(path=str(path), why=str(error)))
        return Chosen(bundle=None, refused=tuple(refused))


class PlainDraft:
    """A directory that gets its manifest last."""

    def __init__(self, archive: PlainArchive, kind: CheckpointKind, train_steps: int) -> None:
        self._archive, self._kind, self._step = archive, kind, train_steps
        self.path = archive.root / "draft"
        self.path.mkdir(parents=True)

    def publish(self, facts: BundleFacts, files: Mapping[str, bytes]) -> Path:
        self._archive._called("publish")
        assert facts.kind is self._kind
        assert facts.base_train_step == self._step
        for name, data in files.items():
            (self.path / name).write_bytes(data)
        (self.path / "manifest").write_bytes(msgspec.json.encode(facts))
        final = self._archive.root / f"bundle-{len(self._archive.bundles()) + 1}"
        self.path.rename(final)
        if self._kind is CheckpointKind.TRAINER_CHECKPOINT:
            self._archive.anchors.add(self._step)
        self._archive.published()
        return final

    def abandon(self) -> None:
        self._archive.calls.append("abandon")
        shutil.rmtree(self.path, ignore_errors=True)


class PlainBundle:
    """A published directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.facts = msgspec.json.decode((path / "manifest").read_bytes(), type=BundleFacts)
        self.trainer_path = path if self.facts.base_train_step else None

    @property
    def newest_link(self) -> Path:
        """The last segment of the state."""
        return self.path.parent / "segments" / self.facts.state_segments[-1]

    @property
    def row_segments(self) -> list[Path]:
        return [self.path.parent / "segments" / name for name in self.facts.segments]

    def read(self, name: str) -> bytes:
        return self._read(self.path / name)

    def read_segment(self, name: str) -> bytes:
        return self._read(self.path.parent / "segments" / name)

    def _read(self, path: Path) -> bytes:
        try:
            return path.read_bytes()
        except OSError as error:
            raise RollsyncError(f"{path}: {error}", remedy="put it back") from error


class Samples:
    """The dataset that `events_kit.prompt` refers to."""

    def __init__(self) -> None:
        self.digest = "d0"
        self.task = "sum"
        self.contents = {f"s{index}": f"c{index}" for index in range(1000)}

    def lookup(self, sample_id: str) -> DatumSpec | None:
        content = self.contents.get(sample_id)
        if content is None:
            return None
        return DatumSpec(sample_id=sample_id, task=self.task, content=content)

    def content_digest(self, datum: DatumSpec) -> str:
        return datum.content


class Manager:
    """Remembers why it was told to start nothing more."""

    def __init__(self) -> None:
        self.closed: list[str] = []

    def close_admission(self, why: str) -> None:
        self.closed.append(why)


def config(
    sampler: BuiltinSampler,
    *,
    checkpointing: CheckpointingConfig,
    num_prompts_per_step: int = 2,
) -> MasterConfig:
    return MasterConfig(
        run=RunConfig(directory="run"),
        data=DataConfig(task="sum", size=1000),
        model=ModelConfig(path="model"),
        grpo=GrpoConfig(
            num_prompts_per_step=num_prompts_per_step,
            num_generations_per_prompt=2,
            max_steps=10,
            learning_rate=1e-3,
        ),
        generation=GenerationConfig(backend="torch", max_new_tokens=4),
        sampler=sampler,
        checkpointing=checkpointing,
    )


class World:
    """One process of a run."""

    def __init__(
        self,
        root: Path,
        *,
        sampler: BuiltinSampler | None = None,
        environment: EnvironmentCheckpoint | None = None,
        checkpointing: CheckpointingConfig | None = None,
        buffer_capacity: int | None = None,
        num_prompts_per_step: int = 2,
        plane: DataPlane | None = None,
        archive: PlainArchive | None = None,
        store_on: FileSystem | None = None,
    ) -> None:
        chosen: BuiltinSampler = WindowedSampler() if sampler is None else sampler
        self.sampler: PromptGroupSampler = chosen
        self.num_prompts_per_step = num_prompts_per_step
        self.barrier = DataPlaneCheckpointBarrier()
        self.cell = StateCell(fresh(stamped=chosen.stamps_target_steps), self.barrier)
        self.plane: DataPlane = InProcessDataPlane() if plane is None else plane
        self.samples = Samples()
        self.trainer_progress: TrainingProgress | None = None
        """The trainer's own counters, where they differ from the state's."""
        self.manager = Manager()
        self.metrics: list[Mapping[str, float]] = []
        self.trace = RolloutTraceRecorder()
        self.buffer = TQReplayBuffer(
            self.cell, self.barrier, self.plane, partition_id=PARTITION, capacity=buffer_capacity
        )
        root.mkdir(parents=True, exist_ok=True)
        self.archive = PlainArchive(root) if archive is None else archive
        self.parts = RolloutParts(
            master_config=config(
                chosen,
                checkpointing=checkpointing or CheckpointingConfig(),
                num_prompts_per_step=num_prompts_per_step,
            ),
            dp_client=self.plane,
            partition_id=PARTITION,
            buffer=self.buffer,
            dataloader=self.samples,
            sampler=self.sampler,
            rollout_manager=self.manager,
            data_plane_barrier=self.barrier,
            environment_checkpoint=environment or NoEnvironmentCheckpoint(),
            runtime_state=self.cell,
            read_progress=lambda: self.trainer_progress or self.cell.state.progress,
            log_metrics=self.metrics.append,
            trace=self.trace,
        )
        self._archive: RunArchive = self.archive
        self.store: SnapshotStore | None = None
        """The real store, if the test wants it on a file system."""
        if store_on is not None:
            self.store = SnapshotStore(
                root,
                config=self.parts.master_config,
                dataset_digest=self.samples.digest,
                fs=store_on,
            )
            self._archive = self.store
        self.writer = BundleWriter(self._archive)
        self.snapshotter = RolloutSnapshotter(self.parts, archive=self._archive, writer=self.writer)
        self.buffer_capacity = buffer_capacity

    @property
    def state(self) -> RolloutState:
        return self.cell.state

    async def do(self, *events: RolloutEvent) -> RolloutState:
        """Apply events that move no rows."""
        async with self.barrier.mutation(CheckpointMutationKind.OTHER) as section:
            return self.cell.apply(section, *events)

    async def admit(self, *positions: int) -> None:
        """Hand out prompts and admit them as one batch."""
        await self.do(reserve(*positions))
        await self.do(admit(self.state, *positions))

    async def seal(self, group_id: str, sibling: int, attempt: int = 0) -> None:
        """Run one attempt to its end."""
        await self.do(dispatch(group_id, sibling, attempt))
        event = seal(group_id, sibling, attempt)
        await self.buffer.seal(event, {key: row_of(key) for key in event.staged_keys})

    async def finish(self, group_id: str, siblings: int = 2) -> None:
        """Seal whatever is not sealed yet and publish the group."""
        for index, sibling in enumerate(self.state.ledger.groups[group_id].siblings):
            last = sibling.attempts[-1]
            if last.status == "reserved":
                await self.seal(group_id, index, last.index)
        await self.buffer.publish(
            group_id,
            [row_of(f"{group_id}/{index}") for index in range(siblings)],
            lengths=[5] * siblings,
            end_weight_version=self.state.progress.trainer_version,
        )

    async def ready(self, *positions: int) -> None:
        """A batch that is admitted and finished."""
        await self.admit(*positions)
        for position in positions:
            await self.finish(f"e0p{position}")

    def policy(self, *, load_buffer: bool = True, max_recoveries: int = 8) -> ResumePolicy:
        return ResumePolicy(
            sampler=self.sampler,
            limits=SamplerLimits(
                num_prompts_per_step=self.num_prompts_per_step,
                num_generations_per_prompt=2,
                granularity=RecoveryGranularity.SIBLING,
                buffer_capacity=self.buffer_capacity,
                prompts_left=True,
                served_weight_version=self.state.progress.trainer_version,
            ),
            load_buffer=load_buffer,
            max_recoveries=max_recoveries,
        )

    async def restore(self, policy: ResumePolicy | None = None) -> RestoredRollout | None:
        return await RolloutRestorer(
            self.parts, archive=self._archive, policy=policy or self.policy(), writer=self.writer
        ).restore()

    def die(self) -> None:
        """What the end of the process does: another may write to the run directory."""
        if self.store is not None:
            self.store.close()

    async def rows(self) -> dict[str, Row]:
        """Everything in the plane."""
        keys = list(await self.plane.list_rows(PARTITION))
        return await self.plane.get(PARTITION, keys)


def row_of(key: str) -> Row:
    """The row that belongs under a key: a function of it, so that a test can tell a wrong one."""
    seed = int.from_bytes(sha256(key.encode()).digest()[:4], "little")
    generator = torch.Generator().manual_seed(seed)
    return {
        "tokens": torch.randint(0, 1000, (5 + seed % 7,), generator=generator),
        "logprobs": torch.randn(5, generator=generator),
    }


def assert_same_rows(left: Mapping[str, Row], right: Mapping[str, Row]) -> None:
    assert set(left) == set(right)
    for key, row in left.items():
        assert set(row) == set(right[key])
        for name, tensor in row.items():
            assert torch.equal(tensor, right[key][name]), f"{key} {name}"
