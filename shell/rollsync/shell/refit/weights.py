"""Which weights a module sends, and how both sides check that they are the declared ones.

Rule kept here: what is sent is what a checkpoint of the module would hold: parameters and
persistent buffers, tied ones once, under their first name, with the other names declared.
"""

import functools
import itertools
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence, Set
from typing import Final

import torch

from rollsync.pure.refit import TensorSpec, check_sent, describe
from rollsync.shell.refit.errors import WeightMismatch

WEIGHT_VERSION_NAME: Final = "rollsync.weight_version"
"""The name under which a stream's first item carries the trainer version, as one int64."""

TAKES_VERSION: Final = "takes_weight_version"
"""In a rollout worker's metadata: it takes that item for what it is, and not for a weight."""


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Torch's own name of an element type, without the module."""
    return str(dtype).removeprefix("torch.")


def checkpoint_weights(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the module's weights by name, tied ones once, sharded ones gathered.

    Gathering is a collective: every rank that shares a parameter has to iterate in step.
    """
    for name, tensor in _named_once(module):
        full_tensor = getattr(tensor, "full_tensor", None)
        yield name, (full_tensor() if callable(full_tensor) else tensor).detach()


def declare_weights(module: torch.nn.Module) -> dict[str, TensorSpec]:
    """What `checkpoint_weights` will yield, by name and in its order; gathers nothing."""
    names: dict[int, list[str]] = {}
    for name, tensor in named_weights(module):
        names.setdefault(id(tensor), []).append(name)
    return {
        name: TensorSpec(
            name=name,
            shape=tuple(tensor.shape),
            dtype=dtype_name(tensor.dtype),
            aliases=tuple(names[id(tensor)][1:]),
        )
        for name, tensor in _named_once(module)
    }


def declared_specs(refit_info: object) -> tuple[TensorSpec, ...] | None:
    """What a policy's `prepare_refit_info` declares, in its order.

    Args:
        refit_info: a mapping of names to `TensorSpec`s, or to pairs of shape and dtype as
            NeMo-RL's policies answer; None, or anything else, declares nothing.
    """
    if not isinstance(refit_info, Mapping):
        return None
    specs = [_declared_spec(name, value) for name, value in refit_info.items()]
    return tuple(spec for spec in specs if spec is not None) if None not in specs else None


def _declared_spec(name: object, value: object) -> TensorSpec | None:
    match name, value:
        case str(), TensorSpec():
            return value
        case str(), (shape, torch.dtype() as dtype) if isinstance(shape, Sequence):
            if all(isinstance(size, int) for size in shape):
                return TensorSpec(name, tuple(shape), dtype_name(dtype))
    return None


def with_version(
    weights: Iterable[tuple[str, torch.Tensor]], version: int
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Puts the trainer version in front of a stream of weights."""
    yield WEIGHT_VERSION_NAME, torch.tensor(version, dtype=torch.int64)
    yield from weights


class WeightChecker:
    """Compares the weights of one stream with what the policy declared.

    Args:
        declared: weights by name; None when the policy declares nothing, and nothing is checked.
    """

    def __init__(self, declared: Mapping[str, TensorSpec] | None) -> None:
        self._declared = declared or {}
        self._missing = dict.fromkeys(self._declared)

    def check(self, batch: Sequence[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        """Answers the batch with every tied weight under all its names, also where the engine that
        it came through knows of one name only.

        Raises:
            WeightMismatch: when a weight's dtype or shape is not the declared one.
        """
        given = {name for name, _ in batch}
        return list(itertools.chain.from_iterable(self._check(*item, given) for item in batch))

    def _check(
        self, name: str, tensor: torch.Tensor, given: Set[str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        yield name, tensor
        declared = self._declared.get(name)
        if declared is None:
            # Not announced, and not forbidden: key/value scales are computed when they are sent.
            return
        self._missing.pop(name, None)
        sent = TensorSpec(
            name=name,
            shape=tuple(tensor.shape),
            dtype=dtype_name(tensor.dtype),
            aliases=declared.aliases,
        )
        mistake = check_sent(declared, sent)
        if mistake is not None:
            raise WeightMismatch(describe(mistake), tensor=name)
        for alias in declared.aliases:
            if alias not in given:
                yield alias, tensor

    def note_arrival(self, name: str) -> None:
        """A weight came by another way, on which its dtype and shape were compared."""
        self._missing.pop(name, None)

    def check_complete(self) -> None:
        """Called at the end of the stream.

        Raises:
            WeightMismatch: when a declared weight did not come.
        """
        for name in self._missing:
            raise WeightMismatch(
                f"the stream ended without the declared weight {name!r}",
                tensor=name,
                remedy="declare what is sent: in the policy's prepare_refit_info, or in the"
                " WeightSource's metadata()",
            )


def named_weights(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and persistent buffer, under each of its names."""
    yield from module.named_parameters(remove_duplicate=False)
    for prefix, part in module.named_modules(remove_duplicate=False):
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer


def _named_once(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    seen: set[int] = set()
    for name, tensor in named_weights(module):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor
