"""Which weights of a module are sent, and which of a stream are accepted."""

import pytest
import torch

from rollsync.pure.refit import TensorSpec
from rollsync.shell.refit.errors import WeightMismatch
from rollsync.shell.refit.torch_update import TorchModelUpdate
from rollsync.shell.refit.weights import (
    WEIGHT_VERSION_NAME,
    WeightChecker,
    checkpoint_weights,
    declare_weights,
    declared_specs,
    with_version,
)
from tests.shell.refit.tiny_models import make_model


class WithBuffers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.BatchNorm1d(3)
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.weight = torch.nn.Parameter(torch.zeros(2, 3))


def test_parameters_and_persistent_buffers_are_sent() -> None:
    module = WithBuffers()
    sent = dict(checkpoint_weights(module))
    assert set(sent) == set(module.state_dict())
    assert all(torch.equal(sent[name], tensor) for name, tensor in module.state_dict().items())


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_weight_is_sent_once_and_declared_under_its_other_names(tied: bool) -> None:
    model = make_model(tied=tied)
    sent = [name for name, _ in checkpoint_weights(model)]
    declared = declare_weights(model)
    assert list(declared) == sent
    assert len(sent) == len(set(sent))
    assert ("lm_head.weight" in sent) != tied
    aliases = declared["model.embed_tokens.weight"].aliases
    assert aliases == (("lm_head.weight",) if tied else ())


def test_the_version_comes_first_even_if_it_is_zero() -> None:
    stream = list(with_version([("w", torch.ones(1))], 0))
    assert [name for name, _ in stream] == [WEIGHT_VERSION_NAME, "w"]
    assert stream[0][1].item() == 0


def test_what_was_declared_is_accepted_under_every_name() -> None:
    checker = WeightChecker({"w": TensorSpec("w", (2,), "float32", ("v", "u"))})
    tensor = torch.ones(2)
    accepted = checker.check([("w", tensor), ("not declared", tensor)])
    assert [name for name, _ in accepted] == ["w", "v", "u", "not declared"]
    checker.check_complete()


@pytest.mark.parametrize(
    "tensor", [torch.ones(2, dtype=torch.bfloat16), torch.ones(3), torch.ones(2, 1)]
)
def test_another_dtype_or_shape_is_refused_by_name(tensor: torch.Tensor) -> None:
    checker = WeightChecker({"w": TensorSpec("w", (2,), "float32")})
    with pytest.raises(WeightMismatch, match="'w'") as raised:
        checker.check([("w", tensor)])
    assert raised.value.tensor == "w"


def test_a_stream_without_a_declared_weight_is_refused() -> None:
    checker = WeightChecker({n: TensorSpec(n, (2,), "float32") for n in ("w", "v")})
    checker.check([("w", torch.ones(2))])
    with pytest.raises(WeightMismatch, match="'v'"):
        checker.check_complete()


def test_a_tie_that_the_engine_hands_on_is_not_doubled() -> None:
    checker = WeightChecker({"w": TensorSpec("w", (2,), "float32", ("tied", "too"))})
    batch = [("w", torch.ones(2)), ("tied", torch.ones(2))]
    assert [name for name, _ in checker.check(batch)] == ["w", "too", "tied"]


@pytest.mark.parametrize(
    ("refit_info", "declared"),
    [
        (None, None),
        ([TensorSpec("w", (2,), "float32")], None),
        ({}, ()),
        (
            {"w": TensorSpec("w", (2,), "float32", ("v",))},
            (TensorSpec("w", (2,), "float32", ("v",)),),
        ),
        (
            {"w": (torch.Size([2, 3]), torch.bfloat16), "v": ((), torch.int8)},
            (TensorSpec("w", (2, 3), "bfloat16"), TensorSpec("v", (), "int8")),
        ),
        ({"w": ((2,), torch.float32), "v": (3, "float32")}, None),
        ({"w": (("2",), torch.float32)}, None),
        ({"w": ((2,), torch.float32, "more")}, None),
        ({1: ((2,), torch.float32)}, None),
    ],
)
def test_what_a_policy_declares_is_read_in_either_form(
    refit_info: object, declared: tuple[TensorSpec, ...] | None
) -> None:
    assert declared_specs(refit_info) == declared


def test_a_policy_that_declares_nothing_is_not_checked() -> None:
    checker = WeightChecker(None)
    batch = [("w", torch.ones(2))]
    assert checker.check(batch) == batch
    checker.check_complete()


def test_a_torch_module_takes_converted_weights_and_buffers() -> None:
    source, target = WithBuffers(), WithBuffers()
    with torch.no_grad():
        source.weight.fill_(1.5)
        source.inner.get_buffer("running_mean").fill_(4.0)
    update = TorchModelUpdate(target)
    update.start()
    update.load(
        [(n, t.double() if t.is_floating_point() else t) for n, t in checkpoint_weights(source)]
    )
    update.finish()
    for name, tensor in source.state_dict().items():
        assert torch.equal(target.state_dict()[name], tensor)


def test_a_torch_module_is_complete_with_one_name_of_a_tied_weight() -> None:
    source, target = make_model(tied=True, seed=1), make_model(tied=True, seed=2)
    update = TorchModelUpdate(target)
    update.start()
    update.load(list(checkpoint_weights(source)))
    update.finish()
    assert torch.equal(target.lm_head.weight, source.lm_head.weight)


@pytest.mark.parametrize(
    "batch", [[("nobody", torch.ones(2))], [("scale", torch.ones(2)), ("weight", torch.ones(3, 2))]]
)
def test_a_torch_module_refuses_a_batch_before_it_takes_any_of_it(
    batch: list[tuple[str, torch.Tensor]],
) -> None:
    module = WithBuffers()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    update = TorchModelUpdate(module)
    update.start()
    with pytest.raises(WeightMismatch):
        update.load(batch)
    for name, tensor in before.items():
        assert torch.equal(module.state_dict()[name], tensor)


def test_a_torch_module_that_did_not_get_everything_is_not_finished() -> None:
    update = TorchModelUpdate(WithBuffers())
    update.start()
    update.load([("weight", torch.ones(2, 3))])
    with pytest.raises(WeightMismatch, match="without weights"):
        update.finish()
    update.abort()
    update.finish()
