"""The built-in engines pass the suite that plug-ins are held to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from rollsync.shell.refit.engines.conformance import FanOutConformance


class TestShm(FanOutConformance):
    backend = "shm"


class TestShmWithoutChecksums(FanOutConformance):
    backend = "shm"
    engine_kwargs: ClassVar[Mapping[str, object]] = {"checksum": False}


class TestShmDirect(FanOutConformance):
    backend = "shm"
    engine_kwargs: ClassVar[Mapping[str, object]] = {"direct": True}


class TestNixl(FanOutConformance):
    backend = "nixl"


class TestNixlOverIpv6(FanOutConformance):
    backend = "nixl"
    engine_kwargs: ClassVar[Mapping[str, object]] = {"bind_address": "::1"}
