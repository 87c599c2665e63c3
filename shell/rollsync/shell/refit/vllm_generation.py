"""A vLLM engine in a Ray actor: it generates, and is refitted, never both at once.

`VllmGenerationWorker` holds an `AsyncLLM`, `VllmSyncGenerationWorker` an `LLM`. Rules kept here:
the engine's state is read back from its workers after every step, and not assumed; caches that
hold what the old weights computed are emptied before the new ones serve.
"""

import asyncio
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import TokensPrompt
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from rollsync.pure.refit import TensorSpec
from rollsync.pure.refit.engine_ranks import engine_state
from rollsync.pure.refit.lifecycle import Closed, EngineState, Poisoned, Serving
from rollsync.shell.refit.errors import RefitError
from rollsync.shell.refit.generation import (
    Completion,
    SamplingSettings,
    ServingGate,
    served_version,
)
from rollsync.shell.refit.report import WorkerTransfer
from rollsync.shell.refit.vllm_loader import check_vllm_version
from rollsync.shell.refit.vllm_worker import WORKER_EXTENSION

UPDATE = "update_weights_from_checkpoint_engine"

CPU_ENVIRONMENT: Mapping[str, str] = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCH_COMPILE_DISABLE": "1",
}
"""Environment of an actor whose engine runs a small model on a shared host's CPU, for Ray's
`env_vars`. Compiling the sampler would take longer there than everything else."""


def engine_options(model: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's options for an engine that rollsync refits.

    Log-probabilities are those of the distribution that is sampled from, and the tokenizer is left
    out: prompts and completions are token ids.
    """
    return {
        "model": model,
        "worker_extension_cls": WORKER_EXTENSION,
        "logprobs_mode": "processed_logprobs",
        "skip_tokenizer_init": True,
        **options,
    }


class VllmGenerationWorker:
    """One asynchronous engine, made for `ray.remote`; see `GenerationEngine`.

    Args:
        model: path of a model in Hugging Face's layout.
        options: of vLLM's engine arguments; rollsync's own come first.
    """

    def __init__(self, model: str, options: Mapping[str, Any] | None = None) -> None:
        check_vllm_version()
        self._args = AsyncEngineArgs(**engine_options(model, options or {}))
        self._gate = ServingGate()
        self._started: asyncio.Task[AsyncLLM] | None = None

    async def start(self) -> None:
        """Starts the engine, unless it is there; every other method does so too."""
        await self._engine()

    async def prepare_refit_info(self, refit_info: object) -> None:
        """Takes what the policy will send, if the policy says so in rollsync's way."""
        llm = await self._engine()
        await llm.collective_rpc("declare_refit_weights", args=(declared(refit_info),))

    async def checkpoint_engine_rpc_async(
        self, checkpoint_method: str, method_args: tuple[object, ...] = ()
    ) -> object:
        """Runs one step of the checkpoint engine's life cycle on every rank of the engine."""
        llm = await self._engine()
        if checkpoint_method != UPDATE:
            answers: object = await llm.collective_rpc(checkpoint_method, args=method_args)
            self._gate.state = await self._read_state(llm)
            return answers
        async with self._gate.update():
            try:
                transfers = await llm.collective_rpc(checkpoint_method, args=method_args)
            finally:
                self._gate.state = await self._read_state(llm)
            self._gate.state = await self._forget_old_weights(llm, self._gate.state)
        return msgspec.convert(transfers, list[WorkerTransfer])

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingSettings,
        *,
        seed: int,
        weight_version: int | None = None,
    ) -> list[Completion]:
        """Samples completions; see `GenerationEngine`."""
        llm = await self._engine()
        async with self._gate.request(weight_version) as version:
            return list(
                await asyncio.gather(
                    *(
                        _complete(llm, prompt_token_ids, params, version)
                        for params in sampling_params(sampling, seed)
                    )
                )
            )

    async def weight_version(self) -> int | None:
        """The version that is served now, None when nothing may be generated."""
        return self._gate.weight_version

    async def refit_state(self) -> EngineState:
        """The engine's life-cycle state."""
        return self._gate.state

    async def stop(self) -> None:
        """Ends the engine's processes; the actor is of no use afterwards."""
        if self._started is not None:
            (await self._started).shutdown()
            self._gate.state = Closed()

    async def _engine(self) -> AsyncLLM:
        if self._started is None:
            # Its queues belong to the event loop, which an actor's __init__ has not got yet.
            self._started = asyncio.create_task(self._start())
        return await asyncio.shield(self._started)

    async def _start(self) -> AsyncLLM:
        return AsyncLLM.from_engine_args(self._args)

    async def _read_state(self, llm: AsyncLLM) -> EngineState:
        if llm.errored:
            return Closed()
        return engine_state(ranks_of(await llm.collective_rpc("refit_state")))

    async def _forget_old_weights(self, llm: AsyncLLM, state: EngineState) -> EngineState:
        await llm.reset_mm_cache()
        await llm.reset_encoder_cache()
        return after_reset(state, await llm.reset_prefix_cache())


class VllmSyncGenerationWorker:
    """One synchronous engine, made for `ray.remote`: an actor that does one thing at a time.

    Args:
        model: path of a model in Hugging Face's layout.
        options: of vLLM's engine arguments; rollsync's own come first.
    """

    def __init__(self, model: str, options: Mapping[str, Any] | None = None) -> None:
        check_vllm_version()
        self._llm = LLM(**engine_options(model, options or {}))
        self._state: EngineState = engine_state(())

    def prepare_refit_info(self, refit_info: object) -> None:
        """Takes what the policy will send, if the policy says so in rollsync's way."""
        self._llm.collective_rpc("declare_refit_weights", args=(declared(refit_info),))

    def checkpoint_engine_rpc(
        self, checkpoint_method: str, method_args: tuple[object, ...] = ()
    ) -> object:
        """Runs one step of the checkpoint engine's life cycle on every rank of the engine."""
        try:
            answers = self._llm.collective_rpc(checkpoint_method, args=method_args)
        finally:
            self._state = engine_state(ranks_of(self._llm.collective_rpc("refit_state")))
        if checkpoint_method != UPDATE:
            return answers
        self._llm.reset_mm_cache()
        self._llm.llm_engine.reset_encoder_cache()
        self._state = after_reset(self._state, self._llm.reset_prefix_cache())
        return msgspec.convert(answers, list[WorkerTransfer])

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingSettings,
        *,
        seed: int,
        weight_version: int | None = None,
    ) -> list[Completion]:
        """Samples completions; see `GenerationEngine`."""
        version = served_version(self._state, weight_version)
        params = sampling_params(sampling, seed)
        prompts = [TokensPrompt(prompt_token_ids=list(prompt_token_ids)) for _ in params]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [completion(output.outputs[0], version) for output in outputs]

    def weight_version(self) -> int | None:
        """The version that is served now, None when nothing may be generated."""
        return self._state.version if isinstance(self._state, Serving) else None

    def refit_state(self) -> EngineState:
        """The engine's life-cycle state."""
        return self._state


def declared(refit_info: object) -> object:
    """The policy's declaration in plain form; None when it is not rollsync's."""
    if not isinstance(refit_info, Mapping):
        return None
    specs = list(refit_info.values())
    if not all(isinstance(spec, TensorSpec) for spec in specs):
        return None
    return msgspec.to_builtins(specs)


def ranks_of(answers: Iterable[object]) -> list[EngineState]:
    """The states of an engine's ranks, from what `refit_state` answered on each."""
    return msgspec.convert(list(answers), list[EngineState])


def after_reset(state: EngineState, emptied: bool) -> EngineState:
    """The state after the prefix cache was to be emptied of what old weights computed."""
    if isinstance(state, Serving) and not emptied:
        return Poisoned(state.version, "the prefix cache of the old weights could not be emptied")
    return state


def sampling_params(sampling: SamplingSettings, seed: int) -> list[SamplingParams]:
    """vLLM's settings of each completion."""
    return [
        SamplingParams(
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_token_ids=list(sampling.stop_token_ids),
            seed=seed + sibling,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        for sibling in range(sampling.n)
    ]


async def _complete(
    llm: AsyncLLM, prompt_token_ids: Sequence[int], params: SamplingParams, version: int
) -> Completion:
    last: RequestOutput | None = None
    async for output in llm.generate(
        TokensPrompt(prompt_token_ids=list(prompt_token_ids)), params, request_id=uuid.uuid4().hex
    ):
        last = output
    if last is None:
        raise RefitError("vLLM ended a request without an answer")
    return completion(last.outputs[0], version)


def completion(output: CompletionOutput, version: int) -> Completion:
    """vLLM's answer as a `Completion`.

    Raises:
        RefitError: when vLLM gave the request up, or left log-probabilities out.
    """
    if output.finish_reason not in ("stop", "length") or output.logprobs is None:
        raise RefitError(f"vLLM ended a request with {output.finish_reason!r}")
    return Completion(
        token_ids=tuple(output.token_ids),
        logprobs=tuple(
            step[token].logprob
            for token, step in zip(output.token_ids, output.logprobs, strict=True)
            if step is not None
        ),
        finish_reason="stop" if output.finish_reason == "stop" else "length",
        weight_version=version,
    )
