"""A trainer's worker as a synchronizer sees it."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rollsync.shell.refit.host_memory import container_limit_bytes, worker_total_memory_bytes
from rollsync.shell.refit.policy_worker import PolicyRefitMixin
from rollsync.shell.refit.weights import WEIGHT_VERSION_NAME
from tests.shell.refit.scripted_engine import SCRIPTED, ScriptedEngine
from tests.shell.refit.tiny_models import TinyPolicy


def test_key_value_scales_follow_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedEngine, "made", [])
    policy = TinyPolicy(rank=3)
    policy.version = 9
    policy.checkpoint_engine_rpc(
        "init_checkpoint_engine",
        {"backend": SCRIPTED, "bucket_size_bytes": 1024, "engine_kwargs": {}},
    )
    assert policy.checkpoint_engine_rpc("prepare_checkpoint_engine") == {
        "endpoint": "here",
        "rank": 3,
    }
    policy.checkpoint_engine_rpc(
        "send_weights_via_checkpoint_engine", {"kv_scales": {"layer.k_scale": 0.5}}
    )
    (engine,) = ScriptedEngine.made
    assert engine.sent[0][0] == WEIGHT_VERSION_NAME
    assert [name for name, _ in engine.sent[1:-1]] == list(policy.prepare_refit_info())
    name, scale = engine.sent[-1]
    assert (name, scale.dtype, scale.shape, scale.item()) == (
        "layer.k_scale",
        torch.float32,
        torch.Size([]),
        0.5,
    )
    policy.checkpoint_engine_rpc("finalize_checkpoint_engine")
    assert engine.calls[-1] == "finalize"


def test_a_rank_is_nought_until_it_is_set() -> None:
    worker = PolicyRefitMixin()
    assert worker.refit_rank == 0
    worker.refit_rank = 3
    assert worker.refit_rank == 3


def test_memory_is_shared_by_the_workers_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    alone = worker_total_memory_bytes(1)
    assert alone > 0
    assert worker_total_memory_bytes(4) == alone // 4
    assert TinyPolicy().checkpoint_engine_rpc("checkpoint_engine_total_memory_bytes") == alone


@pytest.mark.parametrize(("text", "limit_bytes"), [("1073741824\n", 1073741824), ("max\n", None)])
def test_the_container_limit_is_the_first_file_that_is_there(
    tmp_path: Path, text: str, limit_bytes: int | None
) -> None:
    newer, older = tmp_path / "memory.max", tmp_path / "limit_in_bytes"
    assert container_limit_bytes((newer, older)) is None
    older.write_text("42\n")
    assert container_limit_bytes((newer, older)) == 42
    newer.write_text(text)
    assert container_limit_bytes((newer, older)) == limit_bytes


def test_checks_stay_when_python_optimizes() -> None:
    program = (
        "from rollsync.shell.refit.errors import RefitConfigurationError\n"
        "from rollsync.shell.refit.refit_sender import RefitSender\n"
        "from rollsync.shell.refit.generation import ServingGate, served_version\n"
        "from rollsync.shell.refit.errors import EngineNotServing\n"
        "served = lambda: served_version(ServingGate().state, 0)\n"
        "for check in (RefitSender(rank=0).prepare, served):\n"
        "    try:\n"
        "        check()\n"
        "    except (RefitConfigurationError, EngineNotServing) as error:\n"
        "        print(type(error).__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-O", "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["RefitConfigurationError", "EngineNotServing"], done.stderr
