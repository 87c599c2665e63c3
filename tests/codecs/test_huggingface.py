"""Files of published models are read strictly, and whatever they hold is no exception."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from returns.pipeline import is_successful

from rollsync.codecs.refit.huggingface import (
    header_length,
    read_config,
    read_header,
    read_index,
)
from rollsync.pure.refit import TensorSpec, describe
from tests.pure.refit.published_models import QWEN3_235B_A22B

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 94,
    "num_key_value_heads": 4,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
HEADER = {
    "__metadata__": {"format": "pt"},
    "b": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [4, 16]},
    "a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
}
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


def encoded(value: object) -> bytes:
    return json.dumps(value).encode()


def test_a_published_configuration_is_read() -> None:
    config = msgspec.structs.replace(QWEN3_235B_A22B.config, mlp_only_layers=())
    assert read_config(encoded(CONFIG)).unwrap() == config
    without = read_config(encoded({**CONFIG, "mlp_only_layers": None})).unwrap()
    assert without == QWEN3_235B_A22B.config


@given(st.sampled_from(sorted(CONFIG)), json_values)
def test_a_configuration_with_any_field_changed_is_read_or_refused(
    field: str, value: object
) -> None:
    result = read_config(encoded({**CONFIG, field: value}))
    assert is_successful(result) or describe(result.failure())


@pytest.mark.parametrize(
    ("change", "mentioned"),
    [
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": "4096"}, "hidden_size"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers"),
        ({"mlp_only_layers": [-1]}, "mlp_only_layers"),
    ],
)
def test_a_field_out_of_range_is_named(change: dict[str, object], mentioned: str) -> None:
    error = read_config(encoded({**CONFIG, **change})).failure()
    assert mentioned in describe(error)


def test_a_configuration_without_a_needed_field_is_refused() -> None:
    without = {key: value for key, value in CONFIG.items() if key != "hidden_size"}
    assert "hidden_size" in describe(read_config(encoded(without)).failure())


def test_a_header_is_read_in_the_order_of_the_bytes() -> None:
    assert read_header(encoded(HEADER)).unwrap() == (
        TensorSpec("a", (), "float32"),
        TensorSpec("b", (2, 3), "bfloat16"),
    )


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F33", "shape": [], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": 3, "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": []},
        {"dtype": "F32", "shape": [], "data_offsets": [0]},
        {"dtype": "F32", "shape": [], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [], "data_offsets": [4, 8]},
        {"dtype": "F32", "shape": [], "data_offsets": [4, 0]},
        {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 2**126]},
        {"dtype": "F32", "shape": [2**62] * 50_000, "data_offsets": [0, 4]},
        [],
    ],
)
def test_a_header_with_a_malformed_entry_is_refused(entry: object) -> None:
    assert "'tensor'" in describe(read_header(encoded({"tensor": entry})).failure())


def test_tensors_without_bytes_lie_where_the_next_one_does() -> None:
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    full = {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}
    last = {"dtype": "F32", "shape": [3, 0], "data_offsets": [4, 4]}
    header = {"z": last, "a": full, "c": empty, "b": empty}
    specs = read_header(encoded(header)).unwrap()
    assert [spec.name for spec in specs] == ["b", "c", "a", "z"]


def test_tensors_that_lie_on_each_other_or_leave_a_hole_are_refused() -> None:
    first = {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}
    for begin in (0, 8):
        second = {"dtype": "F32", "shape": [], "data_offsets": [begin, begin + 4]}
        error = read_header(encoded({"first": first, "second": second})).failure()
        assert "'second' does not begin" in describe(error)


def test_a_name_that_comes_twice_is_refused() -> None:
    entry = b'{"dtype":"F32","shape":[],"data_offsets":[0,4]}'
    twice = b'{"a":%s,"a":%s}' % (entry, entry)
    assert "'a' comes twice" in describe(read_header(twice).failure())
    assert "'shape' comes twice" in describe(
        read_header(b'{"a":%s}' % entry.replace(b'"shape"', b'"shape":[],"shape"')).failure()
    )
    index = b'{"weight_map":{"a":"1","a":"2"}}'
    assert "'a' comes twice" in describe(read_index(index).failure())


def test_an_index_of_nothing_is_refused() -> None:
    assert "no tensor" in describe(read_index(encoded({"weight_map": {}})).failure())


def test_an_index_gives_its_files_once() -> None:
    index = {"metadata": {}, "weight_map": {"a": "2.safetensors", "b": "1.safetensors"}}
    index["weight_map"]["c"] = "1.safetensors"
    assert read_index(encoded(index)).unwrap() == ("1.safetensors", "2.safetensors")


@pytest.mark.parametrize("file", ["../x.safetensors", "/etc/passwd", "a\\b", "", ".", "..", "a\0b"])
def test_an_index_names_no_file_outside_its_directory(file: str) -> None:
    error = read_index(encoded({"weight_map": {"a": file}})).failure()
    assert repr(file) in describe(error)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"null", b"[]", b"\x00"])
def test_what_is_no_json_object_is_refused(data: bytes) -> None:
    for result in (read_config(data), read_header(data), read_index(data)):
        assert describe(result.failure())


@given(st.binary(max_size=40))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for result in (read_config(data), read_header(data), read_index(data)):
        assert is_successful(result) or describe(result.failure())


def test_the_length_of_a_header_is_bounded() -> None:
    assert header_length((300).to_bytes(8, "little")).unwrap() == 300
    for wrong in (b"", b"\x02" + b"\0" * 6, (1).to_bytes(8, "little"), b"\xff" * 8):
        assert describe(header_length(wrong).failure())


def test_the_configuration_of_a_language_model_inside_another_is_read() -> None:
    inner = CONFIG | {"model_type": "llama4_text"}
    outer = {"model_type": "llama4", "hidden_size": "of something else", "text_config": inner}
    config = read_config(encoded(outer)).unwrap()
    assert config == read_config(encoded(inner)).unwrap()
    tied = read_config(encoded(outer | {"tie_word_embeddings": True})).unwrap()
    assert tied == msgspec.structs.replace(config, tie_word_embeddings=True)
    without = read_config(encoded(CONFIG | {"text_config": None})).unwrap()
    assert without.model_type == CONFIG["model_type"]
    error = read_config(encoded(outer | {"text_config": {}})).failure()
    assert "model_type" in error.why
