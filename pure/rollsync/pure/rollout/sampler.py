"""The staleness policies: which prompts may start, which groups train next, which are too old.

A policy is a frozen value without state of its own: all it decides follows from its settings, the
`RolloutState` (which has the dispatch cursor and the replay index) and `SamplerLimits`. So saving
and resuming a policy is saving and resuming the state.

Meanings follow NeMo-RL's staleness samplers. Beyond them: a dropped group without a replacement
is counted as its batch's shortfall, a batch of which everything was dropped is skipped, and the end
of the data is an answer; so no policy ever waits for a group that nobody will deliver.
"""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from rollsync.pure.rollout._sampling import (
    admit_batch,
    admit_gated,
    admitted_groups,
    batch_need,
    before_selection,
    claim,
    first_step_with_room,
    more_to_come,
    oldest_version,
    ready_groups,
    serves_stale_weights,
    stale_ready,
    take,
    unaccounted_groups,
)
from rollsync.pure.rollout.decisions import (
    Admission,
    NothingLeft,
    SamplerLimits,
    Selection,
    TrainBatch,
    Wait,
    WaitReason,
)
from rollsync.pure.rollout.state import (
    RolloutState,
)


class PromptGroupSampler(Protocol):
    """A staleness policy. A user's own is named in the configuration as `module:ClassName`."""

    @property
    def stamps_target_steps(self) -> bool:
        """Whether a batch's target step is fixed at admission (it is its dispatch index)."""
        ...

    @property
    def counts_batches(self) -> bool:
        """Whether every training step takes one dispatch batch (less its shortfall)."""
        ...

    @property
    def supports_buffer_checkpoint(self) -> bool:
        """Whether ready groups of a snapshot can be selected after a resume."""
        ...

    @property
    def is_on_policy(self) -> bool:
        """Whether every group is trained on top of the weights that generated it."""
        ...

    def required_buffer_capacity(self, groups_per_step: int) -> int:
        """Least buffer capacity, in groups, with which the policy always makes progress."""
        ...

    def admit(self, state: RolloutState, limits: SamplerLimits) -> Admission:
        """Whether the next batch may start, and what it needs first."""
        ...

    def select(self, state: RolloutState, limits: SamplerLimits) -> Selection:
        """The groups that the next training step takes. Drop what `evict` names before."""
        ...

    def evict(self, state: RolloutState) -> tuple[str, ...]:
        """Ready groups that can never be selected any more, in commit order."""
        ...

    def should_abort_inflight(
        self, *, start_weight_version: int, current_train_weight: int
    ) -> bool:
        """Whether an unfinished group could not be selected even if it finished now."""
        ...

    def shortfall_step(
        self, state: RolloutState, group_id: str, limits: SamplerLimits
    ) -> int | None:
        """Target step that lacks a group if this admitted group is dropped and not replaced."""
        ...

    def set_dispatch_index(self, resume_from_trainer_version: int) -> int:
        """The cursor for a checkpoint that has none: the next batch is that version's."""
        ...


class WindowedSampler(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="name",
    tag="windowed",
):
    """Whichever groups are ready and within the window. Only the buffer limits generation, and what
    grows older than the window is dropped as stale."""

    max_staleness_versions: int = 1
    """A group of weight version `w` can be trained on top of versions `w` to `w` + this."""
    sample_freshest_first: bool = False
    """Take the groups with the newest weights first, instead of those committed first."""

    @property
    def stamps_target_steps(self) -> bool:
        return False

    @property
    def counts_batches(self) -> bool:
        return False

    @property
    def supports_buffer_checkpoint(self) -> bool:
        return True

    @property
    def is_on_policy(self) -> bool:
        return self.max_staleness_versions == 0

    def required_buffer_capacity(self, groups_per_step: int) -> int:
        # One group less than a batch may be ready, and a whole batch must still fit.
        return 2 * groups_per_step - 1

    def admit(self, state: RolloutState, limits: SamplerLimits) -> Admission:
        if serves_stale_weights(state, limits, self.max_staleness_versions):
            return Wait(reason=WaitReason.WEIGHTS)
        return admit_batch(state, limits, counts_batches=False)

    def select(self, state: RolloutState, limits: SamplerLimits) -> Selection:
        if state.open_step is not None:
            return Wait(reason=WaitReason.STEP_OPEN)
        oldest = oldest_version(state, self.max_staleness_versions)
        groups = [each for each in ready_groups(state) if each.start_weight_version >= oldest]
        if self.sample_freshest_first:
            groups.sort(key=lambda each: (-each.start_weight_version, each.commit_index))
        if len(groups) >= limits.num_prompts_per_step or more_to_come(state, limits):
            return take(state, groups, limits.num_prompts_per_step)
        if not groups:
            return NothingLeft()
        return TrainBatch(event=claim(state, groups))

    def evict(self, state: RolloutState) -> tuple[str, ...]:
        return stale_ready(state, self.max_staleness_versions)

    def should_abort_inflight(
        self, *, start_weight_version: int, current_train_weight: int
    ) -> bool:
        return start_weight_version < current_train_weight - self.max_staleness_versions

    def shortfall_step(
        self, state: RolloutState, group_id: str, limits: SamplerLimits
    ) -> int | None:
        return None

    def set_dispatch_index(self, resume_from_trainer_version: int) -> int:
        return resume_from_trainer_version - 1


class ReadyFirstSampler(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="name",
    tag="ready_first",
):
    """One batch a step, whichever groups are ready first. Nothing is ever stale."""

    max_staleness_versions: int = 1
    """How many dispatch batches generation may be ahead of the trainer."""

    @property
    def stamps_target_steps(self) -> bool:
        return False

    @property
    def counts_batches(self) -> bool:
        return True

    @property
    def supports_buffer_checkpoint(self) -> bool:
        return True

    @property
    def is_on_policy(self) -> bool:
        return self.max_staleness_versions == 0

    def required_buffer_capacity(self, groups_per_step: int) -> int:
        return groups_per_step * (self.max_staleness_versions + 1)

    def admit(self, state: RolloutState, limits: SamplerLimits) -> Admission:
        return admit_gated(state, limits, lookahead=self.max_staleness_versions)

    def select(self, state: RolloutState, limits: SamplerLimits) -> Selection:
        early = before_selection(state, limits)
        if early is not None:
            return early
        return take(state, ready_groups(state), batch_need(state, limits))

    def evict(self, state: RolloutState) -> tuple[str, ...]:
        return ()

    def should_abort_inflight(
        self, *, start_weight_version: int, current_train_weight: int
    ) -> bool:
        return False

    def shortfall_step(
        self, state: RolloutState, group_id: str, limits: SamplerLimits
    ) -> int | None:
        return first_step_with_room(state, limits)

    def set_dispatch_index(self, resume_from_trainer_version: int) -> int:
        return resume_from_trainer_version - 1


class WeightFifoSampler(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="name",
    tag="weight_fifo",
):
    """One batch a step, the oldest weights first: a younger group never overtakes an older one
    that is still being generated, unless the older one has left the window."""

    max_staleness_versions: int = 1
    """Both how far generation may be ahead, and the window of weight versions."""

    @property
    def stamps_target_steps(self) -> bool:
        return False

    @property
    def counts_batches(self) -> bool:
        return True

    @property
    def supports_buffer_checkpoint(self) -> bool:
        return True

    @property
    def is_on_policy(self) -> bool:
        return self.max_staleness_versions == 0

    def required_buffer_capacity(self, groups_per_step: int) -> int:
        return groups_per_step * (self.max_staleness_versions + 1)

    def admit(self, state: RolloutState, limits: SamplerLimits) -> Admission:
        if serves_stale_weights(state, limits, self.max_staleness_versions):
            return Wait(reason=WaitReason.WEIGHTS)
        return admit_gated(state, limits, lookahead=self.max_staleness_versions)

    def select(self, state: RolloutState, limits: SamplerLimits) -> Selection:
        early = before_selection(state, limits)
        if early is not None:
            return early
        oldest = oldest_version(state, self.max_staleness_versions)
        need = batch_need(state, limits)
        groups = [each for each in ready_groups(state) if each.start_weight_version >= oldest]
        groups.sort(key=lambda each: (each.start_weight_version, each.commit_index))
        unfinished = [
            record.start_weight_version
            for record in admitted_groups(state)
            if record.start_weight_version is not None and record.start_weight_version >= oldest
        ]
        if len(groups) < need:
            return Wait(reason=WaitReason.UNFINISHED)
        youngest_taken = groups[need - 1].start_weight_version
        if any(version < youngest_taken for version in unfinished):
            return Wait(reason=WaitReason.UNFINISHED)
        return take(state, groups, need)

    def evict(self, state: RolloutState) -> tuple[str, ...]:
        return stale_ready(state, self.max_staleness_versions)

    def should_abort_inflight(
        self, *, start_weight_version: int, current_train_weight: int
    ) -> bool:
        return start_weight_version < current_train_weight - self.max_staleness_versions

    def shortfall_step(
        self, state: RolloutState, group_id: str, limits: SamplerLimits
    ) -> int | None:
        return first_step_with_room(state, limits)

    def set_dispatch_index(self, resume_from_trainer_version: int) -> int:
        return resume_from_trainer_version - 1


class InOrderSampler(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="name",
    tag="in_order",
):
    """Dispatch batch `n` is trained on top of weight version `n`, whatever finishes first."""

    max_lookahead_versions: int = 1
    """How many dispatch batches generation may be ahead of the trainer."""

    @property
    def stamps_target_steps(self) -> bool:
        return True

    @property
    def counts_batches(self) -> bool:
        return True

    @property
    def supports_buffer_checkpoint(self) -> bool:
        return True

    @property
    def is_on_policy(self) -> bool:
        return self.max_lookahead_versions == 0

    def required_buffer_capacity(self, groups_per_step: int) -> int:
        return groups_per_step * (self.max_lookahead_versions + 1)

    def admit(self, state: RolloutState, limits: SamplerLimits) -> Admission:
        return admit_gated(state, limits, lookahead=self.max_lookahead_versions)

    def select(self, state: RolloutState, limits: SamplerLimits) -> Selection:
        early = before_selection(state, limits)
        if early is not None:
            return early
        step = state.progress.trainer_version
        groups = [each for each in ready_groups(state) if each.target_step == step]
        # The order of the hand-out, not of the commits: the same batch in every run.
        groups.sort(key=lambda each: (each.prompt.epoch, each.prompt.position))
        return take(state, groups, batch_need(state, limits))

    def evict(self, state: RolloutState) -> tuple[str, ...]:
        return tuple(
            group.group_id
            for group in ready_groups(state)
            if group.target_step is not None and group.target_step < state.progress.trainer_version
        )

    def should_abort_inflight(
        self, *, start_weight_version: int, current_train_weight: int
    ) -> bool:
        return False

    def shortfall_step(
        self, state: RolloutState, group_id: str, limits: SamplerLimits
    ) -> int | None:
        group = state.ledger.groups.get(group_id) or state.replay.get(group_id)
        return None if group is None else group.target_step

    def set_dispatch_index(self, resume_from_trainer_version: int) -> int:
        return resume_from_trainer_version - 1


class CustomSampler(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="name",
    tag="custom",
):
    """The name of a user's own `PromptGroupSampler`; the shell loads it."""

    target: str
    """`module:ClassName`."""
    options: (
        dict[str, str | int | float | bool] | tuple[tuple[str, str | int | float | bool], ...]
    ) = ()
    """Keyword arguments of the class: a mapping, or pairs, which old configurations have."""


BuiltInSampler = WindowedSampler | ReadyFirstSampler | WeightFifoSampler | InOrderSampler
SamplerConfig = BuiltInSampler | CustomSampler


def batches_unaccounted(
    sampler: PromptGroupSampler, state: RolloutState, *, num_prompts_per_step: int
) -> int:
    """Groups too many (or, negative, too few) for the batches that a gated policy counts.

    Not zero after a resume: the state is damaged, or `num_prompts_per_step` was another one.
    """
    if not sampler.counts_batches:
        return 0
    return unaccounted_groups(state, num_prompts_per_step=num_prompts_per_step)
