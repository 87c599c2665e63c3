"""Shows a run's journal as it grows: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from rollsync.shell.journal import JournalEntry, Saved, StepTrained, WeightsSynced
from rollsync.shell.run.journal_lines import gigabytes_per_s, lines_of, number, staleness

STEPS_SHOWN = 12


class RunDisplay:
    """Shows entries; used in a `with`.

    Args:
        console: where to.
        title: what is shown above the table.
    """

    def __init__(self, console: Console, *, title: str) -> None:
        self._console = console
        self._title = title
        self._steps: list[StepTrained] = []
        self._sync: WeightsSynced | None = None
        self._saves: dict[str, int] = {}
        self._longest_pause_ms = 0.0
        self._last = ""
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(self._table(), console=self._console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    @property
    def listener(self) -> Callable[[JournalEntry], None]:
        """What takes the entries."""
        return self.show

    def show(self, entry: JournalEntry) -> None:
        """Show one more entry."""
        *others, self._last = lines_of(entry)
        self._print(*others)  # Above the table, where they stay.
        if isinstance(entry, StepTrained):
            self._steps.append(entry)
        elif isinstance(entry, WeightsSynced):
            self._sync = entry
        elif isinstance(entry, Saved) and entry.saved:
            self._saves[entry.what] = self._saves.get(entry.what, 0) + 1
            self._longest_pause_ms = max(self._longest_pause_ms, entry.pause_ms)
        if self._live is not None:
            self._live.update(self._table())
        else:
            self._print(self._last)

    def _print(self, *lines: str) -> None:
        for line in lines:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _table(self) -> Table:
        sync = self._sync
        synced = (
            "not synced yet"
            if sync is None
            else f"engines serve version {sync.weight_version}"
            f" ({sync.seconds * 1e3:.1f} ms, {gigabytes_per_s(sync):.3f} GB/s)"
        )
        saves = ", ".join(
            f"{count} {what.replace('_', ' ')}s" for what, count in sorted(self._saves.items())
        )
        table = Table(
            title=self._title,
            caption=f"{synced}\n{saves or 'nothing saved yet'}; longest pause"
            f" {self._longest_pause_ms:.2f} ms\n{self._last}",
        )
        for heading in ("step", "reward", "loss", "weight version", "staleness"):
            table.add_column(heading, justify="right")
        for step in self._steps[-STEPS_SHOWN:]:
            table.add_row(
                str(step.step),
                number(step.mean_reward),
                number(step.loss),
                str(step.step),
                staleness(step),
            )
        return table
