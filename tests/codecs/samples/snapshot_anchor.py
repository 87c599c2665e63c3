"""Sample values of `snapshot.anchor`."""

from __future__ import annotations

from typing import Final

from rollsync.pure.snapshot.lineage import BootstrapAnchor, fingerprint_of
from tests.codecs.samples.recovery_ledger import LARGEST


def _anchor(schema_version: int, **settings: str) -> BootstrapAnchor:
    return BootstrapAnchor(
        schema_version=schema_version, settings=settings, fingerprint=fingerprint_of(settings)
    )


SAMPLES: Final = {
    "full": _anchor(1, **{"data.digest": '"0a"', "grpo.learning_rate": "0.001"}),
    "empty": _anchor(0),
    "extremes": _anchor(LARGEST, seed=str(LARGEST)),
    "non-ascii": _anchor(1, **{"model.path": '"模型-é"'}),
}
