"""`rollsync inspect PATH`: what is in a file, or in the files of a directory.

A journal is printed in words; with a run directory, what happened to its generation engines.

Reads only. Needs neither torch nor ray nor vllm. Exit code 1 when a rollsync file is damaged.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path

import msgspec
from returns.pipeline import is_successful

from rollsync.codecs import Header, decode_any, describe, read_header
from rollsync.codecs.view import view
from rollsync.pure.snapshot.places import is_segment
from rollsync.shell.cli._printing import say, say_json, visible_line
from rollsync.shell.files import UnreadableFile, is_ours, read_bytes, read_if_ours
from rollsync.shell.journal import EngineChanged, SyncRetried, read_evidence
from rollsync.shell.run.journal_lines import line_of, lines_of
from rollsync.shell.run.saved import JOURNAL
from rollsync.shell.segment_index import ListedRow, NoSegment, list_rows

_SHOWN_ENTRIES = 20
_OTHER = "other"
_ROWS = "row segment"


class FileSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a directory, as the table and `--json` show it."""

    path: str
    size_bytes: int
    kind: str
    version: int | None
    problem: str | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares `PATH` and `--json`."""
    parser.add_argument("path", type=Path, metavar="PATH", help="a file or a directory")
    parser.add_argument("--json", action="store_true", help="print everything, as JSON")


def run(args: argparse.Namespace) -> int:
    """Prints the file or the directory."""
    path: Path = args.path
    as_json: bool = args.json
    if path.is_dir():
        return _inspect_directory(path, as_json)
    if path.name == JOURNAL:
        return _inspect_journal(path, as_json)
    if _is_of_rows(path.name, read_if_ours(path)):
        return _inspect_rows(path, as_json)
    return _inspect_file(path, as_json)


def _inspect_file(path: Path, as_json: bool) -> int:
    data = read_if_ours(path)
    header = read_header(data)
    result = decode_any(data)
    summary = _summary(str(path), data, path.stat().st_size)
    if as_json:
        document = {"file": msgspec.to_builtins(summary)}
        if is_successful(result):
            document["value"] = view(result.unwrap())
        say_json(document)
    else:
        if is_successful(header):
            _say_all(_header_lines(header.unwrap()))
        if is_successful(result):
            _say_all(_lines(view(result.unwrap()), 0))
        else:
            say(f"{path}: {summary.problem}")
    return 0 if is_successful(result) else 1


def _inspect_rows(path: Path, as_json: bool) -> int:
    data = read_bytes(path)
    rows: Mapping[str, ListedRow] = {}
    problem = None if sha256(data).hexdigest() == path.name else "it is not what its name says"
    try:
        rows = list_rows(data)
    except NoSegment as error:
        problem = problem or f"no rows can be read from it: {error}"
    value = msgspec.to_builtins(rows)
    if as_json:
        file = FileSummary(
            path=str(path), size_bytes=len(data), kind=_ROWS, version=None, problem=problem
        )
        document = {"file": msgspec.to_builtins(file), "value": value}
        say_json(document)
    else:
        say(f"{_ROWS}, {len(data)} bytes, {len(rows)} rows")
        _say_all(_lines(value, 0))
        if problem is not None:
            say(f"{path}: {problem}")
    return 0 if problem is None else 1


def _inspect_journal(path: Path, as_json: bool) -> int:
    read_bytes(path)
    entries = list(read_evidence(path))
    if as_json:
        say_json(msgspec.to_builtins(entries))
    else:
        if not entries:
            say("no entries")
        for entry in entries:
            _say_all(lines_of(entry))
    return 0


def _say_all(lines: Iterable[str]) -> None:
    for line in lines:
        say(line)


def _header_lines(header: Header) -> Iterator[str]:
    yield f"{header.kind}, version {header.version}"
    yield f"{header.payload_bytes} bytes, XXH3-128 {header.payload_checksum.hex()}"


def _lines(value: object, indent: int) -> Iterator[str]:
    """The value as an indented tree. Long collections are cut, and say so."""
    if isinstance(value, dict):
        entries = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list):
        entries = [(f"[{index}]", item) for index, item in enumerate(value)]
    else:
        yield "  " * indent + _scalar(value)
        return
    for name, item in entries[:_SHOWN_ENTRIES]:
        if isinstance(item, (dict, list)) and item:
            yield "  " * indent + f"{name}: ({len(item)})"
            yield from _lines(item, indent + 1)
        else:
            yield "  " * indent + f"{name}: {_scalar(item)}"
    if len(entries) > _SHOWN_ENTRIES:
        yield "  " * indent + f"... and {len(entries) - _SHOWN_ENTRIES} more; --json prints all"


def _scalar(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _inspect_directory(directory: Path, as_json: bool) -> int:
    summaries = list(_summaries(directory))
    if as_json:
        say_json(msgspec.to_builtins(summaries))
    else:
        _say_all(_table(summaries))
        for entry in read_evidence(directory / JOURNAL):
            if isinstance(entry, EngineChanged | SyncRetried):
                say(line_of(entry))
    return 1 if any(summary.problem for summary in summaries) else 0


def _summaries(directory: Path) -> Iterator[FileSummary]:
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            name = str(path.relative_to(directory))
            try:
                data = read_if_ours(path)
            except UnreadableFile as error:
                yield FileSummary(
                    path=name, size_bytes=0, kind=_OTHER, version=None, problem=error.message
                )
                continue
            summary = _summary(name, data, path.stat().st_size)
            # Tensors and a user's own files lie beside ours: they are no damage.
            # An empty lock file lies beside them too; what a cut-off left empty is a `.bin`.
            ours = is_ours(data) and (data != b"" or path.suffix == ".bin")
            if not ours:
                kind = _ROWS if _is_of_rows(path.name, data) else _OTHER
                summary = msgspec.structs.replace(summary, kind=kind, problem=None)
            yield summary


def _is_of_rows(name: str, beginning: bytes) -> bool:
    """Whether a file is a row segment. Those of the state have a name of the same form, and begin
    as all of ours do."""
    return is_segment(name) and not is_ours(beginning)


def _summary(name: str, data: bytes, size_bytes: int) -> FileSummary:
    header = read_header(data)
    known = header.unwrap() if is_successful(header) else None
    result = decode_any(data)
    return FileSummary(
        path=name,
        size_bytes=size_bytes,
        kind=known.kind if known is not None else _OTHER,
        version=known.version if known is not None else None,
        problem=None if is_successful(result) else describe(result.failure()),
    )


def _table(summaries: list[FileSummary]) -> Iterator[str]:
    rows = [("file", "bytes", "kind", "version", "")]
    for summary in summaries:
        version = "" if summary.version is None else str(summary.version)
        rows.append(
            (
                visible_line(summary.path),
                str(summary.size_bytes),
                summary.kind,
                version,
                summary.problem or "",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for path, size, kind, version, problem in rows:
        line = (
            f"{path:<{widths[0]}}  {size:>{widths[1]}}  {kind:<{widths[2]}}  "
            f"{version:>{widths[3]}}  {problem}"
        )
        yield line.rstrip()
