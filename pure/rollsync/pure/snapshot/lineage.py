"""Which run a directory belongs to: its settings less the operational ones, and their fingerprint.

Rules kept here: a setting counts unless `OPERATIONAL` names it, so one that is added later counts
too; credentials are never recorded; the same settings have the same fingerprint on every machine.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping

import msgspec
from msgspec import Struct

from rollsync.pure.config import MasterConfig, Scalar
from rollsync.pure.rollout.sampler import CustomSampler

ANCHOR_SCHEMA_VERSION = 1
DATASET_DIGEST = "data.digest"
"""Path under which the digest of the dataset's content stands among the settings."""
_MODEL_PATH = "model.path"
_MODEL_DIGEST = "model.digest"
_SAMPLER_OPTIONS = "sampler.options"
OPERATIONAL = (
    "buffer_capacity",
    "checkpoint_engine",
    "checkpointing",
    "cluster",
    "data.max_epochs",
    "data_plane",
    "generation.engines",
    "generation.fleet",
    "generation.max_concurrent_requests",
    "grpo.data_parallel_size",
    "grpo.max_steps",
    "recovery.load_replay_buffer",
    "recovery.max_attempts",
    "recovery.max_recoveries",
    "run.address",
    "run.directory",
)
"""Settings, and whole sections, that may differ when a run is resumed: where and how long it runs,
on how many workers, how it is saved, how weights travel, where its rows are between two saves, and
what it puts up with."""
_CREDENTIAL = re.compile(
    r"(^|_)(password|passwd|secret|credentials?|api_key|access_key|private_key"
    r"|auth_token|access_token)$",
    re.IGNORECASE,
)
_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")
_ABSENT = "not set"


class BootstrapAnchor(Struct, frozen=True, kw_only=True):
    """A run's identity, written before its first bundle."""

    schema_version: int
    settings: Mapping[str, str]
    """JSON text of every setting that counts, by dotted path."""
    fingerprint: str
    """SHA-256 of the settings, hexadecimal."""


class ChangedSetting(Struct, frozen=True, kw_only=True):
    """A setting that is not what the run directory was made with. The values are JSON text."""

    path: str
    saved: str
    current: str


class LineageChanged(Struct, frozen=True, kw_only=True):
    """The run directory belongs to another run."""

    changed: tuple[ChangedSetting, ...]
    """Sorted by path; empty when the anchor cannot be read, so that only fingerprints differ."""


class _Settings(Struct, frozen=True):
    """What the fingerprint is the digest of."""

    settings: dict[str, str]


def bootstrap_anchor(config: MasterConfig, dataset_digest: str) -> BootstrapAnchor:
    """The identity of a run with this configuration on a dataset with this content."""
    settings = dict(_settings(msgspec.to_builtins(config), ""))
    if config.model.digest is None:
        del settings[_MODEL_DIGEST]
    if isinstance(config.sampler, CustomSampler):
        # One setting, in the form that runs have had from the beginning.
        settings = {
            path: text
            for path, text in settings.items()
            if not path.startswith(f"{_SAMPLER_OPTIONS}.")
        }
        settings[_SAMPLER_OPTIONS] = _json(_pairs(config.sampler))
    settings[DATASET_DIGEST] = _json(dataset_digest)
    return BootstrapAnchor(
        schema_version=ANCHOR_SCHEMA_VERSION,
        settings=dict(sorted(settings.items())),
        fingerprint=fingerprint_of(settings),
    )


def fingerprint_of(settings: Mapping[str, str]) -> str:
    """SHA-256, hexadecimal, of the canonical MessagePack of a record with the settings."""
    data = msgspec.msgpack.encode(_Settings(settings=dict(settings)), order="deterministic")
    return hashlib.sha256(data).hexdigest()


def lineage_change(saved: BootstrapAnchor, current: BootstrapAnchor) -> LineageChanged | None:
    """How the run of `current` differs from the one that made the directory, or None.

    A model is the same one when its digest is; where either side does not know it, when its path
    is. The order of a sampler's options says nothing.
    """
    if saved.fingerprint == current.fingerprint:
        return None
    both_know = _MODEL_DIGEST in saved.settings and _MODEL_DIGEST in current.settings
    paths = {*saved.settings, *current.settings} - {_MODEL_PATH if both_know else _MODEL_DIGEST}
    changed = tuple(
        ChangedSetting(path=path, saved=before, current=now)
        for path in sorted(paths)
        if (before := saved.settings.get(path, _ABSENT))
        != (now := current.settings.get(path, _ABSENT))
        and not (path == _SAMPLER_OPTIONS and _same_options(before, now))
    )
    return LineageChanged(changed=changed) if changed else None


def describe_change(change: LineageChanged) -> str:
    """The change in words, every path with both values."""
    if not change.changed:
        return "its fingerprint is another one; what changed is not known, the anchor is unreadable"
    return "; ".join(
        f"{setting.path} was {setting.saved}, is now {setting.current}"
        for setting in change.changed
    )


def _settings(value: object, path: str) -> Iterator[tuple[str, str]]:
    """Every setting that counts below `path`. An empty section counts as itself."""
    if path in OPERATIONAL or _CREDENTIAL.search(path.rpartition(".")[2]):
        return
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _settings(item, f"{path}.{name}" if path else str(name))
    else:
        yield path, _json(value)


def _pairs(sampler: CustomSampler) -> list[tuple[str, Scalar]]:
    """Its options: pairs as they are given, so that old runs stay what they are."""
    options = sampler.options
    named = sorted(options.items()) if isinstance(options, dict) else options
    return [(name, value) for name, value in named if not _CREDENTIAL.search(name)]


def _same_options(saved: str, current: str) -> bool:
    try:
        one, other = (
            msgspec.json.decode(text, type=list[tuple[str, msgspec.Raw]])
            for text in (saved, current)
        )
    except msgspec.MsgspecError:
        return False
    return _sorted_options(one) == _sorted_options(other)


def _sorted_options(pairs: list[tuple[str, msgspec.Raw]]) -> list[tuple[str, bytes]]:
    # Runs have recorded credentials among them before.
    return sorted((name, bytes(value)) for name, value in pairs if not _CREDENTIAL.search(name))


def _json(value: object) -> str:
    text = msgspec.json.encode(value, order="deterministic").decode()
    return _USER_IN_URL.sub("***@", text)
