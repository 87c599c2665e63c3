"""A short run on a simulated machine: what each save holds, how it is made, and what is found.

Save number `k` holds a file of its own, an environment's file, a new row segment and the one of the
save before, a chain of state segments, and, if it is a trainer checkpoint, weights. All content
follows from `k`, so what is found can be told apart and is whole or not.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from returns.pipeline import is_successful

from rollsync.pure.config import RetentionConfig
from rollsync.pure.rollout.checkpointing import CheckpointKind
from rollsync.pure.snapshot.errors import DamagedBundleFile
from rollsync.pure.snapshot.manifest import BundleFacts
from rollsync.pure.snapshot.places import BundlePlace, is_leftover
from rollsync.shell.store import FileSystem, SnapshotStore, StoreError
from rollsync.shell.store.reader import RunReader
from rollsync.shell.store.survey import Survey
from tests.crash.disk import Tree
from tests.crash.operations import SimulatedFileSystem
from tests.shell.store.kit import config

ROOT = Path("/runs/run")
METADATA = "data_plane.bin"
EPISODES = "environment/worker-0/episodes"
WEIGHTS = "policy/model.safetensors"
SNAPSHOT, CHECKPOINT = CheckpointKind.ROLLOUT_SNAPSHOT, CheckpointKind.TRAINER_CHECKPOINT
NOTHING = 0
"""What is found in a fresh run."""
_EXTRA = 1000


@dataclass(frozen=True)
class Save:
    """One save of the run."""

    number: int
    kind: CheckpointKind
    step: int


RUN = (
    Save(1, SNAPSHOT, 0),
    Save(2, SNAPSHOT, 0),
    Save(3, CHECKPOINT, 1),
    Save(4, SNAPSHOT, 1),
    Save(5, SNAPSHOT, 1),
    Save(6, CHECKPOINT, 2),
    Save(7, SNAPSHOT, 2),
)
"""With one checkpoint and one snapshot to keep, saves 2 and 4 to 7 have something to prune."""


@cache
def content(name: str, number: int, size_bytes: int) -> bytes:
    """Bytes of a file of a save."""
    return f"{name} {number} ".encode() + random.Random(f"{name}{number}").randbytes(size_bytes)


def metadata_of(save: Save) -> bytes:
    return content("metadata", save.number, 300)


def chain_of(save: Save) -> list[bytes]:
    """The state: a base, and differences. A checkpoint begins a chain, and so do the first save of
    a resumed process and every third of the others: of the run, saves 1, 3 and 6."""
    first = save.number
    if save.kind is SNAPSHOT and save.number < _EXTRA:
        first = max(1, save.number - save.number % 3)
    base, *changes = range(first, save.number + 1)
    return [
        content("state", base, 1500),
        *(content("state change", number, 200) for number in changes),
    ]


def episodes_of(save: Save) -> bytes:
    return content("episodes", save.number, 40)


def weights_of(save: Save) -> bytes:
    return content("weights", save.number, 9000)


def segments_of(save: Save) -> list[bytes]:
    """Oldest first. All but the last are of the save before, and of one that may have died."""
    before = save.number % _EXTRA
    numbers = (save.number - 1,) if before == save.number else (before, before + 1)
    return [content("rows", number, 600) for number in (*numbers, save.number) if number]


def open_store(files: FileSystem, *, keep: int = 1) -> SnapshotStore:
    return SnapshotStore(
        ROOT,
        config=config(),
        dataset_digest="d0",
        retention=RetentionConfig(trainer_checkpoints=keep, snapshots_per_checkpoint=keep),
        fs=files,
    )


def perform(files: SimulatedFileSystem, store: SnapshotStore, save: Save) -> None:
    """Make the save, as the snapshotter does. Returns once it is published.

    Raises:
        OSError, StoreError: nothing was published, and the draft was abandoned.
    """
    assert save.kind is CHECKPOINT or store.has_anchor(save.step)
    draft = store.begin(save.kind, save.step)
    try:
        files.write_as_others(draft.path / EPISODES, episodes_of(save))
        if save.kind is CHECKPOINT:
            files.write_as_others(draft.path / WEIGHTS, weights_of(save))
        names = tuple(store.put_segment(data) for data in segments_of(save))
        chain = tuple(store.put_segment(data) for data in chain_of(save))
        facts = BundleFacts(
            kind=save.kind,
            base_train_step=save.step,
            trainer_version=save.step,
            current_epoch=0,
            sampler_dispatch_index=save.number,
            mutation_version=save.number,
            rolled_back_train_group_count=0,
            environment_fingerprint=None,
            segments=names,
            state_segments=chain,
        )
        draft.publish(facts, {METADATA: metadata_of(save)})
    finally:
        draft.abandon()


def prepared(count: int) -> tuple[SimulatedFileSystem, SnapshotStore]:
    """A machine whose process has made the first saves of the run, each pruned after.

    Somebody has made a directory for runs; its name is not durable.
    """
    files = SimulatedFileSystem()
    files.make_directory(ROOT.parent)
    store = open_store(files)
    for save in RUN[:count]:
        perform(files, store, save)
        store.prune()
    return files, store


class Mixture(AssertionError):
    """What was found is not one whole save."""


def found(files: SimulatedFileSystem) -> int:
    """The number of the save that a resume takes, after checking that it is whole.

    Raises:
        Mixture: it has parts that are not of that save.
        StoreError, OSError: it could not be read.
    """
    bundle = open_store(files).choose().bundle
    if bundle is None:
        return NOTHING
    facts = bundle.facts
    save = Save(facts.mutation_version, facts.kind, facts.base_train_step)
    expect(bundle.read(METADATA) == metadata_of(save), "metadata", save)
    expect(bundle.read(EPISODES) == episodes_of(save), "episodes", save)
    rows = [bundle.read_segment(name) for name in facts.segments]
    expect(rows == segments_of(save), "segments", save)
    links = [bundle.read_segment(name) for name in facts.state_segments]
    expect(links == chain_of(save), "state", save)
    expect((bundle.trainer_path is not None) == bool(save.step), "trainer path", save)
    if bundle.trainer_path is not None:
        weights = b"".join(files.read(bundle.trainer_path / WEIGHTS))
        owner = weights_owner(files, save)
        expect(weights == weights_of(owner), "weights", save)
        expect((owner.kind, owner.step) == (CHECKPOINT, save.step), "checkpoint", save)
    return save.number


def weights_owner(files: SimulatedFileSystem, save: Save) -> Save:
    """The save whose weights are those of the step, as their own manifest says."""
    read = RunReader(ROOT, files).manifest(BundlePlace(step=save.step, number=0))
    if not is_successful(read):
        raise StoreError(DamagedBundleFile(path=str(ROOT), why=read.failure().why))
    facts = read.unwrap().facts
    return Save(facts.mutation_version, facts.kind, facts.base_train_step)


def check_all_whole(files: SimulatedFileSystem) -> None:
    """Whatever has the name of a bundle is one, also those that no resume would take; and the
    run's identity is there before the first.

    Raises:
        Mixture: part of a bundle is missing or is not what was saved.
    """
    reader = RunReader(ROOT, files)
    survey = Survey(reader)
    places = reader.listing().places
    anchor = reader.anchor()
    if not is_successful(anchor) if anchor is not None else places:
        raise Mixture("the run's identity is damaged or missing")
    for place in places:
        checked = survey.checked(place)
        if not is_successful(checked):
            raise Mixture(f"{reader.path(place)}: {checked.failure().why}")


def leftovers(files: SimulatedFileSystem) -> list[str]:
    """What is half written or half removed and has a name of neither."""
    return [
        path
        for path in paths(files.disk.visible())
        if any(is_leftover(part) for part in path.split("/"))
    ]


def paths(tree: Tree) -> Iterator[str]:
    """Everything in a tree, parts joined by `/`."""
    for name, item in tree.items():
        yield name
        if isinstance(item, dict):
            yield from (f"{name}/{inner}" for inner in paths(item))


def extra(number: int) -> Save:
    """A save that a resumed process makes, as a snapshot under the step it resumed at. Its number
    has that step and the save that it resumed from in it."""
    return Save(number, SNAPSHOT, number // _EXTRA - 1)


def next_save(number: int) -> Save:
    """The snapshot that a process makes which has resumed from save `number`."""
    step = 0 if number == NOTHING else RUN[number - 1].step
    return extra((step + 1) * _EXTRA + number)


def expect(holds: bool, what: str, save: Save) -> None:
    if not holds:
        raise Mixture(f"{what} is not that of {save}")
