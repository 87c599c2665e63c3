"""A refit that does not run yet: the plan that its workers would make, or why there is none."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from returns.pipeline import is_successful

from rollsync.pure.refit import MEBIBYTE, TensorSpec, describe
from rollsync.pure.refit.cuts import Attention
from rollsync.pure.refit.deployment import Deployment, plan_refit, sites_of
from rollsync.pure.refit.errors import BeyondPlanning, RefitErrorValue, TooManyLayouts
from rollsync.pure.refit.estimate import Links, RefitEstimate
from rollsync.pure.refit.model_shapes import (
    ARCHITECTURES,
    HuggingFaceConfig,
    attention_of,
    model_tensors,
)
from rollsync.pure.refit.parallel import Parallelism
from rollsync.pure.refit.plan_limits import MOST
from tests.pure.refit.published_models import DEEPSEEK_V3, LLAMA_3_1_70B

LINKS = Links(between_hosts=50e9, inside_host=100e9)
EXPERTS = HuggingFaceConfig(
    model_type="qwen3_moe",
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    vocab_size=128,
    num_experts=8,
    moe_intermediate_size=8,
)


def planned(
    config: HuggingFaceConfig, deployment: Deployment, bucket_bytes: int = MEBIBYTE
) -> RefitEstimate | RefitErrorValue:
    tensors = model_tensors(config)
    if not is_successful(tensors):
        return tensors.failure()
    attention = attention_of(config)
    result = plan_refit(
        tensors.unwrap(), attention, deployment, bucket_bytes=bucket_bytes, links=LINKS
    )
    return result.unwrap() if is_successful(result) else result.failure()


def figures(config: HuggingFaceConfig, deployment: Deployment) -> RefitEstimate:
    estimate = planned(config, deployment)
    assert isinstance(estimate, RefitEstimate), estimate
    return estimate


SIZES = st.sampled_from([1, 1, 1, 1, 2, 2, 2, 3, 4, 4, 8, 8, 12, 10_001, 2**31])
DEPLOYMENTS = st.builds(
    Deployment,
    train_world_size=SIZES,
    engines=st.builds(
        Parallelism,
        rollout_world_size=SIZES,
        tensor_parallel=SIZES,
        pipeline_parallel=SIZES,
        expert_parallel=SIZES,
    ),
    whole=st.booleans(),
    workers_per_host=st.none() | SIZES,
    shared_hosts=st.booleans(),
)


@st.composite
def configurations(draw: st.DrawFn) -> HuggingFaceConfig:
    values: dict[str, object] = {"model_type": draw(st.sampled_from(sorted(ARCHITECTURES)))}
    for field in (
        *("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"),
        *("num_key_value_heads", "head_dim", "moe_intermediate_size", "decoder_sparse_step"),
        *("shared_expert_intermediate_size", "n_shared_experts", "first_k_dense_replace"),
        *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    ):
        values[field] = draw(st.sampled_from([1, 8, 8, 8, 8, 64, 64, 64, 64, 96, 2**31]))
    values["num_hidden_layers"] = draw(st.sampled_from([1, 2, 3, 3, 4]))
    values["num_experts"] = draw(st.sampled_from([1, 2, 3, 8, 8, 100_000]))
    values["tie_word_embeddings"] = draw(st.booleans())
    values["attention_bias"] = draw(st.booleans())
    return msgspec.convert(values, HuggingFaceConfig)


@given(configurations(), DEPLOYMENTS)
@settings(max_examples=200, deadline=None)
def test_any_sizes_are_answered_by_figures_or_by_words(
    config: HuggingFaceConfig, deployment: Deployment
) -> None:
    estimate = planned(config, deployment)
    if not isinstance(estimate, RefitEstimate):
        assert describe(estimate)
        return
    world = deployment.engines.rollout_world_size
    assert [route.rollout_rank for route in estimate.routes] == list(range(world))
    assert sum(r.payload_bytes + r.padding_bytes for r in estimate.routes) == estimate.sent_bytes
    by_policy = estimate.sent_bytes_by_policy_rank
    assert len(by_policy) == deployment.train_world_size
    assert max(by_policy) <= estimate.most_sent_bytes <= estimate.sent_bytes
    assert [rank for rank, sent in enumerate(by_policy) if not sent] == list(
        estimate.idle_policy_ranks
    )
    assert estimate.parameters_bytes <= sum(route.payload_bytes for route in estimate.routes)
    for route in estimate.routes:
        assert 0 <= route.payload_bytes <= estimate.parameters_bytes
        assert route.tensors <= min(route.parts, estimate.tensors)
        full = (route.buckets - 1) * (route.bucket_bytes - 255)
        moved = route.payload_bytes + route.padding_bytes
        assert full <= moved <= route.buckets * route.bucket_bytes
        assert 0 <= route.seconds <= estimate.seconds


def test_more_workers_than_a_plan_is_made_for_are_refused() -> None:
    one = Parallelism(rollout_world_size=1)
    error = planned(EXPERTS, Deployment(train_world_size=10_001, engines=one))
    assert error == BeyondPlanning(what="policy workers", size=10_001, most=10_000)
    many = Parallelism(rollout_world_size=10_001)
    error = planned(EXPERTS, Deployment(train_world_size=1, engines=many))
    assert error == BeyondPlanning(what="rollout workers", size=10_001, most=10_000)


def test_as_many_workers_as_a_plan_is_made_for_are_planned_in_one_chain_of_relays() -> None:
    most = MOST["rollout workers"]
    deployment = Deployment(
        train_world_size=1, engines=Parallelism(rollout_world_size=most), workers_per_host=1
    )
    estimate = figures(EXPERTS, deployment)
    assert len(estimate.routes) == most
    assert {route.policy_rank for route in estimate.routes} == {0}
    assert [route.sender_rank for route in estimate.routes[1:]] == list(range(most - 1))


def test_ranks_that_keep_other_experts_and_as_many_are_sent_as_much() -> None:
    config = msgspec.structs.replace(DEEPSEEK_V3.config, num_hidden_layers=5)
    engines = Parallelism(rollout_world_size=64, expert_parallel=64)
    estimate = figures(config, Deployment(train_world_size=64, engines=engines))
    assert len({route.shard for route in estimate.routes}) == 64
    assert len({route.payload_bytes for route in estimate.routes}) == 1


def test_more_bytes_or_parts_than_a_plan_is_made_for_are_refused() -> None:
    engines = Parallelism(rollout_world_size=8192, tensor_parallel=8192)
    deployment = Deployment(train_world_size=1, engines=engines)
    shapes = [(8192, 1024)] * 80
    specs = [TensorSpec(f"{i}.q_proj.weight", shape, "int8") for i, shape in enumerate(shapes)]
    for tensors, what in ((specs, "parts"), ([TensorSpec("x", (2**62,), "int8")], "bytes")):
        result = plan_refit(tensors, Attention(), deployment, bucket_bytes=MEBIBYTE, links=LINKS)
        error = result.failure()
        assert isinstance(error, BeyondPlanning)
        assert (error.what, error.most) == (what, MOST[error.what])


def test_a_worker_divides_its_buckets_among_the_layouts_that_it_sends() -> None:
    engines = Parallelism(rollout_world_size=8, tensor_parallel=4)
    one = figures(EXPERTS, Deployment(train_world_size=1, engines=engines))
    # Two engines of one worker: its streams are those of the four layouts.
    assert {route.bucket_bytes for route in one.routes} == {MEBIBYTE // 4}
    four = figures(EXPERTS, Deployment(train_world_size=4, engines=engines))
    assert {route.bucket_bytes for route in four.routes} == {MEBIBYTE // 2}
    each = figures(EXPERTS, Deployment(train_world_size=8, engines=engines))
    assert {route.bucket_bytes for route in each.routes} == {MEBIBYTE}
    whole = figures(EXPERTS, Deployment(train_world_size=1, engines=engines, whole=True))
    assert {route.bucket_bytes for route in whole.routes} == {MEBIBYTE}


def test_too_many_layouts_for_a_workers_buckets_are_refused() -> None:
    config = msgspec.structs.replace(EXPERTS, num_experts=8, num_attention_heads=8)
    engines = Parallelism(rollout_world_size=8, tensor_parallel=8)
    error = planned(config, Deployment(train_world_size=1, engines=engines), bucket_bytes=256 * 7)
    assert error == TooManyLayouts(layouts=8, buffer_bytes=256 * 7)


def test_workers_of_one_rank_in_their_engines_relay_to_each_other() -> None:
    engines = Parallelism(rollout_world_size=8, tensor_parallel=2)
    deployment = Deployment(train_world_size=1, engines=engines, workers_per_host=2)
    assert sites_of(deployment).rollout_shards == (0, 1) * 4
    estimate = figures(EXPERTS, deployment)
    assert [(r.sender, r.sender_rank) for r in estimate.routes] == [
        ("policy", 0),
        ("policy", 0),
        *(("rollout", rank) for rank in range(6)),
    ]
    assert not any(route.sent_whole for route in estimate.routes)


def test_relays_that_keep_different_experts_are_sent_whole_tensors() -> None:
    engines = Parallelism(rollout_world_size=8, tensor_parallel=2, expert_parallel=8)
    deployment = Deployment(train_world_size=1, engines=engines, workers_per_host=2)
    estimate = figures(EXPERTS, deployment)
    assert all(route.sent_whole for route in estimate.routes)
    assert {route.payload_bytes for route in estimate.routes} == {estimate.parameters_bytes}
    assert {route.bucket_bytes for route in estimate.routes} == {MEBIBYTE}
    direct = figures(EXPERTS, msgspec.structs.replace(deployment, workers_per_host=None))
    assert not any(route.sent_whole for route in direct.routes)
    assert direct.sent_bytes < estimate.sent_bytes / 2


@pytest.mark.parametrize("shared_hosts", [False, True])
@pytest.mark.parametrize("per_host", [1, 2, 3, 8])
def test_a_route_goes_through_memory_exactly_inside_a_host(
    per_host: int, shared_hosts: bool
) -> None:
    deployment = Deployment(
        train_world_size=2,
        engines=Parallelism(rollout_world_size=8, tensor_parallel=2),
        workers_per_host=per_host,
        shared_hosts=shared_hosts,
    )
    sites = sites_of(deployment)
    for route in figures(EXPERTS, deployment).routes:
        hosts = sites.policy_hosts if route.sender == "policy" else sites.rollout_hosts
        inside = hosts[route.sender_rank] == sites.rollout_hosts[route.rollout_rank]
        assert route.engine == ("shm" if inside else "nixl")


def test_a_dense_70b_goes_to_engines_of_eight_once_from_each_policy_worker() -> None:
    engines = Parallelism(rollout_world_size=32, tensor_parallel=8)
    deployment = Deployment(train_world_size=4, engines=engines)
    result = planned(LLAMA_3_1_70B.config, deployment, bucket_bytes=819 * MEBIBYTE)
    assert isinstance(result, RefitEstimate)
    share = result.parameters_bytes / 8
    assert all(share < route.payload_bytes < 1.001 * share for route in result.routes)
    assert {route.bucket_bytes for route in result.routes} == {819 * MEBIBYTE // 8}
    # Each worker sends the model once, in 819 MiB for its eight streams together.
    assert result.seconds == pytest.approx(result.parameters_bytes / 50e9, rel=0.001)
    assert result.assembly_bytes_per_receiver == 0


def test_what_two_buckets_cannot_hold_is_put_together_elsewhere() -> None:
    deployment = Deployment(train_world_size=1, engines=Parallelism(rollout_world_size=2))
    for size, more in ((2 * MEBIBYTE - 256, 0), (2 * MEBIBYTE - 255, 2 * MEBIBYTE - 255)):
        specs = [TensorSpec("x", (size,), "int8")]
        plan = plan_refit(specs, Attention(), deployment, bucket_bytes=MEBIBYTE, links=LINKS)
        assert plan.unwrap().assembly_bytes_per_receiver == more
