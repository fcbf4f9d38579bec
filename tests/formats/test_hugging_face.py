"""The names of a Hugging Face directory's files, and which tensors are in which."""

from __future__ import annotations

import json

import pytest

from fastckpt.formats import hugging_face


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
    found = hugging_face.divided(sizes, 10)
    assert [sizes[its.start : its.stop] for its in found] == divided


def test_names_and_index() -> None:
    assert hugging_face.file_names(1) == ["model.safetensors"]
    first, second = hugging_face.file_names(2)
    assert first == "model-00001-of-00002.safetensors"
    told = json.loads(hugging_face.index({"a": first, "b": second}, 30))
    assert told == {"metadata": {"total_size": 30}, "weight_map": {"a": first, "b": second}}
