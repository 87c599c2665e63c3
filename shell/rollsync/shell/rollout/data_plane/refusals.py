"""What every data plane refuses of a caller, in the same words.

Rule kept here: an error names the partition, and at most five of what is wrong.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import torch

from rollsync.shell.rollout.data_plane.protocol import Row, Tags
from rollsync.shell.rollout.errors import DataPlaneError


def check_tags(partition_id: str, rows: Container[str], tags: Mapping[str, Tags]) -> None:
    """Tags are put with rows, and not by themselves.

    Raises:
        DataPlaneError: there are some for a row that is not put.
    """
    stray = [key for key in tags if key not in rows]
    if stray:
        raise DataPlaneError(
            f"partition {partition_id}: tags for {some(stray)}, which are not put",
            remedy="give tags only for the keys of `rows`",
        )


def check_held(partition_id: str, held: Container[str], keys: Sequence[str]) -> None:
    """What is asked for has to be there.

    Raises:
        DataPlaneError: a row is not.
    """
    missing = [key for key in keys if key not in held]
    if missing:
        raise DataPlaneError(f"partition {partition_id} has no row {some(missing)}")


def field_of(row: Row, name: str, key: str, partition_id: str) -> torch.Tensor:
    """A field of a row.

    Raises:
        DataPlaneError: the row has none of that name.
    """
    tensor = row.get(name)
    if tensor is None:
        raise DataPlaneError(
            f"partition {partition_id}: row {key} has no field {name}, it has {some(sorted(row))}"
        )
    return tensor


def some(names: Sequence[str]) -> str:
    """The first few, and how many more there are."""
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
