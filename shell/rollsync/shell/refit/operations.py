"""Every torch operation that happens in a block, told one by one, and the tensors it is given.

Rule kept here: nothing about an operation is changed; who is told of one may use torch freely, and
is told of nothing that this leads to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

SeeOperation = Callable[[torch._ops.OpOverload, object, object], None]
SeeCall = Callable[[str, object], None]

_GIVE_AWAY = (
    torch.Tensor.numpy,
    torch.Tensor.__array__,
    torch.Tensor.tolist,
    torch.Tensor.__dlpack__,
    torch.Tensor.__reduce_ex__,
    torch.Tensor.data_ptr,
    torch.Tensor.untyped_storage,
)


@contextlib.contextmanager
def watched(see_operation: SeeOperation, see_call: SeeCall) -> Iterator[None]:
    """Watches this thread.

    Args:
        see_operation: told of each operation of the dispatcher after it was done: what it was, its
            arguments, its answer.
        see_call: told, before it is made, of each call of an operator that torch itself does not
            bring, with its arguments, as some are registered so that the dispatcher does not tell;
            and of each that gives a tensor's elements to something else than torch.
    """
    with _Calls(see_call), _Operations(see_operation):
        yield


def gave_views(
    func: torch._ops.OpOverload, tensors: Sequence[torch.Tensor], answer: object
) -> bool:
    """Whether an operation neither read nor wrote elements, and only gave views of `tensors`."""
    if not all(each.alias_info and not each.alias_info.is_write for each in func._schema.returns):
        return False
    # Some, such as `reshape`, copy where no view is possible.
    given = {each.untyped_storage()._cdata for each in tensors}
    views = tensors_in(answer)
    return bool(views) and all(each.untyped_storage()._cdata in given for each in views)


def rows_taken(func: torch._ops.OpOverload, arguments: object) -> list[torch.Tensor] | None:
    """What an operation reads that takes some rows of a tensor by their numbers; None: it does
    something else."""
    match arguments:
        case ((torch.Tensor() as tensor, [torch.Tensor() as index]), _) if (
            func is torch.ops.aten.index.Tensor
        ):
            dimension = 0
        case ((torch.Tensor() as tensor, int(dimension), torch.Tensor() as index), _) if (
            func is torch.ops.aten.index_select.default
        ):
            pass
        case _:
            return None
    if index.dtype in (torch.bool, torch.uint8):
        return None
    numbers: list[int] = index.unique().tolist()
    return [index, *(tensor.select(dimension, number) for number in numbers)]


def tensors_in(tree: object) -> list[torch.Tensor]:
    """The tensors of an operation's arguments, or of its answer."""
    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]


class _Operations(TorchDispatchMode):
    """Tells `see` of every operation after it was done."""

    def __init__(self, see: SeeOperation) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._see = see

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        answer: object = func(*args, **(kwargs or {}))
        with _disable_current_modes():
            self._see(func, (args, kwargs), answer)
        return answer


class _Calls(TorchFunctionMode):
    """Tells `see` of every call of an operator of another library than torch's own, and of those
    that give a tensor away."""

    def __init__(self, see: SeeCall) -> None:
        super().__init__()
        self._see = see

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        if isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            name = str(func)
            if not name.startswith(("aten.", "prims.")):
                self._see(name, (args, kwargs))
        elif func in _GIVE_AWAY:
            self._see(f"Tensor.{func.__name__}", (args, kwargs))
        return func(*args, **(kwargs or {}))
