"""vLLM's model, read into directly: it ends with the bytes that its own loader would leave."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from rollsync.shell.refit.load_recorder import serving_tensors
from rollsync.shell.refit.refit_sender import RefitSender
from rollsync.shell.refit.weights import checkpoint_weights
from tests.shell.refit.tiny_models import make_model, save_model
from tests.shell.refit.vllm_models import VllmModel, on_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

VOCABULARY = 100


def weights_after(model: VllmModel, options: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """The serving weights after three syncs over an engine of these options."""
    sender = RefitSender(rank=0)
    receiver = model.receiver()
    for end in (sender, receiver):
        end.init("shm", 65536, {"refit_timeout_s": 30.0, **options})
    metadata = [sender.prepare(), receiver.prepare()]
    sender.init_process_group(metadata=metadata, train_world_size=1, rollout_world_size=1)
    receiver.init_process_group(0, 1, 1, metadata)
    for version in (1, 2, 3):
        policy = make_model(seed=version, vocabulary=VOCABULARY)
        sending = threading.Thread(
            target=sender.send,
            args=(checkpoint_weights(policy),),
            kwargs={"weight_version": lambda version=version: version},
        )
        sending.start()
        receiver.update()
        sending.join()
    sender.finalize()
    receiver.finalize()
    return {name: tensor.clone() for name, (_, tensor) in serving_tensors(model.module).items()}


def different(model: VllmModel) -> list[str]:
    """Weights that the direct way leaves otherwise than the buckets do."""
    direct = weights_after(model, {"direct": True})
    staged = weights_after(model, {})
    return [name for name in staged if not torch.equal(staged[name], direct[name])]


@pytest.mark.parametrize("plain", [True, False])
def test_a_direct_refit_leaves_what_the_loader_leaves(tmp_path: Path, plain: bool) -> None:
    path = save_model(tmp_path / "model", vocabulary=VOCABULARY)
    assert on_ranks(different, path, ranks=1, plain=plain) == [[]]
