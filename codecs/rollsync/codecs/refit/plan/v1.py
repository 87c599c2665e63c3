"""Version 1 of a declared plan: what the place of every byte in the buckets follows from."""

from __future__ import annotations

from rollsync.codecs.canonical import Natural, Wire


class Tensor(Wire, frozen=True, kw_only=True):
    """One tensor of the stream."""

    name: str
    shape: tuple[Natural, ...]
    dtype: str
    aliases: tuple[str, ...]


class DeclaredPlan(Wire, frozen=True, kw_only=True):
    """The declaration."""

    plan_version: Natural
    bucket_bytes: Natural
    tensors: tuple[Tensor, ...]
