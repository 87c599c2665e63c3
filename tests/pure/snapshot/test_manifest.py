"""Manifests: what they may name, and where they belong."""

from __future__ import annotations

import msgspec
import pytest

from rollsync.pure.rollout.checkpointing import CheckpointKind
from rollsync.pure.snapshot.manifest import (
    MANIFEST_SCHEMA_VERSION,
    BundleFacts,
    SnapshotFile,
    SnapshotSegment,
    manifest_of,
    unsafe_name,
)
from rollsync.pure.snapshot.places import BundlePlace
from rollsync.pure.snapshot.selection import (
    why_not_of_place,
    why_not_of_run,
    why_not_on_anchor,
)

FACTS = BundleFacts(
    kind=CheckpointKind.ROLLOUT_SNAPSHOT,
    base_train_step=3,
    trainer_version=4,
    current_epoch=1,
    sampler_dispatch_index=-1,
    mutation_version=17,
    rolled_back_train_group_count=2,
    environment_fingerprint="guessing",
    segments=("0b" * 32, "0a" * 32),
    state_segments=("0d" * 32, "0c" * 32),
)
MANIFEST = manifest_of(
    FACTS,
    fingerprint="ff" * 32,
    files=tuple(
        SnapshotFile(name=name, size_bytes=1, digest="00" * 32) for name in ("b", "a/c", "a")
    ),
    segments=tuple(SnapshotSegment(digest=name, size_bytes=2) for name in FACTS.segments),
    state_segments=tuple(
        SnapshotSegment(digest=name, size_bytes=3) for name in FACTS.state_segments
    ),
)
PLACE = BundlePlace(step=3, number=1)


def test_facts_come_back_from_the_manifest() -> None:
    assert MANIFEST.facts == FACTS
    assert [file.name for file in MANIFEST.files] == ["a", "a/c", "b"]
    assert why_not_of_place(MANIFEST, PLACE) is None


@pytest.mark.parametrize(
    "name",
    [
        *("", "/a", "a/", "a//b", ".", "..", "../a", "a/../b", "a/./b", "a\0b", "a\\b"),
        *("manifest.bin", "snapshots", "snapshots/000001/rollout_state.bin"),
    ],
)
def test_names_that_lead_elsewhere_are_refused(name: str) -> None:
    assert unsafe_name(name) is not None
    file = SnapshotFile(name=name, size_bytes=0, digest="00" * 32)
    manifest = msgspec.structs.replace(MANIFEST, files=(file,))
    assert why_not_of_place(manifest, PLACE) == unsafe_name(name)


@pytest.mark.parametrize("name", ["a", "a/b", "...", ".hidden", "a/manifest.bin", "é/模型"])
def test_plain_names_are_fine(name: str) -> None:
    assert unsafe_name(name) is None


def test_a_manifest_belongs_to_one_place() -> None:
    assert why_not_of_place(MANIFEST, BundlePlace(step=3, number=7)) is None
    assert "of step 3, not of step 4" in str(
        why_not_of_place(MANIFEST, BundlePlace(step=4, number=1))
    )
    assert "not of a trainer_checkpoint" in str(
        why_not_of_place(MANIFEST, BundlePlace(step=3, number=0))
    )
    newer = msgspec.structs.replace(MANIFEST, schema_version=MANIFEST_SCHEMA_VERSION + 1)
    assert "reads up to" in str(why_not_of_place(newer, PLACE))
    twice = msgspec.structs.replace(MANIFEST, segments=MANIFEST.segments * 2)
    assert "twice" in str(why_not_of_place(twice, PLACE))


def test_a_snapshot_continues_from_weights_of_its_version_and_run() -> None:
    anchor = msgspec.structs.replace(MANIFEST, kind=CheckpointKind.TRAINER_CHECKPOINT)
    assert why_not_on_anchor(MANIFEST, anchor) is None
    other = msgspec.structs.replace(anchor, trainer_version=5)
    assert "trainer version 4" in str(why_not_on_anchor(MANIFEST, other))
    assert why_not_of_run(MANIFEST, "ff" * 32) is None
    assert "fingerprint" in str(why_not_of_run(MANIFEST, "fe" * 32))
