"""`refit.plan`: what one side of a refit declares about its bucket plan.

Every declaration that fits the schema is read, also one that no side could pack (a name that comes
twice, a tensor of any size): it is only compared with one's own, which finds the difference.
"""

from __future__ import annotations

from typing import Final

from returns.result import Result, Success

from rollsync.codecs.kind import Refusal, first, kind
from rollsync.codecs.refit.plan import v1
from rollsync.pure.refit import DeclaredPlan, TensorSpec


def to_wire(declared: DeclaredPlan) -> v1.DeclaredPlan:
    """The declaration with its tensors as records."""
    return v1.DeclaredPlan(
        plan_version=declared.plan_version,
        bucket_bytes=declared.bucket_bytes,
        tensors=tuple(
            v1.Tensor(name=spec.name, shape=spec.shape, dtype=spec.dtype, aliases=spec.aliases)
            for spec in declared.tensors
        ),
    )


def from_wire(wire: v1.DeclaredPlan) -> Result[DeclaredPlan, Refusal]:
    """The declaration."""
    return Success(
        DeclaredPlan(
            plan_version=wire.plan_version,
            bucket_bytes=wire.bucket_bytes,
            tensors=tuple(
                TensorSpec(tensor.name, tensor.shape, tensor.dtype, tensor.aliases)
                for tensor in wire.tensors
            ),
        )
    )


DECLARED_PLAN: Final = kind(
    "refit.plan",
    domain=DeclaredPlan,
    history=first(v1.DeclaredPlan),
    to_wire=to_wire,
    from_wire=from_wire,
)
