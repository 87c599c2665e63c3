"""Work that only computes, on all of the machine's cores."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

_Given = TypeVar("_Given")
_Answer = TypeVar("_Answer")


def in_processes(
    function: Callable[[_Given], _Answer], arguments: Iterable[_Given]
) -> list[_Answer]:
    """What `map` gives, from processes of their own, of which none has anything of this one.

    Args:
        function: of a module that the processes can import.
    """
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        return list(pool.map(function, arguments))
