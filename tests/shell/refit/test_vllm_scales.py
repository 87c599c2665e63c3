"""Scales of the key/value cache, from a synchronizer's argument to vLLM's attention."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.shell.refit.tiny_models import TinyPolicy, save_model
from tests.shell.refit.vllm_models import VllmModel, on_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCHEME = {
    "quant_method": "compressed-tensors",
    "format": "dense",
    "config_groups": {},
    "ignore": [],
    "kv_cache_scheme": {
        "num_bits": 8,
        "type": "float",
        "strategy": "tensor",
        "symmetric": True,
        "dynamic": False,
    },
}
"""Of a model that only has scales of its fp8 cache."""


def scales_after(
    model: VllmModel, options: Mapping[str, object], syncs: list[dict[str, float]]
) -> list[list[tuple[str, float, float]]]:
    """The scales that attention computes with after each of several syncs with these."""
    policy = TinyPolicy()
    receiver = model.receiver()
    engine = {
        "backend": "shm",
        "bucket_size_bytes": 65536,
        "engine_kwargs": {"refit_timeout_s": 60.0, **options},
    }
    policy.checkpoint_engine_rpc("init_checkpoint_engine", engine)
    receiver.init(**engine)  # type: ignore[arg-type]
    metadata = [policy.checkpoint_engine_rpc("prepare_checkpoint_engine"), receiver.prepare()]
    world = {"train_world_size": 1, "rollout_world_size": 1, "metadata": metadata}
    policy.checkpoint_engine_rpc("init_checkpoint_engine_process_group", world)
    receiver.init_process_group(0, 1, 1, metadata)
    after = []
    for kv_scales in syncs:
        sending = threading.Thread(
            target=policy.checkpoint_engine_rpc,
            args=("send_weights_via_checkpoint_engine", {"kv_scales": kv_scales}),
        )
        sending.start()
        receiver.update()
        sending.join()
        after.append(
            [
                (name, float(layer._k_scale), float(layer._v_scale))
                for name, layer in model.module.named_modules()
                if hasattr(layer, "_k_scale")
            ]
        )
    policy.checkpoint_engine_rpc("finalize_checkpoint_engine")
    receiver.finalize()
    return after


def kv_scales(name: str, k_scale: float, v_scale: float) -> dict[str, float]:
    """For both layers, whose names are told apart by their number."""
    return {
        name.format(layer) + end: scale
        for layer in range(2)
        for end, scale in ((".k_scale", k_scale), (".v_scale", v_scale))
    }


NAMES = ("model.layers.{}.self_attn", "model.layers.{}.self_attn.attn")


def staged_and_direct(model: VllmModel) -> list[list[list[tuple[str, float, float]]]]:
    staged = [kv_scales(NAMES[0], 0.25, 0.5), kv_scales(NAMES[1], 0.125, 2.0), {}]
    # Directly, a stream is of the same names each time.
    direct = [kv_scales(NAMES[0], scale, 2 * scale) for scale in (0.25, 0.5, 4.0)]
    return [scales_after(model, {}, staged), scales_after(model, {"direct": True}, direct)]


def test_scales_of_the_cache_reach_attention_and_stay_until_others_come(tmp_path: Path) -> None:
    path = save_model(tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": SCHEME}))
    attention = [f"model.layers.{layer}.self_attn.attn" for layer in range(2)]
    expected = [
        [[(name, *scales) for name in attention] for scales in synced]
        for synced in (
            ((0.25, 0.5), (0.125, 2.0), (0.125, 2.0)),
            ((0.25, 0.5), (0.5, 1.0), (4.0, 8.0)),
        )
    ]
    assert on_ranks(staged_and_direct, path, ranks=1, plain=True) == [expected]
