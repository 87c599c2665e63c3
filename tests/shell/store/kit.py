"""A run directory to try the store on: small bundles whose content says which save they are of."""

from __future__ import annotations

from pathlib import Path

from rollsync.pure.config import (
    DataConfig,
    GenerationConfig,
    GrpoConfig,
    MasterConfig,
    ModelConfig,
    RetentionConfig,
    RunConfig,
)
from rollsync.pure.rollout.checkpointing import CheckpointKind
from rollsync.pure.rollout.sampler import WindowedSampler
from rollsync.pure.snapshot.manifest import BundleFacts
from rollsync.shell.store import FileSystem, SnapshotStore

STATE = "rollout_state.bin"
WEIGHTS = "weights.bin"


def config(*, learning_rate: float = 1e-3, max_steps: int = 10, seed: int = 0) -> MasterConfig:
    return MasterConfig(
        run=RunConfig(directory="run", seed=seed),
        data=DataConfig(task="sum", size=1000),
        model=ModelConfig(path="model"),
        grpo=GrpoConfig(
            num_prompts_per_step=2,
            num_generations_per_prompt=2,
            max_steps=max_steps,
            learning_rate=learning_rate,
        ),
        generation=GenerationConfig(backend="torch", max_new_tokens=4),
        sampler=WindowedSampler(),
    )


def store_at(
    root: Path,
    *,
    fs: FileSystem | None = None,
    master_config: MasterConfig | None = None,
    dataset_digest: str = "d0",
    trainer_checkpoints: int = 2,
    snapshots_per_checkpoint: int = 2,
) -> SnapshotStore:
    return SnapshotStore(
        root,
        config=master_config or config(),
        dataset_digest=dataset_digest,
        retention=RetentionConfig(
            trainer_checkpoints=trainer_checkpoints,
            snapshots_per_checkpoint=snapshots_per_checkpoint,
        ),
        fs=fs,
    )


def facts(
    kind: CheckpointKind,
    step: int,
    *,
    mutation_version: int = 0,
    segments: tuple[str, ...] = (),
    chain: tuple[str, ...] = (),
) -> BundleFacts:
    return BundleFacts(
        kind=kind,
        base_train_step=step,
        trainer_version=step,
        current_epoch=0,
        sampler_dispatch_index=-1,
        mutation_version=mutation_version,
        rolled_back_train_group_count=0,
        environment_fingerprint=None,
        segments=segments,
        state_segments=chain,
    )


def save_snapshot(
    store: SnapshotStore, step: int, save: int, *rows: bytes, chain: tuple[bytes, ...] = ()
) -> Path:
    """Save number `save`, with these row segments, and these links of a state."""
    draft = store.begin(CheckpointKind.ROLLOUT_SNAPSHOT, step)
    segments = tuple(store.put_segment(data) for data in rows)
    links = tuple(store.put_segment(data) for data in chain)
    return draft.publish(
        facts(
            CheckpointKind.ROLLOUT_SNAPSHOT,
            step,
            mutation_version=save,
            segments=segments,
            chain=links,
        ),
        {STATE: state_of(save)},
    )


def save_checkpoint(store: SnapshotStore, step: int, save: int, *rows: bytes) -> Path:
    """As `save_snapshot`, with a trainer's files."""
    draft = store.begin(CheckpointKind.TRAINER_CHECKPOINT, step)
    segments = tuple(store.put_segment(data) for data in rows)
    (draft.path / "trainer").mkdir()
    (draft.path / "trainer" / WEIGHTS).write_bytes(f"weights {save}".encode())
    return draft.publish(
        facts(CheckpointKind.TRAINER_CHECKPOINT, step, mutation_version=save, segments=segments),
        {STATE: state_of(save)},
    )


def state_of(save: int) -> bytes:
    return f"state {save}".encode()


def chosen_save(store: SnapshotStore) -> int:
    """The save that a resume would start from; 0 for a fresh run."""
    bundle = store.choose().bundle
    if bundle is None:
        return 0
    assert bundle.read(STATE) == state_of(bundle.facts.mutation_version)
    return bundle.facts.mutation_version


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def resumed(
    root: Path, *, trainer_checkpoints: int = 2, snapshots_per_checkpoint: int = 2
) -> SnapshotStore:
    """The store of a process that has resumed."""
    store = store_at(
        root,
        trainer_checkpoints=trainer_checkpoints,
        snapshots_per_checkpoint=snapshots_per_checkpoint,
    )
    assert store.choose().bundle is not None
    return store
