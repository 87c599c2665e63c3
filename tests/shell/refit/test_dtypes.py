"""The table of element sizes, against torch itself."""

from __future__ import annotations

import json

import safetensors.torch
import torch

from rollsync.pure.refit.dtypes import DTYPE_BYTES, SAFETENSORS_DTYPES


def torch_dtypes() -> dict[str, torch.dtype]:
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return {str(dtype).removeprefix("torch."): dtype for dtype in found}


def test_every_dtype_of_torch_has_its_size() -> None:
    sizes = {name: dtype.itemsize for name, dtype in torch_dtypes().items()}
    assert {name: DTYPE_BYTES.get(name) for name in sizes} == sizes


def test_safetensors_writes_each_dtype_under_the_name_in_the_table() -> None:
    dtypes = torch_dtypes()
    for written, name in SAFETENSORS_DTYPES.items():
        data = safetensors.torch.save({"t": torch.zeros(2, dtype=dtypes[name])})
        header_bytes = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + header_bytes])
        assert header["t"]["dtype"] == written
        assert header["t"]["data_offsets"] == [0, 2 * DTYPE_BYTES[name]]
