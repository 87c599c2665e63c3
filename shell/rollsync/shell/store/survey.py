"""What this process knows of the bundles on disk.

Rules kept here: a bundle is whole when its files are, the segments that it lists, and the weights
that it continues from; what was verified or published by this process is not read again.
"""

from __future__ import annotations

from collections.abc import Callable

from returns.pipeline import is_successful
from returns.result import Failure, Result, Success

from rollsync.pure.snapshot.manifest import RolloutSnapshotManifest, SnapshotFile
from rollsync.pure.snapshot.places import BundlePlace
from rollsync.pure.snapshot.retention import BundleCondition, ListedBundle
from rollsync.pure.snapshot.selection import why_not_on_anchor
from rollsync.shell.store.reader import Fault, RunReader

Checked = Result[RolloutSnapshotManifest, Fault]


def names_of(manifest: RolloutSnapshotManifest) -> tuple[str, ...]:
    """Names of the segments that a bundle needs."""
    return tuple(segment.digest for segment in manifest.shared)


class Survey:
    """Verifies bundles, and remembers what came of it."""

    def __init__(self, reader: RunReader) -> None:
        self._reader = reader
        self._alone: dict[BundlePlace, Checked] = {}
        """Each bundle by itself, every byte compared."""
        self._anchors: dict[BundlePlace, Checked] = {}
        """The trainer's files of each checkpoint, every byte compared."""
        self._doubtful: set[BundlePlace] = set()
        self._passed_over: set[BundlePlace] = set()
        self._segments: set[str] = set()
        """Whole and durable."""
        self._compared: set[str] = set()
        """Whole."""

    def start_over(self) -> None:
        """Believe only what is read from now on, except for doubts."""
        self._passed_over.clear()
        self._alone.clear()
        self._anchors.clear()
        self._segments.clear()
        self._compared.clear()

    def checked(self, place: BundlePlace) -> Checked:
        """A bundle's manifest, if it and the weights that it continues from are whole."""
        return self._with_anchor(place, self._checked_alone(place), self._checked_anchor)

    def carries(self, place: BundlePlace) -> bool:
        """Whether snapshots of a checkpoint's step can continue from it."""
        return is_successful(self._checked_anchor(place))

    def trust(self, place: BundlePlace, manifest: RolloutSnapshotManifest) -> None:
        """The bundle is whole and durable, and so are its segments."""
        self._alone[place] = Success(manifest)
        self._segments.update(segment.digest for segment in manifest.shared)

    def doubt(self, place: BundlePlace, manifest: RolloutSnapshotManifest) -> None:
        """The bundle is whole, but may be gone after a power failure."""
        self._alone[place] = Success(manifest)
        self._doubtful.add(place)

    def doubts(self, place: BundlePlace) -> bool:
        """Whether the bundle may be gone after a power failure."""
        return place in self._doubtful

    def pass_over(self, place: BundlePlace) -> None:
        """This run goes on from an older bundle, so this one is no longer of its past, even if it
        should turn out to be whole after all."""
        self._passed_over.add(place)

    def is_passed_over(self, place: BundlePlace) -> bool:
        """Whether this run goes on from an older bundle."""
        return place in self._passed_over

    def listed(self, place: BundlePlace, *, contents: bool) -> ListedBundle:
        """What retention needs to know of a bundle.

        Args:
            contents: compare every byte; else, of bundles that this process has not verified,
                names and sizes only.
        """
        if contents:
            checked = self.checked(place)
        else:
            checked = self._with_anchor(place, self._looked_at(place), self._anchor_looked_at)
        manifest = checked if is_successful(checked) else self._reader.manifest(place)
        return ListedBundle(
            place=place,
            condition=self._condition(place, checked),
            segments=names_of(manifest.unwrap()) if is_successful(manifest) else None,
        )

    def forget(self, place: BundlePlace) -> None:
        """The bundle is gone, and what is under it."""
        gone = {
            each
            for each in (*self._alone, *self._anchors, *self._doubtful, *self._passed_over)
            if each == place or (each.step == place.step and not place.is_snapshot)
        }
        self._doubtful -= gone
        self._passed_over -= gone
        for each in gone:
            self._alone.pop(each, None)
            self._anchors.pop(each, None)

    # Segments.

    def trusts_segment(self, name: str) -> bool:
        """Whether the segment is known to be whole and durable."""
        return name in self._segments

    def trust_segment(self, name: str) -> None:
        """The segment is whole and durable."""
        self._segments.add(name)

    def forget_segment(self, name: str) -> None:
        """The segment is gone."""
        self._segments.discard(name)
        self._compared.discard(name)

    def is_segment_whole(self, name: str, size_bytes: int) -> bool:
        """Whether the segment on disk is what its name says."""
        file = SnapshotFile(name=name, size_bytes=size_bytes, digest=name)
        path = self._reader.segment_path(name)
        return self._reader.compared(path, name, file, contents=True) is None

    def _checked_alone(self, place: BundlePlace) -> Checked:
        known = self._alone.get(place)
        if known is None:
            # A checkpoint's weights are most of it, and its snapshots have asked for them before.
            anchor = self._anchors.get(place)
            seen = anchor is not None and is_successful(anchor)
            known = self._reader.verified(place, trainer=not seen, but_not=self._compared)
            if is_successful(known):
                self._compared.update(names_of(known.unwrap()))
            # An error of the disk may be gone the next time.
            if is_successful(known) or not known.failure().is_transient:
                self._alone[place] = known
        return known

    def _checked_anchor(self, place: BundlePlace) -> Checked:
        """What a snapshot needs of its checkpoint: the trainer's files. The checkpoint's own
        rollout state is not among it, so damage to that, and reading it, stays out of a resume from
        the snapshot."""
        alone = self._alone.get(place)
        if alone is not None and is_successful(alone):
            return alone
        known = self._anchors.get(place)
        if known is None:
            known = self._reader.verified(place, segments=False)
            if is_successful(known) or not known.failure().is_transient:
                self._anchors[place] = known
        return known

    def _anchor_looked_at(self, place: BundlePlace) -> Checked:
        known = self._alone.get(place)
        if known is not None and is_successful(known):
            return known
        return self._reader.verified(place, contents=False, segments=False)

    def _looked_at(self, place: BundlePlace) -> Checked:
        known = self._alone.get(place)
        return self._reader.verified(place, contents=False) if known is None else known

    def _with_anchor(
        self, place: BundlePlace, checked: Checked, check: Callable[[BundlePlace], Checked]
    ) -> Checked:
        if not is_successful(checked) or not place.is_snapshot or place.step == 0:
            return checked
        anchor = check(place.anchor)
        if not is_successful(anchor):
            fault = anchor.failure()
            why = f"its checkpoint {self._reader.path(place.anchor)}: {fault.why}"
            return Failure(Fault(why=why, is_transient=fault.is_transient))
        changed = why_not_on_anchor(checked.unwrap(), anchor.unwrap())
        return checked if changed is None else Failure(Fault(why=changed))

    def _condition(self, place: BundlePlace, checked: Checked) -> BundleCondition:
        if not is_successful(checked) and not checked.failure().is_transient:
            return BundleCondition.DAMAGED
        certain = is_successful(checked) and place not in self._doubtful | self._passed_over
        return BundleCondition.WHOLE if certain else BundleCondition.UNKNOWN
