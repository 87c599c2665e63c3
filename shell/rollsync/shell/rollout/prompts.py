"""Prompts from reasoning-gym, with their verifier, and the dataloader that hands them out.

Rule kept here: a sample is a function of the task, its options, the dataset's seed and its index;
it is made again whenever it is needed and never stored.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha256

import reasoning_gym
from msgspec import Struct, json

from rollsync.pure.config import DataConfig, dataset_digest
from rollsync.pure.rollout.order import HandOutPlace, epoch_order, hand_out, prompts_left
from rollsync.pure.rollout.state import DataloaderState, DatumSpec, PromptReference
from rollsync.shell.config import ConfigError

EPOCHS_KEPT = 2
"""Orders in memory: a batch may span two epochs."""


class PulledPrompts(Struct, frozen=True, kw_only=True):
    """Prompts taken from the dataloader, and where it goes on."""

    references: tuple[PromptReference, ...]
    after: DataloaderState


class ReasoningGymDataset:
    """One reasoning-gym task as a dataset of prompts with a verifier.

    Args:
        config: task, options, size and seed.

    Raises:
        ConfigError: there is no such task, or it does not take the options.
    """

    def __init__(self, config: DataConfig) -> None:
        self._config = config
        try:
            self._data = reasoning_gym.create_dataset(
                config.task, size=config.size, seed=config.seed, **config.options
            )
        except (AssertionError, TypeError, ValueError) as error:
            raise ConfigError(
                f"data: reasoning-gym makes no dataset {config.task!r} with the options"
                f" {config.options}: {error}",
                remedy="name one of reasoning-gym's tasks, with options that it takes",
                paths=("data.task", "data.options"),
            ) from error
        self.digest = dataset_digest(config)

    def __len__(self) -> int:
        return self._config.size

    def sample(self, index: int) -> DatumSpec:
        """The sample at `index` of the dataset."""
        entry = self._data[index]
        return DatumSpec(
            sample_id=f"{self._config.task}:{index}",
            task=self._config.task,
            content=entry["question"],
            extra=(("answer", entry["answer"]),),
        )

    def lookup(self, sample_id: str) -> DatumSpec | None:
        """The sample with this id; None if the dataset has no such sample."""
        task, _, index = sample_id.rpartition(":")
        if task != self._config.task or not index.isdecimal() or int(index) >= len(self):
            return None
        return self.sample(int(index))

    def content_digest(self, datum: DatumSpec) -> str:
        """Hexadecimal SHA-256 of all that the sample consists of."""
        return sha256(json.encode(datum)).hexdigest()

    def score(self, sample_id: str, answer: str) -> float:
        """The verifier's reward for `answer`, from 0 to 1."""
        entry = self._data[int(sample_id.rpartition(":")[2])]
        return float(self._data.score_answer(answer=answer, entry=entry))


class PromptDataloader:
    """Hands out a dataset in the order that `pure` decides. It keeps no position: that is state."""

    def __init__(self, dataset: ReasoningGymDataset, *, max_epochs: int) -> None:
        self.dataset = dataset
        self._max_epochs = max_epochs
        self._order = lru_cache(maxsize=EPOCHS_KEPT)(self._order_of)

    @property
    def digest(self) -> str:
        """Identity of the dataset."""
        return self.dataset.digest

    def lookup(self, sample_id: str) -> DatumSpec | None:
        """The dataset's sample with this id, or None."""
        return self.dataset.lookup(sample_id)

    def content_digest(self, datum: DatumSpec) -> str:
        """As in `PromptReference.content_digest`."""
        return self.dataset.content_digest(datum)

    def prompts_left(self, state: DataloaderState) -> int:
        """Hand-outs still to come after `state`."""
        return prompts_left(state, size=len(self.dataset), max_epochs=self._max_epochs)

    def pull(self, state: DataloaderState, count: int) -> PulledPrompts:
        """The next prompts after `state`: `count`, or as many as are left."""
        taken = hand_out(state, size=len(self.dataset), max_epochs=self._max_epochs, count=count)
        return PulledPrompts(
            references=tuple(self._reference(state.seed, place) for place in taken.places),
            after=taken.after,
        )

    def _reference(self, seed: int, place: HandOutPlace) -> PromptReference:
        datum = self.dataset.sample(self._order(seed, place.epoch)[place.position])
        return PromptReference(
            prompt_id=place.prompt_id,
            sample_id=datum.sample_id,
            task=datum.task,
            epoch=place.epoch,
            position=place.position,
            content_digest=self.dataset.content_digest(datum),
        )

    def _order_of(self, seed: int, epoch: int) -> tuple[int, ...]:
        return epoch_order(len(self.dataset), seed=seed, epoch=epoch)
