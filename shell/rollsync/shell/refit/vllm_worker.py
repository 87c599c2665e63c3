"""The receiving half of a refit inside each of vLLM's workers, as its `worker_extension_cls`.

vLLM makes `RefitWorkerExtension` a base of its worker, and `collective_rpc` calls these methods by
name, as NeMo-RL's generation does too. Rules kept here: no name collides with the worker's own;
arguments and answers are plain values, because vLLM's own transport carries nothing else; and what
rollsync calls here answers failures as values, because an exception of one rank leaves the answers
of the other ranks in vLLM's queues, where the next call takes them for its own; and from the start
of an update to its success this worker computes nothing for a request, whoever drives it.

What a worker cannot do is empty the prefix, multi-modal and encoder caches of what old weights
computed: vLLM keeps them where it schedules. rollsync's own generation workers do it after every
update; whoever calls these methods otherwise has to call `reset_prefix_cache`, `reset_mm_cache` and
`reset_encoder_cache` of the engine.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from rollsync.pure.refit import TensorSpec
from rollsync.pure.refit.lifecycle import Poisoned
from rollsync.pure.refit.steps import UPDATE, Step
from rollsync.shell.refit.errors import RefitConfigurationError
from rollsync.shell.refit.host_memory import worker_total_memory_bytes
from rollsync.shell.refit.load_recorder import LoadRecorder
from rollsync.shell.refit.rank_answers import RankAnswer, RankDone, rank_failed
from rollsync.shell.refit.refit_receiver import RefitReceiver
from rollsync.shell.refit.vllm_gate import RunnerGate
from rollsync.shell.refit.vllm_loader import VllmModelUpdate

if TYPE_CHECKING:
    from vllm.config import VllmConfig

WORKER_EXTENSION = "rollsync.shell.refit.vllm_worker.RefitWorkerExtension"
"""What to give vLLM as `worker_extension_cls`."""


logger = logging.getLogger(__name__)


class RefitWorkerExtension:
    """Methods of a vLLM worker for the checkpoint engine's life cycle."""

    if TYPE_CHECKING:
        # The worker's own attributes.
        vllm_config: VllmConfig
        model_runner: Any

    _refit_receiver: RefitReceiver | None = None
    _refit_gate: RunnerGate

    def checkpoint_engine_total_memory_bytes(self) -> int:
        """Total memory of this worker, in bytes."""
        return worker_total_memory_bytes(self.vllm_config.parallel_config.world_size)

    def declare_refit_weights(self, declared: list[object] | None) -> None:
        """Takes the plain form of what the policy will send."""
        self._refit().declare(msgspec.convert(declared, list[TensorSpec] | None))

    def init_checkpoint_engine(
        self, backend: str, bucket_size_bytes: int, engine_kwargs: Mapping[str, object]
    ) -> None:
        """Makes the checkpoint engine, unless it is there already."""
        self._refit().init(backend, bucket_size_bytes, dict(engine_kwargs))

    def prepare_checkpoint_engine(self) -> object:
        """Makes the engine reachable; answers its metadata with this worker's rank."""
        return self._refit().prepare()

    def init_checkpoint_engine_process_group(
        self,
        rank_prefix: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: list[object],
    ) -> None:
        """Connects to the policy's workers."""
        self._refit().init_process_group(
            rank_prefix, train_world_size, rollout_world_size, metadata
        )

    def update_weights_from_checkpoint_engine(self) -> object:
        """Receives and loads one whole stream.

        Answers:
            A `WorkerTransfer` in plain form, or False when the update failed; the log and
            `refit_state` say why.
        """
        answer = self._refit_step(UPDATE, ())
        return answer.value if isinstance(answer, RankDone) else False

    def finalize_checkpoint_engine(self) -> None:
        """Gives back what the engine reserved."""
        self._refit().finalize()

    def refit_step(self, step: str, arguments: Sequence[Any]) -> object:
        """Runs one of the steps above; answers a `RankAnswer` in plain form, and never raises."""
        return msgspec.to_builtins(self._refit_step(step, arguments))

    def refit_state(self) -> object:
        """This worker's life-cycle state, in plain form."""
        return msgspec.to_builtins(self._refit().state)

    def _refit_step(self, step: str, arguments: Sequence[Any]) -> RankAnswer:
        steps: dict[str, Callable[..., object]] = {
            Step.MEASURE: self.checkpoint_engine_total_memory_bytes,
            "declare_refit_weights": self.declare_refit_weights,
            Step.MAKE: self.init_checkpoint_engine,
            Step.PREPARE: self.prepare_checkpoint_engine,
            Step.CONNECT: self.init_checkpoint_engine_process_group,
            UPDATE: self._refit_update,
            Step.FINALIZE: self.finalize_checkpoint_engine,
        }
        try:
            if step not in steps:
                raise RefitConfigurationError(
                    f"a generation worker has no step {step!r}",
                    remedy=f"call one of {', '.join(steps)}",
                )
            return RankDone(steps[step](*arguments))
        except Exception as error:
            logger.exception("%s failed", step)
            return rank_failed(torch.distributed.get_rank(), error)

    def _refit_update(self) -> object:
        receiver = self._refit()
        self._refit_gate.close("a weight update has begun and is not finished")
        try:
            return msgspec.to_builtins(receiver.update())
        finally:
            # An update that could not begin has changed nothing.
            if isinstance(receiver.state, Poisoned):
                self._refit_gate.close(f"its last weight update failed: {receiver.state.cause}")
            else:
                self._refit_gate.open()

    def _refit(self) -> RefitReceiver:
        if self._refit_receiver is None:
            self._refit_receiver = RefitReceiver(
                local_rank=torch.distributed.get_rank(),
                engine_world_size=torch.distributed.get_world_size(),
                make_update=self._refit_load,
                model=self._refit_model,
            )
            self._refit_gate = RunnerGate(self.model_runner)
        return self._refit_receiver

    def _refit_model(self) -> torch.nn.Module:
        model: torch.nn.Module = self.model_runner.get_model()
        return model

    def _refit_load(self, recorder: LoadRecorder | None) -> VllmModelUpdate:
        return VllmModelUpdate(
            self.vllm_config, self.vllm_config.model_config, self._refit_model(), recorder
        )
