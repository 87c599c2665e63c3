"""`docs/format.md` is enough to read rollsync's bytes, and says exactly what rollsync accepts."""

from __future__ import annotations

import json
import re
from itertools import chain, islice

import pytest
from returns.pipeline import is_successful

from rollsync.codecs import decode_any, encode
from rollsync.codecs.envelope import HEADER_BYTES, seal
from rollsync.codecs.registry import KINDS, AnyKind
from tests.codecs.damage import SOME_BYTES, bit_flips, insertions, truncations
from tests.codecs.goldens import Golden, expected_goldens
from tests.codecs.independent_reader import (
    DOCUMENT,
    Refused,
    Tables,
    plain,
    read,
    read_document,
)
from tests.codecs.samples import SAMPLES

TABLES = read_document(DOCUMENT.read_text("utf-8"))


def test_document_describes_every_version_of_every_kind_and_no_others() -> None:
    assert set(TABLES) == {
        f"{kind.name}.v{version}" for kind in KINDS for version in range(1, kind.newest_version + 1)
    }


@pytest.mark.parametrize("golden", expected_goldens(), ids=str)
def test_every_golden_is_read_by_the_document_alone(golden: Golden) -> None:
    kind, version, value = read(golden.data(), TABLES)
    assert (kind, version) == (golden.kind.name, golden.version)
    assert plain(value) == json.loads(golden.json_path.read_text("utf-8"))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_document_and_rollsync_accept_the_same_payloads(kind: AnyKind) -> None:
    payload = encode(SAMPLES[kind.name]["full"])[HEADER_BYTES:]
    accepted = 0
    damage = chain(bit_flips(payload), truncations(payload), insertions(payload, SOME_BYTES))
    # Every third: the reader made from the document takes its time.
    for damaged in islice(damage, None, None, 3):
        data = seal(kind.name, kind.newest_version, damaged)
        result = decode_any(data)
        assert is_accepted(data, TABLES) == is_successful(result), (damaged, result)
        accepted += is_successful(result)
    assert accepted > 0


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_document_without_one_of_its_rows_does_not_read_the_goldens(kind: AnyKind) -> None:
    text = DOCUMENT.read_text("utf-8")
    section = text.index(f"\n### {kind.name}, version {kind.newest_version}\n")
    rows = re.compile(r"^\| \w* ?\| \w+ \| [^|]+ \|\n", re.MULTILINE)
    # Together the samples have every record; a union's members cannot all be in one value.
    samples = [encode(sample) for sample in SAMPLES[kind.name].values()]
    row = rows.search(text, text.index("|---", section))
    assert row is not None
    count = 0
    while row is not None and row.start() < text.find("\n#", section + 1):
        without = read_document(text[: row.start()] + text[row.end() :])
        assert not all(is_accepted(sample, without) for sample in samples), row.group()
        row = rows.search(text, row.end())
        count += 1
    assert count > 0


def is_accepted(data: bytes, tables: Tables) -> bool:
    try:
        read(data, tables)
    except Refused:
        return False
    return True
