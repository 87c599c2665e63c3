"""Files of published models: `config.json`, and the index and headers of safetensors.

They are others' formats, so they have no envelope and no golden; only what refit needs is read.
Rule kept here: whatever the bytes are, reading them ends in a value or in a declared error.
"""

from __future__ import annotations

import json
from typing import Final

import msgspec
from msgspec import Struct
from returns.result import Failure, Result, Success

from rollsync.codecs.canonical import Natural
from rollsync.pure.refit.buckets import TensorSpec
from rollsync.pure.refit.dtypes import DTYPE_BYTES, SAFETENSORS_DTYPES
from rollsync.pure.refit.errors import ConfigMalformed, HeaderMalformed
from rollsync.pure.refit.model_shapes import HuggingFaceConfig

LENGTH_BYTES: Final = 8
"""A safetensors file begins with the length of its header: 8 bytes, little-endian."""
MOST_HEADER_BYTES: Final = 100_000_000
"""The format's own bound on the length of a header."""
MOST_TENSOR_BYTES: Final = 2**63 - 1
"""A file has no more bytes than a signed offset of 64 bits can say."""


class _Entry(Struct, frozen=True):
    dtype: str
    shape: tuple[Natural, ...]
    data_offsets: tuple[Natural, Natural]


class _Outer(Struct, frozen=True):
    """A configuration that has that of its language model inside."""

    text_config: msgspec.Raw = msgspec.Raw(b"null")
    tie_word_embeddings: bool = False


class _Index(Struct, frozen=True):
    weight_map: dict[str, str]


_CONFIG: Final = msgspec.json.Decoder(HuggingFaceConfig)
_OUTER: Final = msgspec.json.Decoder(_Outer)
_HEADER: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENTRY: Final = msgspec.json.Decoder(_Entry)
_INDEX: Final = msgspec.json.Decoder(_Index)


def read_config(data: bytes) -> Result[HuggingFaceConfig, ConfigMalformed]:
    """The fields of a `config.json` that decide about shapes: of its language model, where it has
    one inside, as those of models have that see or hear."""
    try:
        outer = _OUTER.decode(data)
        if bytes(outer.text_config) == b"null":
            return Success(_CONFIG.decode(data))
        inner = _CONFIG.decode(outer.text_config)
        tied = inner.tie_word_embeddings or outer.tie_word_embeddings
        return Success(msgspec.structs.replace(inner, tie_word_embeddings=tied))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return Failure(ConfigMalformed(why=str(error)))


def read_index(data: bytes) -> Result[tuple[str, ...], HeaderMalformed]:
    """The names of the files that a `model.safetensors.index.json` lists, each once, sorted."""
    try:
        index = _INDEX.decode(data)
        _refuse_names_that_come_twice(data)
    except (ValueError, RecursionError) as error:
        return Failure(HeaderMalformed(why=str(error)))
    files = tuple(sorted(set(index.weight_map.values())))
    for file in files:
        if file in ("", ".", "..") or any(character in file for character in "/\\\0"):
            return Failure(HeaderMalformed(why=f"the index names {file!r}, which is no file name"))
    if not files:
        return Failure(HeaderMalformed(why="the index names no tensor"))
    return Success(files)


def header_length(data: bytes) -> Result[int, HeaderMalformed]:
    """The length in bytes of the header that follows the first `LENGTH_BYTES` of a file."""
    length = int.from_bytes(data[:LENGTH_BYTES], "little")
    if len(data) < LENGTH_BYTES or not 2 <= length <= MOST_HEADER_BYTES:
        return Failure(HeaderMalformed(why="the file does not begin with the length of a header"))
    return Success(length)


def read_header(data: bytes) -> Result[tuple[TensorSpec, ...], HeaderMalformed]:
    """The tensors that a safetensors header names, in the order of their bytes in the file.

    Args:
        data: The header: the JSON object that follows the length.
    """
    found: list[tuple[int, int, TensorSpec]] = []
    try:
        entries = _HEADER.decode(data)
        _refuse_names_that_come_twice(data)
        for name, raw in entries.items():
            if name == "__metadata__":
                continue
            try:
                entry = _ENTRY.decode(raw)
            except msgspec.DecodeError as error:
                return Failure(HeaderMalformed(why=f"tensor {name!r}: {error}"))
            dtype = SAFETENSORS_DTYPES.get(entry.dtype)
            if dtype is None:
                why = f"tensor {name!r} has the unknown dtype {entry.dtype!r}"
                return Failure(HeaderMalformed(why=why))
            begin, end = entry.data_offsets
            if _size(entry.shape, DTYPE_BYTES[dtype]) != end - begin:
                why = f"tensor {name!r} does not have the size that its shape and dtype say"
                return Failure(HeaderMalformed(why=why))
            found.append((begin, end, TensorSpec(name, entry.shape, dtype)))
    except (ValueError, RecursionError) as error:
        return Failure(HeaderMalformed(why=str(error)))
    # Tensors without bytes lie where the next one does, and in the order of their names.
    found.sort(key=lambda each: (each[0], each[1], each[2].name))
    filled = 0
    for begin, end, spec in found:
        if begin != filled:
            why = f"tensor {spec.name!r} does not begin where the one before it ends"
            return Failure(HeaderMalformed(why=why))
        filled = end
    return Success(tuple(spec for _, _, spec in found))


def _size(shape: tuple[int, ...], element_bytes: int) -> int | None:
    """Bytes of a tensor; None: more than a file can have, however long the shape."""
    if 0 in shape:
        return 0
    size = element_bytes
    for length in shape:
        size *= length
        if size > MOST_TENSOR_BYTES:
            return None
    return size


def _refuse_names_that_come_twice(data: bytes) -> None:
    """Raise `ValueError` if an object in `data` has two values of one name; msgspec takes the last.

    Args:
        data: JSON that msgspec has read.
    """
    json.loads(data, object_pairs_hook=_refuse_twice)


def _refuse_twice(pairs: list[tuple[str, object]]) -> None:
    names: set[str] = set()
    for name, _ in pairs:
        if name in names:
            raise ValueError(f"{name!r} comes twice")
        names.add(name)
