"""The run directory: what saving and restoring ask of it (`rollsync.shell.rollout.archive`).

Rules kept here: nothing is written before the directory is known to be this run's; nothing old is
removed before what is newer is durable; choosing writes nothing. What is chosen, kept or removed is
decided in `rollsync.pure.snapshot`.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from returns.pipeline import is_successful
from returns.result import Failure, Result, Success

from rollsync.codecs import encode
from rollsync.pure.config import MasterConfig, RetentionConfig
from rollsync.pure.rollout.checkpointing import CheckpointKind
from rollsync.pure.snapshot.errors import (
    DirectoryInUse,
    FileSystemRefused,
    NothingValid,
    OtherRun,
    UnreadableDirectory,
)
from rollsync.pure.snapshot.lineage import LineageChanged, bootstrap_anchor, lineage_change
from rollsync.pure.snapshot.manifest import RolloutSnapshotManifest
from rollsync.pure.snapshot.places import (
    ANCHOR_FILE,
    BOOTSTRAP_DIRECTORY,
    LOCK_FILE,
    SEGMENTS_DIRECTORY,
    BundlePlace,
    draft_name,
)
from rollsync.pure.snapshot.selection import RefusedBundle, resume_order, why_not_of_run
from rollsync.shell.store.chosen import Chosen
from rollsync.shell.store.draft import StoredDraft
from rollsync.shell.store.durable import (
    DurableDirectories,
    delete_tree,
    digest_of,
    displace,
    names_in,
    publish_file,
    status_of,
    sweep,
)
from rollsync.shell.store.errors import StoreError
from rollsync.shell.store.filesystem import (
    FileSystem,
    Lock,
    RealFileSystem,
    UnsuitableFileSystem,
    reason_of,
    require_suitable,
)
from rollsync.shell.store.pruning import prune
from rollsync.shell.store.reader import RunReader, StoredBundle
from rollsync.shell.store.survey import Survey

_logger = logging.getLogger(__name__)


class SnapshotStore:
    """Run directory of one run; both a `SnapshotArchive` and a `ResumeArchive`.

    Args:
        root: the run directory. Made at the first save.
        config: the run's configuration; with `dataset_digest` it is the run's identity.
        dataset_digest: digest of the dataset's content.
        retention: how much stays; default: what `config` says.
    """

    def __init__(
        self,
        root: Path,
        *,
        config: MasterConfig,
        dataset_digest: str,
        retention: RetentionConfig | None = None,
        fs: FileSystem | None = None,
    ) -> None:
        self._fs: FileSystem = RealFileSystem() if fs is None else fs
        self._reader = RunReader(root, self._fs)
        self._root = root
        self._identity = bootstrap_anchor(config, dataset_digest)
        self._retention = config.checkpointing.retention if retention is None else retention
        self._survey = Survey(self._reader)
        self._resumed: BundlePlace | None = None
        self._new_segments: set[str] = set()
        """Written by the save under way; no bundle lists them yet."""
        self._drafts: dict[Path, BundlePlace] = {}
        """What is being written, and where it will be."""
        self._directories = DurableDirectories(self._fs)
        self._is_prepared = False
        self._lock: Lock | None = None

    # Restoring. Writes nothing.

    def choose(self) -> Chosen:
        """See `rollsync.shell.rollout.archive.ResumeArchive`.

        Raises:
            StoreError: the directory is another run's, or nothing in it can be taken.
        """
        self._survey.start_over()
        self._resumed = None
        try:
            listing = self._reader.listing()
        except OSError as error:
            raise StoreError(
                UnreadableDirectory(directory=str(self._root), why=reason_of(error))
            ) from error
        self._check_anchor()
        refused = [RefusedBundle(path=str(path), why=why) for path, why in listing.unlisted]
        for place in resume_order(listing.places):
            checked = self._verified(place)
            if is_successful(checked):
                manifest = checked.unwrap()
                self._resumed = place
                self._survey.trust(place, manifest)
                bundle = StoredBundle(self._reader, self._fs, place, manifest)
                return Chosen(bundle=bundle, refused=tuple(refused))
            self._survey.pass_over(place)
            path = str(self._reader.path(place))
            refused.append(RefusedBundle(path=path, why=checked.failure()))
        if refused:
            raise StoreError(NothingValid(directory=str(self._root), refused=tuple(refused)))
        return Chosen(bundle=None, refused=())

    def _verified(self, place: BundlePlace) -> Result[RolloutSnapshotManifest, str]:
        """The manifest of a bundle that is whole and this run's, or what speaks against it."""
        checked = self._survey.checked(place)
        if not is_successful(checked):
            return Failure(checked.failure().why)
        why = why_not_of_run(checked.unwrap(), self._identity.fingerprint)
        return Success(checked.unwrap()) if why is None else Failure(why)

    def _check_anchor(self) -> None:
        """Refuse another run's directory, and be the run that made this one: what may be written
        in several ways has the fingerprint of the way in which it was written first. An unreadable
        anchor is left to the manifests, which have the fingerprint too."""
        anchor = self._reader.anchor()
        if anchor is None or not is_successful(anchor):
            return
        change = lineage_change(anchor.unwrap(), self._identity)
        if change is not None:
            raise StoreError(OtherRun(directory=str(self._root), change=change))
        self._identity = anchor.unwrap()

    # Saving.

    def claim(self) -> None:
        """Let nobody else write to the directory from now on, until `close`.

        Raises:
            StoreError: another process writes to it, or it is another run's. Nothing in it was
                changed.
        """
        self._directories.make(self._root)
        if self._lock is None:
            self._lock = self._locked()
        try:
            self._check_anchor()
        except StoreError:
            self.close()
            raise

    def has_anchor(self, train_steps: int) -> bool:
        """See `rollsync.shell.rollout.archive.SnapshotArchive`."""
        self._prepare()
        if train_steps == 0:
            return True
        place = BundlePlace(step=train_steps, number=0)
        return not self._survey.doubts(place) and self._survey.carries(place)

    def put_segment(self, data: bytes) -> str:
        """See `rollsync.shell.rollout.archive.SnapshotArchive`."""
        self._prepare()
        name = digest_of(data)
        path = self._reader.segment_path(name)
        self._new_segments.add(name)
        if self._survey.trusts_segment(name):
            return name
        if status_of(self._fs, path) is None:
            publish_file(self._fs, path, data)
        elif self._survey.is_segment_whole(name, len(data)):
            # Whoever wrote it may have been killed before it was durable.
            self._fs.sync_file(path)
            self._fs.sync_directory(path.parent)
        else:
            delete_tree(self._fs, displace(self._fs, path))
            publish_file(self._fs, path, data)
        self._survey.trust_segment(name)
        return name

    def begin(self, kind: CheckpointKind, train_steps: int) -> StoredDraft:
        """See `rollsync.shell.rollout.archive.SnapshotArchive`."""
        self._prepare()
        self._sweep()
        place = self._place_of_next(kind, train_steps)
        final = self._reader.path(place)
        path = final.parent / draft_name(final.name, names_in(self._fs, final.parent))
        self._fs.make_directory(path)
        self._drafts[path] = place

        def published(manifest: RolloutSnapshotManifest, is_durable: bool) -> None:
            if is_durable:
                self._survey.trust(place, manifest)
            else:
                self._survey.doubt(place, manifest)

        def ended() -> None:
            self._drafts.pop(path, None)
            if not self._drafts:
                self._new_segments.clear()

        return StoredDraft(
            self._fs,
            path,
            final,
            fingerprint=self._identity.fingerprint,
            segment_path=self._reader.segment_path,
            make_way=lambda: self._make_way(place),
            published=published,
            ended=ended,
        )

    def _place_of_next(self, kind: CheckpointKind, train_steps: int) -> BundlePlace:
        """Where the next bundle of a kind goes. The directory above it is there, durably."""
        if kind is CheckpointKind.TRAINER_CHECKPOINT:
            if train_steps < 1:
                # Its place would be the bootstrap anchor's, with all snapshots of step 0.
                raise ValueError(f"a trainer checkpoint of step {train_steps}: none was trained")
            place = BundlePlace(step=train_steps, number=0)
            self._refuse_whole(place)
            return place
        anchor = self._reader.anchor_path(train_steps)
        self._fs.status(anchor)  # A missing one must not be made up.
        self._directories.make(anchor)
        self._directories.make(self._reader.snapshots_path(train_steps))
        places = self._reader.listing().places
        numbers = [place.number for place in places if place.step == train_steps]
        return BundlePlace(step=train_steps, number=max(numbers, default=0) + 1)

    def prune(self) -> Sequence[str]:
        """See `rollsync.shell.rollout.archive.SnapshotArchive`.

        Raises:
            OSError: something could not be removed; the rest was.
        """
        return prune(
            self._fs,
            self._reader,
            self._survey,
            self._retention,
            protected=self._protected(),
            protected_segments=frozenset(self._new_segments),
        )

    def _protected(self) -> frozenset[BundlePlace]:
        resumed = () if self._resumed is None else (self._resumed,)
        return frozenset((*resumed, *self._drafts.values()))

    def close(self) -> None:
        """Let another process write to the directory. The end of this process does so too."""
        lock, self._lock = self._lock, None
        self._is_prepared = False
        if lock is not None:
            lock.release()

    def _refuse_whole(self, place: BundlePlace) -> None:
        path = self._reader.path(place)
        if self._survey.is_passed_over(place):
            return
        if is_successful(self._survey.checked(place)):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))

    def _make_way(self, place: BundlePlace) -> None:
        """Take the name away from a checkpoint of the same step that is damaged, or that this run
        has passed over."""
        path = self._reader.path(place)
        if status_of(self._fs, path) is not None:
            self._refuse_whole(place)
            displace(self._fs, path)
            self._survey.forget(place)
            self._directories.forget(path)

    def _prepare(self) -> None:
        """Make the directory this run's, once."""
        if self._is_prepared:
            return
        self.claim()
        self._require_suitable()
        self._directories.make(self._root / SEGMENTS_DIRECTORY)
        self._directories.make(self._root / BOOTSTRAP_DIRECTORY)
        self._make_anchor()
        self._is_prepared = True

    def _locked(self) -> Lock:
        try:
            return self._fs.lock(self._root / LOCK_FILE)
        except BlockingIOError as error:
            raise StoreError(DirectoryInUse(directory=str(self._root))) from error

    def _require_suitable(self) -> None:
        try:
            require_suitable(self._fs, self._root)
        except UnsuitableFileSystem as error:
            refusal = FileSystemRefused(directory=str(self._root), lacks=str(error.strerror))
            raise StoreError(refusal) from error

    def _make_anchor(self) -> None:
        anchor = self._reader.anchor()
        if anchor is not None and is_successful(anchor):
            return
        path = self._root / BOOTSTRAP_DIRECTORY / ANCHOR_FILE
        if anchor is not None and anchor.failure().is_transient:
            raise OSError(errno.EIO, anchor.failure().why, str(path))
        for place in self._reader.listing().places:
            manifest = self._reader.manifest(place)
            if is_successful(manifest) and why_not_of_run(
                manifest.unwrap(), self._identity.fingerprint
            ):
                change = LineageChanged(changed=())
                raise StoreError(OtherRun(directory=str(self._root), change=change))
        if anchor is not None:
            displace(self._fs, path)
        publish_file(self._fs, path, encode(self._identity))

    def _sweep(self) -> None:
        """Delete what interrupted saves and removals have left. What will not go stays."""
        for directory in self._reader.directories():
            try:
                sweep(self._fs, directory, but_not=self._drafts)
            except OSError as error:
                _logger.warning("leftovers in %s stay: %s", directory, error)
