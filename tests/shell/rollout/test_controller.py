"""How the controller wires its parts: what their rules ask of each other."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from rollsync.pure.config import CheckpointingConfig, DataConfig, RunConfig
from rollsync.pure.rollout.sampler import InOrderSampler
from rollsync.pure.snapshot.places import snapshot_of, step_of
from rollsync.shell.journal import Journal, JournalLine, StepTrained
from rollsync.shell.rollout.clients import SyncFigures
from rollsync.shell.rollout.controller import RolloutController, RunClients
from rollsync.shell.rollout.data_plane import InProcessDataPlane
from rollsync.shell.rollout.environments import NoEnvironmentCheckpoint
from rollsync.shell.rollout.prompts import PromptDataloader, ReasoningGymDataset
from rollsync.shell.store import RealFileSystem, SnapshotStore
from rollsync.shell.store.filesystem import WritableFile
from tests.shell.rollout.pumps import SOON_S, Engine, Letters, Trainer
from tests.shell.rollout.world import config


class Recorded:
    """The journal's file: its lines and syncs are written down."""

    def __init__(self, file: WritableFile, calls: list[str]) -> None:
        self._file = file
        self._calls = calls

    def write(self, data: bytes | memoryview) -> int:
        entry = msgspec.json.decode(data, type=JournalLine).entry
        self._calls.append(f"trained {entry.step}" if isinstance(entry, StepTrained) else "line")
        return self._file.write(data)

    def sync(self) -> None:
        self._file.sync()
        self._calls.append("sync")

    def close(self) -> None:
        self._file.close()


class Recording(RealFileSystem):
    """Beside that, which bundles get their name."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def append(self, path: Path) -> WritableFile:
        return Recorded(super().append(path), self.calls)

    def rename(self, source: Path, target: Path) -> None:
        if step_of(target.name) is not None or snapshot_of(target.name) is not None:
            self.calls.append(f"bundle {target.name}")
        super().rename(source, target)


@pytest.mark.asyncio
async def test_what_accounts_for_a_save_is_durable_before_the_save_has_its_name(
    tmp_path: Path,
) -> None:
    sampler = InOrderSampler()
    settings = replace(
        config(sampler, checkpointing=CheckpointingConfig(trainer_every_steps=1)),
        run=RunConfig(directory=str(tmp_path)),
        data=DataConfig(task="chain_sum", size=20),
    )
    settings = replace(settings, grpo=replace(settings.grpo, max_steps=3))
    dataset = ReasoningGymDataset(settings.data)
    files, trainer, engine = Recording(), Trainer(), Engine()
    store = SnapshotStore(tmp_path, config=settings, dataset_digest=dataset.digest, fs=files)
    journal = Journal(tmp_path / "journal.jsonl", files)

    async def sync() -> SyncFigures:
        engine.weight_version = trainer.trainer_version
        return SyncFigures(weight_version=trainer.trainer_version, bytes=1, seconds=0.0)

    controller = RolloutController(
        settings,
        sampler=sampler,
        clients=RunClients(
            trainer=trainer,
            load_trainer=trainer.load,
            generation=engine,
            sync=sync,
            codec=Letters(),
            verifier=dataset,
        ),
        dataloader=PromptDataloader(dataset, max_epochs=1),
        plane=InProcessDataPlane(),
        archive=store,
        environment=NoEnvironmentCheckpoint(),
        journal=journal,
    )
    async with asyncio.timeout(SOON_S):
        assert (await controller.run(asyncio.Event())).completed
    store.close()
    calls = files.calls
    for step in (1, 2, 3):
        trained, named = calls.index(f"trained {step}"), calls.index(f"bundle step_{step:06d}")
        assert "sync" in calls[trained:named], calls
    journal.close()
