"""What a torch engine says and does while an update is stuck in it, without Ray."""

import asyncio
import threading
from pathlib import Path

import pytest
import torch

from rollsync.pure.refit.lifecycle import Poisoned, Serving, Updating
from rollsync.pure.refit.steps import UPDATE, Step
from rollsync.shell.refit.engines import Batch
from rollsync.shell.refit.errors import EngineNotServing, RefitError
from rollsync.shell.refit.generation import SamplingSettings
from rollsync.shell.refit.torch_generation import TorchGenerationWorker
from rollsync.shell.refit.torch_update import TorchModelUpdate
from rollsync.shell.refit.weights import WEIGHT_VERSION_NAME
from tests.shell.refit.scripted_engine import SCRIPTED, ScriptedEngine
from tests.shell.refit.tiny_models import make_model, save_model

GREEDY = SamplingSettings(max_new_tokens=1, temperature=0.0)


class StuckLoader:
    """Lets half of a batch be loaded, and the rest when it is freed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_stuck = threading.Event()
        self.free = threading.Event()
        load = TorchModelUpdate.load

        def stuck(update: TorchModelUpdate, batch: Batch) -> None:
            load(update, batch[::2])
            self.is_stuck.set()
            self.free.wait(60)
            load(update, batch[1::2])

        monkeypatch.setattr(TorchModelUpdate, "load", stuck)


def stream(version: int) -> list[Batch]:
    weights = list(make_model().named_parameters())
    return [[(WEIGHT_VERSION_NAME, torch.tensor(version)), *weights]]


def test_an_engine_in_which_an_update_is_stuck_does_not_say_that_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        worker = TorchGenerationWorker(save_model(tmp_path))
        call = worker.checkpoint_engine_rpc_async
        monkeypatch.setattr(ScriptedEngine, "made", [])
        await call(Step.MAKE, (SCRIPTED, 1024, {"refit_timeout_s": 0.001}))
        await call(Step.PREPARE)
        await call(Step.CONNECT, (0, 1, 1, []))
        monkeypatch.setattr(ScriptedEngine, "script", stream(1))
        await call(UPDATE)
        assert await worker.refit_state() == Serving(1)

        monkeypatch.setattr(ScriptedEngine, "script", stream(2))
        loader = StuckLoader(monkeypatch)
        update = asyncio.create_task(call(UPDATE))
        await asyncio.to_thread(loader.is_stuck.wait)
        # A synchronizer that has given it up goes on to the next step.
        for step in (None, Step.MEASURE, Step.FINALIZE):
            if step is not None:
                await call(step)
            assert await worker.refit_state() == Updating(2)
            assert (await worker.probe()).state == Updating(2)
            assert await worker.weight_version() is None
        with pytest.raises(EngineNotServing, match="held the request back"):
            await worker.generate([5], GREEDY, seed=0)

        loader.free.set()
        with pytest.raises(RefitError, match="poisoned"):
            await update
        with pytest.raises(EngineNotServing, match="the connection was lost"):
            await worker.generate([5], GREEDY, seed=0)
        assert isinstance(await worker.refit_state(), Poisoned)

    asyncio.run(run())
