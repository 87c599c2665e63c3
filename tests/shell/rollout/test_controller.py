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
from rollsync.shell.journal import (
    Finished,
    Journal,
    JournalLine,
    Resumed,
    StepTrained,
    read_journal,
)
from rollsync.shell.rollout.clients import SyncFigures
from rollsync.shell.rollout.controller import RolloutController, RunClients, RunOutcome
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


class Wired:
    """A controller of a run of three steps in `directory`, with all parts real but its workers.

    Args:
        directory: the run's.
        hanging: what the trainer and the engines never come to an end of: "load" or "sync".
    """

    def __init__(self, directory: Path, *, hanging: str = "") -> None:
        sampler = InOrderSampler()
        settings = replace(
            config(sampler, checkpointing=CheckpointingConfig(trainer_every_steps=1)),
            run=RunConfig(directory=str(directory)),
            data=DataConfig(task="chain_sum", size=20),
        )
        settings = replace(settings, grpo=replace(settings.grpo, max_steps=3))
        dataset = ReasoningGymDataset(settings.data)
        self.files, self.trainer, self.engine = Recording(), Trainer(), Engine()
        self.hanging = hanging
        self.hangs = asyncio.Event()
        self.store = SnapshotStore(
            directory, config=settings, dataset_digest=dataset.digest, fs=self.files
        )
        self.journal = Journal(directory / "journal.jsonl", self.files)
        self.controller = RolloutController(
            settings,
            sampler=sampler,
            clients=RunClients(
                trainer=self.trainer,
                load_trainer=self._load,
                generation=self.engine,
                sync=self._sync,
                codec=Letters(),
                verifier=dataset,
            ),
            dataloader=PromptDataloader(dataset, max_epochs=1),
            plane=InProcessDataPlane(),
            archive=self.store,
            environment=NoEnvironmentCheckpoint(),
            journal=self.journal,
        )

    async def run(self, stop: asyncio.Event) -> RunOutcome:
        async with asyncio.timeout(SOON_S):
            outcome = await self.controller.run(stop)
        self.store.close()
        self.journal.close()
        return outcome

    async def _load(self, directory: Path) -> None:
        await self._hang_in("load")
        await self.trainer.load(directory)

    async def _sync(self) -> SyncFigures:
        await self._hang_in("sync")
        version = self.engine.weight_version = self.trainer.trainer_version
        return SyncFigures(weight_version=version, bytes=1, seconds=0.0)

    async def _hang_in(self, what: str) -> None:
        if self.hanging == what:
            self.hangs.set()
            await asyncio.Event().wait()


@pytest.mark.asyncio
async def test_what_accounts_for_a_save_is_durable_before_the_save_has_its_name(
    tmp_path: Path,
) -> None:
    wired = Wired(tmp_path)
    assert (await wired.run(asyncio.Event())).completed
    calls = wired.files.calls
    for step in (1, 2, 3):
        trained, named = calls.index(f"trained {step}"), calls.index(f"bundle step_{step:06d}")
        assert "sync" in calls[trained:named], calls


@pytest.mark.asyncio
@pytest.mark.parametrize("hanging", ["load", "sync"])
async def test_a_stop_during_the_start_ends_it_with_nothing_done(
    tmp_path: Path, hanging: str
) -> None:
    begun, asked = Wired(tmp_path), asyncio.Event()
    begun.journal.listen(lambda entry: asked.set() if isinstance(entry, StepTrained) else None)
    assert not (await begun.run(asked)).completed

    stop, halted = asyncio.Event(), Wired(tmp_path, hanging=hanging)
    running = asyncio.create_task(halted.run(stop))
    await halted.hangs.wait()
    stop.set()
    outcome = await running
    assert (outcome.completed, outcome.saved) == (False, True)
    assert outcome.why.startswith("asked to stop during the start; nothing was done")
    assert [call for call in halted.files.calls if call.startswith("bundle")] == []
    entries = list(read_journal(tmp_path / "journal.jsonl"))
    assert sum(isinstance(entry, Resumed) for entry in entries) == (2 if hanging == "sync" else 1)
    last = entries[-1]
    assert isinstance(last, Finished)
    assert (last.why == outcome.why) == (hanging == "sync")

    assert (await Wired(tmp_path).run(asyncio.Event())).completed
