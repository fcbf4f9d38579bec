"""A Hugging Face directory: the names of its files, the division of tensors among the safetensors
files, the index, and the dtype in the model's config.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from fastckpt.formats import file_list

CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
INDEX_SUFFIX = ".safetensors.index.json"
INDEX = f"model{INDEX_SUFFIX}"
METADATA = {"format": "pt"}  # of each file; transformers asks for it
_OF_A_MODEL = (".json", ".jinja", ".model", ".py", ".tiktoken", ".txt")  # ends of names


class Tensor(Protocol):
    """A tensor of the directory: its name and its size in the files."""

    @property
    def name(self) -> str: ...

    @property
    def nbytes(self) -> int: ...


T = TypeVar("T", bound=Tensor)


def divided(tensors: Sequence[T], shard_bytes: int) -> dict[str, Sequence[T]]:
    """Divides tensors among files, in their order.

    Args:
        shard_bytes: the most bytes of tensors in a file; a larger tensor has a separate file.

    Returns:
        Each file's tensors by its name; at least one file, and none is empty unless all are.
    """
    begins, room = [0], shard_bytes
    for number, tensor in enumerate(tensors):
        if tensor.nbytes > room and number > begins[-1]:
            begins.append(number)
            room = shard_bytes
        room -= tensor.nbytes
    count = len(begins)
    ends = zip(begins, [*begins[1:], len(tensors)], strict=True)
    if count == 1:
        return {"model.safetensors": tensors}
    return {
        f"model-{number:05d}-of-{count:05d}.safetensors": tensors[begin:end]
        for number, (begin, end) in enumerate(ends, 1)
    }


def index(files: Mapping[str, Sequence[Tensor]]) -> bytes:
    """Returns the index of the files of divided(); b"" for a single file, which needs none."""
    if len(files) == 1:
        return b""
    file_of = {tensor.name: name for name, tensors in files.items() for tensor in tensors}
    nbytes = sum(tensor.nbytes for tensors in files.values() for tensor in tensors)
    content = {"metadata": {"total_size": nbytes}, "weight_map": file_of}
    return json.dumps(content, indent=2).encode() + b"\n"


def files_for_a_model(names: Iterable[str]) -> list[str]:
    """Returns the names of those files of a directory that a model needs beside its tensors: the
    configs, the tokenizer, and code.
    """
    others = ".index.json", file_list.NAME
    return sorted(
        name
        for name in names
        if name.endswith(_OF_A_MODEL) and not name.endswith(others) and name[0] != "."
    )


def config(content: bytes, dtype: str) -> bytes:
    """Replaces the dtype in a config.json, if it has one, for the model or its parts. Returns the
    same bytes if nothing changes or if they are not a JSON object.

    Args:
        dtype: the name of the dtype, such as "bfloat16"; "": nothing changes.
    """
    try:
        config = json.loads(content)
    except (ValueError, RecursionError):
        return content
    if not dtype or not isinstance(config, dict) or not _tell_dtype(config, dtype):
        return content
    return json.dumps(config, indent=2).encode() + b"\n"


def _tell_dtype(told: dict[str, Any], dtype: str) -> bool:
    """Sets the dtype in a config and those of a model's parts; returns whether any changed."""
    changed = False
    for key, value in told.items():
        if key in ("dtype", "torch_dtype"):  # torch_dtype: before transformers 4.56
            new: object = dtype if isinstance(value, str) else value
            if isinstance(value, dict):  # of parts, by their names
                new = dict.fromkeys(value, dtype)
            changed |= new != value
            told[key] = new
        elif isinstance(value, dict) and _is_config(key, value):
            changed |= _tell_dtype(value, dtype)
    return changed


def _is_config(key: str, value: Mapping[str, Any]) -> bool:
    """Returns whether this is the config of a part of the model."""
    return "model_type" in value or (key.endswith("_config") and key != "quantization_config")
