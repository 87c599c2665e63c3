"""The rules by which layers, experts and vocabularies are dealt out, against vLLM's own."""

from __future__ import annotations

import pytest

from rollsync.pure.refit.cuts import VOCABULARY_PADDING
from rollsync.pure.refit.parallel import experts_of, stage_of_layers

# What vLLM imports warns about torch's own future; that is not ours to mend.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def test_layers_lie_in_the_stages_that_vllm_gives_them() -> None:
    from vllm.distributed.utils import get_pp_indices

    for layers in range(1, 100):
        for stages in range(1, min(layers, 16) + 1):
            bounds = [get_pp_indices(layers, stage, stages) for stage in range(stages)]
            expected = [
                stage for stage, (first, end) in enumerate(bounds) for _ in range(first, end)
            ]
            assert list(stage_of_layers(layers, stages)) == expected


def test_experts_lie_on_the_ranks_that_vllm_gives_them() -> None:
    from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map

    for experts in (1, 2, 5, 8, 60, 128, 160, 256):
        for ranks in range(2, min(experts, 17)):
            for rank in range(ranks):
                count, local_of, _ = determine_expert_map(ranks, rank, experts)
                assert local_of is not None
                kept = [expert for expert in range(experts) if int(local_of[expert]) >= 0]
                assert kept == list(experts_of(rank, ranks, experts))
                assert count == len(kept)


def test_vocabularies_are_padded_as_in_vllm() -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        DEFAULT_VOCAB_PADDING_SIZE,
        pad_vocab_size,
    )

    assert VOCABULARY_PADDING == DEFAULT_VOCAB_PADDING_SIZE
    for size in (1, 63, 64, 65, 128256, 151936, 151937):
        assert pad_vocab_size(size) == size + -size % VOCABULARY_PADDING
