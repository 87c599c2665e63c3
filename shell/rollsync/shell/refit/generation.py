"""What a generation engine offers a rollout, and when it may.

Rules kept here: every completion comes from one weight version, which it names; and an engine
generates only with the weights of one whole sync, so that no request sees half-updated ones.
"""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Literal, Protocol

import msgspec

from rollsync.pure.refit import describe
from rollsync.pure.refit.errors import ServesAnotherVersion
from rollsync.pure.refit.lifecycle import (
    BeginUpdate,
    EngineState,
    Serving,
    Unconnected,
    apply,
    check_serves,
    next_version,
    phase_of,
)
from rollsync.pure.refit.patience import (
    DEFAULT_REFIT_TIMEOUT_S,
    refit_timeout,
    whole_stream_s,
)
from rollsync.shell.refit.errors import EngineNotServing, EngineOutdated, accepted


class SamplingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How completions of one prompt are sampled.

    Attributes:
        n: completions of the prompt.
        max_new_tokens: where a completion ends at the latest, in tokens.
        temperature: 0 takes the likeliest token always.
        top_p: smallest probability mass of likeliest tokens that is kept.
        top_k: number of likeliest tokens that is kept; 0 keeps all.
        stop_token_ids: tokens that end a completion, and are its last token.
    """

    n: int = 1
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()


class Completion(msgspec.Struct, frozen=True):
    """One sampled continuation of a prompt.

    Attributes:
        token_ids: the new tokens, a stop token included.
        logprobs: of each new token, in the distribution that it was sampled from.
        finish_reason: `stop` at a stop token, `length` at the limit.
        weight_version: the trainer version of the weights that all of it was sampled with.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: Literal["stop", "length"]
    weight_version: int


class EngineProbe(msgspec.Struct, frozen=True):
    """What an engine says of itself when it is asked whether it is there.

    Attributes:
        state: which weights it holds.
        pid: of its actor's process.
        host: the name of the machine that it is on.
    """

    state: EngineState
    pid: int
    host: str


def probe_of(state: EngineState) -> EngineProbe:
    """The answer of an engine in this process."""
    return EngineProbe(state, os.getpid(), socket.gethostname())


class GenerationEngine(Protocol):
    """One generation engine, or several behind one face.

    The same prompt, settings, seed and weights give the same completions; sibling i of a prompt is
    sampled with `seed + i`.
    """

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingSettings,
        *,
        seed: int,
        weight_version: int | None = None,
    ) -> list[Completion]:
        """Samples `sampling.n` completions.

        Args:
            prompt_token_ids: the prompt.
            sampling: how to sample.
            seed: of the first completion.
            weight_version: the version that the completions have to come from, None for any.

        Raises:
            EngineNotServing: when no whole sync has succeeded since the last one that failed, or
                one holds the request back for longer than a stream may take.
            EngineOutdated: when the engine serves another version than `weight_version`.
        """
        ...

    async def weight_version(self) -> int | None:
        """The version that is served now, None when nothing may be generated."""
        ...


class ServingGate:
    """Lets requests through while whole weights are served, and updates while no request runs.

    An update waits for the requests that run, and holds back those that come; which of them are
    let through afterwards is for the engine's state to say, which is `Updating` from when an update
    may write until its body says what it has left. One event loop's only.
    """

    def __init__(self) -> None:
        self.state: EngineState = Unconnected()
        self._updating = False
        self._running = 0
        self._changed = asyncio.Condition()
        self._longest_hold_s = whole_stream_s(DEFAULT_REFIT_TIMEOUT_S)

    def hold_by(self, options: object) -> None:
        """Takes from a checkpoint engine's options how long an update may hold a request back.

        Raises:
            RefitConfigurationError: `refit_timeout_s` is no number of seconds.
        """
        if isinstance(options, Mapping):
            self._longest_hold_s = whole_stream_s(accepted(refit_timeout(options)))

    @property
    def weight_version(self) -> int | None:
        """The version that is served now, None when nothing may be generated."""
        return self.state.version if isinstance(self.state, Serving) else None

    @asynccontextmanager
    async def request(self, weight_version: int | None = None) -> AsyncIterator[int]:
        """Holds off updates while a request runs; answers the version that it runs with.

        Raises:
            EngineNotServing: when there are no whole weights, or an update is stuck.
            EngineOutdated: when the version is not the wanted one.
        """
        async with self._changed:
            try:
                async with asyncio.timeout(self._longest_hold_s):
                    await self._changed.wait_for(lambda: not self._updating)
            except TimeoutError:
                raise EngineNotServing(
                    f"a weight update has held the request back for {self._longest_hold_s:g} s",
                    state=phase_of(self.state).value,
                    remedy="see whether the engine's process is stopped or stuck, and end it; raise"
                    " refit_timeout_s if the update is only slow",
                ) from None
            version = served_version(self.state, weight_version)
            self._running += 1
        try:
            yield version
        finally:
            async with self._changed:
                self._running -= 1
                self._changed.notify_all()

    @asynccontextmanager
    async def update(self) -> AsyncIterator[None]:
        """Holds off requests while the weights change; the body sets `state` at its end."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._updating)
            self._updating = True
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self._running == 0)
            # One that cannot begin in this state is refused by whoever the body asks for it.
            begun = apply(self.state, BeginUpdate(next_version(self.state)))
            self.state = begun.value_or(self.state)
            yield
        finally:
            async with self._changed:
                self._updating = False
                self._changed.notify_all()


def served_version(state: EngineState, weight_version: int | None) -> int:
    """The version that a request may run with.

    Raises:
        EngineNotServing: when there are no whole weights.
        EngineOutdated: when the version is not the wanted one.
    """
    refusal = check_serves(state, weight_version)
    if isinstance(refusal, ServesAnotherVersion):
        raise EngineOutdated(serving=refusal.serving, wanted=refusal.wanted)
    if refusal is not None or not isinstance(state, Serving):
        reason = "" if refusal is None else describe(refusal)
        raise EngineNotServing(reason, state=phase_of(state).value)
    return state.version
