"""Options of a checkpoint engine are refused before there is one."""

from __future__ import annotations

import pytest

from rollsync.pure.config import CheckpointEngineConfig
from rollsync.shell.refit.engines.addresses import listen_at
from rollsync.shell.refit.engines.factory import check_options, create_checkpoint_engine
from rollsync.shell.refit.errors import RefitConfigurationError


@pytest.mark.parametrize(
    "config",
    [
        CheckpointEngineConfig(),
        CheckpointEngineConfig(backend="nixl", engine_kwargs={"nixl": {"preinit": True}}),
        CheckpointEngineConfig(engine_kwargs={"shm": {"refit_timeout_s": 60}}),
        CheckpointEngineConfig(
            backend="auto", engine_kwargs={"auto": {"shard_expert_weights": True}}
        ),
        CheckpointEngineConfig(backend="auto", engine_kwargs={"shm": {"of": "another"}}),
        CheckpointEngineConfig(engine_kwargs={"shm": {"direct": True, "large_pages": False}}),
        CheckpointEngineConfig(backend="rollsync.shell.refit.engines.shm:ShmCheckpointEngine"),
    ],
)
def test_what_an_engine_takes_is_taken(config: CheckpointEngineConfig) -> None:
    check_options(config)


@pytest.mark.parametrize("backend", ["nixl", "auto"])
@pytest.mark.parametrize("shard_expert_weights", [False, True])
def test_all_options_that_a_configuration_of_nemo_rl_has_are_taken(
    backend: str, shard_expert_weights: bool
) -> None:
    options = {
        "device": "cuda",
        "backend_name": "UCX",
        "backend_init_params": None,
        "release_after_refit": False,
        "shard_expert_weights": shard_expert_weights,
    }
    engine = create_checkpoint_engine(backend, bucket_size_bytes=4096, engine_kwargs=options)
    # Its workers do nothing for that themselves.
    assert engine.shard_expert_weights is False


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (CheckpointEngineConfig(backend="smh"), "no checkpoint engine 'smh'"),
        (CheckpointEngineConfig(backend="no_such_module:Engine"), "cannot be loaded"),
        (
            CheckpointEngineConfig(engine_kwargs={"shm": {"chekcsum": False}}),
            "'shm' does not take these options: .*chekcsum",
        ),
        (
            CheckpointEngineConfig(engine_kwargs={"shm": {"direct": "yes"}}),
            "direct .* is 'yes': Expected `bool`, got `str`.*engine_kwargs.shm.direct",
        ),
        (
            CheckpointEngineConfig(
                backend="auto", engine_kwargs={"auto": {"refit_timeout_s": "60"}}
            ),
            "refit_timeout_s .* is '60': Expected `float`, got `str`",
        ),
        (
            CheckpointEngineConfig(engine_kwargs={"shm": {"refit_timeout_s": 0.0}}),
            "refit_timeout_s is 0.0: give a positive number",
        ),
        (
            CheckpointEngineConfig(backend="nixl", engine_kwargs={"nixl": {"bind_address": 10}}),
            r"bind_address .* is 10: Expected `str \| null`",
        ),
        (
            CheckpointEngineConfig(
                backend="nixl", engine_kwargs={"nixl": {"direct": True, "relay": True}}
            ),
            "direct and relay are both set",
        ),
    ],
)
def test_what_it_would_refuse_is_refused(config: CheckpointEngineConfig, words: str) -> None:
    with pytest.raises(RefitConfigurationError, match=words):
        check_options(config)


@pytest.mark.parametrize(
    ("backend", "option", "value", "words"),
    [
        ("shm", "direct", "yes", "direct .* is 'yes': Expected `bool`"),
        ("shm", "refit_timeout_s", "60", "refit_timeout_s .* is '60': Expected `float`"),
        ("shm", "refit_timeout_s", -1, "refit_timeout_s is -1: .*positive number"),
        ("shm", "refit_timeout_s", float("nan"), "refit_timeout_s is nan: .*positive number"),
        ("nixl", "refit_timeout_s", float("inf"), "refit_timeout_s is inf: .*at most 1e"),
        ("nixl", "device", "gpu", "device is 'gpu', .*`cuda`"),
        ("auto", "device", "gpu", "device is 'gpu', .*`cuda`"),
        ("nixl", "backend_init_params", "x", "backend_init_params is 'x', and no mapping"),
    ],
)
def test_an_option_that_is_of_no_use_is_named_where_the_engine_is_made(
    backend: str, option: str, value: object, words: str
) -> None:
    with pytest.raises(RefitConfigurationError, match=words):
        create_checkpoint_engine(backend, bucket_size_bytes=4096, engine_kwargs={option: value})


@pytest.mark.parametrize("address", ["1.2.3.4", "localhost"])
def test_an_address_that_is_not_of_this_host_is_named(address: str) -> None:
    with pytest.raises(RefitConfigurationError, match=f"bind_address is '{address}', where"):
        listen_at(address)


@pytest.mark.parametrize("backend", ["nixl", "auto"])
def test_weights_are_not_both_read_directly_and_relayed(backend: str) -> None:
    with pytest.raises(RefitConfigurationError, match="leave out one of them"):
        create_checkpoint_engine(
            backend, bucket_size_bytes=4096, engine_kwargs={"direct": True, "relay": True}
        )
