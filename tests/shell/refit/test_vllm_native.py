"""rollsync as vLLM's own weight-transfer backend, driven by vLLM's own calls."""

from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import ray

from rollsync.shell.refit.errors import EngineNotServing, RefitConfigurationError, RefitError
from tests.shell.refit.native_backend import NativeTrainer, NativeVllm
from tests.shell.refit.tiny_models import save_model
from tests.shell.refit.vllm_engines import (
    MEBIBYTE,
    answer_of_a_fresh_engine,
    is_answer_of,
    saved_step,
    vllm_actor,
)


def test_vllm_finds_the_backend_by_its_entry_point() -> None:
    (plugin,) = entry_points(group="vllm.general_plugins", name="rollsync")
    assert plugin.value == "rollsync.shell.refit.vllm_plugin:register"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("cluster")
def test_start_update_and_finish_move_to_each_rank_what_it_keeps(tmp_path: Path) -> None:
    # So many rows divide by two ranks without padding.
    start = save_model(tmp_path / "start", tied=True, vocabulary=128)
    engine = vllm_actor(
        NativeVllm,
        start,
        env={"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"},
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
    )
    trainer: Any = ray.remote(NativeTrainer).options(num_cpus=0).remote(tied=True, vocabulary=128)
    options = {"engine": "shm", "bucket_size_bytes": MEBIBYTE, "rollout_world_size": 2}
    with pytest.raises(RefitConfigurationError, match="only part of the weights"):
        ray.get(trainer.connect.remote(engine, options, held_names=["lm_head.weight"]))
    ray.get(trainer.connect.remote(engine, options))
    received: list[list[int]] = []
    for _ in range(3):
        saved, version = saved_step(trainer, tmp_path)
        ray.get(trainer.send.remote())
        assert ray.get(engine.get_weight_version.remote()) == str(version)
        (answer,) = ray.get(engine.answer.remote(version))
        assert is_answer_of(saved, answer, version)
        received.append(ray.get(engine.received_bytes.remote()))
    # The first update is whole; in those after it a rank gets half of all but norms.
    whole_bytes = received[0][0]
    assert received[0] == [whole_bytes, whole_bytes]
    assert received[1] == received[2]
    assert all(whole_bytes / 2 <= part < 0.52 * whole_bytes for part in received[1])
    ray.kill(engine)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("cluster")
def test_an_update_that_breaks_in_the_middle_is_made_good_or_ends_the_engine(
    tmp_path: Path,
) -> None:
    # In one process, vLLM lets its caller see what a worker raises.
    engine = vllm_actor(
        NativeVllm, save_model(tmp_path / "start"), env={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    )
    trainer: Any = ray.remote(NativeTrainer).options(num_cpus=0).remote()
    # One bucket holds half of the weights.
    options = {"engine": "shm", "bucket_size_bytes": MEBIBYTE // 8, "rollout_world_size": 1}
    ray.get(trainer.connect.remote(engine, options))
    ray.get(trainer.send.remote())
    ray.get(trainer.break_after.remote(20))
    saved, version = saved_step(trainer, tmp_path)
    with pytest.raises(ArithmeticError):
        ray.get(trainer.send.remote())
    assert ray.get(engine.get_weight_version.remote()) == "0"
    ray.get(trainer.break_after.remote(None))
    ray.get(trainer.send.remote())
    answer = ray.get(engine.answer.remote(version))
    assert answer == answer_of_a_fresh_engine(saved, version)
    ray.get(trainer.break_after.remote(20))
    with pytest.raises(ArithmeticError):
        ray.get(trainer.send.remote())
    with pytest.raises(EngineNotServing, match="mixture"):
        ray.get(engine.answer.remote(version))
    ray.get(engine.start_weight_update.remote())
    with pytest.raises(RefitError, match="before a whole stream of weights has come"):
        ray.get(engine.finish_weight_update.remote())
    ray.kill(engine)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("cluster")
def test_an_update_that_breaks_ends_an_engine_in_a_process_of_its_own(tmp_path: Path) -> None:
    engine = vllm_actor(NativeVllm, save_model(tmp_path / "start"))
    trainer: Any = ray.remote(NativeTrainer).options(num_cpus=0).remote()
    options = {"engine": "shm", "bucket_size_bytes": MEBIBYTE // 8, "rollout_world_size": 1}
    ray.get(trainer.connect.remote(engine, options))
    ray.get(trainer.send.remote())
    assert ray.get(engine.answer.remote(0))
    ray.get(trainer.break_after.remote(20))
    with pytest.raises(ArithmeticError):
        ray.get(trainer.send.remote())
    assert ray.get(engine.refusal.remote(0)) == "EngineDeadError"
    ray.kill(engine)
