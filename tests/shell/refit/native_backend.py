"""vLLM's own weight transfer with rollsync as its backend: an engine's actor and a trainer's."""

from collections.abc import Collection, Iterator
from typing import Any

import torch

from rollsync.shell.refit.generation import Completion
from tests.shell.refit.tiny_models import TinyPolicy
from tests.shell.refit.vllm_engines import GREEDY, PROMPT


class NativeVllm:
    """An engine as a user of vLLM starts it: no extension, only a backend's name."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import WeightTransferConfig

        self._llm = LLM(
            model=model,
            skip_tokenizer_init=True,
            logprobs_mode="processed_logprobs",
            weight_transfer_config=WeightTransferConfig(backend="rollsync"),
            **options,
        )

    def init_weight_transfer_engine(self, request: Any) -> None:
        self._llm.init_weight_transfer_engine(request)

    def start_weight_update(self) -> None:
        self._llm.start_weight_update()

    def update_weights(self, request: Any) -> None:
        self._llm.update_weights(request)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._llm.finish_weight_update(weight_version)

    def update_weight_version(self, weight_version: str) -> None:
        self._llm.update_weight_version(weight_version)

    def get_weight_version(self) -> str:
        return self._llm.get_weight_version()

    def received_bytes(self) -> list[int]:
        """What the last update brought to each rank."""
        return list(self._llm.collective_rpc(_received_bytes))

    def answer(self, version: int) -> list[Completion]:
        """What `GREEDY` gives for `PROMPT`, after caches of old weights are emptied."""
        from rollsync.shell.refit.vllm_calls import complete_all, sampling_params

        self._llm.reset_prefix_cache()
        return complete_all(self._llm, PROMPT, sampling_params(GREEDY, 11), version)

    def refusal(self, version: int) -> str:
        """The name of vLLM's error in place of an answer, which may be one that only processes
        with vLLM can read; empty if it answers."""
        try:
            self.answer(version)
        except Exception as error:
            return type(error).__name__
        return ""


def _received_bytes(worker: Any) -> int:
    received: int = worker.weight_transfer_engine.last_transfer.payload_bytes
    return received


class NativeTrainer(TinyPolicy):
    """A trainer that drives vLLM's calls."""

    def connect(
        self,
        engine: Any,
        backend_options: dict[str, Any],
        held_names: Collection[str] | None = None,
    ) -> None:
        """Meets the engine's workers, with a source that says that it has these weights here; None
        for all."""
        from vllm.distributed.weight_transfer import (
            ModuleSource,
            RayVLLMWeightSyncClient,
            WeightTransferTrainerFactory,
        )

        from rollsync.shell.refit.vllm_plugin import register
        from rollsync.shell.refit.vllm_transfer_trainer import RollsyncTrainerInitInfo

        trainer = self

        class Source(ModuleSource):
            """Breaks where the trainer says."""

            def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
                for sent, item in enumerate(super().__iter__()):
                    if sent == trainer.fail_after:
                        raise ArithmeticError(f"the iterator broke at {item[0]}")
                    yield item

            def held_names(self) -> Collection[str] | None:
                return held_names

        register()
        self._transfer: Any = WeightTransferTrainerFactory.trainer_init(
            RollsyncTrainerInitInfo(rank=0, **backend_options),
            client=RayVLLMWeightSyncClient(engine),
            source=Source(self.model),
        )

    def send(self) -> None:
        self._transfer.send_weights(self.version)
