"""What can go wrong in the decisions of refit, as values.

Rule kept here: each kind of mistake is a frozen struct of its own, and `describe` says in a
sentence or two what is wrong and what to do. Nothing here is an exception.
"""

from __future__ import annotations

from typing import assert_never

from msgspec import Struct


class BucketSizeUnaligned(Struct, frozen=True, kw_only=True, tag=True):
    """A bucket size that is not a positive multiple of the alignment."""

    bucket_bytes: int
    alignment_bytes: int


class TensorNamedTwice(Struct, frozen=True, kw_only=True, tag=True):
    """A tensor whose name, or one of whose aliases, came before in the stream."""

    tensor: str
    aliases: tuple[str, ...]


class UnknownDtype(Struct, frozen=True, kw_only=True, tag=True):
    """A tensor of an element type whose size is not known."""

    tensor: str
    dtype: str


class NegativeDimension(Struct, frozen=True, kw_only=True, tag=True):
    """A tensor with a dimension below zero."""

    tensor: str
    shape: tuple[int, ...]


PlanError = BucketSizeUnaligned | TensorNamedTwice | UnknownDtype | NegativeDimension


def describe(error: PlanError) -> str:
    """What is wrong, and what to do about it."""
    match error:
        case BucketSizeUnaligned():
            return (
                f"a bucket of {error.bucket_bytes} bytes cannot be packed: give a positive "
                f"multiple of {error.alignment_bytes} bytes"
            )
        case TensorNamedTwice():
            names = " or ".join(repr(name) for name in (error.tensor, *error.aliases))
            return (
                f"{names} comes twice in the stream of weights: send each tensor once, and name "
                "tied weights as aliases of one tensor"
            )
        case UnknownDtype():
            return (
                f"tensor {error.tensor!r} has the dtype {error.dtype!r}, which is no torch dtype: "
                "send it under torch's own name, such as 'bfloat16'"
            )
        case NegativeDimension():
            return (
                f"tensor {error.tensor!r} has the shape {list(error.shape)}: "
                "a dimension cannot be negative"
            )
        case _:
            assert_never(error)
