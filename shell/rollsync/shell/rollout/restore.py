"""Puts a run back where a bundle says it was.

Rules kept here:

1. Choosing and validating come first and change nothing: neither the run nor the disk.
2. The state is put in place last, in one section. Before that only the run's own partition was
   filled, so a restore that died begins again and ends the same.
3. Every refusal names the file, the field and what to do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path

from msgspec import Struct
from returns.pipeline import is_successful

from rollsync.codecs import decode, describe
from rollsync.pure.rollout.checkpointing import CheckpointKind, ResumeSource, RolloutTraceKind
from rollsync.pure.rollout.episodes import EnvironmentEpisode
from rollsync.pure.rollout.inventory import (
    RowsUnowned,
    describe_problem,
    restoring_problems,
    take_inventory,
)
from rollsync.pure.rollout.resume import ResumePlan, ResumePolicy, SiblingsResumed, plan_resume
from rollsync.pure.rollout.row_segments import RowSegments, SavedRow
from rollsync.pure.rollout.state import (
    DatumSpec,
    PromptReference,
    RolloutAttemptStatus,
    RolloutState,
)
from rollsync.shell.errors import RollsyncError
from rollsync.shell.rollout.archive import (
    ENVIRONMENT_DIRECTORY,
    STATE_FILE,
    FoundBundle,
    ResumeArchive,
)
from rollsync.shell.rollout.barrier import CheckpointMutationKind
from rollsync.shell.rollout.bundle_writer import BundleWriter
from rollsync.shell.rollout.data_plane import StoredRow
from rollsync.shell.rollout.parts import RolloutParts, _UsesRolloutParts
from rollsync.shell.rollout.segments import decode_segment, rows_of
from rollsync.shell.rollout.settle import settled

_ROWS_PER_PUT = 256


class RolloutRestoreError(RollsyncError):
    """A bundle that this run may not resume from. Nothing was changed."""


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


class _Validated(Struct, frozen=True, kw_only=True):
    """A bundle that is right in itself and right for this run."""

    state: RolloutState
    plan: ResumePlan
    prompts: dict[str, DatumSpec]
    segments: dict[str, dict[str, StoredRow]]
    """Rows by key, by segment, oldest first."""


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
        self._policy = policy
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
        validated = await settled(asyncio.to_thread(self._validate, bundle))
        self._trace.record(RolloutTraceKind.VALIDATED, str(bundle.path))
        return await self._load(bundle, validated)

    # Validation. Runs in a thread; reads only.

    def _validate(self, bundle: FoundBundle) -> _Validated:
        state = _read_state(bundle)
        _check_facts(bundle, state)
        self._check_environment(bundle)
        self._check_samples(bundle, state)
        segments = {
            name: decode_segment(bundle.read_segment(name), f"segment {name}")
            for name in bundle.facts.segments
        }
        problems = restoring_problems(
            take_inventory(state, [key for rows in segments.values() for key in rows]),
            state,
            sampler=self._sampler,
            num_prompts_per_step=self._policy.limits.num_prompts_per_step,
            buffer_capacity=self._policy.limits.buffer_capacity,
        )
        # Segments are shared, so they also have rows that nobody owns any more: no problem.
        problems = tuple(each for each in problems if not isinstance(each, RowsUnowned))
        if problems:
            listed = "; ".join(describe_problem(problem) for problem in problems[:5])
            raise RolloutRestoreError(
                f"{bundle.path / STATE_FILE}: {len(problems)} problems: {listed}",
                remedy="resume with the settings that the message names, or from an older snapshot",
            )
        plan = plan_resume(state, self._policy)
        return _Validated(
            state=state, plan=plan, prompts=self._prompts_of(plan.state), segments=segments
        )

    def _check_environment(self, bundle: FoundBundle) -> None:
        saved, mine = bundle.facts.environment_fingerprint, self._environment.fingerprint
        if saved is not None and mine is not None and saved != mine:
            raise RolloutRestoreError(
                f"{bundle.path}: field environment_fingerprint is {saved}, "
                f"this run's environment is {mine}",
                remedy="resume with the environment that the run was saved with",
            )

    def _check_samples(self, bundle: FoundBundle, state: RolloutState) -> None:
        """Every prompt in flight has to be the same in the dataset; then the dataset itself."""
        changed = [
            f"{reference.sample_id} ({why})"
            for reference in _references(state)
            if (why := self._why_changed(reference)) is not None
        ]
        saved = state.dataloader_state.dataset_digest
        if changed:
            raise RolloutRestoreError(
                f"{bundle.path / STATE_FILE}: {len(changed)} prompts in flight are not in the "
                f"dataset as they were: {', '.join(changed[:5])}",
                remedy="resume with the dataset that the run was saved with",
            )
        if saved != self._dataloader.digest:
            raise RolloutRestoreError(
                f"{bundle.path / STATE_FILE}: field dataset_digest is {saved}, "
                f"this run's dataset is {self._dataloader.digest}",
                remedy="resume with the dataset that the run was saved with; its position says "
                "nothing about another one",
            )

    def _why_changed(self, reference: PromptReference) -> str | None:
        datum = self._dataloader.lookup(reference.sample_id)
        if datum is None:
            return "missing"
        if datum.task != reference.task:
            return f"task {datum.task}, was {reference.task}"
        if self._dataloader.content_digest(datum) != reference.content_digest:
            return "other content"
        return None

    def _prompts_of(self, state: RolloutState) -> dict[str, DatumSpec]:
        found = {}
        for group_id, record in state.ledger.groups.items():
            datum = self._dataloader.lookup(record.prompt.sample_id)
            if datum is not None:
                found[group_id] = datum
        return found

    # Loading.

    async def _load(self, bundle: FoundBundle, validated: _Validated) -> RestoredRollout:
        plan = validated.plan
        rows, sources = _rows_to_load(plan, validated.segments)
        async with self._barrier.mutation(CheckpointMutationKind.RECOVERY_RESTORE) as section:
            # What an earlier restore that died left is this run's own, and not owned by anything.
            left = await self._dp_client.list_rows(self._partition_id)
            await self._dp_client.clear(self._partition_id, left)
            await self._put(rows)
            self._trace.record(RolloutTraceKind.ROWS_LOADED, f"{len(rows)} rows")
            continued = await self._continue_episodes(bundle, validated)
            self._cell.restore(section, plan.state, plan.events)
            self._remember(validated.segments, sources)
        for group in plan.groups:
            self._trace.record(RolloutTraceKind.GROUP_PLANNED, group.group_id, type(group).__name__)
        self._trace.record(RolloutTraceKind.RESTORED, str(bundle.path))
        metrics = {
            "rollout_checkpoint/loaded_rows": float(len(rows)),
            "rollout_checkpoint/planned_groups": float(len(plan.groups)),
            "rollout_checkpoint/continued_episodes": float(len(continued)),
        }
        self._log_metrics(metrics)
        return RestoredRollout(
            source=ResumeSource(
                path=str(bundle.path),
                from_rollout_snapshot=bundle.facts.kind is CheckpointKind.ROLLOUT_SNAPSHOT,
                rollout_checkpoint_load_metrics=tuple(sorted(metrics.items())),
            ),
            plan=plan,
            prompts=validated.prompts,
            trainer_path=bundle.trainer_path,
            continued=frozenset(continued),
        )

    async def _put(self, rows: dict[str, StoredRow]) -> None:
        keys = list(rows)
        for start in range(0, len(keys), _ROWS_PER_PUT):
            chunk = {key: rows[key] for key in keys[start : start + _ROWS_PER_PUT]}
            tags = {key: row.tags for key, row in chunk.items()}
            await self._dp_client.put(self._partition_id, rows_of(chunk), tags=tags)

    async def _continue_episodes(
        self, bundle: FoundBundle, validated: _Validated
    ) -> tuple[EnvironmentEpisode, ...]:
        saved = bundle.facts.environment_fingerprint
        if saved is None or self._environment.fingerprint is None:
            return ()
        wanted = _continuations(validated.state, validated.plan)
        return await self._environment.restore(bundle.path / ENVIRONMENT_DIRECTORY, wanted)

    def _remember(self, segments: dict[str, dict[str, StoredRow]], sources: dict[str, str]) -> None:
        if self._writer is None:
            return
        pinned = self._dp_client.pin(self._partition_id)
        revisions = pinned.revisions(sources)
        pinned.release()
        self._writer.remember(
            RowSegments(
                rows={
                    key: SavedRow(segment=sources[key], revision=revision)
                    for key, revision in revisions.items()
                },
                row_counts={name: len(rows) for name, rows in segments.items()},
            )
        )


def _read_state(bundle: FoundBundle) -> RolloutState:
    decoded = decode(bundle.read(STATE_FILE), RolloutState)
    if not is_successful(decoded):
        raise RolloutRestoreError(
            f"{bundle.path / STATE_FILE}: {describe(decoded.failure())}",
            remedy="resume with the rollsync that wrote it, or a newer one",
        )
    return decoded.unwrap()


def _check_facts(bundle: FoundBundle, state: RolloutState) -> None:
    """The manifest and the state file have to be of one save."""
    facts, progress = bundle.facts, state.progress
    for field, said, found in (
        ("base_train_step", facts.base_train_step, progress.train_steps),
        ("trainer_version", facts.trainer_version, progress.trainer_version),
        ("current_epoch", facts.current_epoch, progress.current_epoch),
        ("sampler_dispatch_index", facts.sampler_dispatch_index, state.sampler_dispatch_index),
    ):
        if said != found:
            raise RolloutRestoreError(
                f"{bundle.path}: field {field} of the manifest is {said}, that of {STATE_FILE} is "
                f"{found}: they are of two saves",
                remedy="remove this directory and resume from the snapshot before it",
            )


def _references(state: RolloutState) -> Iterable[PromptReference]:
    for record in state.ledger.groups.values():
        yield record.prompt
    for group in state.replay.values():
        yield group.prompt
    yield from state.runtime.replacement_reserve


def _rows_to_load(
    plan: ResumePlan, segments: dict[str, dict[str, StoredRow]]
) -> tuple[dict[str, StoredRow], dict[str, str]]:
    """The rows that the plan loads, and the segment that each is from: the last that has it."""
    rows: dict[str, StoredRow] = {}
    sources: dict[str, str] = {}
    wanted = frozenset(plan.rows_to_load)
    for name, held in segments.items():
        for key in wanted.intersection(held):
            rows[key], sources[key] = held[key], name
    return rows, sources


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
