"""What a run directory holds, for commands that explain it. Needs no torch, Ray or vLLM."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from rollsync.pure.config import MasterConfig, dataset_digest
from rollsync.pure.rollout.audit import Audit, ProcessBegan, StepRecorded, TrainingRecord, audit
from rollsync.pure.rollout.order import prompts_left
from rollsync.pure.rollout.resume import ResumePlan, plan_resume
from rollsync.pure.rollout.settings import buffer_capacity, resume_policy, sampler_limits
from rollsync.pure.rollout.state import RolloutState
from rollsync.shell.config import read_config
from rollsync.shell.errors import RollsyncError
from rollsync.shell.files import read_state
from rollsync.shell.journal import Resumed, StepTrained, read_evidence
from rollsync.shell.samplers import load_sampler
from rollsync.shell.store import FoundBundle, RealFileSystem, SnapshotStore, is_run_directory

CONFIG = "config.json"
"""The configuration that a run was last started with, in its run directory."""
CONFIG_IS_WRITTEN = "`rollsync run` with the run's configuration writes it as it starts"
"""What puts a lost one back."""
JOURNAL = "journal.jsonl"
"""The journal's file in the run directory."""


class NoRunDirectory(RollsyncError):
    """A directory that is not a run's, or in which no run has saved anything."""


class NothingSaved(RollsyncError):
    """A run directory from which nothing can be resumed."""


class SavedRun(Struct, frozen=True, kw_only=True):
    """What a resume would start from."""

    config: MasterConfig
    bundle: FoundBundle
    state: RolloutState
    refused: tuple[str, ...]
    """Newer bundles that were passed over, with the reason."""

    def plan(self) -> ResumePlan:
        """What a resume would do with each group in flight."""
        sampler = load_sampler(self.config)
        left = prompts_left(
            self.state.dataloader_state,
            size=self.config.data.size,
            max_epochs=self.config.data.max_epochs,
        )
        limits = sampler_limits(
            self.config,
            capacity=buffer_capacity(self.config, sampler),
            prompts_left=left > 0,
            served_weight_version=self.state.progress.trainer_version,
        )
        return plan_resume(self.state, resume_policy(self.config, sampler, limits))


def write_config(config: MasterConfig) -> None:
    """Note in the run directory what the run was started with. A kill leaves the note of before."""
    directory = Path(config.run.directory)
    directory.mkdir(parents=True, exist_ok=True)
    begun = directory / f"{CONFIG}.new"
    with begun.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(config)))
        file.flush()
        os.fsync(file.fileno())
    begun.replace(directory / CONFIG)


def read_saved(directory: Path) -> SavedRun:
    """What a resume of the run in `directory`, copied or not, would start from.

    Raises:
        NothingSaved: nothing was saved there yet.
        RollsyncError: what is there cannot be used; the message has every reason.
    """
    if not (directory / CONFIG).is_file():
        if directory.is_dir() and is_run_directory(directory, RealFileSystem()):
            raise NothingSaved(
                f"{directory} has no {CONFIG}, without which nobody knows the run's settings",
                remedy=f"put it back: {CONFIG_IS_WRITTEN}; `rollsync verify` says which save that "
                "start would take",
            )
        raise NothingSaved(
            f"{directory} is no run directory: it has no {CONFIG}",
            remedy="name the directory that a configuration's run.directory names",
        )
    config = read_config(directory / CONFIG)
    config = replace(config, run=replace(config.run, directory=str(directory)))
    store = SnapshotStore(directory, config=config, dataset_digest=dataset_digest(config.data))
    chosen = store.choose()
    if chosen.bundle is None:
        raise NothingSaved(
            f"{directory} holds no save", remedy="name the directory of a run that has saved once"
        )
    return SavedRun(
        config=config,
        bundle=chosen.bundle,
        state=read_state(chosen.bundle.path),
        refused=tuple(f"{each.path}: {each.why}" for each in chosen.refused),
    )


def close_account(saved: SavedRun) -> Audit:
    """Compare the saved state with the journal beside it."""
    directory = Path(saved.config.run.directory)
    records: list[TrainingRecord] = []
    for entry in read_evidence(directory / JOURNAL):
        if isinstance(entry, Resumed):
            records.append(ProcessBegan(train_steps=entry.train_steps))
        elif isinstance(entry, StepTrained):
            records.append(StepRecorded(step=entry.step, prompt_ids=entry.prompt_ids))
    return audit(saved.state, records, dataset_size=saved.config.data.size)
