"""The worker's half of rollsync as vLLM's own weight-transfer backend.

For users who drive vLLM's `init_weight_transfer_engine`, `start_weight_update`, `update_weights`
and `finish_weight_update`. These calls have no place for a refusal to generate: after a failed
`update_weights` the weights are a mixture, and vLLM's weight version stays the old one. A whole
update makes that good. A request that comes before it is refused by the model, which ends the
engine; rollsync's own generation workers refuse by themselves, and their engine lives. Nor do these
calls empty the prefix, multi-modal and encoder caches of what old weights computed: whoever drives
them has to call `reset_prefix_cache`, `reset_mm_cache` and `reset_encoder_cache` after each update.

Rules kept here: one `update_weights` receives and loads one whole stream, so that what the ranks of
an engine learn of their loader in one is there for the next; and from the start of an update to its
success the model answers no request.
"""

import rollsync.shell.refit.vllm_version  # noqa: F401

# isort: split
import logging
from dataclasses import dataclass, field

import msgspec
import torch
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from rollsync.pure.refit import TensorSpec
from rollsync.shell.refit.errors import RefitError
from rollsync.shell.refit.refit_receiver import RefitReceiver
from rollsync.shell.refit.rendezvous import Rendezvous
from rollsync.shell.refit.report import WorkerTransfer
from rollsync.shell.refit.vllm_gate import ModelGate
from rollsync.shell.refit.vllm_loader import VllmModelUpdate

logger = logging.getLogger(__name__)


@dataclass
class RollsyncInitInfo(WeightTransferInitInfo):
    """How a worker finds the trainer.

    Attributes:
        engine: a checkpoint engine's name, or `module:ClassName`.
        bucket_size_bytes: bytes of one transfer buffer.
        host: address of the trainer's rendezvous.
        port: its port.
        secret: the run's, in hexadecimal.
        train_world_size: trainer workers.
        rollout_world_size: workers of all engines together.
        declared: what every stream will hold, in its order: `TensorSpec`s in plain form.
        engine_kwargs: the engine's options.
        timeout_s: how long the rendezvous may take.
    """

    engine: str
    bucket_size_bytes: int
    host: str
    port: int
    secret: str
    train_world_size: int
    rollout_world_size: int
    declared: list[dict[str, object]]
    engine_kwargs: dict[str, object] = field(default_factory=dict)
    timeout_s: float = 300.0


@dataclass
class RollsyncUpdateInfo(WeightTransferUpdateInfo):
    """Nothing: a stream says itself what it carries."""


class RollsyncWeightTransferEngine(WeightTransferEngine[RollsyncInitInfo, RollsyncUpdateInfo]):
    """Receives weights through a checkpoint engine."""

    init_info_cls = RollsyncInitInfo
    update_info_cls = RollsyncUpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: VllmConfig,
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._gate = ModelGate(model)
        self._receiver = RefitReceiver(
            local_rank=torch.distributed.get_rank(),
            engine_world_size=torch.distributed.get_world_size(),
            make_update=lambda recorder: VllmModelUpdate(
                self.vllm_config, self.model_config, self.model, recorder
            ),
            model=lambda: self.model,
        )
        self._is_started = False
        self._is_received = False
        self.last_transfer: WorkerTransfer | None = None
        """The figures of the last update that succeeded on this worker; None before the first."""

    def init_transfer_engine(self, init_info: RollsyncInitInfo) -> None:
        """Meets the trainer and the other workers, and learns what will come."""
        self._receiver.declare(msgspec.convert(init_info.declared, list[TensorSpec]))
        parallel = self.parallel_config
        rank_prefix = parallel.data_parallel_index * parallel.world_size
        rendezvous = Rendezvous(
            init_info.host,
            init_info.port,
            bytes.fromhex(init_info.secret),
            timeout_s=init_info.timeout_s,
        )
        self._receiver.init(init_info.engine, init_info.bucket_size_bytes, init_info.engine_kwargs)
        worker = init_info.train_world_size + rank_prefix + torch.distributed.get_rank()
        metadata = rendezvous.exchange(
            worker,
            init_info.train_world_size + init_info.rollout_world_size,
            self._receiver.prepare(),
        )
        self._receiver.init_process_group(
            rank_prefix, init_info.train_world_size, init_info.rollout_world_size, metadata
        )

    def start_weight_update(self) -> None:
        """Has the model answer nothing from now on."""
        self._is_started = True
        self._is_received = False
        self._gate.close("a weight update has begun and is not finished")

    def receive_weights(self, update_info: RollsyncUpdateInfo) -> None:
        """Receives and loads one whole stream.

        Raises:
            RefitError: no update was started; the weights are as they were.
            Exception: whatever went wrong. `finish_weight_update` then refuses as well.
        """
        if not self._is_started:
            raise RefitError(
                "weights cannot be received before a weight update is started: the model would"
                " answer with a mixture of them",
                remedy="call start_weight_update before update_weights",
            )
        self._is_received = False
        try:
            self.last_transfer = self._receiver.update()
        except BaseException as error:
            logger.error("this worker's weights are a mixture until a whole update succeeds")
            self._gate.close(f"its weights are a mixture, as the last update failed: {error}")
            raise
        self._is_received = True
        logger.info("received %s", self.last_transfer)

    def finish_weight_update(self) -> None:
        """Has the model answer again.

        Raises:
            RefitError: no whole stream came since the update was started.
        """
        if not self._is_received:
            raise RefitError(
                "a weight update cannot be finished before a whole stream of weights has come",
                remedy="call update_weights between start_weight_update and finish_weight_update",
            )
        self._is_started = self._is_received = False
        self._gate.open()

    def shutdown(self) -> None:
        """Gives back what the checkpoint engine reserved."""
        self._receiver.finalize()
