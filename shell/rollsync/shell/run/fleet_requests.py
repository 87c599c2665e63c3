"""What the engines of a run are asked to generate.

Rule kept here: a request goes only to an engine that serves the version of the newest sync, and how
it ended is told to the fleet's ledger, which decides what the engine is still good for.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from ray.exceptions import RayError

from rollsync.pure.refit.fleet.decisions import may_serve
from rollsync.pure.refit.fleet.events import (
    ActorDied,
    RequestAnswered,
    RequestFailed,
    RequestRefused,
)
from rollsync.shell.actor_deaths import is_death
from rollsync.shell.refit.errors import EngineNotServing, EngineOutdated, RefitError
from rollsync.shell.refit.generation import Completion, SamplingSettings
from rollsync.shell.refit.worker_group import call_remote
from rollsync.shell.rollout.clients import GenerationFailed
from rollsync.shell.run.fleet import EngineFleet, reason_of


class EngineRequests:
    """Spreads requests over the engines that may serve them.

    Args:
        fleet: the engines.
    """

    def __init__(self, fleet: EngineFleet) -> None:
        self._fleet = fleet
        self._under_way: Counter[str] = Counter()

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingSettings, *, seed: int
    ) -> list[Completion]:
        """Sample on the engine that has least to do, of those with the newest weights.

        Raises:
            GenerationFailed: the engine failed or died; what it did not take is given to another.
        """
        while True:
            engine, version = await self._acquire()
            self._under_way[engine] += 1
            try:
                completions = await self._ask(engine, prompt_token_ids, sampling, seed, version)
            finally:
                self._under_way[engine] -= 1
            if completions is not None:
                return completions

    async def _acquire(self) -> tuple[str, int]:
        while True:
            seen = self._fleet.changes.version
            version = self._fleet.state.target_version
            able = () if version is None else may_serve(self._fleet.state, version)
            if version is not None and able:
                return min(able, key=lambda name: self._under_way[name]), version
            await self._fleet.changes.wait_past(seen)

    async def _ask(
        self,
        engine: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingSettings,
        seed: int,
        version: int,
    ) -> list[Completion] | None:
        """Have one engine sample; None when it did not take the request."""
        try:
            async with asyncio.timeout(self._fleet.state.settings.request_timeout_s):
                completions: list[Completion] = await call_remote(
                    self._fleet.actor_of(engine),
                    "generate",
                    prompt_token_ids,
                    sampling,
                    seed=seed,
                    weight_version=version,
                )
        except EngineNotServing as error:
            self._fleet.apply(RequestRefused(engine, reason_of(error)))
            return None
        except EngineOutdated as error:
            # It may have been synced while the request was under way: then it is the newer one.
            if error.serving < error.wanted:
                self._fleet.apply(RequestRefused(engine, reason_of(error)))
            return None
        except TimeoutError:
            why = f"no completion within {self._fleet.state.settings.request_timeout_s:g} s"
            self._fleet.apply(RequestFailed(engine, why))
            raise GenerationFailed(f"{engine}: {why}") from None
        except (RefitError, RayError) as error:
            why = reason_of(error)
            died = is_death(error)
            self._fleet.apply(ActorDied(engine, why) if died else RequestFailed(engine, why))
            raise GenerationFailed(f"{engine} gave a request up: {why}") from error
        self._fleet.apply(RequestAnswered(engine))
        return completions
