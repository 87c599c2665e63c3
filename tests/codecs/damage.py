"""Ways to damage bytes, each tried at every place."""

from __future__ import annotations

from collections.abc import Iterator

SOME_BYTES = (0x00, 0x01, 0x7F, 0x80, 0x90, 0xC0, 0xCB, 0xD9, 0xDD, 0xFF)
"""Bytes that mean different things in MessagePack: numbers, nil, codes of every sort."""


def bit_flips(data: bytes) -> Iterator[bytes]:
    """`data` with one bit changed, for each bit."""
    for position in range(len(data)):
        for bit in range(8):
            flipped = data[position] ^ (1 << bit)
            yield data[:position] + bytes((flipped,)) + data[position + 1 :]


def truncations(data: bytes) -> Iterator[bytes]:
    """Every beginning of `data` but the whole."""
    for length in range(len(data)):
        yield data[:length]


def insertions(data: bytes, values: tuple[int, ...]) -> Iterator[bytes]:
    """`data` with one of `values` inserted, at each place."""
    for position in range(len(data) + 1):
        for value in values:
            yield data[:position] + bytes((value,)) + data[position:]
