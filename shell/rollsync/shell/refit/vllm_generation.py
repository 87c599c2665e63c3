"""A vLLM engine in a Ray actor: it generates, and is refitted, never both at once.

`VllmGenerationWorker` holds an `AsyncLLM`, `VllmSyncGenerationWorker` an `LLM`. Rules kept here:
the engine's state is read back from its workers after every step, and not assumed; caches that
hold what the old weights computed are emptied before the new ones serve; and vLLM is imported when
an engine is started, in its actor, so that a driver needs none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from rollsync.pure.refit.blame import HowEnded, StepEnd
from rollsync.pure.refit.engine_ranks import engine_state
from rollsync.pure.refit.lifecycle import Closed, EngineState, Poisoned, Serving
from rollsync.pure.refit.steps import UPDATE, Step
from rollsync.shell.refit.errors import EngineStepFailed, RefitConfigurationError
from rollsync.shell.refit.generation import (
    Completion,
    EngineProbe,
    SamplingSettings,
    ServingGate,
    probe_of,
    served_version,
)
from rollsync.shell.refit.rank_answers import values_of
from rollsync.shell.refit.report import WorkerTransfer
from rollsync.shell.refit.weights import declared_specs

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


OWN_OPTIONS: Mapping[str, str] = {
    "model": "it is named beside the options",
    "worker_extension_cls": "it is the half of a refit that receives",
    "logprobs_mode": "completions tell the log-probabilities of the distribution sampled from",
}
"""Options of vLLM that a caller cannot give, and why."""

CPU_ENVIRONMENT: Mapping[str, str] = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCH_COMPILE_DISABLE": "1",
}
"""Environment of an actor whose engine runs a small model on a shared host's CPU, for Ray's
`env_vars`. Compiling the sampler would take longer there than everything else."""


class VllmGenerationWorker:
    """One asynchronous engine, made for `ray.remote`; see `GenerationEngine`.

    Args:
        model: path of a model in Hugging Face's layout.
        options: of vLLM's engine arguments, but for `OWN_OPTIONS`.

    Raises:
        RefitConfigurationError: when one of those is among the options.
    """

    def __init__(self, model: str, options: Mapping[str, Any] | None = None) -> None:
        self._model = model
        self._options = checked_options(options)
        self._gate = ServingGate()
        self._started: asyncio.Task[AsyncLLM] | None = None

    async def start(self) -> EngineProbe:
        """Starts the engine, unless it is there; every other method but `probe` does so too."""
        await self._engine()
        return await self.probe()

    async def probe(self) -> EngineProbe:
        """Answers at once, whatever else runs; `Closed` when vLLM's own processes have ended."""
        if self._started is not None and self._started.done() and (await self._started).errored:
            self._gate.state = Closed()
        return probe_of(self._gate.state)

    async def prepare_refit_info(self, refit_info: object) -> None:
        """Takes what the policy will send, if the policy says so."""
        await self._step(await self._engine(), "declare_refit_weights", (declared(refit_info),))

    async def checkpoint_engine_rpc_async(
        self, checkpoint_method: str, method_args: tuple[object, ...] = ()
    ) -> object:
        """Runs one step of the checkpoint engine's life cycle on every rank of the engine."""
        llm = await self._engine()
        if checkpoint_method == Step.MAKE:
            self._gate.hold_by(method_args[-1])
        if checkpoint_method != UPDATE:
            return await self._step(llm, checkpoint_method, method_args)
        async with self._gate.update():
            transfers = await self._step(llm, checkpoint_method, method_args)
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
        from rollsync.shell.refit.vllm_calls import complete, sampling_params

        llm = await self._engine()
        async with self._gate.request(weight_version) as version:
            return list(
                await asyncio.gather(
                    *(
                        complete(llm, prompt_token_ids, params, version)
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
        from rollsync.shell.refit.vllm_calls import start_async

        return start_async(self._model, self._options)

    async def _step(self, llm: AsyncLLM, step: str, arguments: tuple[object, ...]) -> list[object]:
        """Runs a step on every rank, and reads the state that it left them in."""
        from rollsync.shell.refit.vllm_calls import answered

        state: EngineState = Closed()
        try:
            run = llm.collective_rpc("refit_step", args=(step, arguments))
            answers: list[object] = await answered(llm, run)
            states: list[object] = await answered(llm, llm.collective_rpc("refit_state"))
            state = engine_state(ranks_of(states))
        except Exception as error:
            raise engine_ended(step, error) from error
        finally:
            self._gate.state = state
        return values_of(step, answers)

    async def _forget_old_weights(self, llm: AsyncLLM, state: EngineState) -> EngineState:
        await llm.reset_mm_cache()
        await llm.reset_encoder_cache()
        return after_reset(state, await llm.reset_prefix_cache())


class VllmSyncGenerationWorker:
    """One synchronous engine, made for `ray.remote`: an actor that does one thing at a time.

    Args:
        model: path of a model in Hugging Face's layout.
        options: of vLLM's engine arguments, but for `OWN_OPTIONS`.

    Raises:
        RefitConfigurationError: when one of those is among the options.
    """

    def __init__(self, model: str, options: Mapping[str, Any] | None = None) -> None:
        own = checked_options(options)
        from rollsync.shell.refit.vllm_calls import start_sync

        self._llm = start_sync(model, own)
        self._state: EngineState = engine_state(())

    def prepare_refit_info(self, refit_info: object) -> None:
        """Takes what the policy will send, if the policy says so."""
        self._step("declare_refit_weights", (declared(refit_info),))

    def checkpoint_engine_rpc(
        self, checkpoint_method: str, method_args: tuple[object, ...] = ()
    ) -> object:
        """Runs one step of the checkpoint engine's life cycle on every rank of the engine."""
        answers = self._step(checkpoint_method, method_args)
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
        from rollsync.shell.refit.vllm_calls import complete_all, sampling_params

        version = served_version(self._state, weight_version)
        return complete_all(self._llm, prompt_token_ids, sampling_params(sampling, seed), version)

    def weight_version(self) -> int | None:
        """The version that is served now, None when nothing may be generated."""
        return self._state.version if isinstance(self._state, Serving) else None

    def refit_state(self) -> EngineState:
        """The engine's life-cycle state."""
        return self._state

    def _step(self, step: str, arguments: tuple[object, ...]) -> list[object]:
        """Runs a step on every rank, and reads the state that it left them in."""
        from rollsync.shell.refit.vllm_calls import answered_by

        llm = self._llm
        state: EngineState = Closed()
        try:
            answers: list[object] = answered_by(
                llm, lambda: llm.collective_rpc("refit_step", args=(step, arguments))
            )
            states: list[object] = answered_by(llm, lambda: llm.collective_rpc("refit_state"))
            state = engine_state(ranks_of(states))
        except Exception as error:
            raise engine_ended(step, error) from error
        finally:
            self._state = state
        return values_of(step, answers)


def checked_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """A caller's options.

    Raises:
        RefitConfigurationError: when one is not the caller's to choose.
    """
    for name, why in OWN_OPTIONS.items():
        if name in (options or {}):
            raise RefitConfigurationError(
                f"the vLLM option {name!r} is rollsync's own to set: {why}",
                remedy=f"leave {name!r} out of the engine's options",
            )
    return dict(options or {})


def declared(refit_info: object) -> object:
    """The policy's declaration in plain form; None when there is none."""
    specs = declared_specs(refit_info)
    return None if specs is None else msgspec.to_builtins(specs)


def engine_ended(step: str, error: Exception) -> EngineStepFailed:
    """What to make of an exception of vLLM's at a step whose own failures are answers: its
    processes are gone. (Its own error for that cannot be read by a process without vLLM.)"""
    return EngineStepFailed(
        f"{step} failed as vLLM's processes have ended: {type(error).__name__}: {error}",
        end=StepEnd(HowEnded.GONE),
        remedy="see Ray's log of the engine for why they ended; start the engine anew",
    )


def ranks_of(answers: Iterable[object]) -> list[EngineState]:
    """The states of an engine's ranks, from what `refit_state` answered on each."""
    return msgspec.convert(list(answers), list[EngineState])


def after_reset(state: EngineState, emptied: bool) -> EngineState:
    """The state after the prefix cache was to be emptied of what old weights computed."""
    if isinstance(state, Serving) and not emptied:
        return Poisoned(state.version, "the prefix cache of the old weights could not be emptied")
    return state
