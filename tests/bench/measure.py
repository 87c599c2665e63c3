"""How every benchmark here measures: both sides in turn, in one process, medians, ratios.

Absolute times say little on shared machines, so a result is a ratio, with the machine beside it.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

Side = Callable[[], object]


def medians_s(sides: Mapping[str, Side], *, rounds: int) -> dict[str, float]:
    """Median seconds of each side. A round runs every side once, so that all meet the same load."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds + 1):
        for name, side in sides.items():
            gc.collect()
            start = time.perf_counter()
            result = side()
            times[name].append(time.perf_counter() - start)
            del result
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def machine(packages: Sequence[str]) -> dict[str, object]:
    """What a reader needs to compare: processor, cores, Python, and these packages' versions."""
    model = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "processor": model[0] if model else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in packages},
    }


def figure(
    name: str, value: float, unit: str, *, against: tuple[str, float], goal: float | None = None
) -> dict[str, object]:
    """One measured value beside another, as a ratio.

    Args:
        against: name and value of the other side, in the same unit.
        goal: the largest ratio that is wanted, if one is.
    """
    other, other_value = against
    ratio = value / other_value
    return {
        "name": name,
        "value": round(value, 4),
        "unit": unit,
        "compared_with": other,
        "ratio": round(ratio, 4),
        "goal": goal,
        "met": None if goal is None else ratio <= goal,
    }


def row(
    name: str,
    value: float,
    unit: str,
    *,
    against: str | None = None,
    ratio: float | None = None,
    goal: float | None = None,
) -> dict[str, object]:
    """One measured value, alone or beside another.

    Args:
        against: the other's name.
        ratio: to that.
        goal: the smallest ratio that is wanted, if one is.
    """
    return {
        "name": name,
        "value": round(value, 2),
        "unit": unit,
        "compared_with": against,
        "ratio": None if ratio is None else round(ratio, 2),
        "goal": goal,
        "met": None if goal is None or ratio is None else ratio >= goal,
    }


def write_results(results: Mapping[str, object]) -> None:
    """Prints the results, and writes them to the file of `--out`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, help="a JSON file")
    out: Path | None = parser.parse_args().out
    text = json.dumps(results, indent=2) + "\n"
    print(text, end="")
    if out is not None:
        out.write_text(text)
