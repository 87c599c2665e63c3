"""Bytes that rollsync has written once must be read for ever, and the newest be written again."""

from __future__ import annotations

import msgspec
import pytest

from rollsync.codecs import decode_any, encode
from rollsync.codecs.canonical import encode_canonical
from rollsync.codecs.envelope import HEADER_BYTES
from rollsync.codecs.registry import KINDS, AnyKind
from tests.codecs.goldens import (
    GOLDEN,
    UPDATE,
    Golden,
    expected_goldens,
    hex_lines,
    json_view,
    schema_digest,
    schema_path,
)
from tests.codecs.samples import SAMPLES

GOLDENS = expected_goldens()
NEWEST = [golden for golden in GOLDENS if golden.is_newest]
VERSIONS = [(kind, version) for kind in KINDS for version in range(1, kind.newest_version + 1)]


def test_every_kind_has_samples_and_every_sample_a_kind() -> None:
    assert set(SAMPLES) == {kind.name for kind in KINDS}
    for cases in SAMPLES.values():
        assert {"full", "empty"} <= set(cases)


@pytest.mark.parametrize("golden", NEWEST, ids=str)
def test_newest_version_is_written_byte_for_byte(golden: Golden) -> None:
    data = encode(SAMPLES[golden.kind.name][golden.case])
    if UPDATE:
        golden.hex_path.write_text(hex_lines(data), "ascii")
        golden.json_path.write_text(json_view(golden, data), "utf-8")
    assert golden.data() == data
    assert decode_any(data).unwrap() == SAMPLES[golden.kind.name][golden.case]


@pytest.mark.parametrize("golden", GOLDENS, ids=str)
def test_golden_is_read_and_upgraded(golden: Golden) -> None:
    value = decode_any(golden.data()).unwrap()
    assert type(value) is golden.kind.domain
    again = encode(value)
    assert decode_any(again).unwrap() == value
    if golden.is_newest:
        assert again == golden.data()


@pytest.mark.parametrize("golden", GOLDENS, ids=str)
def test_both_views_of_a_golden_say_the_same(golden: Golden) -> None:
    data = golden.data()
    assert golden.hex_path.read_text("ascii") == hex_lines(data)
    view = golden.json_path.read_text("utf-8")
    assert view == json_view(golden, data)
    from_json = msgspec.json.decode(view, type=golden.wire)
    decoder = msgspec.msgpack.Decoder(golden.wire)
    assert from_json == decoder.decode(data[HEADER_BYTES:])
    assert encode_canonical(from_json, decoder) == data[HEADER_BYTES:]


@pytest.mark.parametrize(
    ("kind", "version"), VERSIONS, ids=lambda part: getattr(part, "name", part)
)
def test_schema_of_every_version_is_locked(kind: AnyKind, version: int) -> None:
    path = schema_path(kind, version)
    digest = schema_digest(kind.wires[version - 1])
    if UPDATE and version == kind.newest_version:
        path.write_text(f"{digest}\n", "ascii")
    assert path.read_text("ascii") == f"{digest}\n", (
        f"the wire struct of {kind.name} version {version} has changed: add a version instead"
    )


def test_every_version_has_a_golden() -> None:
    assert {(golden.kind.name, golden.version) for golden in GOLDENS} == {
        (kind.name, version) for kind, version in VERSIONS
    }


def test_every_golden_file_is_used() -> None:
    used = {path for golden in GOLDENS for path in (golden.hex_path, golden.json_path)}
    used |= {schema_path(kind, version) for kind, version in VERSIONS}
    # The directories are runs of released versions; `tests/shell/run/test_released.py` has those.
    assert {path for path in GOLDEN.iterdir() if not path.is_dir()} == used
