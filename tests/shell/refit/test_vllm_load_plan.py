"""The plan of vLLM's own loader: replayed, it leaves the bytes that the loader leaves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from rollsync.pure.refit.layout import joined, whole
from rollsync.shell.refit.boxes import bytes_of
from rollsync.shell.refit.load_recorder import LoadRecorder, serving_tensors
from rollsync.shell.refit.weights import checkpoint_weights
from tests.shell.refit.tiny_models import make_model, save_model
from tests.shell.refit.vllm_models import VllmModel, on_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

VOCABULARY = 100
"""Which vLLM pads."""


@dataclass(frozen=True)
class Learned:
    direct: list[str]
    staged: dict[str, str]
    read: list[str]
    """Tensors of which everything is read."""
    different: list[str]
    """Parameters whose bytes a replay left otherwise than the loader did."""


def learn_and_replay(model: VllmModel, *, tied: bool) -> Learned:
    def load(seed: int, recorder: LoadRecorder | None) -> None:
        weights = list(checkpoint_weights(make_model(tied=tied, seed=seed, vocabulary=VOCABULARY)))
        update = model.update(recorder)
        update.start()
        for first in range(0, len(weights), 5):
            # One memory for every batch, which the next overwrites, as with buckets.
            batch = [
                (name, memory.copy_(t))
                for name, t in weights[first : first + 5]
                for memory in [torch.empty_like(t)]
            ]
            update.load(batch)
            for _, tensor in batch:
                tensor.fill_(float("nan"))
        update.finish()

    recorder = LoadRecorder(serving_tensors(model.module))
    load(1, recorder)
    tensors = serving_tensors(model.module)
    plan = recorder.plan(lambda name: tensors[name][1] if name in tensors else None)
    load(2, None)
    loaded = {name: tensor.clone() for name, (_, tensor) in tensors.items()}
    load(1, None)
    for name, tensor in checkpoint_weights(make_model(tied=tied, seed=2, vocabulary=VOCABULARY)):
        for copy in plan.tensors[name].copies if plan.tensors[name].is_direct else ():
            target = bytes_of(tensors[copy.parameter][1], copy.target).view(-1)
            target.copy_(bytes_of(tensor, copy.source).reshape(-1))
    return Learned(
        direct=sorted(plan.direct),
        staged={n: t.staged_because for n, t in plan.tensors.items() if not t.is_direct},
        read=sorted(n for n, t in plan.tensors.items() if joined(t.reads) == (whole(t.spec),)),
        different=sorted(
            name
            for name, (layer, tensor) in tensors.items()
            if layer in plan.layers and not torch.equal(tensor, loaded[name])
        ),
    )


def untied_plan(model: VllmModel) -> Learned:
    return learn_and_replay(model, tied=False)


def tied_plan(model: VllmModel) -> Learned:
    return learn_and_replay(model, tied=True)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_that_serve_as_they_are_loaded_are_all_direct(
    tmp_path: Path, ranks: int, tied: bool
) -> None:
    path = save_model(tmp_path / "model", tied=tied, vocabulary=VOCABULARY)
    names = sorted(name for name, _ in checkpoint_weights(make_model(tied=tied)))
    for learned in on_ranks(tied_plan if tied else untied_plan, path, ranks=ranks, plain=True):
        assert learned.direct == names
        assert learned.staged == {}
        assert learned.different == []


def test_packed_weights_stay_with_the_loader(tmp_path: Path) -> None:
    path = save_model(tmp_path / "model", vocabulary=VOCABULARY)
    (learned,) = on_ranks(untied_plan, path, ranks=1, plain=False)
    assert learned.direct
    assert all("norm" in name for name in learned.direct)
    assert set(learned.read) == {*learned.direct, *learned.staged}
    assert learned.different == []
