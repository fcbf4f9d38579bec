"""The names of a Hugging Face directory's files, and which tensors are in which."""

from __future__ import annotations

import json
from typing import NamedTuple

import pytest

from fastckpt.formats import hugging_face


class Tensor(NamedTuple):
    name: str
    nbytes: int


@pytest.mark.parametrize(
    ("sizes", "divided"),
    [
        ([], [[]]),
        ([10], [[10]]),
        ([11], [[11]]),
        ([4, 6], [[4, 6]]),
        ([4, 7], [[4], [7]]),
        ([11, 1, 9, 0, 1], [[11], [1, 9, 0], [1]]),
        ([0, 11, 0], [[0], [11], [0]]),
    ],
)
def test_files_are_filled_in_order_up_to_their_size(
    sizes: list[int], divided: list[list[int]]
) -> None:
    found = hugging_face.divided([Tensor(str(size), size) for size in sizes], 10)
    assert [[its.nbytes for its in tensors] for tensors in found.values()] == divided


def test_names_and_index() -> None:
    a, b = Tensor("a", 10), Tensor("b", 20)
    (alone,) = hugging_face.divided([a, b], 30).items()
    assert alone == ("model.safetensors", [a, b]) and not hugging_face.index(dict([alone]))
    found = hugging_face.divided([a, b], 20)
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    assert found == {first: [a], second: [b]}
    told = json.loads(hugging_face.index(found))
    assert told == {"metadata": {"total_size": 30}, "weight_map": {"a": first, "b": second}}


def test_a_config_names_the_dtype_of_the_files() -> None:
    told = {
        "torch_dtype": "float32",
        "dtype": {"": "float32", "text_config": "float16"},
        "text_config": {"dtype": "float16", "x": [1, {"dtype": "float32"}]},
        "encoder": {"model_type": "bert", "torch_dtype": "float32"},
        "quantization_config": {"dtype": "int8"},
        "vocabulary_map": {"dtype": 7},
    }
    assert json.loads(hugging_face.config(json.dumps(told).encode(), "bfloat16")) == {
        "torch_dtype": "bfloat16",
        "dtype": {"": "bfloat16", "text_config": "bfloat16"},
        "text_config": {"dtype": "bfloat16", "x": [1, {"dtype": "float32"}]},
        "encoder": {"model_type": "bert", "torch_dtype": "bfloat16"},
        "quantization_config": {"dtype": "int8"},
        "vocabulary_map": {"dtype": 7},
    }


@pytest.mark.parametrize(
    "content", [b"", b"no JSON", b"[1]", b'{"a":1}', b'{"dtype":"bfloat16"}', b'{"dtype":null}']
)
def test_a_config_that_needs_no_change_is_copied_as_it_is(content: bytes) -> None:
    assert hugging_face.config(content, "bfloat16") == content
