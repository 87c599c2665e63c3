"""Is a bundle right in itself, and right for this run? Everything is looked at before anything is
changed.

Rule kept here: every refusal names the file, the field and what to do; nothing here writes, neither
to the disk nor to the run. It blocks, so it runs in a thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from msgspec import Struct
from returns.pipeline import is_successful

from rollsync.codecs import DecodeError, decode, describe
from rollsync.codecs.rollout.chain import ReadChain, read_chain
from rollsync.pure.rollout.checkpointing import (
    DataPlaneCheckpointMetadata,
    TQReplayMetadataState,
)
from rollsync.pure.rollout.inventory import (
    RowsUnowned,
    describe_problem,
    restoring_problems,
    take_inventory,
)
from rollsync.pure.rollout.persistent import items_of, values_of
from rollsync.pure.rollout.resume import ResumePlan, ResumePolicy, plan_resume
from rollsync.pure.rollout.state import DatumSpec, PromptReference, RolloutState
from rollsync.shell.errors import RollsyncError
from rollsync.shell.rollout.archive import STATE_FILE, FoundBundle
from rollsync.shell.rollout.captured import (
    DATA_PLANE_FILE,
    REPLAY_METADATA_FILE,
    disagreement,
)
from rollsync.shell.rollout.parts import RolloutParts, _UsesRolloutParts
from rollsync.shell.rollout.segments import read_rows

T = TypeVar("T")
_OLDER = "remove this directory and resume from the snapshot before it"


class RolloutRestoreError(RollsyncError):
    """A bundle that this run may not resume from. Nothing was changed."""


class ValidatedBundle(Struct, frozen=True, kw_only=True):
    """A bundle that is right in itself and right for this run."""

    state: RolloutState
    plan: ResumePlan
    prompts: dict[str, DatumSpec]
    metadata: DataPlaneCheckpointMetadata
    segments: dict[str, tuple[str, ...]]
    """Keys of the rows in each row segment, oldest segment first."""


class BundleValidator(_UsesRolloutParts):
    """Reads and checks bundles for one run.

    Args:
        parts: the run's parts.
        policy: its settings.
    """

    def __init__(self, parts: RolloutParts, policy: ResumePolicy) -> None:
        super().__init__(parts)
        self._policy = policy

    def validate(self, bundle: FoundBundle) -> ValidatedBundle:
        """The bundle's content and the plan of its resume.

        Raises:
            RolloutRestoreError: this run may not resume from it.
        """
        chain = _read_state(bundle)
        state = chain.state
        _check_facts(bundle, state)
        metadata = _read(bundle, DATA_PLANE_FILE, DataPlaneCheckpointMetadata)
        _check_metadata(bundle, chain, metadata)
        self._check_environment(bundle)
        samples = self._samples_in_flight(bundle, state)
        # One at a time: the rows of a whole buffer need not fit twice into memory.
        segments = {name: tuple(read_rows(bundle, name)) for name in bundle.facts.segments}
        problems = restoring_problems(
            take_inventory(state, [key for keys in segments.values() for key in keys]),
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
                f"{_state_name(bundle)}: {len(problems)} problems: {listed}",
                remedy="resume with the settings that the message names, or from an older snapshot",
            )
        plan = plan_resume(state, self._policy)
        return ValidatedBundle(
            state=state,
            plan=plan,
            # What a plan starts (again) was in flight before.
            prompts={
                group_id: samples[record.prompt.sample_id]
                for group_id, record in items_of(plan.state.ledger.groups)
            },
            metadata=metadata,
            segments=segments,
        )

    def _check_environment(self, bundle: FoundBundle) -> None:
        saved, mine = bundle.facts.environment_fingerprint, self._environment.fingerprint
        if saved is not None and mine is not None and saved != mine:
            raise RolloutRestoreError(
                f"{bundle.path}: field environment_fingerprint is {saved}, "
                f"this run's environment is {mine}",
                remedy="resume with the environment that the run was saved with",
            )

    def _samples_in_flight(self, bundle: FoundBundle, state: RolloutState) -> dict[str, DatumSpec]:
        """Samples of the prompts in flight, by id. Every one has to be the same in the dataset;
        then the dataset itself."""
        samples: dict[str, DatumSpec] = {}
        changed = []
        for reference in _references(state):
            checked = self._unchanged(reference)
            if isinstance(checked, DatumSpec):
                samples[reference.sample_id] = checked
            else:
                changed.append(f"{reference.sample_id} ({checked})")
        saved = state.dataloader_state.dataset_digest
        if changed:
            raise RolloutRestoreError(
                f"{_state_name(bundle)}: {len(changed)} prompts in flight are not in the "
                f"dataset as they were: {', '.join(changed[:5])}",
                remedy="resume with the dataset that the run was saved with",
            )
        if saved != self._dataloader.digest:
            raise RolloutRestoreError(
                f"{_state_name(bundle)}: field dataset_digest is {saved}, "
                f"this run's dataset is {self._dataloader.digest}",
                remedy="resume with the dataset that the run was saved with; its position says "
                "nothing about another one",
            )
        return samples

    def _unchanged(self, reference: PromptReference) -> DatumSpec | str:
        """The sample that is referred to, or in which way it is another one."""
        datum = self._dataloader.lookup(reference.sample_id)
        if datum is None:
            return "missing"
        if datum.task != reference.task:
            return f"task {datum.task}, was {reference.task}"
        if self._dataloader.content_digest(datum) != reference.content_digest:
            return "other content"
        return datum


def _state_links(bundle: FoundBundle) -> tuple[str, ...]:
    """What the state is read from, for people: its base first."""
    names = bundle.facts.state_segments
    return tuple(f"{bundle.path}, state segment {name}" for name in names) or (
        str(bundle.path / STATE_FILE),
    )


def _state_name(bundle: FoundBundle) -> str:
    return _state_links(bundle)[-1]


def _read_state(bundle: FoundBundle) -> ReadChain:
    names = bundle.facts.state_segments
    links = map(bundle.read_segment, names) if names else iter((bundle.read(STATE_FILE),))
    read = read_chain(links)
    if not is_successful(read):
        broken = read.failure()
        raise _undecodable(_state_links(bundle)[broken.index], broken.error)
    return read.unwrap()


def _read(bundle: FoundBundle, name: str, kind: type[T]) -> T:
    decoded = decode(bundle.read(name), kind)
    if not is_successful(decoded):
        raise _undecodable(str(bundle.path / name), decoded.failure())
    return decoded.unwrap()


def _undecodable(name: str, error: DecodeError) -> RolloutRestoreError:
    return RolloutRestoreError(
        f"{name}: {describe(error)}",
        remedy="resume with the rollsync that wrote it, or a newer one",
    )


def _check_metadata(
    bundle: FoundBundle, chain: ReadChain, metadata: DataPlaneCheckpointMetadata
) -> None:
    replay = _read(bundle, REPLAY_METADATA_FILE, TQReplayMetadataState)
    differs = disagreement(chain.state, chain.newest, replay, metadata, bundle.facts.kind)
    if differs is not None:
        field, why = differs
        raise RolloutRestoreError(
            f"{bundle.path / DATA_PLANE_FILE}: field {field}: {why}: they are of two saves",
            remedy=_OLDER,
        )


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
                f"{bundle.path}: field {field} of the manifest is {said}, that of the state is "
                f"{found}: they are of two saves",
                remedy=_OLDER,
            )


def _references(state: RolloutState) -> Iterable[PromptReference]:
    for record in values_of(state.ledger.groups):
        yield record.prompt
    for group in values_of(state.replay):
        yield group.prompt
    yield from state.runtime.replacement_reserve
