"""The list of a checkpoint directory's files, which is stored in the directory.

Responsible for the bytes of `fastckpt.json` (docs/reference/format.md).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

from fastckpt.errors import CorruptCheckpoint
from fastckpt.formats.strict_json import (
    check_members,
    check_text,
    decode,
    encode,
    refuse_other_version,
    shown,
)

NAME = "fastckpt.json"
VERSION = 1
NBYTES_MAX = 64 << 20
_CRC_END = 1 << 32


class File(NamedTuple):
    """A file's size and the CRC-32 of all its bytes."""

    nbytes: int
    crc32: int


def to_bytes(files: Mapping[str, File]) -> bytes:
    """Encodes the list for storage.

    Args:
        files: the files by their names relative to the directory, with slashes.

    Raises:
        ValueError: a name cannot be that of a file in the directory.
    """
    members = {name: {"nbytes": f.nbytes, "crc32": f.crc32} for name, f in sorted(files.items())}
    content = {"fastckpt": VERSION, "files": members}
    validate(content)
    return encode(content).encode() + b"\n"


def from_bytes(content: bytes) -> dict[str, File]:
    """Decodes a stored list.

    Raises:
        CorruptCheckpoint: the list is damaged.
        IncompatibleCheckpoint: a newer fastckpt wrote it.
    """
    try:
        if len(content) > NBYTES_MAX:
            raise ValueError(f"it has more than {NBYTES_MAX} bytes")
        value = decode(content)
        if isinstance(value, dict):
            refuse_other_version(NAME, value.get("fastckpt"), VERSION)
        validate(value)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{NAME} is malformed: {error}") from None
    assert isinstance(value, dict)
    files = {name: File(**members) for name, members in value["files"].items()}
    if to_bytes(files) != content:
        raise CorruptCheckpoint(f"{NAME} is damaged: its bytes differ from those that were written")
    return files


def is_of_others(content: bytes) -> bool:
    """Returns whether a file with a list's name is another program's, not a damaged list."""
    try:
        value = decode(content)
    except (ValueError, RecursionError):
        return False
    return not (isinstance(value, dict) and "fastckpt" in value)


def validate(value: object) -> None:
    """Raises ValueError unless this is a list's JSON; both writers and readers use this check."""
    check_members(value, {"fastckpt": int, "files": dict}, "the list")
    assert isinstance(value, dict)
    if value["fastckpt"] != VERSION:
        raise ValueError(f"its version is {value['fastckpt']}, must be {VERSION}")
    for name, members in value["files"].items():
        check_text(name)
        parts = name.split("/")
        if name == NAME or "\0" in name or any(part in ("", ".", "..") for part in parts):
            raise ValueError(f"{shown(name)} must be the name of a file in the directory")
        check_members(members, {"nbytes": int, "crc32": int}, shown(name))
        if members["crc32"] >= _CRC_END:
            raise ValueError(f"the crc32 of {shown(name)} has more than 32 bits")


def to_record(files: Mapping[str, File]) -> bytes:
    """Encodes a rank's files and their checksums, to send them to the first rank."""
    return json.dumps({name: [*file] for name, file in files.items()}).encode()


def from_record(record: bytes) -> dict[str, File]:
    """Decodes the result of to_record() of another rank."""
    return {name: File(*numbers) for name, numbers in json.loads(record).items()}
