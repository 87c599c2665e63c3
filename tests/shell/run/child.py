"""One process's part of a run, as it happens inside a child that may be killed at any moment."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from msgspec import Struct

from rollsync.pure.config import MasterConfig
from rollsync.pure.rollout.order import epoch_order
from rollsync.shell.config import read_config
from rollsync.shell.journal import Journal
from rollsync.shell.rollout.controller import RolloutController, RunClients, RunOutcome
from rollsync.shell.rollout.data_plane import InProcessDataPlane
from rollsync.shell.rollout.environments import NoEnvironmentCheckpoint
from rollsync.shell.rollout.prompts import PromptDataloader, ReasoningGymDataset
from rollsync.shell.run.saved import JOURNAL, write_config
from rollsync.shell.run.tokenizer import PolicyTokenizer
from rollsync.shell.samplers import load_sampler
from rollsync.shell.store import SnapshotStore
from tests.shell.run.local_clients import LocalEngine, LocalTrainer

ENDED, FAILED, STOPPED = 0, 1, 3
"""Exit codes: all is done; it raised; it was asked to stop, and can be resumed."""


COMMIT = "Commit"


class Moment(Struct, frozen=True, kw_only=True):
    """Right after the journal's `count`-th entry of a kind in this process."""

    kind: str
    """Name of the entry's class; `COMMIT`: in the middle of an optimizer commit."""
    count: int = 1
    signal: int = signal.SIGKILL.value
    """What the process sends itself then."""


class Order(Struct, frozen=True, kw_only=True):
    """What a child is to do."""

    config: str
    """Path of the configuration file."""
    moment: Moment | None = None
    """When it gets a signal; None: never."""
    kill_after_s: float | None = None
    """When the server kills it, from the fork on; None: never."""
    poison_position: int | None = None
    """Position, in the order of hand-outs, of the prompt that no engine ever completes."""


def carry_out(order: Order) -> int:
    """Run until the end, or to a signal; the exit code."""
    config = read_config(Path(order.config))
    dataset = ReasoningGymDataset(config.data)
    tokenizer = PolicyTokenizer(config.model.path)
    store = SnapshotStore(Path(config.run.directory), config=config, dataset_digest=dataset.digest)
    write_config(config)
    journal = Journal(Path(config.run.directory) / JOURNAL)
    at = None if order.moment is None else SignalAt(order.moment)
    if at is not None:
        journal.listen(lambda entry: at.seen(type(entry).__name__))
    poison = None
    if order.poison_position is not None:
        poison = poisoned_prompt(config, dataset, tokenizer, order.poison_position)
    outcome = asyncio.run(_run(config, dataset, tokenizer, store, journal, poison, at))
    journal.close()
    return ENDED if outcome.completed else STOPPED


class SignalAt:
    """Sends this process a signal at a moment."""

    def __init__(self, moment: Moment) -> None:
        self._moment = moment
        self._seen = 0

    def seen(self, kind: str) -> None:
        """Something of this kind has happened."""
        if kind == self._moment.kind:
            self._seen += 1
            if self._seen == self._moment.count:
                os.kill(os.getpid(), self._moment.signal)


def poisoned_prompt(
    config: MasterConfig, dataset: ReasoningGymDataset, tokenizer: PolicyTokenizer, position: int
) -> tuple[int, ...]:
    """The tokens of the prompt at `position` of the first epoch, which no other prompt has."""
    order = epoch_order(len(dataset), seed=config.run.seed, epoch=0)
    questions = [dataset.sample(index).content for index in order]
    assert questions.count(questions[position]) == 1, "choose a prompt that occurs once"
    return tokenizer.encode(questions[position])


async def _run(
    config: MasterConfig,
    dataset: ReasoningGymDataset,
    tokenizer: PolicyTokenizer,
    store: SnapshotStore,
    journal: Journal,
    poison: tuple[int, ...] | None,
    at: SignalAt | None,
) -> RunOutcome:
    trainer = LocalTrainer(config, committing=lambda: None if at is None else at.seen(COMMIT))
    engine = LocalEngine(config, end_token_id=tokenizer.end_token_id, poison=poison)
    controller = RolloutController(
        config,
        sampler=load_sampler(config),
        clients=RunClients(
            trainer=trainer,
            load_trainer=trainer.load,
            generation=engine,
            sync=lambda: engine.take_weights(trainer.trainer),
            codec=tokenizer,
            verifier=dataset,
        ),
        dataloader=PromptDataloader(dataset, max_epochs=config.data.max_epochs),
        plane=InProcessDataPlane(),
        archive=store,
        environment=NoEnvironmentCheckpoint(),
        journal=journal,
    )
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    return await controller.run(stop)
