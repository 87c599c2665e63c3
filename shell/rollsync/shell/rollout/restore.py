"""Puts a run back where a bundle says it was.

Rules kept here:

1. Choosing and validating come first and change nothing: neither the run nor the disk.
2. The state is put in place last, in one section. Before that only the run's own partition was
   filled, so a restore that died begins again and ends the same.
3. Every refusal names the file, the field and what to do.
4. Rows are read twice, to validate them and to load them, and one segment at a time: a restore
   needs the memory of one segment beside what it loads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from rollsync.pure.rollout.checkpointing import (
    CheckpointKind,
    ResumeSource,
    RolloutTraceKind,
)
from rollsync.pure.rollout.episodes import EnvironmentEpisode
from rollsync.pure.rollout.resume import ResumePlan, ResumePolicy, SiblingsResumed
from rollsync.pure.rollout.row_segments import SavedRow, found_segments
from rollsync.pure.rollout.state import (
    DatumSpec,
    RolloutAttemptStatus,
    RolloutState,
)
from rollsync.pure.snapshot.selection import RefusedBundle
from rollsync.shell.rollout.archive import (
    ENVIRONMENT_DIRECTORY,
    FoundBundle,
    ResumeArchive,
)
from rollsync.shell.rollout.barrier import CheckpointMutationKind
from rollsync.shell.rollout.bundle_writer import BundleWriter
from rollsync.shell.rollout.data_plane import StoredRow
from rollsync.shell.rollout.parts import RolloutParts, _UsesRolloutParts
from rollsync.shell.rollout.segments import read_rows, rows_of, saved_row
from rollsync.shell.rollout.settle import settled
from rollsync.shell.rollout.validation import (
    BundleValidator,
    RolloutRestoreError,
    ValidatedBundle,
)

__all__ = ["RestoredRollout", "RolloutRestoreError", "RolloutRestorer"]

_ROWS_PER_PUT = 256


class RestoredRollout(Struct, frozen=True, kw_only=True):
    """What a run goes on with."""

    source: ResumeSource
    plan: ResumePlan
    """Already applied. Its `dispatches`, `to_finalize` and `readmissions` are the work to take up
    first, in that order, before any new prompt."""
    prompts: Mapping[str, DatumSpec]
    """The prompt of every unfinished group, by group id, as the dataset has it."""
    trainer_path: Path | None
    """Where the weights are; None: the initial ones."""
    continued: frozenset[EnvironmentEpisode]
    """Attempts (of `plan.dispatches`) whose episode the environment still has: they go on where
    they were."""
    refused: tuple[RefusedBundle, ...]
    """Newer bundles that were passed over."""


class RolloutRestorer(_UsesRolloutParts):
    """Restores a run's rollout state, before its pumps start.

    Args:
        parts: the run's parts, fresh.
        archive: where bundles lie.
        policy: this run's settings.
        writer: shared with the snapshotter, which then writes no row again that it finds here.
    """

    def __init__(
        self,
        parts: RolloutParts,
        *,
        archive: ResumeArchive,
        policy: ResumePolicy,
        writer: BundleWriter | None = None,
    ) -> None:
        super().__init__(parts)
        self._archive = archive
        self._validator = BundleValidator(parts, policy)
        self._writer = writer

    async def restore(self) -> RestoredRollout | None:
        """Choose, validate, load. None: there is nothing to resume, the run is fresh.

        Raises:
            RolloutRestoreError: there is something, and this run may not resume from it.
        """
        chosen = await settled(asyncio.to_thread(self._archive.choose))
        for refused in chosen.refused:
            self._trace.record(RolloutTraceKind.CANDIDATE_REFUSED, refused.path, refused.why)
        bundle = chosen.bundle
        if bundle is None:
            return None
        self._trace.begin(RolloutTraceKind.RESUME_CHOSEN, str(bundle.path))
        validated = await settled(asyncio.to_thread(self._validator.validate, bundle))
        self._trace.record(RolloutTraceKind.VALIDATED, str(bundle.path))
        return await self._load(bundle, validated, chosen.refused)

    async def _load(
        self,
        bundle: FoundBundle,
        validated: ValidatedBundle,
        refused: tuple[RefusedBundle, ...],
    ) -> RestoredRollout:
        plan = validated.plan
        sources = _sources(plan, validated.segments)
        async with self._barrier.mutation(CheckpointMutationKind.RECOVERY_RESTORE) as section:
            # What an earlier restore that died left is this run's own, and not owned by anything.
            left = await self._dp_client.list_rows(self._partition_id)
            await self._dp_client.clear(self._partition_id, left)
            loaded = await self._load_rows(bundle, sources)
            self._trace.record(RolloutTraceKind.ROWS_LOADED, f"{len(loaded)} rows")
            continued = await self._continue_episodes(bundle, validated)
            self._cell.restore(section, plan.state, plan.events)
            self._remember(validated.segments, loaded)
        for group in plan.groups:
            self._trace.record(RolloutTraceKind.GROUP_PLANNED, group.group_id, type(group).__name__)
        self._trace.record(RolloutTraceKind.RESTORED, str(bundle.path))
        metrics = {
            "rollout_checkpoint/loaded_rows": float(len(loaded)),
            "rollout_checkpoint/planned_groups": float(len(plan.groups)),
            "rollout_checkpoint/continued_episodes": float(len(continued)),
        }
        self._log_metrics(metrics)
        return RestoredRollout(
            source=ResumeSource(
                path=str(bundle.path),
                data_plane_metadata=validated.metadata,
                from_rollout_snapshot=bundle.facts.kind is CheckpointKind.ROLLOUT_SNAPSHOT,
                rollout_checkpoint_load_metrics=tuple(sorted(metrics.items())),
            ),
            plan=plan,
            prompts=validated.prompts,
            trainer_path=bundle.trainer_path,
            continued=frozenset(continued),
            refused=refused,
        )

    async def _load_rows(
        self, bundle: FoundBundle, sources: Mapping[str, frozenset[str]]
    ) -> dict[str, SavedRow]:
        """Put the rows in place; where each is from. Of revision 0: it has got a new one."""
        loaded: dict[str, SavedRow] = {}
        for name, keys in sources.items():
            loaded |= await self._load_segment(bundle, name, keys)
        return loaded

    async def _load_segment(
        self, bundle: FoundBundle, name: str, keys: frozenset[str]
    ) -> dict[str, SavedRow]:
        held = await settled(asyncio.to_thread(read_rows, bundle, name))
        rows = {key: row for key, row in held.items() if key in keys}
        await self._put(rows)
        return {key: saved_row(row, segment=name, revision=0) for key, row in rows.items()}

    async def _put(self, rows: dict[str, StoredRow]) -> None:
        keys = list(rows)
        for start in range(0, len(keys), _ROWS_PER_PUT):
            chunk = {key: rows[key] for key in keys[start : start + _ROWS_PER_PUT]}
            tags = {key: row.tags for key, row in chunk.items()}
            await self._dp_client.put(self._partition_id, rows_of(chunk), tags=tags)

    async def _continue_episodes(
        self, bundle: FoundBundle, validated: ValidatedBundle
    ) -> tuple[EnvironmentEpisode, ...]:
        saved = bundle.facts.environment_fingerprint
        if saved is None or self._environment.fingerprint is None:
            return ()
        wanted = _continuations(validated.state, validated.plan)
        return await self._environment.restore(bundle.path / ENVIRONMENT_DIRECTORY, wanted)

    def _remember(
        self, segments: Mapping[str, tuple[str, ...]], loaded: Mapping[str, SavedRow]
    ) -> None:
        if self._writer is None:
            return
        pinned = self._dp_client.pin(self._partition_id)
        revisions = pinned.revisions(loaded)
        pinned.release()
        rows = {key: replace(loaded[key], revision=revision) for key, revision in revisions.items()}
        self._writer.remember(found_segments(segments, rows))


def _sources(plan: ResumePlan, segments: dict[str, tuple[str, ...]]) -> dict[str, frozenset[str]]:
    """The rows that the plan loads, by the segment that each is from: the last that has it."""
    left = set(plan.rows_to_load)
    sources: dict[str, frozenset[str]] = {}
    for name, held in reversed(segments.items()):
        found = frozenset(left.intersection(held))
        left -= found
        if found:
            sources[name] = found
    return sources


def _continuations(
    saved: RolloutState, plan: ResumePlan
) -> dict[EnvironmentEpisode, EnvironmentEpisode]:
    """Running attempts of the saved state and the attempts that take their place."""
    wanted = {}
    for group in plan.groups:
        if not isinstance(group, SiblingsResumed):
            continue
        before = saved.ledger.groups[group.group_id]
        after = plan.state.ledger.groups[group.group_id]
        for index in group.regenerate:
            running = before.siblings[index].attempts[-1]
            if running.status is RolloutAttemptStatus.DISPATCHED:
                wanted[_episode(group.group_id, index, running.index)] = _episode(
                    group.group_id, index, after.siblings[index].attempts[-1].index
                )
    return wanted


def _episode(group_id: str, sibling_index: int, attempt_index: int) -> EnvironmentEpisode:
    return EnvironmentEpisode(
        group_id=group_id, sibling_index=sibling_index, attempt_index=attempt_index
    )
