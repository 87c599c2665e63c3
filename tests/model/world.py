"""A small world around the real core: dataset, engines, data plane, trainer, store, crashes.

The world holds physical facts that the core does not see (which rows exist, what the weights were
trained on, which generations run), so that the promise can be checked against something other than
the state itself. The core's functions come in as a `Machine`, so that a planted mistake can take
the place of any of them.

A crash needs no product of live state and saved state: what a resume continues with depends only
on the save it starts from. So a save is an edge from the node it was made at to the node that a
crash, at whatever later moment, and a resume from it lead to. A save's cut and its publication are
one edge, as the rows it names are pinned in between; a crash between the two is a resume from the
save before. A further crash without a save in between resumes to the same node with one crash less
to come: whatever can happen from there can happen from the node that is explored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec import Struct
from msgspec.structs import replace
from returns.pipeline import is_successful
from returns.result import Result

from rollsync.codecs import decode, encode
from rollsync.pure.rollout import (
    AdmitBatch,
    BuiltInSampler,
    Capture,
    CaptureRefused,
    CheckpointKind,
    DataloaderState,
    DrawReserve,
    DropReason,
    NothingLeft,
    NothingToAdmit,
    PromptGroupPhase,
    PromptGroupRecoveryRecord,
    PromptGroupStatus,
    PromptReference,
    PullPrompts,
    RecoveryGranularity,
    ReservedGroups,
    ResumePlan,
    ResumePolicy,
    RolloutEvent,
    RolloutState,
    SamplerLimits,
    SkipStep,
    TrainBatch,
    TransitionError,
    apply,
    capture,
    describe_problem,
    drop_group,
    fresh_state,
    is_exhausted,
    next_stale_drop,
    plan_resume,
    restoring_problems,
    sample_id_of,
    staged_key,
    take_inventory,
    why,
)
from rollsync.pure.rollout.dispatch import next_dispatch
from rollsync.pure.rollout.events import (
    AttemptFailed,
    BatchReserved,
    ClaimsReleased,
    FinalizationFailed,
    FinalizationStarted,
    GroupCommitted,
    OptimizerCommitOpened,
    ReserveFilled,
    RowsCleared,
    SiblingSealed,
    StepCommitted,
)

Attempt = tuple[str, int, int]
"""Group id, sibling, attempt."""


class Config(Struct, frozen=True, kw_only=True):
    """The size of the world."""

    sampler: BuiltInSampler
    prompts: int = 3
    """In all epochs together."""
    epoch: int | None = None
    """Prompts in an epoch; None: all of them."""
    siblings: int = 2
    batch: int = 2
    crashes: int = 2
    faults: int = 1
    """Failed attempts, failed or unsettled finalizations, and released claims, in all."""
    max_failed_attempts: int = 1
    slack: int = 0
    """Groups that the buffer holds beyond what the policy needs."""
    spares: int = 1
    """Most prompts that the run keeps in the replacement reserve."""
    granularity: RecoveryGranularity = RecoveryGranularity.SIBLING
    resumes: tuple[tuple[bool, ReservedGroups], ...] = (
        (True, ReservedGroups.READMIT),
        (False, ReservedGroups.READMIT),
        (True, ReservedGroups.RETURN_TO_RESERVE),
    )
    """Ways to resume: whether the buffer is loaded, and what becomes of reserved groups."""

    def limits(self, state: RolloutState, served: int) -> SamplerLimits:
        return SamplerLimits(
            num_prompts_per_step=self.batch,
            num_generations_per_prompt=self.siblings,
            granularity=self.granularity,
            buffer_capacity=self.capacity,
            prompts_left=self.handed_out(state) < self.prompts,
            served_weight_version=served,
        )

    def handed_out(self, state: RolloutState) -> int:
        """How many prompts the dataloader has given, by where it stands."""
        place = state.dataloader_state
        return place.epoch * (self.epoch or self.prompts) + place.position

    def prompt_at(self, index: int) -> PromptReference:
        """The dataset's prompt number `index`, counted over all epochs."""
        epoch, position = divmod(index, self.epoch or self.prompts)
        return PromptReference(
            prompt_id=f"p{index}",
            sample_id=f"s{position}",
            task="t",
            epoch=epoch,
            position=position,
            content_digest=f"c{position}",
        )

    @property
    def capacity(self) -> int:
        return self.sampler.required_buffer_capacity(self.batch) + self.slack


class Machine(Struct, frozen=True, kw_only=True):
    """The core, as functions that a planted mistake can replace."""

    apply: Callable[[RolloutState, RolloutEvent], Result[RolloutState, TransitionError]] = apply
    capture: Callable[[RolloutState, CheckpointKind], Result[Capture, CaptureRefused]] = capture
    plan_resume: Callable[[RolloutState, ResumePolicy], ResumePlan] = plan_resume


class Node(Struct, frozen=True, kw_only=True):
    """One moment of the world."""

    state: RolloutState
    rows: frozenset[str]
    """Keys of the rows that the data plane has."""
    weights: tuple[tuple[str, ...], ...]
    """What each optimizer step of the live weights was made of: prompt ids, sorted."""
    running: frozenset[Attempt]
    """Generations that engines are working on."""
    served: int
    """Weight version that the engines serve."""
    training: tuple[str, ...] | None
    """The batch that the trainer holds; None between steps."""
    anchored: bool
    """Whether a trainer checkpoint of exactly this step exists."""
    crashes: int
    faults: int


class Edge(Struct, frozen=True, kw_only=True):
    """A step from one moment to the next."""

    label: str
    node: Node
    productive: bool = True
    """Work that goes on by itself, as against faults, saves and crashes."""


class Broken(Exception):
    """The core refused what the world had done, or could not be asked: a broken promise."""


def initial(config: Config) -> Node:
    """A fresh run. Also what a crash before the first save leads back to."""
    return Node(
        state=fresh_state(
            dataset_digest="d",
            seed=0,
            sampler_stamps_target_steps=config.sampler.stamps_target_steps,
        ),
        rows=frozenset(),
        weights=(),
        running=frozenset(),
        served=0,
        training=None,
        anchored=True,
        crashes=0,
        faults=0,
    )


def edges(config: Config, machine: Machine, node: Node) -> Iterator[Edge]:
    """Everything that can happen next.

    Raises:
        Broken: the core refuses something that the run has to do, or has done already.
    """
    yield from _admission_edges(config, machine, node)
    for record in node.state.ledger.groups.values():
        if record.phase is PromptGroupPhase.ADMITTED:
            yield from _generation_edges(config, machine, node, record)
            yield from _finalization_edges(config, machine, node, record)
    yield from _drop_edges(config, machine, node)
    yield from _training_edges(config, machine, node)
    version = node.state.progress.trainer_version
    if node.served < version:
        yield Edge(label=f"sync weights {version}", node=replace(node, served=version))
    if len(node.state.rows_to_clear):
        keys = tuple(sorted(node.state.rows_to_clear))
        after = _applied(machine, node, RowsCleared(keys=keys))
        yield Edge(label="clear rows", node=replace(after, rows=after.rows - set(keys)))
    yield from _save_edges(config, machine, node)


def is_over(config: Config, node: Node) -> bool:
    """Whether the run itself would end here."""
    limits = config.limits(node.state, node.served)
    return (
        isinstance(config.sampler.select(node.state, limits), NothingLeft)
        and isinstance(config.sampler.admit(node.state, limits), NothingToAdmit)
        and len(node.state.rows_to_clear) == 0
    )


def _applied(machine: Machine, node: Node, *events: RolloutEvent) -> Node:
    state = node.state
    for event in events:
        result = machine.apply(state, event)
        if not is_successful(result):
            raise Broken(f"{type(event).__name__} is refused: {why(result.failure())}")
        state = result.unwrap()
    return replace(node, state=state)


def _pulled(config: Config, state: RolloutState, count: int) -> tuple[PromptReference, ...]:
    first = config.handed_out(state)
    return tuple(config.prompt_at(at) for at in range(first, min(config.prompts, first + count)))


def _moved(config: Config, state: RolloutState, count: int) -> DataloaderState:
    epoch, position = divmod(config.handed_out(state) + count, config.epoch or config.prompts)
    return replace(state.dataloader_state, epoch=epoch, position=position)


def _admission_edges(config: Config, machine: Machine, node: Node) -> Iterator[Edge]:
    state = node.state
    limits = config.limits(state, node.served)
    answer = config.sampler.admit(state, limits)
    if isinstance(answer, AdmitBatch):
        names = " ".join(answer.event.group_ids)
        yield Edge(label=f"admit {names}", node=_applied(machine, node, answer.event))
    if isinstance(answer, DrawReserve):
        yield Edge(label="draw the reserve", node=_applied(machine, node, answer.event))
    if isinstance(answer, PullPrompts):
        prompts = _pulled(config, state, answer.count)
        event = BatchReserved(
            prompts=prompts,
            dataloader_after=_moved(config, state, len(prompts)),
            granularity=config.granularity,
            expected_generations=config.siblings,
        )
        names = " ".join(prompt.prompt_id for prompt in prompts)
        yield Edge(label=f"reserve {names}", node=_applied(machine, node, event))
    if limits.prompts_left and len(state.runtime.replacement_reserve) < config.spares:
        prompts = _pulled(config, state, 1)
        filled = ReserveFilled(prompts=prompts, dataloader_after=_moved(config, state, 1))
        label = f"keep {prompts[0].prompt_id} as a spare"
        yield Edge(label=label, node=_applied(machine, node, filled), productive=False)


def _generation_edges(
    config: Config, machine: Machine, node: Node, record: PromptGroupRecoveryRecord
) -> Iterator[Edge]:
    group_id = record.group_id
    exhausted = is_exhausted(record, max_failed_attempts=config.max_failed_attempts)
    for sibling in record.siblings:
        last = sibling.attempts[-1]
        event = None if exhausted else next_dispatch(record, sibling.index)
        if event is not None:
            attempt = (group_id, sibling.index, event.attempt_index)
            after = _applied(machine, node, event)
            label = f"dispatch {group_id}/{sibling.index} attempt {event.attempt_index}"
            yield Edge(label=label, node=replace(after, running=node.running | {attempt}))
        attempt = (group_id, sibling.index, last.index)
        if attempt in node.running:
            yield from _ending_edges(config, machine, node, attempt)


def _ending_edges(config: Config, machine: Machine, node: Node, attempt: Attempt) -> Iterator[Edge]:
    group_id, sibling, index = attempt
    name = f"{group_id}/{sibling} attempt {index}"
    key = staged_key(group_id, sibling, index)
    sealed = SiblingSealed(
        group_id=group_id,
        sibling_index=sibling,
        attempt_index=index,
        receipt=key,
        reward=1.0,
        masked=False,
        staged_keys=(key,),
    )
    idle = replace(node, running=node.running - {attempt})
    staged = replace(idle, rows=node.rows | {key})
    yield Edge(label=f"seal {name}", node=_applied(machine, staged, sealed))
    if node.faults < config.faults:
        failed = AttemptFailed(group_id=group_id, sibling_index=sibling, attempt_index=index)
        worse = replace(idle, faults=node.faults + 1)
        yield Edge(label=f"fail {name}", node=_applied(machine, worse, failed), productive=False)


def _finalization_edges(
    config: Config, machine: Machine, node: Node, record: PromptGroupRecoveryRecord
) -> Iterator[Edge]:
    group_id = record.group_id
    if record.status is PromptGroupStatus.READY_TO_FINALIZE:
        started = _applied(machine, node, FinalizationStarted(group_id=group_id))
        yield Edge(label=f"finalize {group_id}", node=started)
    unknown = record.status is PromptGroupStatus.FINALIZATION_UNKNOWN
    if unknown or record.status is PromptGroupStatus.FINALIZING:
        rows = tuple(sample_id_of(group_id, index) for index in range(config.siblings))
        committed = GroupCommitted(
            group_id=group_id,
            sample_ids=rows,
            end_weight_version=node.served,
            lengths=(1,) * config.siblings,
        )
        published = replace(node, rows=node.rows | set(rows))
        yield Edge(label=f"commit {group_id}", node=_applied(machine, published, committed))
    if unknown:
        settled = FinalizationFailed(group_id=group_id, outcome_known=True)
        yield Edge(label=f"settle {group_id}", node=_applied(machine, node, settled))
    elif record.status is PromptGroupStatus.FINALIZING and node.faults < config.faults:
        lost = FinalizationFailed(group_id=group_id, outcome_known=False)
        worse = replace(node, faults=node.faults + 1)
        label = f"lose sight of the finalization of {group_id}"
        yield Edge(label=label, node=_applied(machine, worse, lost), productive=False)


def _drop_edges(config: Config, machine: Machine, node: Node) -> Iterator[Edge]:
    limits = config.limits(node.state, node.served)
    stale = next_stale_drop(config.sampler, node.state, limits)
    if stale is not None:
        yield _dropped(machine, node, stale.group_id, stale, "stale")
    for record in node.state.ledger.groups.values():
        generating = record.status is PromptGroupStatus.GENERATING
        if generating and is_exhausted(record, max_failed_attempts=config.max_failed_attempts):
            event = drop_group(
                config.sampler,
                node.state,
                record.group_id,
                reason=DropReason.UNRECOVERABLE,
                limits=limits,
            )
            yield _dropped(machine, node, record.group_id, event, "unrecoverable")


def _dropped(machine: Machine, node: Node, group_id: str, event: RolloutEvent, why_: str) -> Edge:
    aborted = frozenset(attempt for attempt in node.running if attempt[0] != group_id)
    after = _applied(machine, replace(node, running=aborted), event)
    return Edge(label=f"drop {group_id} ({why_})", node=after)


def _training_edges(config: Config, machine: Machine, node: Node) -> Iterator[Edge]:
    state = node.state
    answer = config.sampler.select(state, config.limits(state, node.served))
    if isinstance(answer, TrainBatch | SkipStep) and node.training is None:
        batch = tuple(
            sorted(state.replay[name].prompt.prompt_id for name in answer.event.group_ids)
        )
        for name in answer.event.group_ids:
            absent = [row for row in state.replay[name].sample_ids if row not in node.rows]
            if absent:
                raise Broken(f"the trainer reads row {absent[0]} of {name}, which is not there")
        after = _applied(machine, node, answer.event)
        label = f"claim {' '.join(answer.event.group_ids) or 'nothing'}"
        yield Edge(label=label, node=replace(after, training=batch))
    step = state.open_step
    if step is None or node.training is None:
        return
    if not step.optimizer_commit_open:
        opened = _applied(machine, node, OptimizerCommitOpened(step=step.step))
        # The worst moment: the weights have changed, the counters have not.
        changed = replace(opened, weights=(*node.weights, node.training))
        yield Edge(label=f"optimizer step {step.step}", node=changed)
        if node.faults < config.faults:
            released = _applied(machine, node, ClaimsReleased(step=step.step))
            given_up = replace(released, training=None, faults=node.faults + 1)
            yield Edge(label="release the claims", node=given_up, productive=False)
    else:
        event = StepCommitted(step=step.step, trainer_version=state.progress.trainer_version + 1)
        done = replace(_applied(machine, node, event), training=None, anchored=False)
        yield Edge(label=f"commit step {step.step}", node=done)


def _save_edges(config: Config, machine: Machine, node: Node) -> Iterator[Edge]:
    trainer = machine.capture(node.state, CheckpointKind.TRAINER_CHECKPOINT)
    if is_successful(trainer):
        if not node.anchored:
            saved = replace(node, anchored=True)
            yield Edge(label="trainer checkpoint", node=saved, productive=False)
        # With the anchor made, a snapshot resumes to the same node (unless the core allows a
        # trainer checkpoint where it must not).
        if not node.anchored or node.training is not None:
            yield from _resume_edges(
                config, machine, node, trainer.unwrap(), "trainer checkpoint", node.weights
            )
    snapshot = machine.capture(node.state, CheckpointKind.ROLLOUT_SNAPSHOT)
    if node.anchored and is_successful(snapshot):
        anchor_weights = node.weights[: node.state.progress.train_steps]
        yield from _resume_edges(
            config, machine, node, snapshot.unwrap(), "snapshot", anchor_weights
        )


def _resume_edges(
    config: Config,
    machine: Machine,
    node: Node,
    captured: Capture,
    save: str,
    weights: tuple[tuple[str, ...], ...],
) -> Iterator[Edge]:
    if node.crashes == config.crashes:
        return
    for load_buffer, reserved in config.resumes:
        if not load_buffer and len(captured.state.replay) == 0:
            continue  # the same as loading it
        if reserved is ReservedGroups.RETURN_TO_RESERVE and not any(
            record.phase is PromptGroupPhase.RESERVED
            for record in captured.state.ledger.groups.values()
        ):
            continue  # the same as admitting none again
        plan = _plan(config, machine, node, captured, load_buffer, reserved)
        resumed = Node(
            state=plan.state,
            rows=frozenset(plan.rows_to_load).intersection(node.rows),
            weights=weights,
            running=frozenset(),
            served=plan.state.progress.trainer_version,
            training=None,
            anchored=True,
            crashes=node.crashes + 1,
            faults=node.faults,
        )
        yield Edge(
            label=f"{save}; CRASH; resume"
            + ("" if load_buffer else ", buffer not loaded")
            + ("" if reserved is ReservedGroups.READMIT else ", reserved become spares"),
            node=resumed,
            productive=False,
        )


def _plan(
    config: Config,
    machine: Machine,
    node: Node,
    captured: Capture,
    load_buffer: bool,
    reserved: ReservedGroups,
) -> ResumePlan:
    """What a resume from this save does: through the real codecs and the real checks."""
    wanted = (*captured.replay_rows, *captured.staging_rows)
    lost = [row for row in wanted if row not in node.rows]
    if lost:
        raise Broken(f"the save names row {lost[0]}, which is not there")
    decoded = decode(encode(captured.state), RolloutState)
    if not is_successful(decoded):
        raise Broken(f"the saved state cannot be read: {decoded.failure()}")
    state = decoded.unwrap()
    problems = restoring_problems(
        take_inventory(state, wanted),
        state,
        sampler=config.sampler,
        num_prompts_per_step=config.batch,
        buffer_capacity=config.capacity,
    )
    if problems:
        raise Broken(f"the resume refuses what was saved: {describe_problem(problems[0])}")
    policy = ResumePolicy(
        sampler=config.sampler,
        limits=config.limits(state, state.progress.trainer_version),
        load_buffer=load_buffer,
        reserved=reserved,
        max_failed_attempts=config.max_failed_attempts,
    )
    plan = machine.plan_resume(state, policy)
    _check_plan(machine, state, plan)
    return plan


def _check_plan(machine: Machine, saved: RolloutState, plan: ResumePlan) -> None:
    """The plan speaks of every group once, and the work that it lists can be done."""
    planned = sorted(group.group_id for group in plan.groups)
    if planned != sorted({*saved.ledger.groups, *saved.replay}):
        raise Broken(f"the plan speaks of {planned}, and not of each saved group once")
    state = plan.state
    for event in plan.dispatches:
        result = machine.apply(state, event)
        if not is_successful(result):
            raise Broken(f"the plan's dispatch is refused: {why(result.failure())}")
        state = result.unwrap()
    idle = [
        record.group_id
        for record in state.ledger.groups.values()
        if record.phase is PromptGroupPhase.ADMITTED
        and record.group_id not in plan.to_finalize
        and all(next_dispatch(record, sibling.index) for sibling in record.siblings)
    ]
    if idle:
        raise Broken(f"the plan leaves {idle[0]} to nobody")
