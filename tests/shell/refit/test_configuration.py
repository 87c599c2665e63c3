"""What code gives as a checkpoint-engine configuration is refused where a file's would be."""

from __future__ import annotations

import logging
import math

import pytest

from rollsync.shell.refit.configuration import check_configuration, note_unread
from rollsync.shell.refit.errors import RefitConfigurationError
from tests.shell.refit.scripted_workers import scripted_sync

WHOLE: dict[str, object] = {
    "backend": "shm",
    "update_weights_bucket_memory_ratio": 0.1,
    "engine_kwargs": {"shm": {"direct": True}, "nixl": {"device": "cpu"}, "a:Plugin": {}},
}


def test_a_whole_configuration_is_taken() -> None:
    check_configuration(WHOLE)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"direct": True}, "has 'direct', which is none of its keys"),
        ({"backend": None}, "backend is None, and no name .*`auto`"),
        ({"backend": ""}, "backend is '', and no name"),
        ({"engine_kwargs": None}, "engine_kwargs is None, and no mapping"),
        (
            {"engine_kwargs": {"direct": True}},
            r"engine_kwargs.direct is True.*\{'shm': \{'direct': True\}\}",
        ),
    ],
)
def test_what_a_file_may_not_have_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(RefitConfigurationError, match=words):
        check_configuration({**WHOLE, **change})


@pytest.mark.parametrize("key", ["backend", "engine_kwargs"])
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(RefitConfigurationError, match=f"lacks '{key}'"):
        check_configuration({name: value for name, value in WHOLE.items() if name != key})


def test_a_synchronizer_refuses_a_bad_backend_before_it_calls_anybody() -> None:
    sync = scripted_sync([object()], [object()], timeout_s=1.0, backend="")
    with pytest.raises(RefitConfigurationError, match="backend is ''"):
        sync.init_communicator()
    with pytest.raises(RefitConfigurationError, match="backend is ''"):
        sync.sync_weights()


@pytest.mark.parametrize("timeout_s", [0, -1, 0.0, math.nan, math.inf, 10**400, "60", True, None])
@pytest.mark.parametrize("backend", ["shm", "a_plug_in:Engine"])
def test_a_synchronizer_refuses_to_wait_by_what_is_no_number_of_seconds(
    backend: str, timeout_s: object
) -> None:
    sync = scripted_sync([object()], [object()], timeout_s=timeout_s, backend=backend)
    with pytest.raises(RefitConfigurationError, match=r"refit_timeout_s is .*positive num"):
        sync.init_communicator()
    sync = scripted_sync([object()], [object()], timeout_s=1)
    sync.step_timeout_s = 0.0
    with pytest.raises(RefitConfigurationError, match=r"step_timeout_s is 0\.0: give a"):
        sync.init_communicator()


@pytest.mark.parametrize("ratio", [0, 1, -0.5, math.nan, math.inf, True, "0.1", None])
def test_a_share_that_is_none_is_refused_where_it_is_needed(ratio: object) -> None:
    config = {**WHOLE, "update_weights_bucket_memory_ratio": ratio}
    with pytest.raises(RefitConfigurationError, match="update_weights_bucket_memory_ratio is"):
        check_configuration(config)
    check_configuration(config, needs_ratio=False)


def test_options_of_another_backend_are_noted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        note_unread("shm", {"shm": {"direct": True}, "nixl": {"device": "cpu"}, "auto": {}})
    assert [record.getMessage() for record in caplog.records] == [
        "engine_kwargs.nixl is not read, as the checkpoint engine is 'shm'"
    ]
