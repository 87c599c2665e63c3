"""Requests and answers of vLLM, and the options that rollsync starts it with.

Rule kept here: this and `vllm_loader` are the modules that import vLLM, and only an actor that
holds an engine imports them, so that a driver needs no vLLM.
"""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import TokensPrompt
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from rollsync.shell.refit.errors import RefitError
from rollsync.shell.refit.generation import Completion, SamplingSettings
from rollsync.shell.refit.vllm_loader import check_vllm_version
from rollsync.shell.refit.vllm_worker import WORKER_EXTENSION


def start_async(model: str, options: Mapping[str, Any]) -> AsyncLLM:
    """Starts an asynchronous engine; in the event loop that will use it."""
    check_vllm_version()
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_options(model, options)))


def start_sync(model: str, options: Mapping[str, Any]) -> LLM:
    """Starts a synchronous engine."""
    check_vllm_version()
    return LLM(**engine_options(model, options))


def engine_options(model: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's options for an engine that rollsync refits; the caller's own win.

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
    outputs = llm.generate(prompts, params, use_tqdm=False)
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
