"""Both pumps over a `World`, with an engine and a trainer that do as a test says.

State, barrier, data plane, buffer, samplers, dataset, snapshotter and journal are the real ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from msgspec.structs import replace

from rollsync.pure.config import DataConfig
from rollsync.pure.rollout.decisions import AdmitBatch
from rollsync.pure.rollout.events import BatchReserved, RolloutEvent
from rollsync.pure.rollout.state import RolloutState
from rollsync.shell.grpo import StepMetrics, TrainingRow
from rollsync.shell.journal import Journal, JournalEntry
from rollsync.shell.rollout.clients import (
    GeneratedCompletion,
    GenerationFailed,
    GenerationRequest,
    SteadyFleet,
    SyncFigures,
)
from rollsync.shell.rollout.prompts import PromptDataloader, ReasoningGymDataset
from rollsync.shell.rollout.rollout_pump import RolloutPump
from rollsync.shell.rollout.train_pump import TrainPump
from rollsync.shell.rollout.waiting import ChangeSignal
from tests.shell.rollout.world import World

SOON_S = 20.0
"""A pump that has not got anywhere by then hangs."""


class Letters:
    """A tokenizer with a token per character."""

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))


class Engine:
    """Answers at once, unless it is told to fail or to wait."""

    def __init__(self) -> None:
        self.failing: list[Exception] = []
        """What the next requests raise, in their order."""
        self.refuses_first_prompt = False
        """Whether every request for the prompt that came first fails."""
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.weight_version = 0
        """That it says it answers with."""
        self.asked: list[GenerationRequest] = []
        self.cancelled = 0

    async def generate(self, request: GenerationRequest) -> GeneratedCompletion:
        self.asked.append(request)
        first = self.asked[0].prompt_token_ids
        if self.refuses_first_prompt and request.prompt_token_ids == first:
            raise GenerationFailed("this prompt never works")
        if self.failing:
            raise self.failing.pop(0)
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return GeneratedCompletion(
            token_ids=(49, 50),
            log_probabilities=(-0.5, -0.25),
            finished=True,
            weight_version=self.weight_version,
        )


class Trainer:
    """Counts its steps, and writes down what it is asked for."""

    def __init__(self) -> None:
        self.trainer_version = 0
        self.calls: list[str] = []
        self.rows: list[Sequence[Sequence[TrainingRow]]] = []
        self.may_compute = asyncio.Event()
        self.may_compute.set()
        self.unwritable: Exception | None = None
        """What saving raises."""

    async def compute_gradients(self, groups: Sequence[Sequence[TrainingRow]]) -> StepMetrics:
        self.calls.append("compute")
        self.rows.append(groups)
        await self.may_compute.wait()
        return StepMetrics(loss=0.5, mean_reward=1.0, gradient_norm=1.0, tokens=4)

    async def apply_gradients(self) -> None:
        self.calls.append("apply")
        self.trainer_version += 1

    async def skip_step(self) -> None:
        self.calls.append("skip")
        self.trainer_version += 1

    async def save(self, directory: Path) -> None:
        self.calls.append("save")
        if self.unwritable is not None:
            raise self.unwritable
        (directory / "weights").write_text(str(self.trainer_version))

    async def load(self, directory: Path) -> None:
        self.calls.append("load")
        self.trainer_version = int((directory / "weights").read_text())


class Fleet(SteadyFleet):
    """Engines of which one waits for weights when a test says so."""

    def __init__(self) -> None:
        self.due = False
        self.change: Callable[[], None] = lambda: None

    def listen(self, changed: Callable[[], None]) -> None:
        self.change = changed

    def sync_is_due(self) -> bool:
        return self.due


class Pumps:
    """A world with its pumps, and `prompts` prompts to train."""

    def __init__(
        self,
        world: World,
        root: Path,
        *,
        max_steps: int = 2,
        every: int = 1,
        prompts: int = 20,
    ) -> None:
        self.world = world
        settings = world.parts.master_config
        self.config = replace(
            settings,
            grpo=replace(settings.grpo, max_steps=max_steps),
            checkpointing=replace(settings.checkpointing, trainer_every_steps=every),
        )
        self.engine, self.trainer, self.fleet = Engine(), Trainer(), Fleet()
        self.in_sync: Callable[[], Awaitable[None]] | None = None
        """What happens while weights are synced."""
        dataset = ReasoningGymDataset(DataConfig(task="chain_sum", size=prompts))
        self.dataloader = PromptDataloader(dataset, max_epochs=1)
        self.changes = ChangeSignal()
        self.journal = Journal(root / "journal.jsonl")
        self.entries: list[JournalEntry] = []
        self.journal.listen(self.entries.append)
        self.rollouts = RolloutPump(
            world.parts,
            self.config,
            dataloader=self.dataloader,
            generation=self.engine,
            codec=Letters(),
            verifier=dataset,
            changes=self.changes,
        )
        self.training = TrainPump(
            world.parts,
            self.config,
            rollouts=self.rollouts,
            trainer=self.trainer,
            sync=self._sync,
            fleet=self.fleet,
            snapshotter=world.snapshotter,
            changes=self.changes,
            journal=self.journal,
        )
        self._events: list[RolloutEvent] = []
        world.cell.listen(self._saw)

    async def _sync(self) -> SyncFigures:
        self.trainer.calls.append("sync")
        self.fleet.due = False
        if self.in_sync is not None:
            await self.in_sync()
        self.engine.weight_version = self.trainer.trainer_version
        return SyncFigures(weight_version=self.trainer.trainer_version, bytes=1, seconds=0.0)

    def _saw(self, event: RolloutEvent, _: RolloutState) -> None:
        self._events.append(event)

    def seen(self, kind: type[RolloutEvent]) -> int:
        """How many events of a kind there were."""
        return sum(type(event) is kind for event in self._events)

    async def admit_batch(self) -> str:
        """Hand out and admit a batch, as a process before would have; its first group."""
        world = self.world
        pulled = self.dataloader.pull(world.state.dataloader_state, world.num_prompts_per_step)
        await world.do(
            BatchReserved(
                prompts=pulled.references,
                dataloader_after=pulled.after,
                granularity=self.config.recovery.granularity,
                expected_generations=self.config.grpo.num_generations_per_prompt,
            )
        )
        decided = world.sampler.admit(world.state, self.rollouts.limits())
        assert isinstance(decided, AdmitBatch)
        await world.do(decided.event)
        return pulled.references[0].prompt_id

    @asynccontextmanager
    async def rolling(self) -> AsyncIterator[None]:
        """The rollout pump runs meanwhile; what it raises comes out at the end."""
        running = asyncio.create_task(self.rollouts.run())
        try:
            async with asyncio.timeout(SOON_S):
                yield
        finally:
            running.cancel()
            await asyncio.wait((running,))
        if not running.cancelled():
            running.result()

    async def until(self, kind: type[RolloutEvent], count: int = 1) -> None:
        """Wait for events; what was there before counts."""
        while self.seen(kind) < count:
            await asyncio.sleep(0.001)
