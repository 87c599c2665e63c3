"""What the two halves of the native backend refuse, and that each refusal reaches the trainer.

The halves are the real ones, in one process; only vLLM's engine between them is left out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollsync.shell.refit.errors import RefitConfigurationError, RefitError, WeightMismatch
from rollsync.shell.refit.intake import Batch
from rollsync.shell.refit.refit_receiver import RefitReceiver

# What vLLM imports warns about torch's own future; that is not ours to mend.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

WEIGHTS = {f"w{index}": torch.full((300, 4), float(index)) for index in range(4)}


class Update:
    """Keeps what it is given."""

    def __init__(self, kept: dict[str, torch.Tensor]) -> None:
        self._kept = kept

    def leave_out(self, layers: frozenset[str]) -> None:
        assert not layers

    def start(self) -> None:
        self._kept.clear()

    def load(self, batch: Batch) -> None:
        self._kept.update((name, tensor.clone()) for name, tensor in batch)

    def finish(self) -> None: ...

    def abort(self) -> None: ...


class Client:
    """vLLM's calls, answered by one worker here; a call in `refused` fails."""

    def __init__(self) -> None:
        from rollsync.shell.refit.vllm_transfer import RollsyncWeightTransferEngine

        self.kept: dict[str, torch.Tensor] = {}
        self.refused: set[str] = set()
        self.version: str | None = None

        self.worker: Any = RollsyncWeightTransferEngine(
            SimpleNamespace(),  # type: ignore[arg-type]
            SimpleNamespace(  # type: ignore[arg-type]
                parallel_config=SimpleNamespace(data_parallel_index=0, world_size=1),
                model_config=None,
            ),
            torch.device("cpu"),
            torch.nn.Linear(1, 1),
        )
        self.worker._receiver = RefitReceiver(
            local_rank=0, engine_world_size=1, update=lambda _: Update(self.kept)
        )

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._check("init")
        self.worker.init_transfer_engine(self.worker.parse_init_info(init_info))

    def start_weight_update(self) -> None:
        self.worker.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        self._check("update")
        self.worker.receive_weights(self.worker.parse_update_info(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.worker.finish_weight_update()
        self.version = weight_version

    def _check(self, call: str) -> None:
        if call in self.refused:
            raise ValueError(f"no {call} today")


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    client = Client()
    yield client
    client.worker.shutdown()


def source(declared: list[Any], before: Callable[[], object] = lambda: None) -> Any:
    """Yields `WEIGHTS`, each after `before`, having declared these names."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class Source(WeightSource):
        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(name, torch.float32, (300, 4)) for name in declared]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for item in WEIGHTS.items():
                before()
                yield item

    return Source()


def connected(client: Client, weights: Any) -> Any:
    from rollsync.shell.refit.vllm_transfer_trainer import (
        RollsyncTrainerInitInfo,
        RollsyncTrainerWeightTransferEngine,
    )

    return RollsyncTrainerWeightTransferEngine.trainer_init(
        RollsyncTrainerInitInfo(
            rank=0, engine="shm", bucket_size_bytes=8192, rollout_world_size=1, timeout_s=250
        ),
        client=client,
        source=weights,
    )


def assert_sent(trainer: Any, client: Client, version: int) -> None:
    trainer.send_weights(version)
    assert client.version == str(version)
    assert list(client.kept) == list(WEIGHTS)
    assert all(torch.equal(client.kept[name], WEIGHTS[name]) for name in WEIGHTS)
    client.worker._gate.check()


@pytest.mark.timeout(60)
def test_a_refusal_to_join_ends_the_meeting_with_its_cause(client: Client) -> None:
    client.refused = {"init"}
    with pytest.raises(RefitError, match="no init today") as refused:
        connected(client, source(list(WEIGHTS)))
    assert isinstance(refused.value.__cause__, ValueError)


@pytest.mark.timeout(60)
def test_a_name_that_is_no_string_is_refused_before_an_engine_is_told(client: Client) -> None:
    with pytest.raises(RefitConfigurationError, match="Expected `str`, got `int`"):
        connected(client, source([5]))


@pytest.mark.timeout(60)
def test_a_refused_update_ends_the_send_with_its_cause_and_the_next_one_is_whole(
    client: Client,
) -> None:
    trainer = connected(client, source(list(WEIGHTS)))
    client.refused = {"update"}
    with pytest.raises(RefitError, match="no update today") as refused:
        trainer.send_weights()
    assert isinstance(refused.value.__cause__, ValueError)
    client.refused = set()
    assert_sent(trainer, client, 3)
    trainer.shutdown()


def test_an_update_that_was_not_started_is_refused_and_nothing_changes(client: Client) -> None:
    trainer = connected(client, source(list(WEIGHTS)))
    with pytest.raises(RefitError, match="call start_weight_update before"):
        client.update_weights({})
    client.worker._gate.check()
    assert_sent(trainer, client, 1)
    with pytest.raises(RefitError, match="call start_weight_update before"):
        client.update_weights({})
    trainer.shutdown()


def test_a_second_send_is_refused_and_the_first_is_whole(client: Client) -> None:
    running, go_on = threading.Event(), threading.Event()

    def before() -> None:
        running.set()
        go_on.wait(60)

    trainer = connected(client, source(list(WEIGHTS), before))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(trainer.send_weights, 1)
        assert running.wait(60)
        with pytest.raises(RefitError, match="a send is running"):
            trainer.send_weights(2)
        go_on.set()
        first.result()
    assert client.version == "1"
    assert_sent(trainer, client, 2)
    trainer.shutdown()


@pytest.mark.parametrize(
    ("declared", "undeclared"), [(["w0", "w2", "w3"], "w1"), (["w0", "w1", "w2"], "w3"), ([], "w0")]
)
def test_a_weight_that_was_not_declared_is_refused_by_name(
    client: Client, declared: list[str], undeclared: str
) -> None:
    trainer = connected(client, source(declared))
    with pytest.raises(WeightMismatch, match=f"'{undeclared}', which its metadata"):
        trainer.send_weights()
    assert client.version is None
    trainer.shutdown()
