"""What makes a run the same run."""

from __future__ import annotations

import msgspec

from rollsync.pure.config import (
    CheckpointEngineConfig,
    CheckpointingConfig,
    ClusterConfig,
    DataConfig,
    GenerationConfig,
    GrpoConfig,
    MasterConfig,
    ModelConfig,
    RecoveryConfig,
    RunConfig,
    Scalar,
    TransferQueuePlaneConfig,
)
from rollsync.pure.refit.fleet.state import FleetSettings
from rollsync.pure.rollout.sampler import CustomSampler, InOrderSampler, WindowedSampler
from rollsync.pure.rollout.state import RecoveryGranularity
from rollsync.pure.snapshot.lineage import (
    OPERATIONAL,
    BootstrapAnchor,
    bootstrap_anchor,
    describe_change,
    lineage_change,
)

CONFIG = MasterConfig(
    run=RunConfig(directory="run"),
    data=DataConfig(task="sum", size=10, options={"digits": 3}),
    model=ModelConfig(path="model"),
    grpo=GrpoConfig(
        num_prompts_per_step=2, num_generations_per_prompt=2, max_steps=10, learning_rate=1e-3
    ),
    generation=GenerationConfig(backend="torch", max_new_tokens=4),
    sampler=WindowedSampler(),
)
ANCHOR = bootstrap_anchor(CONFIG, "d0")


def changed_paths(config: MasterConfig, dataset_digest: str = "d0") -> tuple[str, ...]:
    change = lineage_change(ANCHOR, bootstrap_anchor(config, dataset_digest))
    return () if change is None else tuple(setting.path for setting in change.changed)


def test_operational_settings_may_change() -> None:
    grpo = msgspec.structs.replace(CONFIG.grpo, max_steps=99, data_parallel_size=2)
    generation = msgspec.structs.replace(
        CONFIG.generation,
        engines=4,
        max_concurrent_requests=3,
        fleet=FleetSettings(min_healthy=2, probe_interval_s=1.0),
    )
    changed = msgspec.structs.replace(
        CONFIG,
        run=RunConfig(directory="elsewhere", address="ray://head:10001"),
        cluster=ClusterConfig(address="head:6379", strategy="spread"),
        data_plane=TransferQueuePlaneConfig(storage="ray"),
        data=msgspec.structs.replace(CONFIG.data, max_epochs=7),
        grpo=grpo,
        generation=generation,
        checkpoint_engine=CheckpointEngineConfig(backend="nixl"),
        checkpointing=CheckpointingConfig(trainer_every_steps=5),
        recovery=RecoveryConfig(max_attempts=9, max_recoveries=9, load_replay_buffer=False),
        buffer_capacity=64,
    )
    assert changed_paths(changed) == ()


def test_operational_settings_exist() -> None:
    """A setting that was renamed would silently count."""
    for path in OPERATIONAL:
        value: object = CONFIG
        for name in path.split("."):
            assert hasattr(value, name), path
            value = getattr(value, name)


def test_every_other_setting_counts() -> None:
    replace = msgspec.structs.replace
    cases = {
        "run.seed": replace(CONFIG, run=replace(CONFIG.run, seed=1)),
        "run.deterministic": replace(CONFIG, run=replace(CONFIG.run, deterministic=True)),
        "data.task": replace(CONFIG, data=replace(CONFIG.data, task="product")),
        "data.size": replace(CONFIG, data=replace(CONFIG.data, size=11)),
        "model.path": replace(CONFIG, model=ModelConfig(path="other")),
        "grpo.learning_rate": replace(CONFIG, grpo=replace(CONFIG.grpo, learning_rate=1e-4)),
        "recovery.granularity": replace(
            CONFIG, recovery=RecoveryConfig(granularity=RecoveryGranularity.PROMPT_GROUP)
        ),
    }
    for path, config in cases.items():
        assert changed_paths(config) == (path,)
    assert changed_paths(CONFIG, "d1") == ("data.digest",)


def test_a_setting_that_came_or_went_counts() -> None:
    options = msgspec.structs.replace(CONFIG.data, options={"digits": 3, "carry": True})
    assert changed_paths(msgspec.structs.replace(CONFIG, data=options)) == ("data.options.carry",)
    none = msgspec.structs.replace(CONFIG.data, options={})
    assert changed_paths(msgspec.structs.replace(CONFIG, data=none)) == (
        "data.options",
        "data.options.digits",
    )
    sampler = msgspec.structs.replace(CONFIG, sampler=InOrderSampler())
    assert "sampler.name" in changed_paths(sampler)


def test_a_model_is_known_by_its_digest_where_both_know_it() -> None:
    def anchor(path: str, digest: str | None) -> BootstrapAnchor:
        model = ModelConfig(path=path, digest=digest)
        return bootstrap_anchor(msgspec.structs.replace(CONFIG, model=model), "d0")

    def changed(saved: BootstrapAnchor, current: BootstrapAnchor) -> tuple[str, ...]:
        change = lineage_change(saved, current)
        return () if change is None else tuple(setting.path for setting in change.changed)

    one, other = "1" * 64, "2" * 64
    assert anchor("model", None) == ANCHOR, "what old runs have recorded"
    assert changed(anchor("model", one), anchor("moved", one)) == ()
    assert changed(anchor("model", one), anchor("model", other)) == ("model.digest",)
    for saved, current in ((None, one), (one, None), (None, None)):
        assert changed(anchor("model", saved), anchor("model", current)) == ()
        assert changed(anchor("model", saved), anchor("moved", current)) == ("model.path",)


def test_a_sampler_s_options_are_the_same_in_either_form_and_any_order() -> None:
    def anchor(options: dict[str, Scalar] | tuple[tuple[str, Scalar], ...]) -> BootstrapAnchor:
        sampler = CustomSampler(target="own:Sampler", options=options)
        return bootstrap_anchor(msgspec.structs.replace(CONFIG, sampler=sampler), "d0")

    pairs = anchor((("b", 1), ("a", "x")))
    assert pairs.settings["sampler.options"] == '[["b",1],["a","x"]]', "as old runs recorded it"
    assert anchor({"b": 1, "a": "x"}) == anchor({"a": "x", "b": 1})
    assert anchor({}) == anchor(())
    assert lineage_change(pairs, anchor({"a": "x", "b": 1})) is None
    others: list[dict[str, Scalar]] = [{"a": "x", "b": 2}, {"a": "x"}, {"a": "x", "b": True}, {}]
    for other in others:
        change = lineage_change(pairs, anchor(other))
        assert change is not None
        assert [setting.path for setting in change.changed] == ["sampler.options"]
    secret = anchor({"a": "x", "api_key": "k-123"})
    assert secret == anchor({"a": "x"})
    damaged = msgspec.structs.replace(
        pairs, settings={**pairs.settings, "sampler.options": "{}"}, fingerprint="0" * 64
    )
    assert lineage_change(damaged, pairs) is not None


def test_the_change_is_readable() -> None:
    other = msgspec.structs.replace(CONFIG, run=RunConfig(directory="run", seed=7))
    change = lineage_change(ANCHOR, bootstrap_anchor(other, "d1"))
    assert change is not None
    assert describe_change(change) == (
        'data.digest was "d0", is now "d1"; run.seed was 0, is now 7'
    )


def test_credentials_are_never_recorded() -> None:
    options: dict[str, str | int | float | bool] = {
        "api_key": "k-123",
        "hub_auth_token": "t-123",
        "password": "p-123",
        "source": "https://me:p-123@host/data?a@b",
        "max_token": 5,
    }
    config = msgspec.structs.replace(
        CONFIG, data=msgspec.structs.replace(CONFIG.data, options=options)
    )
    anchor = bootstrap_anchor(config, "d0")
    assert not [text for text in anchor.settings.values() if "123" in text]
    assert anchor.settings["data.options.source"] == '"https://***@host/data?a@b"'
    assert anchor.settings["data.options.max_token"] == "5"
    rotated = msgspec.structs.replace(
        CONFIG,
        data=msgspec.structs.replace(
            CONFIG.data,
            options=options | {"api_key": "k-456", "source": "https://you:p-456@host/data?a@b"},
        ),
    )
    assert bootstrap_anchor(rotated, "d0") == anchor


def test_the_fingerprint_is_the_same_everywhere() -> None:
    assert ANCHOR.fingerprint == (
        "86d066f3ae4efcb0c8424465f8357dc6d480cfd0e02caad4c57f9c16d80d181d"
    )
