"""One trainer: a causal language model, its optimizer, one step at a time, and their files.

It may be one of several replicas, each with its share of a step's rows. Rules kept here: a step is
a function of the weights, the optimizer and the rows, in their order, and of how they are shared;
what is saved is everything that a later step depends on (weights, moments, random generators), in
safetensors and JSON, never pickled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from msgspec import Struct
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollsync.pure.config import GrpoConfig
from rollsync.shell.errors import RollsyncError
from rollsync.shell.grpo.loss import clipped_policy_loss, group_relative_advantages
from rollsync.shell.grpo.replicas import Replicas

WEIGHTS, OPTIMIZER, GENERATORS, COUNTERS = (
    "policy",
    "optimizer.safetensors",
    "generators.safetensors",
    "trainer.json",
)
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""AdamW's state per parameter."""


class TrainingRow(Struct, frozen=True, kw_only=True):
    """One sibling, ready to train."""

    token_ids: Tensor
    """`(length,)` int64: prompt and completion."""
    prompt_length: int
    behaviour_log_probabilities: Tensor
    """`(length - prompt_length,)` float32, nats."""
    reward: float
    masked: bool
    """Kept out of the loss; its reward still counts towards its group's mean."""


class StepMetrics(Struct, frozen=True, kw_only=True):
    """What one optimizer step saw, on all replicas together."""

    loss: float
    mean_reward: float
    gradient_norm: float
    """Before clipping."""
    tokens: int
    """Completion tokens in the loss."""


class TrainerCounters(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers of a trainer checkpoint."""

    trainer_version: int


class TrainerCheckpointError(RollsyncError):
    """Trainer files that do not fit the model."""


class GrpoTrainer:
    """Trains the model in `model_path` (Hugging Face format).

    Args:
        model_path: where the weights come from until `load` replaces them.
        config: step size and clipping.
        temperature: at which the engines sample: log-probabilities are those of that distribution.
        threads: torch threads of this process; None leaves torch's choice.
        deterministic: refuse kernels whose results depend on the order of additions.
        replicas: the others that train the same model.
    """

    def __init__(
        self,
        model_path: str,
        config: GrpoConfig,
        *,
        temperature: float,
        threads: int | None = None,
        deterministic: bool = False,
        replicas: Replicas | None = None,
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        self._config = config
        self._temperature = temperature
        self._replicas = replicas or Replicas()
        self._tokenizer = AutoTokenizer.from_pretrained(model_path)
        self._model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        # Dropout and the like would make a step depend on more than it is given.
        self._model.eval()
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=config.learning_rate, weight_decay=0.0
        )
        self.trainer_version = 0
        """Optimizer steps that the weights have seen."""

    @property
    def module(self) -> torch.nn.Module:
        """The model that is trained."""
        return self._model

    def compute_gradients(self, groups: Sequence[Sequence[TrainingRow]]) -> StepMetrics:
        """The gradients of one step. The weights stay as they are.

        Args:
            groups: this replica's share of the step, whole groups of siblings; it may be empty.

        Raises:
            ReplicaUnreachable: another replica is gone, or did not come in time.
        """
        rewards = torch.tensor([[row.reward for row in group] for group in groups])
        rows = [row for group in groups for row in group]
        batch = _padded(rows) if rows else None
        counted = 0.0 if batch is None else float(batch.counts.sum())
        totals = torch.tensor([counted, float(rewards.sum()), len(rows)], dtype=torch.float64)
        self._replicas.add_up([totals])
        tokens, reward, siblings = totals.tolist()
        self._optimizer.zero_grad()
        loss = torch.zeros(())
        if batch is not None:
            share = clipped_policy_loss(
                self._log_probabilities(batch.tokens),
                batch.behaviour_log_probabilities,
                group_relative_advantages(rewards).flatten(),
                batch.counts,
                counted_in_step=tokens,
                clip_ratio=self._config.clip_ratio,
            )
            share.backward()
            loss = share.detach()
        self._replicas.add_up([loss, *self._gradients()])
        norm = torch.nn.utils.clip_grad_norm_(
            self._model.parameters(), self._config.max_grad_norm, error_if_nonfinite=True
        )
        return StepMetrics(
            loss=float(loss),
            mean_reward=reward / siblings,
            gradient_norm=float(norm),
            tokens=int(tokens),
        )

    def _gradients(self) -> Iterator[Tensor]:
        """Of every parameter, the same on each replica; 0 where its share did not touch one."""
        for parameter in self._model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            yield parameter.grad

    def apply_gradients(self) -> None:
        """Take the optimizer step whose gradients were computed last."""
        self._optimizer.step()
        self.trainer_version += 1

    def _log_probabilities(self, tokens: Tensor) -> Tensor:
        """`(rows, length - 1)`: of each token after the first, given those before it."""
        logits = self._model(input_ids=tokens).logits[:, :-1] / self._temperature
        chosen = logits.gather(2, tokens[:, 1:].unsqueeze(2)).squeeze(2)
        picked: Tensor = chosen - logits.logsumexp(dim=2)
        return picked

    def save(self, directory: Path) -> None:
        """Write weights, moments, generators and counters into `directory`, which exists."""
        self._model.save_pretrained(directory / WEIGHTS)
        self._tokenizer.save_pretrained(directory / WEIGHTS)
        moments: dict[str, Tensor] = {}
        for name, parameter in self._model.named_parameters():
            for moment, value in self._optimizer.state.get(parameter, {}).items():
                moments[f"{name}/{moment}"] = value.detach().clone()
        save_file(moments, directory / OPTIMIZER)
        save_file({"torch_cpu": torch.get_rng_state()}, directory / GENERATORS)
        counters = TrainerCounters(trainer_version=self.trainer_version)
        (directory / COUNTERS).write_bytes(msgspec.json.encode(counters))

    def load(self, directory: Path) -> None:
        """Become the trainer that `save` wrote to `directory`.

        Raises:
            TrainerCheckpointError: the files are of another model, or of none.
        """
        try:
            counters = msgspec.json.decode(
                (directory / COUNTERS).read_bytes(), type=TrainerCounters
            )
            weights = load_file(directory / WEIGHTS / "model.safetensors")
            moments = load_file(directory / OPTIMIZER)
            generators = load_file(directory / GENERATORS)
        except (OSError, msgspec.MsgspecError) as error:
            raise TrainerCheckpointError(
                f"{directory} has no whole trainer checkpoint: {error}",
                remedy="resume from another checkpoint of the run",
            ) from error
        missing, unexpected = self._model.load_state_dict(weights, strict=False)
        # A tied weight is written once and arrives under its other name.
        absent = set(missing) - set(self._model.all_tied_weights_keys)
        if absent or unexpected:
            raise TrainerCheckpointError(
                f"{directory} holds another model: missing {sorted(absent)},"
                f" unexpected {sorted(unexpected)}",
                remedy="start with the model path that the run was started with",
            )
        for name, parameter in self._model.named_parameters():
            state = {m: moments[f"{name}/{m}"] for m in MOMENTS if f"{name}/{m}" in moments}
            if state:
                self._optimizer.state[parameter] = state
        torch.set_rng_state(generators["torch_cpu"])
        self.trainer_version = counters.trainer_version


class _Padded(NamedTuple):
    """Rows of a share, as long as its longest."""

    tokens: Tensor
    """`(rows, longest)`."""
    behaviour_log_probabilities: Tensor
    """`(rows, longest - 1)`, aligned with the token that each position predicts."""
    counts: Tensor
    """Likewise: 1.0 for a completion token in the loss, 0.0 for all others."""


def _padded(rows: Sequence[TrainingRow]) -> _Padded:
    longest = max(len(row.token_ids) for row in rows)
    tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
    behaviour = torch.zeros(len(rows), longest - 1)
    counts = torch.zeros(len(rows), longest - 1)
    for index, row in enumerate(rows):
        length = len(row.token_ids)
        tokens[index, :length] = row.token_ids
        completion = slice(row.prompt_length - 1, length - 1)
        behaviour[index, completion] = row.behaviour_log_probabilities
        if not row.masked:
            counts[index, completion] = 1.0
    return _Padded(tokens, behaviour, counts)
