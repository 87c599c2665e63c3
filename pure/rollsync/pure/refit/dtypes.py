"""Element types of tensors by torch's names, so that sizes are known without torch.

Rule kept here: a name that is not in the table has no size; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

DTYPE_BYTES: Final[Mapping[str, int]] = MappingProxyType(
    {
        "bfloat16": 2,
        "bits16": 2,
        "bits1x8": 1,
        "bits2x4": 1,
        "bits4x2": 1,
        "bits8": 1,
        "bool": 1,
        "complex128": 16,
        "complex32": 4,
        "complex64": 8,
        "float16": 2,
        "float32": 4,
        "float4_e2m1fn_x2": 1,
        "float64": 8,
        "float8_e4m3fn": 1,
        "float8_e4m3fnuz": 1,
        "float8_e5m2": 1,
        "float8_e5m2fnuz": 1,
        "float8_e8m0fnu": 1,
        "int1": 1,
        "int16": 2,
        "int2": 1,
        "int3": 1,
        "int32": 4,
        "int4": 1,
        "int5": 1,
        "int6": 1,
        "int64": 8,
        "int7": 1,
        "int8": 1,
        "qint32": 4,
        "qint8": 1,
        "quint2x4": 1,
        "quint4x2": 1,
        "quint8": 1,
        "uint1": 1,
        "uint16": 2,
        "uint2": 1,
        "uint3": 1,
        "uint32": 4,
        "uint4": 1,
        "uint5": 1,
        "uint6": 1,
        "uint64": 8,
        "uint7": 1,
        "uint8": 1,
    }
)
"""Bytes of one element, by the name of the `torch.dtype` without its `torch.` prefix."""

SAFETENSORS_DTYPES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "BF16": "bfloat16",
        "BOOL": "bool",
        "C64": "complex64",
        "F16": "float16",
        "F32": "float32",
        "F64": "float64",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2",
        "F8_E8M0": "float8_e8m0fnu",
        "I16": "int16",
        "I32": "int32",
        "I64": "int64",
        "I8": "int8",
        "U16": "uint16",
        "U32": "uint32",
        "U64": "uint64",
        "U8": "uint8",
    }
)
"""Torch's name of each type that a safetensors header can state, where both have one."""
