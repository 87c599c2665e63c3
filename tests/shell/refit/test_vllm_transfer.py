"""What the two halves of the native backend refuse, and that each refusal reaches the trainer.

The halves are the real ones, in one process; only vLLM's engine between them is left out.
"""

from __future__ import annotations

import socket
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
    """vLLM's calls, answered by one worker here; a call in `refused` fails, and one in `halted`
    does not end."""

    def __init__(self, place: int = 0) -> None:
        from rollsync.shell.refit.vllm_transfer import RollsyncWeightTransferEngine

        self.kept: dict[str, torch.Tensor] = {}
        self.refused: set[str] = set()
        self.halted: set[str] = set()
        self.version: str | None = None

        self.worker: Any = RollsyncWeightTransferEngine(
            SimpleNamespace(),  # type: ignore[arg-type]
            SimpleNamespace(  # type: ignore[arg-type]
                parallel_config=SimpleNamespace(data_parallel_index=place, world_size=1),
                model_config=None,
            ),
            torch.device("cpu"),
            torch.nn.Linear(1, 1),
        )
        self.worker._receiver = RefitReceiver(
            local_rank=0, engine_world_size=1, make_update=lambda _: Update(self.kept)
        )

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._check("init")
        self.worker.init_transfer_engine(self.worker.parse_init_info(init_info))

    def start_weight_update(self) -> None:
        self._check("start")
        self.worker.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        self._check("update")
        self.worker.receive_weights(self.worker.parse_update_info(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._check("finish")
        self.worker.finish_weight_update()
        self.version = weight_version

    def _check(self, call: str) -> None:
        if call in self.refused:
            raise ValueError(f"no {call} today")
        if call in self.halted:
            threading.Event().wait()


class Both:
    """vLLM's client of two engines, each of which is at it at the same time."""

    def __init__(self, clients: list[Client]) -> None:
        self.clients = clients
        self._pool = ThreadPoolExecutor(2)

    def _each(self, call: Callable[[Client], object]) -> None:
        for done in [self._pool.submit(call, client) for client in self.clients]:
            done.result()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._each(lambda client: client.init_weight_transfer_engine(init_info))

    def start_weight_update(self) -> None:
        self._each(Client.start_weight_update)

    def update_weights(self, update_info: Any) -> None:
        self._each(lambda client: client.update_weights(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._each(lambda client: client.finish_weight_update(weight_version))


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


def connected(client: Any, weights: Any, **options: Any) -> Any:
    from rollsync.shell.refit.vllm_transfer_trainer import (
        RollsyncTrainerInitInfo,
        RollsyncTrainerWeightTransferEngine,
    )

    return RollsyncTrainerWeightTransferEngine.trainer_init(
        RollsyncTrainerInitInfo(
            **{
                "rank": 0,
                "engine": "shm",
                "bucket_size_bytes": 8192,
                "rollout_world_size": 1,
                "timeout_s": 250,
                **options,
            }
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


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@pytest.mark.timeout(60)
def test_all_trainer_workers_hear_of_an_update_that_only_the_first_was_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    engines = Both([Client(0), Client(1)])
    meeting = {"port": free_port(), "secret": "5ec2e7", "train_world_size": 2}
    options = {**meeting, "rollout_world_size": 2}
    with ThreadPoolExecutor(2) as workers:

        def each(work: Callable[[int], Any]) -> list[Any]:
            return [done.result() for done in [workers.submit(work, rank) for rank in (0, 1)]]

        def send(rank: int) -> Exception | None:
            try:
                trainers[rank].send_weights(4)
            except RefitError as error:
                return error
            return None

        trainers = each(
            lambda rank: connected(engines, source(list(WEIGHTS)), rank=rank, **options)
        )
        for client in engines.clients:
            client.refused = {"update"}
        first, second = each(send)
        assert isinstance(first.__cause__, ValueError)
        assert "trainer rank 0 has given this update up" in str(second)
        assert "no update today" in str(second)
        for client in engines.clients:
            client.refused = set()
        assert each(send) == [None, None]
        for client in engines.clients:
            assert list(client.kept) == list(WEIGHTS)
            client.worker.shutdown()
        for trainer in trainers:
            trainer.shutdown()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("call", ["start", "update", "finish"])
def test_an_engine_that_is_halted_is_not_waited_for_for_ever(client: Client, call: str) -> None:
    trainer = connected(
        client, source(list(WEIGHTS)), timeout_s=5.0, engine_kwargs={"refit_timeout_s": 0.3}
    )
    client.halted = {call}
    trainer._timeout_s = 0.3
    with pytest.raises(RefitError, match=r"not ended start_|said nothing for|not ended finish_"):
        trainer.send_weights()
    trainer.shutdown()


@pytest.mark.timeout(60)
def test_an_engine_that_is_halted_when_it_is_to_join_is_not_either(client: Client) -> None:
    client.halted = {"init"}
    with pytest.raises(RefitError, match=r"worker 1 of 2 .* within 0.3 s"):
        connected(client, source(list(WEIGHTS)), timeout_s=0.3)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"timeout_s": 0}, "timeout_s is 0: give a positive number"),
        ({"timeout_s": float("inf")}, "timeout_s is inf: give a positive number"),
        ({"timeout_s": float("nan")}, "timeout_s is nan: give a positive number"),
        ({"engine_kwargs": {"refit_timeout_s": -1}}, "refit_timeout_s is -1: give a positive"),
        ({"bucket_size_bytes": 0}, "bucket_size_bytes is 0 .*at least 1"),
        ({"rollout_world_size": 0}, "rollout_world_size is 0 .*at least 1"),
        ({"train_world_size": 0}, "train_world_size is 0 .*at least 1"),
        ({"rank": 1}, "rank is 1 .*from 0 to 0"),
        ({"port": 70_000}, "port is 70000 .*from 0 to 65535"),
    ],
)
def test_a_number_that_is_of_no_use_is_refused_by_its_name(
    client: Client, wrong: dict[str, Any], words: str
) -> None:
    with pytest.raises(RefitConfigurationError, match=words):
        connected(client, source(list(WEIGHTS)), **wrong)
