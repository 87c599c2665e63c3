"""Journal entries in words. Needs the base package only."""

from __future__ import annotations

from rollsync.shell.journal import (
    EngineChanged,
    Finished,
    JournalEntry,
    PromptDropped,
    Resumed,
    Saved,
    StepClaimed,
    StepTrained,
    SyncRetried,
    WeightsSynced,
)


def lines_of(entry: JournalEntry) -> tuple[str, ...]:
    """One entry in words: what a resume has passed over comes before it, a line each."""
    refused = entry.refused if isinstance(entry, Resumed) else ()
    return (*(f"resume  passed over {each}" for each in refused), line_of(entry))


def line_of(entry: JournalEntry) -> str:
    """What an entry comes to, in one line."""
    match entry:
        case Resumed(source=None):
            return "start   a fresh run"
        case Resumed():
            return f"resume  from {entry.source}, after step {entry.train_steps}"
        case StepClaimed():
            return f"step {entry.step:3}  training {len(entry.prompt_ids)} prompt groups"
        case StepTrained():
            return (
                f"step {entry.step:3}  reward {number(entry.mean_reward)}"
                f"  loss {number(entry.loss)}  staleness {staleness(entry)}"
            )
        case WeightsSynced():
            return (
                f"sync    weight version {entry.weight_version}: {entry.bytes / 1e6:.2f} MB in"
                f" {entry.seconds * 1e3:.1f} ms, {gigabytes_per_s(entry):.3f} GB/s"
            )
        case EngineChanged():
            return _engine_line(entry)
        case SyncRetried():
            return f"sync    weight version {entry.weight_version} is tried again: {entry.why}"
        case Saved():
            done = "saved" if entry.saved else f"not saved ({entry.reason})"
            return (
                f"save    {entry.what.replace('_', ' ')} after step {entry.train_steps}: {done},"
                f" changes paused {entry.pause_ms:.2f} ms"
            )
        case PromptDropped():
            return f"drop    prompt {entry.prompt_id}: {entry.reason}"
        case Finished():
            return f"end     after step {entry.train_steps}: {entry.why}"


def _engine_line(entry: EngineChanged) -> str:
    was = "" if entry.was is None else f", was {entry.was}"
    at = "" if entry.pid is None else f", process {entry.pid} on {entry.host}"
    why = f": {entry.why}" if entry.why else ""
    version = "" if entry.weight_version is None else f" at weight version {entry.weight_version}"
    return f"engine  {entry.engine} is {entry.now}{version}{was}{at}{why}"


def staleness(entry: StepTrained) -> str:
    """Weight versions between generating and training: the largest of the batch."""
    if not entry.weight_versions:
        return "-"
    return str(entry.step - 1 - min(entry.weight_versions))


def gigabytes_per_s(entry: WeightsSynced) -> float:
    """Speed of a sync, in units of 10^9 bytes."""
    return entry.bytes / entry.seconds / 1e9 if entry.seconds > 0 else 0.0


def number(value: float | None) -> str:
    """A figure of a step, or a dash where there is none."""
    return "-" if value is None else f"{value:.3f}"
