"""What a worker with the extension computes, and when, whoever calls the extension's methods."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollsync.shell.refit.engines import Batch
from rollsync.shell.refit.errors import EngineNotServing, RefitError
from tests.shell.refit.scripted_engine import SCRIPTED, ScriptedEngine
from tests.shell.refit.test_refit_receiver import WHOLE, RecordedUpdate, versioned

# What vLLM imports warns about torch's own future; that is not ours to mend.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

REQUEST = SimpleNamespace(total_num_scheduled_tokens=3)
EMPTY = SimpleNamespace(total_num_scheduled_tokens=0)


class Runner:
    """Computes whatever it is asked to."""

    def execute_model(self, scheduled: Any, dummy_run: bool = False) -> str:
        return f"computed {scheduled.total_num_scheduled_tokens}"


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker, connected, of whose update the script says what comes."""
    from rollsync.shell.refit.vllm_worker import RefitWorkerExtension

    class Worker(RefitWorkerExtension):
        def __init__(self) -> None:
            self.model_runner = Runner()
            self.update = RecordedUpdate()

        def _refit_load(self, recorder: object) -> Any:
            return self.update

    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(ScriptedEngine, "made", [])
    worker = Worker()
    worker.init_checkpoint_engine(SCRIPTED, 1024, {})
    worker.prepare_checkpoint_engine()
    return worker


def computes(worker: Any) -> bool:
    """Whether it computes for requests; what is for none it always computes."""
    assert worker.model_runner.execute_model(EMPTY) == "computed 0"
    assert worker.model_runner.execute_model(REQUEST, dummy_run=True) == "computed 3"
    try:
        assert worker.model_runner.execute_model(REQUEST) == "computed 3"
    except EngineNotServing:
        return False
    return True


def receive(worker: Any, monkeypatch: pytest.MonkeyPatch, script: list[Batch | Exception]) -> bool:
    monkeypatch.setattr(ScriptedEngine, "script", script)
    return bool(worker.update_weights_from_checkpoint_engine())


def test_from_a_failed_update_to_a_whole_one_nothing_is_computed_for_a_request(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert computes(worker)
    # Nothing has come before the connection, so nothing has changed.
    assert not receive(worker, monkeypatch, versioned(0, WHOLE))
    assert computes(worker)
    worker.init_checkpoint_engine_process_group(0, 1, 1, [])
    assert receive(worker, monkeypatch, versioned(0, WHOLE))
    assert computes(worker)
    broken = versioned(1, [WHOLE[0], RefitError("the stream broke")])
    assert not receive(worker, monkeypatch, broken)
    with pytest.raises(EngineNotServing, match=r"last weight update failed: .*the stream broke"):
        worker.model_runner.execute_model(REQUEST)
    assert not computes(worker)
    # Nor does a call that cannot begin open what is shut.
    worker.finalize_checkpoint_engine()
    assert not receive(worker, monkeypatch, versioned(1, WHOLE))
    assert not computes(worker)
    worker.prepare_checkpoint_engine()
    worker.init_checkpoint_engine_process_group(0, 1, 1, [])
    assert receive(worker, monkeypatch, versioned(1, WHOLE))
    assert computes(worker)


def test_while_weights_are_loaded_nothing_is_computed_for_a_request(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(worker.update, "start", lambda: seen.append(computes(worker)))
    monkeypatch.setattr(worker.update, "finish", lambda: seen.append(computes(worker)))
    worker.init_checkpoint_engine_process_group(0, 1, 1, [])
    assert receive(worker, monkeypatch, versioned(0, WHOLE))
    assert seen == [False, False]
    assert computes(worker)
