"""What a receiver reads straight from the policy's memory into its parameters, beside bare reads of
the same weights into the same parameters: one call for each, by the kernel or over NIXL, without
names, messages or checksums.

How fast the kernel reads depends on the pages of the memory. So everything is measured twice: while
the kernel gives large pages to neither process, as if it could not, which is how a trainer's memory
mostly is; and when the first syncs have made them large. Beside it, as what the machine does while
all this goes on, a memory copy by one thread and bare reads of flat memory, all of ordinary pages;
and, as what checksums alone cost a receiver, bare reads in slices that are hashed as they come.

Two processes, a core each; each way runs once a round. Called by `bench_refit`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from tests.bench.measure import row
from tests.bench.refit_direct_ends import FLAT_BYTES, Ends, Shapes, Variant

ROUNDS: Final = 5
SYNCS_TO_SETTLE: Final = 4
"""Until the connection is there and all pages that can be large are: 512 MiB a sync."""
GOAL: Final = 0.9
COPY: Final = "memory copy in a process of its own"
BARE: Final = {"shm": "bare process_vm_readv", "nixl": "bare NIXL read"}
HASHED: Final = "bare process_vm_readv of each weight, hashed in slices"
VARIANTS: Final[Sequence[Variant]] = [
    (backend, hashed) for backend in BARE for hashed in (True, False)
]
ORDINARY, LARGE = PAGES = ("ordinary pages", "large pages")


def bare(backend: str, what: str) -> str:
    """The name of bare reads: of flat memory, or of each weight."""
    return f"{BARE[backend]} of {what}"


def ours(variant: Variant, pages: str) -> str:
    """The name of the direct way."""
    backend, checksum = variant
    return f"{backend} direct, {'' if checksum else 'without checksums, '}{pages}"


@dataclass
class _Figures:
    """Seconds of what moves so many bytes, by name."""

    model_bytes: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    is_flat: set[str] = field(default_factory=set)

    def note(self, name: str, seconds: float, *, flat: bool = False) -> None:
        """One more measurement."""
        self.seconds.setdefault(name, []).append(seconds)
        if flat:
            self.is_flat.add(name)

    def rates(self) -> dict[str, float]:
        """The median of each, in GB/s."""
        return {
            name: (FLAT_BYTES if name in self.is_flat else self.model_bytes)
            / statistics.median(values)
            / 1e9
            for name, values in self.seconds.items()
        }


def direct_rows(model: Shapes, small: Shapes) -> list[dict[str, object]]:
    """The figures of the direct way.

    Args:
        model: names and shapes of a model's tensors, of bfloat16.
        small: many small ones.
    """
    ends = Ends({"model": model, "small": small})
    found = _Figures(sum(2 * torch.Size(shape).numel() for _, shape in model))
    _measure(ends, found, ORDINARY)
    ends.ask_both("allow_large_pages")
    settling = _measure(ends, found, LARGE)
    large = min(ends.ask_both("large_bytes"))
    each_us = {backend: _small_us(ends, (backend, True), len(small)) for backend in BARE}
    ends.close()
    rates = found.rates()
    result = [row(name, value, "GB/s") for name, value in rates.items()]
    result += _compared(rates)
    usual = statistics.median(found.seconds[ours(VARIANTS[0], LARGE)])
    result += [
        row("shm direct, made large pages of", large / found.model_bytes, "of all bytes"),
        row(
            "shm direct, making pages large, both ends at once",
            sum(settling) - len(settling) * usual,
            "s, once",
        ),
    ]
    result += [
        row(f"{backend} direct, small tensors, both ends", value, "microseconds a tensor")
        for backend, value in each_us.items()
    ]
    return result


def _measure(ends: Ends, found: _Figures, pages: str) -> list[float]:
    """Measure everything with one kind of pages; how long the first engine's first syncs took."""
    settling: list[list[float]] = []
    for variant in VARIANTS:
        ends.make(variant, "model")
        settling.append([ends.sync_s(variant, "model") for _ in range(SYNCS_TO_SETTLE)])
    for number in range(ROUNDS + 1):
        # The first round is a warm-up.
        figures = found if number else _Figures(1)
        figures.note(COPY, ends.copy_s(), flat=True)
        for backend in BARE:
            read = f"read_{backend}"
            figures.note(bare(backend, "flat memory"), ends.raw_s(read, "flat"), flat=True)
            figures.note(bare(backend, f"each weight, {pages}"), ends.raw_s(read, "model"))
        figures.note(f"{HASHED}, {pages}", ends.raw_s("hash_shm", "model"))
        for variant in VARIANTS:
            figures.note(ours(variant, pages), ends.sync_s(variant, "model"))
    ends.ask_both("finalize")
    return settling[0]


def _small_us(ends: Ends, variant: Variant, count: int) -> float:
    """Microseconds for each of many small tensors."""
    ends.make(variant, "small")
    seconds = [ends.sync_s(variant, "small") for _ in range(ROUNDS + 1)]
    ends.ask_both("finalize")
    return statistics.median(seconds[1:]) / count * 1e6


def _compared(rates: dict[str, float]) -> list[dict[str, object]]:
    """The direct way beside the bare reads of the same pages, and of those that it found."""
    result: list[dict[str, object]] = []
    for variant in VARIANTS:
        weight = {pages: bare(variant[0], f"each weight, {pages}") for pages in PAGES}
        for name, against, goal in (
            (ours(variant, ORDINARY), weight[ORDINARY], GOAL),
            (ours(variant, LARGE), weight[ORDINARY], GOAL),
            (ours(variant, LARGE), weight[LARGE], GOAL),
            (ours(variant, LARGE), COPY, None),
            *(
                (ours(variant, pages), f"{HASHED}, {pages}", None)
                for pages in PAGES
                if variant == ("shm", True)
            ),
        ):
            ratio = rates[name] / rates[against]
            result.append(row(name, rates[name], "GB/s", against=against, ratio=ratio, goal=goal))
    return result
