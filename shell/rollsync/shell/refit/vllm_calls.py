"""Requests and answers of vLLM, and the options that rollsync starts it with.

Rules kept here: nothing that a driver imports imports this module, so that a driver needs no vLLM
(`vllm_generation` does so when its actor starts an engine); and a call of an engine ends when the
engine's processes do, which vLLM's own would wait for.
"""

import rollsync.shell.refit.vllm_version  # noqa: F401

# isort: split
import asyncio
import concurrent.futures
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import TokensPrompt
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import MPClient
from vllm.v1.engine.exceptions import EngineDeadError

from rollsync.shell.refit.beside import begun
from rollsync.shell.refit.errors import RefitError
from rollsync.shell.refit.generation import Completion, SamplingSettings
from rollsync.shell.refit.vllm_worker import WORKER_EXTENSION

LOOK_S: Final = 0.5
"""How often a call looks whether the engine's processes are there."""

_T = TypeVar("_T")


def start_async(model: str, options: Mapping[str, Any]) -> AsyncLLM:
    """Starts an asynchronous engine; in the event loop that will use it."""
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_options(model, options)))


def start_sync(model: str, options: Mapping[str, Any]) -> LLM:
    """Starts a synchronous engine."""
    return LLM(**engine_options(model, options))


async def answered(llm: AsyncLLM, call: Awaitable[_T]) -> _T:
    """What a call of an asynchronous engine answers.

    Raises:
        EngineDeadError: the engine's processes have ended meanwhile.
    """
    asked = asyncio.ensure_future(call)
    try:
        while not (await asyncio.wait([asked], timeout=LOOK_S))[0]:
            if llm.errored:
                raise llm.dead_error
        return asked.result()
    finally:
        asked.cancel()


def answered_by(llm: LLM, call: Callable[[], _T]) -> _T:
    """What a call of a synchronous engine answers.

    Raises:
        EngineDeadError: the engine's processes have ended meanwhile.
    """
    core = llm.llm_engine.engine_core
    if not isinstance(core, MPClient):
        # It is in this process.
        return call()
    answer = begun(call)
    while not concurrent.futures.wait([answer], timeout=LOOK_S).done:
        if core.resources.engine_dead:
            raise EngineDeadError
    return answer.result()


def engine_options(model: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's options for an engine that rollsync refits: the caller's, and `OWN_OPTIONS` of
    `vllm_generation`. The tokenizer is left out unless the caller wants it: prompts and completions
    are token ids."""
    return {
        "skip_tokenizer_init": True,
        **options,
        "model": model,
        "worker_extension_cls": WORKER_EXTENSION,
        "logprobs_mode": "processed_logprobs",
    }


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


def complete_all(
    llm: LLM, prompt_token_ids: Sequence[int], params: Sequence[SamplingParams], version: int
) -> list[Completion]:
    """All completions of a synchronous engine."""
    prompts = [TokensPrompt(prompt_token_ids=list(prompt_token_ids)) for _ in params]
    outputs = answered_by(llm, lambda: llm.generate(prompts, params, use_tqdm=False))
    return [completion(output.outputs[0], version) for output in outputs]


async def complete(
    llm: AsyncLLM, prompt_token_ids: Sequence[int], params: SamplingParams, version: int
) -> Completion:
    """One completion of an asynchronous engine."""
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
