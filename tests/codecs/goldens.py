"""The golden files: where they lie, how they are written, and what a run should find.

`tests/golden/<kind>.v<N>.<case>.hex` holds an envelope, 16 bytes a line; `.json` beside it shows
its payload to people; `<kind>.v<N>.schema` holds the SHA-256 of the wire struct's JSON schema.
`UPDATE_GOLDEN=1` writes those of the newest version of each kind and no others.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from rollsync.codecs.canonical import Wire
from rollsync.codecs.envelope import HEADER_BYTES
from rollsync.codecs.registry import KINDS, AnyKind
from tests.codecs.samples import SAMPLES

GOLDEN: Final = Path(__file__).resolve().parents[1] / "golden"
UPDATE: Final = os.environ.get("UPDATE_GOLDEN") == "1"
_NAME: Final = re.compile(r"(?P<kind>[a-z0-9.-]+)\.v(?P<version>[0-9]+)\.(?P<case>[a-z0-9-]+)\.hex")


@dataclass(frozen=True)
class Golden:
    """One golden file."""

    kind: AnyKind
    version: int
    case: str

    def __str__(self) -> str:
        return f"{self.kind.name}.v{self.version}.{self.case}"

    @property
    def is_newest(self) -> bool:
        return self.version == self.kind.newest_version

    @property
    def wire(self) -> type[Wire]:
        return self.kind.wires[self.version - 1]

    @property
    def hex_path(self) -> Path:
        return GOLDEN / f"{self}.hex"

    @property
    def json_path(self) -> Path:
        return GOLDEN / f"{self}.json"

    def data(self) -> bytes:
        """The envelope in the file."""
        return bytes.fromhex(self.hex_path.read_text("ascii"))


def schema_path(kind: AnyKind, version: int) -> Path:
    """Where the digest of a wire struct's schema is locked."""
    return GOLDEN / f"{kind.name}.v{version}.schema"


def schema_digest(wire: type[Wire]) -> str:
    """SHA-256 of the JSON schema of a wire struct."""
    return hashlib.sha256(msgspec.json.encode(msgspec.json.schema(wire))).hexdigest()


def hex_lines(data: bytes) -> str:
    """`data` in hexadecimal, 16 bytes a line."""
    lines = (data[start : start + 16].hex(" ") for start in range(0, len(data), 16))
    return "".join(f"{line}\n" for line in lines)


def json_view(golden: Golden, data: bytes) -> str:
    """The payload of an envelope as indented JSON."""
    value = msgspec.msgpack.decode(data[HEADER_BYTES:], type=golden.wire)
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n"


def expected_goldens() -> list[Golden]:
    """Every golden that the run uses: the samples of the newest versions, and all older files."""
    newest = [
        Golden(kind, kind.newest_version, case)
        for kind in KINDS
        for case in SAMPLES.get(kind.name, {})
    ]
    by_name = {kind.name: kind for kind in KINDS}
    older = []
    for path in sorted(GOLDEN.glob("*.hex")):
        name = _NAME.fullmatch(path.name)
        if name is None or name["kind"] not in by_name:
            continue
        golden = Golden(by_name[name["kind"]], int(name["version"]), name["case"])
        if 1 <= golden.version < golden.kind.newest_version:
            older.append(golden)
    return newest + older
