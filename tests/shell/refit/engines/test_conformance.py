"""The built-in engines pass the suite that plug-ins are held to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import pytest

from rollsync.shell.refit.engines.conformance import FanOutConformance
from rollsync.shell.refit.engines.metadata import HOST_LABEL


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


@pytest.mark.slow
class TestNixlDirect(FanOutConformance):
    backend = "nixl"
    engine_kwargs: ClassVar[Mapping[str, object]] = {"direct": True}


class TestNixlOverIpv6(FanOutConformance):
    backend = "nixl"
    engine_kwargs: ClassVar[Mapping[str, object]] = {"bind_address": "::1"}


class TestAuto(FanOutConformance):
    """All on this host, so over shared memory."""

    backend = "auto"


class TestAutoBetweenHosts(FanOutConformance):
    """The first rollout worker is elsewhere, so over NIXL; the second, if there is one, is here:
    then the same buckets go both ways."""

    backend = "auto"
    environments: ClassVar[Sequence[Mapping[str, str]]] = ({HOST_LABEL: "elsewhere"},)


class TestAutoDirect(FanOutConformance):
    backend = "auto"
    engine_kwargs: ClassVar[Mapping[str, object]] = {"direct": True}
    environments: ClassVar[Sequence[Mapping[str, str]]] = ({HOST_LABEL: "elsewhere"},)
