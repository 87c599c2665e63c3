"""What the controller asks of the trainer and of the generation engines.

Both are objects over Ray actors in a real run; the controller needs no more than these protocols.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from msgspec import Struct
from ray.exceptions import RayActorError

from rollsync.shell.actor_deaths import reason_of_death
from rollsync.shell.errors import RollsyncError
from rollsync.shell.grpo import StepMetrics, TrainingRow
from rollsync.shell.rollout.errors import WorkersLost


class GenerationFailed(RollsyncError):
    """An engine did not complete a request, or died of it: another attempt may succeed."""


class EnginesLost(WorkersLost):
    """Fewer engines are left than the run may go on with."""


class TrainerLost(WorkersLost):
    """A policy worker is gone or stuck, and with it what was not in a checkpoint."""


def trainer_lost(error: RayActorError, rank: int) -> TrainerLost:
    """The loss of a policy worker, with Ray's reason."""
    lost = TrainerLost(
        f"policy worker {rank} is gone: {reason_of_death(error)}",
        remedy="see Ray's log of the worker; the same command goes on from the last save",
    )
    lost.__cause__ = error
    return lost


class GenerationRequest(Struct, frozen=True, kw_only=True):
    """One completion to sample. Equal requests to equal weights give equal completions."""

    prompt_token_ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float
    seed: int


class GeneratedCompletion(Struct, frozen=True, kw_only=True):
    """One sampled completion."""

    token_ids: tuple[int, ...]
    """Completion only, with the end token if there was one."""
    log_probabilities: tuple[float, ...]
    """Of each token under the distribution that it was sampled from, nats."""
    finished: bool
    """False when it was cut off by its length."""
    weight_version: int
    """Of the weights that generated it, all of it."""


class GenerationClient(Protocol):
    """The engines."""

    async def generate(self, request: GenerationRequest) -> GeneratedCompletion:
        """Sample one completion on any engine.

        Raises:
            GenerationFailed: this request failed.
        """
        ...


class TrainerClient(Protocol):
    """The trainer. Every call raises `TrainerLost` when a worker of it is gone."""

    @property
    def trainer_version(self) -> int:
        """Version of the weights it holds, as of its last answer."""
        ...

    async def compute_gradients(self, groups: Sequence[Sequence[TrainingRow]]) -> StepMetrics:
        """The gradients of one step; the weights stay as they are."""
        ...

    async def apply_gradients(self) -> None:
        """Take the step whose gradients were computed last: the version grows by one."""
        ...

    async def skip_step(self) -> None:
        """Count a step that had nothing to train: the version grows by one."""
        ...

    async def save(self, directory: Path) -> None:
        """Write the trainer's files into `directory`."""
        ...


class SyncFigures(Struct, frozen=True, kw_only=True):
    """What moving the weights into the engines took."""

    weight_version: int
    bytes: int
    seconds: float


class WeightSync(Protocol):
    """Brings the engines to the trainer's weights."""

    async def __call__(self) -> SyncFigures:
        """Move the weights; afterwards every engine that may serve has the trainer's version.

        Raises:
            EnginesLost: too few engines are left.
            TrainerLost: a policy worker is gone.
            RollsyncError: the weights were not moved, and no engine is to blame for it.
        """
        ...


class FleetWatch(Protocol):
    """What the controller has to know of engines that come and go."""

    def sync_is_due(self) -> bool:
        """Whether an engine waits for weights that the others have: one that joined, or is back."""
        ...

    def listen(self, changed: Callable[[], None]) -> None:
        """Have `changed` called whenever `sync_is_due` may have become true."""
        ...

    async def wait_lost(self) -> EnginesLost:
        """Wait until too few engines are left to go on with."""
        ...


class SteadyFleet:
    """Engines that neither come nor go; see `FleetWatch`."""

    def sync_is_due(self) -> bool:
        """Never."""
        return False

    def listen(self, changed: Callable[[], None]) -> None:
        """Nothing will change."""

    async def wait_lost(self) -> EnginesLost:
        """Wait until cancelled."""
        await asyncio.Event().wait()
        raise AssertionError("nobody sets this event")


class Codec(Protocol):
    """The policy's tokenizer, as far as a rollout needs it."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a prompt."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a completion, without special tokens."""
        ...


class Verifier(Protocol):
    """The environment's judgement of an answer."""

    def score(self, sample_id: str, answer: str) -> float:
        """Reward from 0 to 1."""
        ...
