"""The value that an asynchronous run has in flight: prompts, rollouts, counters.

One `RolloutState` holds everything that a crash must not lose. It is frozen; it changes only by
`transitions.apply(state, event)`, and the shell keeps one cell with the current value. Its large
maps are persistent (`rpds`), so a new state costs O(log n) and keeping an old one costs nothing:
that is why the exclusive cut of a snapshot is O(1).

The rule this module keeps: every prompt that the dataloader handed out has exactly one *place*
(`PromptPlace`), and the place is derived from the maps below, never stored beside them.

Records of which there may be 100,000 have `gc=False`: they hold no cycles, and so the garbage
collector need not walk through them (encoding and decoding a large state takes half the time).

Names follow the reference's API pages (NeMo-RL, single-controller rollout checkpointing).
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct
from rpds import HashTrieMap, HashTrieSet, Queue


class PromptGroupPhase(StrEnum):
    """How far the sampler has taken an unfinished group."""

    RESERVED = "reserved"
    """Pulled from the dataloader; the sampler's cursor does not count it yet."""
    ADMITTED = "admitted"
    """The sampler's cursor counts it; its target step (if the policy stamps one) is fixed."""


class PromptGroupStatus(StrEnum):
    """Who owns an unfinished group's result."""

    GENERATING = "generating"
    READY_TO_FINALIZE = "ready_to_finalize"
    FINALIZING = "finalizing"
    FINALIZATION_UNKNOWN = "finalization_unknown"


class RecoveryGranularity(StrEnum):
    """What a resume reuses of an unfinished group."""

    SIBLING = "sibling"
    """Sealed siblings are kept, the others are generated again."""
    PROMPT_GROUP = "prompt_group"
    """The whole group is generated again."""


class RolloutAttemptStatus(StrEnum):
    """Life of one physical generation of one sibling."""

    RESERVED = "reserved"
    DISPATCHED = "dispatched"
    SEALED = "sealed"
    FAILED = "failed"
    ABANDONED = "abandoned"


class DropReason(StrEnum):
    """Why a prompt that was handed out will never be trained."""

    STALE = "stale"
    """Its weight version left the sampler's window before it could be trained."""
    UNRECOVERABLE = "unrecoverable"
    """A sibling used up its attempts."""
    REPLACED = "replaced"
    """A prompt of the replacement reserve took its place in the batch. No built-in sampler
    drops for this reason alone; one of a user's may, and `rollout.state` version 1 has it."""


class PromptReference(Struct, frozen=True, kw_only=True, gc=False):
    """A durable locator for one hand-out of one prompt. The content stays in the dataset.

    A resume takes the sample from the dataset again and compares `task` and `content_digest`,
    so that a changed dataset is an error that names the sample.
    """

    prompt_id: str
    """Unique per hand-out: the same sample in two epochs has two prompt ids."""
    sample_id: str
    task: str
    epoch: int
    position: int
    """Position in the epoch's order, from 0."""
    content_digest: str
    """Hexadecimal SHA-256 of the canonical content."""


class DatumSpec(Struct, frozen=True, kw_only=True):
    """A prompt as the dataset gives it."""

    sample_id: str
    task: str
    content: str
    extra: tuple[tuple[str, str], ...] = ()
    """Further fields for the environment (for instance the verifier's answer), sorted by name."""


class FinalizedReward(Struct, frozen=True, kw_only=True, gc=False):
    """The reward of one sibling, as the environment's verifier gave it."""

    sibling_index: int
    reward: float


class RolloutAttemptRecord(Struct, frozen=True, kw_only=True, gc=False):
    """One physical generation of one sibling. Only a sealed attempt has the last four fields."""

    index: int
    status: RolloutAttemptStatus
    receipt: str | None = None
    """Digest of the sealed rows: sealing again with the same receipt is a no-op."""
    reward: float | None = None
    masked: bool | None = None
    """True when the sibling's tokens are kept out of the loss (for instance truncated)."""
    staged_keys: tuple[str, ...] = ()


class RolloutSiblingRecord(Struct, frozen=True, kw_only=True, gc=False):
    """One of the group's generations; its attempts are contiguous from 0."""

    index: int
    attempts: tuple[RolloutAttemptRecord, ...] = ()


class PromptGroupRecoveryRecord(Struct, frozen=True, kw_only=True, gc=False):
    """An unfinished prompt group: from the dataloader's hand-out until its commit to the replay."""

    group_id: str
    """The prompt id: one hand-out of a prompt is one group, whatever happens to it."""
    admission_id: str | None
    """Groups of one dispatch batch share it; None while reserved."""
    prompt: PromptReference
    granularity: RecoveryGranularity
    expected_generations: int
    target_step: int | None
    """Dispatch index of its batch, if the policy stamps it; see `batch_shortfall`."""
    start_weight_version: int | None
    """Weight version that the engines served at admission; None while reserved."""
    phase: PromptGroupPhase
    status: PromptGroupStatus
    siblings: tuple[RolloutSiblingRecord, ...]
    recovery_count: int = 0
    """How many resumes have found it running since a sibling was last sealed: this bounds a
    poison prompt across resumes, and does not punish a long one that makes progress."""


class RolloutRecoveryLedger(Struct, frozen=True, kw_only=True):
    """Ownership of prompts between the dataloader's hand-out and the replay index."""

    groups: HashTrieMap[str, PromptGroupRecoveryRecord]


class ReplayGroup(Struct, frozen=True, kw_only=True, gc=False):
    """A finished group whose rows are in the data plane and that no step has trained yet."""

    group_id: str
    admission_id: str
    """This and `granularity` are kept from the ledger: a group that must be generated again, or
    replaced, goes back into its batch."""
    granularity: RecoveryGranularity
    prompt: PromptReference
    sample_ids: tuple[str, ...]
    """Row keys in the data plane, one per sibling, in sibling order."""
    start_weight_version: int
    end_weight_version: int
    target_step: int | None
    lengths: tuple[int, ...]
    """Tokens per row (prompt and completion)."""
    rewards: tuple[float, ...]
    masked: tuple[bool, ...]
    commit_index: int
    """Position in commit order, from 0: ties among groups are broken by it."""


class DataloaderState(Struct, frozen=True, kw_only=True):
    """Where the dataloader goes on. `position` is that of the next hand-out, within `epoch`."""

    epoch: int
    position: int
    dataset_digest: str
    seed: int


class TrainingProgress(Struct, frozen=True, kw_only=True):
    """The trainer's counters. `trainer_version` is the weight version the trainer holds."""

    train_steps: int = 0
    trainer_version: int = 0
    current_epoch: int = 0


class OpenTrainingStep(Struct, frozen=True, kw_only=True):
    """The training step that has claimed groups and not yet committed."""

    step: int
    """Number of the step in progress: `train_steps + 1`."""
    group_ids: tuple[str, ...]
    optimizer_commit_open: bool = False


class Trained(Struct, frozen=True, kw_only=True, gc=False, tag="trained"):
    """The prompt's group was in the optimizer step `step`."""

    step: int


class Dropped(Struct, frozen=True, kw_only=True, gc=False, tag="dropped"):
    """The prompt will not be trained; `step` is the training step during which that was decided."""

    step: int
    reason: DropReason


PromptOutcome = Trained | Dropped


class RolloutRuntimeState(Struct, frozen=True, kw_only=True):
    """What the pumps change and every checkpoint saves, beside ledger and replay index."""

    replacement_reserve: Queue[PromptReference]
    batch_shortfall: HashTrieMap[int, int]
    """Target step -> groups that it lacks. Target steps count from 0, as weight versions do: the
    batch of target step `t` is trained on top of weight version `t`, as training step `t + 1`."""
    sampler_stamps_target_steps: bool = False
    finalizer_metrics_by_group: HashTrieMap[str, HashTrieMap[str, float]]
    finalizer_rewards_by_group: HashTrieMap[str, tuple[FinalizedReward, ...]]


class RolloutState(Struct, frozen=True, kw_only=True):
    """Everything the run has in flight. See the module's docstring for the rule it keeps."""

    progress: TrainingProgress
    dataloader_state: DataloaderState
    sampler_dispatch_index: int
    """Index of the last admitted dispatch batch; -1 before the first."""
    next_nemo_gym_task_index: int
    runtime: RolloutRuntimeState
    ledger: RolloutRecoveryLedger
    replay: HashTrieMap[str, ReplayGroup]
    next_commit_index: int
    open_step: OpenTrainingStep | None
    rows_to_clear: HashTrieSet[str]
    """Rows in the data plane that nothing owns any more and that are still to be cleared."""
    outcomes: HashTrieMap[str, PromptOutcome]
    """Prompt id -> what became of it: the account that the promise is checked against."""


class PromptPlace(StrEnum):
    """Where a handed-out prompt is. Exactly one holds at any moment."""

    RESERVED = "reserved"
    ADMITTED = "admitted"
    READY = "ready"
    CLAIMED = "claimed"
    RESERVE = "reserve"
    TRAINED = "trained"
    DROPPED = "dropped"


def admission_id_of(dispatch_index: int) -> str:
    """Admission id of the dispatch batch with this index: unique, as the cursor only advances."""
    return f"admission-{dispatch_index}"


def staged_key(group_id: str, sibling_index: int, attempt_index: int) -> str:
    """Row key under which an attempt's output is staged until its group is finalized.

    Every key of a group begins with its id and a slash, and ids have no slash: so no row can
    belong to two groups, without any index of keys.
    """
    return f"{group_id}/{sibling_index}/attempt-{attempt_index}"


def sample_id_of(group_id: str, sibling_index: int) -> str:
    """Row key of a finished group's sibling. See `staged_key` for the rule of the prefix."""
    return f"{group_id}/{sibling_index}"


def owner_of(key: str) -> str:
    """The group whose row has this key, if any has. See `staged_key` for the rule of the prefix."""
    return key.partition("/")[0]


def fresh_state(
    *, dataset_digest: str, seed: int, sampler_stamps_target_steps: bool
) -> RolloutState:
    """The state of a run that has handed out nothing.

    Args:
        dataset_digest: Identity of the dataset, hexadecimal.
        seed: Seed of the dataloader's order.
        sampler_stamps_target_steps: Whether the sampler fixes a target step at admission.
    """
    reserve: Queue[PromptReference] = Queue()
    shortfall: HashTrieMap[int, int] = HashTrieMap()
    metrics: HashTrieMap[str, HashTrieMap[str, float]] = HashTrieMap()
    rewards: HashTrieMap[str, tuple[FinalizedReward, ...]] = HashTrieMap()
    groups: HashTrieMap[str, PromptGroupRecoveryRecord] = HashTrieMap()
    replay: HashTrieMap[str, ReplayGroup] = HashTrieMap()
    rows_to_clear: HashTrieSet[str] = HashTrieSet()
    outcomes: HashTrieMap[str, PromptOutcome] = HashTrieMap()
    return RolloutState(
        progress=TrainingProgress(),
        dataloader_state=DataloaderState(
            epoch=0, position=0, dataset_digest=dataset_digest, seed=seed
        ),
        sampler_dispatch_index=-1,
        next_nemo_gym_task_index=0,
        runtime=RolloutRuntimeState(
            replacement_reserve=reserve,
            batch_shortfall=shortfall,
            sampler_stamps_target_steps=sampler_stamps_target_steps,
            finalizer_metrics_by_group=metrics,
            finalizer_rewards_by_group=rewards,
        ),
        ledger=RolloutRecoveryLedger(groups=groups),
        replay=replay,
        next_commit_index=0,
        open_step=None,
        rows_to_clear=rows_to_clear,
        outcomes=outcomes,
    )
