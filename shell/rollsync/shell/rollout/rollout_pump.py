"""The rollout pump: takes prompts, admits batches, and generates, seals and publishes groups.

Rules kept here: the sampler decides and this carries out; a decision is asked again inside the
section in which it is applied, as the state may have moved while the section was waited for; every
admitted group that is not being worked on is taken up, wherever it came from (a batch, a resume, a
replacement).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from hashlib import sha256

import torch

from rollsync.pure.config import MasterConfig
from rollsync.pure.rollout import is_exhausted
from rollsync.pure.rollout.decisions import (
    AdmitBatch,
    DrawReserve,
    NothingToAdmit,
    PullPrompts,
    SamplerLimits,
    Wait,
)
from rollsync.pure.rollout.dispatch import next_dispatch
from rollsync.pure.rollout.drops import drop_group
from rollsync.pure.rollout.events import (
    AttemptFailed,
    BatchReserved,
    GroupDropped,
    ReserveFilled,
    RolloutEvent,
    SiblingSealed,
)
from rollsync.pure.rollout.settings import sampler_limits
from rollsync.pure.rollout.state import (
    DropReason,
    FinalizedReward,
    PromptGroupPhase,
    PromptGroupRecoveryRecord,
    PromptGroupStatus,
    RolloutState,
    staged_key,
)
from rollsync.shell.errors import RollsyncError
from rollsync.shell.rollout.barrier import CheckpointMutationKind
from rollsync.shell.rollout.clients import (
    Codec,
    GeneratedCompletion,
    GenerationClient,
    GenerationFailed,
    GenerationRequest,
    Verifier,
)
from rollsync.shell.rollout.data_plane import Row
from rollsync.shell.rollout.errors import DataPlaneError, RolloutTransitionError
from rollsync.shell.rollout.parts import RolloutParts
from rollsync.shell.rollout.prompts import PromptDataloader
from rollsync.shell.rollout.waiting import ChangeSignal


class PromptGone(RollsyncError):
    """A group names a sample that the dataset does not have."""


class RolloutPump:
    """Keeps the engines busy with what the sampler admits.

    Args:
        parts: the run's parts.
        config: the run's configuration.
        dataloader: hands out prompts.
        generation: the engines.
        codec: the policy's tokenizer.
        verifier: judges answers.
        changes: notified at every change of the state.
    """

    def __init__(
        self,
        parts: RolloutParts,
        config: MasterConfig,
        *,
        dataloader: PromptDataloader,
        generation: GenerationClient,
        codec: Codec,
        verifier: Verifier,
        changes: ChangeSignal,
    ) -> None:
        self._parts = parts
        self._config = config
        self._dataloader = dataloader
        self._generation = generation
        self._codec = codec
        self._verifier = verifier
        self._requests = asyncio.Semaphore(config.generation.max_concurrent_requests)
        self._changes = changes
        self._working: set[str] = set()
        self._generating: dict[str, set[asyncio.Task[GeneratedCompletion]]] = {}
        self._admission_closed: str | None = None
        self.served_weight_version = 0
        """What the engines serve; the train pump sets it after each sync."""
        parts.runtime_state.listen(self._saw)

    def close_admission(self, why: str) -> None:
        """Start no further rollout. What runs goes on."""
        self._admission_closed = why
        self._changes.notify()

    def limits(self) -> SamplerLimits:
        """What the sampler must know beside the state, as of now."""
        state = self._parts.runtime_state.state
        return sampler_limits(
            self._config,
            capacity=self._parts.buffer.capacity,
            prompts_left=self._dataloader.prompts_left(state.dataloader_state) > 0,
            served_weight_version=self.served_weight_version,
        )

    async def run(self) -> None:
        """Pump until cancelled: groups may come back (as replacements) even at the data's end."""
        async with asyncio.TaskGroup() as groups:
            while True:
                seen = self._changes.version
                for group_id in self._to_take_up():
                    self._working.add(group_id)
                    groups.create_task(self._work_on(group_id), name=f"group {group_id}")
                if not await self._admit():
                    await self._changes.wait_past(seen)

    def _to_take_up(self) -> tuple[str, ...]:
        if self._admission_closed is not None:
            return ()
        records = self._parts.runtime_state.state.ledger.groups.values()
        waiting = [
            record
            for record in records
            if record.phase is PromptGroupPhase.ADMITTED and record.group_id not in self._working
        ]
        waiting.sort(key=lambda record: (record.prompt.epoch, record.prompt.position))
        return tuple(record.group_id for record in waiting)

    async def _admit(self) -> bool:
        """Carry out one decision of admission; False if there is nothing to do for now."""
        if self._admission_closed is not None:
            return False
        if self.served_weight_version < self._parts.runtime_state.state.progress.trainer_version:
            # A sync is due: a batch that waits for it starts from the newest weights.
            return False
        await self._fill_reserve()
        sampler, cell = self._parts.sampler, self._parts.runtime_state
        if isinstance(sampler.admit(cell.state, self.limits()), Wait | NothingToAdmit):
            return False
        kind = CheckpointMutationKind.PROMPT_RESERVATION
        async with self._parts.data_plane_barrier.mutation(kind) as section:
            match sampler.admit(cell.state, self.limits()):
                case AdmitBatch(event=event):
                    cell.apply(section, event)
                case DrawReserve(event=drawn):
                    cell.apply(section, drawn)
                case PullPrompts(count=count):
                    pulled = self._dataloader.pull(cell.state.dataloader_state, count)
                    reserved = BatchReserved(
                        prompts=pulled.references,
                        dataloader_after=pulled.after,
                        granularity=self._config.recovery.granularity,
                        expected_generations=self._config.grpo.num_generations_per_prompt,
                    )
                    cell.apply(section, reserved)
                case Wait() | NothingToAdmit():
                    return False
        return True

    async def _fill_reserve(self) -> None:
        cell = self._parts.runtime_state
        if self._spares_wanted(cell.state) == 0:
            return
        kind = CheckpointMutationKind.PROMPT_RESERVATION
        async with self._parts.data_plane_barrier.mutation(kind) as section:
            wanted = self._spares_wanted(cell.state)
            if wanted:
                pulled = self._dataloader.pull(cell.state.dataloader_state, wanted)
                filled = ReserveFilled(prompts=pulled.references, dataloader_after=pulled.after)
                cell.apply(section, filled)

    def _spares_wanted(self, state: RolloutState) -> int:
        missing = self._config.recovery.replacement_reserve - len(state.runtime.replacement_reserve)
        return max(0, min(missing, self._dataloader.prompts_left(state.dataloader_state)))

    async def _work_on(self, group_id: str) -> None:
        """Generate what the group lacks and publish it."""
        try:
            record = self._record(group_id)
            if record is None:
                return
            prompt = self._prompt_tokens(record)
            async with asyncio.TaskGroup() as siblings:
                for sibling in record.siblings:
                    siblings.create_task(self._seal_sibling(group_id, sibling.index, prompt))
            await self._publish(group_id, prompt)
        finally:
            self._working.discard(group_id)
            self._changes.notify()

    def _record(self, group_id: str) -> PromptGroupRecoveryRecord | None:
        return self._parts.runtime_state.state.ledger.groups.get(group_id)

    def _prompt_tokens(self, record: PromptGroupRecoveryRecord) -> tuple[int, ...]:
        datum = self._dataloader.lookup(record.prompt.sample_id)
        if datum is None:
            raise PromptGone(
                f"the dataset has no sample {record.prompt.sample_id}",
                remedy="run with the dataset that the run was started with",
            )
        return self._codec.encode(datum.content)

    async def _seal_sibling(self, group_id: str, index: int, prompt: tuple[int, ...]) -> None:
        """Attempts until one is sealed, the group is gone, or the attempts are used up."""
        while not self._is_exhausted(group_id):
            attempt = await self._dispatch(group_id, index)
            if attempt is None:
                return
            try:
                completion = await self._generate(group_id, index, prompt)
            except GenerationFailed:
                failed = AttemptFailed(
                    group_id=group_id, sibling_index=index, attempt_index=attempt
                )
                await self._apply(CheckpointMutationKind.RECOVERY_RETRY, group_id, failed)
                continue
            if completion is None:
                return
            try:
                await self._seal(group_id, index, attempt, prompt, completion)
            except RolloutTransitionError:
                if self._record(group_id) is not None:
                    raise
            return
        await self.drop(group_id, DropReason.UNRECOVERABLE)

    def _is_exhausted(self, group_id: str) -> bool:
        """Whether too many attempts of the group have failed, also before a resume."""
        record = self._record(group_id)
        limit = self._config.recovery.max_attempts
        return record is not None and is_exhausted(record, max_failed_attempts=limit)

    async def _dispatch(self, group_id: str, index: int) -> int | None:
        """Begin the sibling's next attempt; None if it is sealed or the group is gone."""
        kind = CheckpointMutationKind.OTHER
        async with self._parts.data_plane_barrier.mutation(kind) as section:
            record = self._record(group_id)
            dispatch = None if record is None else next_dispatch(record, index)
            if dispatch is None:
                return None
            self._parts.runtime_state.apply(section, dispatch)
            return dispatch.attempt_index

    async def _generate(
        self, group_id: str, index: int, prompt: tuple[int, ...]
    ) -> GeneratedCompletion | None:
        """One completion; None if the group was dropped while it was generated."""
        settings = self._config.generation
        request = GenerationRequest(
            prompt_token_ids=prompt,
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            seed=generation_seed(self._config.run.seed, group_id, index),
        )
        async with self._requests:
            if self._record(group_id) is None:
                return None
            running = asyncio.ensure_future(self._generation.generate(request))
            mine = self._generating.setdefault(group_id, set())
            mine.add(running)
            try:
                return await running
            except asyncio.CancelledError:
                running.cancel()
                if self._record(group_id) is not None:
                    raise
                return None
            finally:
                mine.discard(running)
                if not mine:
                    self._generating.pop(group_id, None)

    async def _seal(
        self,
        group_id: str,
        index: int,
        attempt: int,
        prompt: tuple[int, ...],
        completion: GeneratedCompletion,
    ) -> None:
        record = self._record(group_id)
        if record is None:
            return
        answer = self._codec.decode(completion.token_ids).strip()
        reward = self._verifier.score(record.prompt.sample_id, answer)
        row: Row = {
            "token_ids": torch.tensor(prompt + completion.token_ids, dtype=torch.int64),
            "prompt_length": torch.tensor(len(prompt), dtype=torch.int64),
            "behaviour_log_probabilities": torch.tensor(
                completion.log_probabilities, dtype=torch.float32
            ),
            "weight_version": torch.tensor(completion.weight_version, dtype=torch.int64),
        }
        key = staged_key(group_id, index, attempt)
        sealed = SiblingSealed(
            group_id=group_id,
            sibling_index=index,
            attempt_index=attempt,
            receipt=_digest(row),
            reward=reward,
            masked=not completion.finished,
            staged_keys=(key,),
        )
        await self._parts.buffer.seal(sealed, {key: row})

    async def _publish(self, group_id: str, prompt: tuple[int, ...]) -> None:
        record = self._record(group_id)
        if record is None or record.status is not PromptGroupStatus.READY_TO_FINALIZE:
            return
        try:
            rows = await self._parts.buffer.staged_rows_of(group_id)
            await self._publish_rows(record, rows, prompt)
        except (DataPlaneError, RolloutTransitionError):
            # Dropped meanwhile, and its rows cleared.
            if self._record(group_id) is not None:
                raise
            return
        await self._parts.buffer.clear_retired()

    async def _publish_rows(
        self,
        record: PromptGroupRecoveryRecord,
        rows: Sequence[dict[str, torch.Tensor]],
        prompt: tuple[int, ...],
    ) -> None:
        rewards = tuple(
            FinalizedReward(sibling_index=sibling.index, reward=sibling.attempts[-1].reward or 0.0)
            for sibling in record.siblings
        )
        lengths = [len(row["token_ids"]) for row in rows]
        await self._parts.buffer.publish(
            record.group_id,
            rows,
            lengths=lengths,
            end_weight_version=max(int(row["weight_version"]) for row in rows),
            metrics={
                "mean_reward": sum(each.reward for each in rewards) / len(rewards),
                "mean_completion_tokens": sum(lengths) / len(lengths) - len(prompt),
            },
            rewards=rewards,
        )

    async def drop(self, group_id: str, reason: DropReason) -> None:
        """Drop a group, if it is still there, and clear its rows."""
        kind = CheckpointMutationKind.GROUP_REMOVAL
        async with self._parts.data_plane_barrier.mutation(kind) as section:
            state = self._parts.runtime_state.state
            if group_id in state.ledger.groups or group_id in state.replay:
                dropped = drop_group(
                    self._parts.sampler, state, group_id, reason=reason, limits=self.limits()
                )
                self._parts.runtime_state.apply(section, dropped)
        await self._parts.buffer.clear_retired()

    async def _apply(
        self, kind: CheckpointMutationKind, group_id: str, *events: RolloutEvent
    ) -> None:
        """Apply events of a group that may have been dropped meanwhile."""
        async with self._parts.data_plane_barrier.mutation(kind) as section:
            if self._record(group_id) is not None:
                self._parts.runtime_state.apply(section, *events)

    def _saw(self, event: RolloutEvent, _: RolloutState) -> None:
        if isinstance(event, GroupDropped):
            for running in self._generating.get(event.group_id, ()):
                running.cancel()
        self._changes.notify()


def generation_seed(run_seed: int, group_id: str, sibling_index: int) -> int:
    """Seed of a sibling's sampling. A repeated attempt gets the same one: what a crash threw away
    is generated again as it was, if the weights are the same."""
    digest = sha256(f"{run_seed}/{group_id}/{sibling_index}".encode()).digest()
    return int.from_bytes(digest[:4], "big")


def _digest(row: Row) -> str:
    digest = sha256()
    for name, value in sorted(row.items()):
        digest.update(name.encode())
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()
