"""Snapshots on disk: what a bundle says about itself, which one a run resumes from, what stays.

The public names of the room. Rule kept here: decisions are functions of listings and manifests;
nothing here looks at a disk (`rollsync.shell.store` does, and asks).
"""

from rollsync.pure.snapshot.errors import (
    DamagedBundleFile,
    DirectoryInUse,
    FileSystemRefused,
    NothingValid,
    OtherRun,
    StoreRefusal,
    UnreadableDirectory,
    UnsafeFileName,
    describe_refusal,
    remedy_for,
)
from rollsync.pure.snapshot.lineage import (
    BootstrapAnchor,
    ChangedSetting,
    LineageChanged,
    bootstrap_anchor,
    describe_change,
    lineage_change,
)
from rollsync.pure.snapshot.manifest import (
    BundleFacts,
    RolloutSnapshotManifest,
    SnapshotFile,
    SnapshotSegment,
)
from rollsync.pure.snapshot.places import BundlePlace
from rollsync.pure.snapshot.retention import (
    BundleCondition,
    ListedBundle,
    RetentionPlan,
    plan_retention,
)
from rollsync.pure.snapshot.selection import RefusedBundle, resume_order

__all__ = [
    "BootstrapAnchor",
    "BundleCondition",
    "BundleFacts",
    "BundlePlace",
    "ChangedSetting",
    "DamagedBundleFile",
    "DirectoryInUse",
    "FileSystemRefused",
    "LineageChanged",
    "ListedBundle",
    "NothingValid",
    "OtherRun",
    "RefusedBundle",
    "RetentionPlan",
    "RolloutSnapshotManifest",
    "SnapshotFile",
    "SnapshotSegment",
    "StoreRefusal",
    "UnreadableDirectory",
    "UnsafeFileName",
    "bootstrap_anchor",
    "describe_change",
    "describe_refusal",
    "lineage_change",
    "plan_retention",
    "remedy_for",
    "resume_order",
]
