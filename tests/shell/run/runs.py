"""How the tests of this folder start runs, kill them, resume them and check what came of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from rollsync.pure.config import (
    CheckpointingConfig,
    DataConfig,
    GenerationConfig,
    GrpoConfig,
    MasterConfig,
    ModelConfig,
    RunConfig,
)
from rollsync.pure.rollout.audit import Audit, describe_audit
from rollsync.pure.rollout.order import HandOutPlace
from rollsync.pure.rollout.sampler import InOrderSampler
from rollsync.pure.rollout.state import RolloutState
from rollsync.shell.grpo.trainer import WEIGHTS
from rollsync.shell.journal import Finished, JournalEntry, Resumed, StepTrained, read_journal
from rollsync.shell.run.saved import JOURNAL, close_account, read_saved
from tests.shell.run.child import ENDED, FAILED, Order

ROOT = Path(__file__).parents[3]
KILLED = -9
"""Exit code of a child that SIGKILL ended."""
PROMPTS = 12
STEPS = 6


def small_config(directory: Path, model: Path) -> MasterConfig:
    """Six steps of two prompts with two siblings each, saved as often as that goes."""
    return MasterConfig(
        run=RunConfig(directory=str(directory), seed=5),
        data=DataConfig(
            task="chain_sum",
            size=PROMPTS,
            seed=1,
            options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        ),
        model=ModelConfig(path=str(model)),
        grpo=GrpoConfig(
            num_prompts_per_step=2,
            num_generations_per_prompt=2,
            max_steps=STEPS,
            learning_rate=1e-3,
        ),
        generation=GenerationConfig(backend="torch", max_new_tokens=4, max_model_len=64),
        sampler=InOrderSampler(),
        checkpointing=CheckpointingConfig(snapshot_interval_s=0.02),
    )


class Children:
    """The fork server, and at most one child at a time.

    Args:
        errors: file for what children write to their error output.
    """

    def __init__(self, errors: Path) -> None:
        self._errors = errors

    def __enter__(self) -> Self:
        with self._errors.open("wb") as errors:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "tests.shell.run.fork_server"],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"},
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()
        assert self._server.stdout is not None
        self._server.stdout.close()

    def run(self, order: Order) -> int:
        """Have a child carry out `order`; its exit code, negative if a signal ended it."""
        assert self._server.stdin is not None
        self._server.stdin.write(msgspec.json.encode(order) + b"\n")
        self._server.stdin.flush()
        code = self._read()
        assert code != FAILED, self._errors.read_text()[-4000:]
        return code

    def _read(self) -> int:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        assert line, self._errors.read_text()[-4000:]
        return int(line)


def write_file(config: MasterConfig) -> str:
    """A configuration file beside the run directory; its path."""
    path = Path(config.run.directory).with_suffix(".json")
    path.write_bytes(msgspec.json.encode(config))
    return str(path)


def entries_of(config: MasterConfig) -> list[JournalEntry]:
    """All that the run's journal says."""
    return list(read_journal(Path(config.run.directory) / JOURNAL))


def closed_account(config: MasterConfig) -> tuple[RolloutState, Audit]:
    """What the newest save says, and the account, which has to close."""
    saved = read_saved(Path(config.run.directory))
    result = close_account(saved)
    assert result.closes, describe_audit(result)
    return saved.state, result


def ended_prompts(state: RolloutState) -> list[str]:
    """Prompts that were trained or dropped."""
    return sorted(state.outcomes)


def all_prompts(count: int = PROMPTS) -> list[str]:
    """The prompt ids of the first epoch's first `count` hand-outs."""
    return [HandOutPlace(epoch=0, position=position).prompt_id for position in range(count)]


def weights_of(config: MasterConfig) -> bytes:
    """The weights' file of the newest trainer checkpoint."""
    bundle = read_saved(Path(config.run.directory)).bundle
    assert bundle.trainer_path is not None
    return (bundle.trainer_path / WEIGHTS / "model.safetensors").read_bytes()


def run_to_the_end(
    children: Children, config: MasterConfig, *, poison_position: int | None = None
) -> RolloutState:
    """Start once more, without a kill, and check all that is promised of the whole run; its end."""
    order = Order(config=write_file(config), poison_position=poison_position)
    assert children.run(order) == ENDED
    state, _ = closed_account(config)
    assert ended_prompts(state) == all_prompts(config.data.size)
    entries = entries_of(config)
    check_steps_count_on(entries)
    last = entries[-1]
    assert isinstance(last, Finished)
    assert last.train_steps == state.progress.train_steps
    return state


def check_steps_count_on(entries: list[JournalEntry]) -> None:
    """Each process goes on from the step that it resumed at, and counts every step once."""
    step = 0
    for entry in entries:
        if isinstance(entry, Resumed):
            step = entry.train_steps
        elif isinstance(entry, StepTrained):
            step += 1
            assert entry.step == step
