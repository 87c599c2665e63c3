"""Runs that are killed and resumed at random points lose no prompt and train none twice.

One process at a time over the real store: everything a run does at random, saves at random, deaths
at random, with saves that fail in between. In the end every prompt of the dataset has exactly one
outcome, and it has that of the lineage whose weights survived.
"""

from __future__ import annotations

import errno
import random
from collections import Counter
from pathlib import Path

import pytest

from rollsync.pure.rollout.account import account
from rollsync.pure.rollout.checkpointing import RolloutCheckpointAttemptReason as Reason
from rollsync.pure.rollout.checkpointing import RolloutCheckpointSaveResult
from rollsync.pure.rollout.events import (
    AttemptFailed,
    ClaimsReleased,
    GroupsClaimed,
    OptimizerCommitOpened,
    StepCommitted,
)
from rollsync.pure.rollout.state import PromptGroupPhase, RolloutState
from tests.pure.rollout.events_kit import admit, dispatch, drop, prompt, reserve, seal
from tests.shell.rollout.test_with_store import FailingFileSystem
from tests.shell.rollout.world import World, assert_same_rows, row_of

PROMPTS = 24


class Run:
    """A run on its way, through any number of processes."""

    def __init__(self, root: Path, seed: int) -> None:
        self.dice = random.Random(seed)
        self.root = root
        self.fs = FailingFileSystem(errno.ENOSPC)
        self.world = World(root, store_on=self.fs)
        self.trained: frozenset[str] = frozenset()
        """Prompts that the trainer of this process has trained, with what it loaded."""
        self.deaths = 0
        self.seen: Counter[str] = Counter()
        """How saves ended, and what resumes began from."""

    @property
    def state(self) -> RolloutState:
        return self.world.state

    @property
    def is_over(self) -> bool:
        return len(self.state.outcomes) == PROMPTS

    async def step(self) -> None:
        """One thing that may happen now."""
        actions = [
            self._hand_out,
            self._admit,
            self._attempt,
            self._publish,
            self._train,
            self._save,
        ]
        action = self.dice.choice(actions)
        await action()

    async def _hand_out(self) -> None:
        at = self.state.dataloader_state.position
        count = min(self.dice.randrange(1, 4), PROMPTS - at)
        if count:
            await self.world.do(reserve(*range(at, at + count)))

    async def _admit(self) -> None:
        reserved = sorted(
            record.prompt.position
            for record in self.state.ledger.groups.values()
            if record.phase is PromptGroupPhase.RESERVED
        )
        if reserved:
            taken = reserved[: self.dice.randrange(1, 3)]
            await self.world.do(admit(self.state, *taken))

    async def _attempt(self) -> None:
        record = self._any_admitted()
        if record is None:
            return
        group, sibling, attempt = record
        await self.world.do(dispatch(group, sibling, attempt))
        if self.dice.random() < 0.15:
            failed = AttemptFailed(group_id=group, sibling_index=sibling, attempt_index=attempt)
            await self.world.do(failed)
            if self.dice.random() < 0.3:
                await self.world.do(drop(group, None))
            return
        if self.dice.random() < 0.1:
            return  # It goes on running; a resume takes it up.
        event = seal(group, sibling, attempt)
        await self.world.buffer.seal(event, {key: row_of(key) for key in event.staged_keys})

    def _any_admitted(self) -> tuple[str, int, int] | None:
        waiting = [
            (record.group_id, sibling.index, sibling.attempts[-1])
            for record in self.state.ledger.groups.values()
            if record.phase is PromptGroupPhase.ADMITTED
            for sibling in record.siblings
            if sibling.attempts[-1].status in ("reserved", "failed")
        ]
        if not waiting:
            return None
        group, sibling, last = self.dice.choice(sorted(waiting, key=lambda each: each[:2]))
        return group, sibling, last.index + (last.status == "failed")

    async def _publish(self) -> None:
        sealed = sorted(
            record.group_id
            for record in self.state.ledger.groups.values()
            if record.status == "ready_to_finalize"
        )
        for group in sealed[:1]:
            await self.world.buffer.publish(
                group,
                [row_of(f"{group}/{index}") for index in range(2)],
                lengths=[5, 5],
                end_weight_version=self.state.progress.trainer_version,
            )

    async def _train(self) -> None:
        ready = [group.group_id for group in self.world.buffer.ready]
        if not ready:
            return
        claimed = tuple(ready[: self.dice.randrange(1, 3)])
        step = self.state.progress.train_steps + 1
        await self.world.do(GroupsClaimed(step=step, group_ids=claimed))
        if self.dice.random() < 0.3:
            await self._save()  # While claims are open: they are rolled back in the snapshot.
        if self.dice.random() < 0.1:
            await self.world.do(ClaimsReleased(step=step))
            return
        rows = await self.world.buffer.rows_of(claimed)
        for group in claimed:
            for index, row in enumerate(rows[group]):
                key = f"{group}/{index}"
                assert_same_rows({key: row}, {key: row_of(key)})
        await self.world.do(OptimizerCommitOpened(step=step))
        assert not self.trained & set(claimed), "a prompt is trained twice"
        self.trained |= set(claimed)
        await self.world.do(StepCommitted(step=step, trainer_version=step))
        await self.world.buffer.clear_retired()
        if self.dice.random() < 0.7:
            if self.dice.random() < 0.2:
                self.fs.operations, self.fs.fail_at = 0, self.dice.randrange(1, 20)
            result = await self.world.snapshotter.save_trainer_checkpoint(self._write_weights)
            self._mended(result)

    async def _write_weights(self, directory: Path) -> None:
        (directory / "weights").write_text("\n".join(sorted(self.trained)))

    async def _save(self) -> None:
        if self.dice.random() < 0.3:
            self.fs.operations, self.fs.fail_at = 0, self.dice.randrange(1, 20)
        self._mended(await self.world.snapshotter.save_rollout_snapshot())

    def _mended(self, result: RolloutCheckpointSaveResult) -> None:
        self.fs.fail_at = None
        self.seen[result.reason] += 1

    async def die_and_resume(self) -> None:
        """The process ends here, and another one takes the run up."""
        self.world.die()
        self.deaths += 1
        self.world = World(self.root, store_on=self.fs)
        restored = await self.world.restore()
        path = None if restored is None else restored.trainer_path
        self.seen[
            "fresh"
            if restored is None
            else "from a snapshot"
            if restored.source.from_rollout_snapshot
            else "from a checkpoint"
        ] += 1
        self.trained = frozenset()
        if path is not None:
            self.trained = frozenset((path / "weights").read_text().split())
        self.check()

    def check(self) -> None:
        """Every prompt handed out has one place, and the trained ones are those of the weights."""
        counted = account(self.state)
        assert counted.in_two_places == ()
        assert counted.handed_out == self.state.dataloader_state.position
        trained = {
            prompt_id
            for prompt_id, outcome in self.state.outcomes.items()
            if type(outcome).__name__ == "Trained"
        }
        assert trained == self.trained

    async def finish(self) -> None:
        """From here on nothing dies and nothing fails."""
        while not self.is_over:
            for record in list(self.state.ledger.groups.values()):
                for sibling in record.siblings:
                    last = sibling.attempts[-1]
                    if last.status == "dispatched":
                        ended = AttemptFailed(
                            group_id=record.group_id,
                            sibling_index=sibling.index,
                            attempt_index=last.index,
                        )
                        await self.world.do(ended)
            await self.step()


async def killed_at_random(root: Path, seed: int) -> Run:
    run = Run(root, seed)
    for _ in range(150):
        if run.is_over:
            break
        await run.step()
        if run.dice.random() < 0.05:
            await run.die_and_resume()
    await run.finish()
    run.check()
    run.world.die()
    return run


@pytest.mark.asyncio
async def test_killed_at_random_every_prompt_has_one_outcome(tmp_path: Path) -> None:
    seen: Counter[str] = Counter()
    for seed in range(10):
        run = await killed_at_random(tmp_path / str(seed), seed)
        handed_out = {prompt(index).prompt_id for index in range(PROMPTS)}
        assert set(run.state.outcomes) == handed_out, f"seed {seed}"
        assert run.deaths > 0, f"seed {seed} never died: it shows nothing"
        seen += run.seen
    for what in (Reason.COMPLETED, Reason.IO_ERROR, "from a snapshot", "from a checkpoint"):
        assert seen[what] >= 5, f"{what}: too rare among {seen} to show anything"
