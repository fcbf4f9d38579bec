"""The index and the manifest of a step that is a difference: literal files, every byte of which is
flipped; members that are missing, wrong or of another version; and the proof by checksums that a
file is the difference of two others.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fastckpt.engine.staging import crc32
from fastckpt.errors import CorruptCheckpoint, IncompatibleCheckpoint
from fastckpt.formats.manifest import Manifest, ObjectsFile, Writer
from fastckpt.formats.shard_index import Delta, Piece, ShardIndex
from fastckpt.plan.boxes import Box
from tests.kit.forgeries import sealed_bytes

NONCE, BASE, OTHER = "0123456789abcdef", "00112233445566778899aabbccddeeff", "fedcba9876543210"
GOLDEN_INDEX = (
    b'{"format":"fastckpt-index","version":4,"nonce":"0123456789abcdef","rank":3,'
    b'"file":"rank-00003.safetensors.planes","file_nbytes":12288,"nbytes":4160,"block_bytes":4096,'
    b'"crc32":"0000000adeadbeef","codec":"planes","frames":[8192,4096],"per_rank":null,'
    b'"base":"00112233445566778899aabbccddeeff","whole_crc32":"0000000bcafebabe",'
    b'"pieces":[\n'
    b'{"key":"w","dtype":"F32","shape":[4,4],"offset":[0,0],"size":[4,4],"at":4096}\n'
    b"]}\n"
)
INDEX = ShardIndex(
    nonce=NONCE,
    rank=3,
    file="rank-00003.safetensors.planes",
    file_nbytes=12288,
    nbytes=4160,
    block_bytes=4096,
    block_crcs=(10, 0xDEADBEEF),
    codec="planes",
    frames=(8192, 4096),
    pieces=(Piece("w", "F32", (4, 4), Box((0, 0), (4, 4)), 4096),),
    per_rank=None,
    delta=Delta(BASE, (11, 0xCAFEBABE)),
)
WRITER = Writer.of(INDEX, "rank-00003.json", GOLDEN_INDEX)
MANIFEST = Manifest(
    step=5,
    nonce=NONCE,
    sequence=7,
    world_size=4,
    created="2026-01-31T12:00:00Z",
    objects=ObjectsFile("objects.pt", 1234, 0xBEEF),
    writers=(WRITER,),
)
Change = Callable[[dict[str, Any]], object]


def test_the_index_to_the_byte() -> None:
    assert INDEX.to_bytes() == GOLDEN_INDEX
    assert ShardIndex.from_bytes(GOLDEN_INDEX) == INDEX
    assert WRITER.parse_index(GOLDEN_INDEX, NONCE) == INDEX
    assert INDEX.whole_crcs == (11, 0xCAFEBABE)
    plain = replace(INDEX, delta=None)
    assert b'"version":3' in plain.to_bytes() and plain.whole_crcs == INDEX.block_crcs


def test_the_manifest_names_bases() -> None:
    content = MANIFEST.to_bytes()
    assert b'"version":3' in content and f'"base":"{BASE}"'.encode() in content
    assert Manifest.from_bytes(content) == MANIFEST and MANIFEST.bases == {BASE}
    plain = replace(MANIFEST, writers=(replace(WRITER, base=None),))
    assert b'"version":2' in plain.to_bytes() and plain.bases == set()
    assert Writer.from_bytes(WRITER.to_bytes()) == WRITER


def test_every_flipped_byte_is_noticed() -> None:
    manifest = MANIFEST.to_bytes()
    for number in range(max(len(GOLDEN_INDEX), len(manifest))):
        rng = random.Random(number)
        for content, read in (
            (GOLDEN_INDEX, lambda damaged: WRITER.parse_index(damaged, NONCE)),
            (manifest, Manifest.from_bytes),
        ):
            if number < len(content):
                damaged = bytearray(content)
                damaged[number] ^= 1 << rng.randrange(8)
                with pytest.raises(CorruptCheckpoint):
                    read(bytes(damaged))
                with pytest.raises(CorruptCheckpoint):
                    read(content[:number])


HOSTILE_NONCES = ["", "0123456789abcde", BASE.upper(), BASE + "\n", "0" * 65, 7, None]
HOSTILE_INDEXES: list[tuple[Change, str]] = [
    *[(lambda its, value=value: its.update(base=value), "nonce|base") for value in HOSTILE_NONCES],
    *[
        (lambda its, value=value: its.update(whole_crc32=value), "CRC-32|whole_crc32")
        for value in ("", "0000000b", "0000000bCAFEBABE", "0000000bcafebabe00000000", 1, None)
    ],
    (lambda its: its.pop("base"), "lacks.*'base'"),
    (lambda its: its.pop("whole_crc32"), "lacks.*'whole_crc32'"),
    (lambda its: its.update(version=3), "unknown.*'base'"),
    (lambda its: its.update(more=1), "unknown.*'more'"),
    (lambda its: its.update(per_rank=[4160, 8], nbytes=4168), "per_rank must be null"),
]


@pytest.mark.parametrize(("change", "message"), HOSTILE_INDEXES, ids=range(len(HOSTILE_INDEXES)))
def test_a_hostile_index(change: Change, message: str) -> None:
    written = json.loads(GOLDEN_INDEX)
    change(written)
    with pytest.raises(CorruptCheckpoint, match=message):
        ShardIndex.from_bytes(json.dumps(written).encode())


HOSTILE_MANIFESTS: list[tuple[Change, str]] = [
    *[
        (lambda its, value=value: its["writers"][0].update(base=value), "nonce|base")
        for value in HOSTILE_NONCES
    ],
    (lambda its: its["writers"][0].pop("base"), "version 3 does not fit"),
    (lambda its: its.update(version=2), "version 2 does not fit"),
]


@pytest.mark.parametrize(
    ("change", "message"), HOSTILE_MANIFESTS, ids=range(len(HOSTILE_MANIFESTS))
)
def test_a_hostile_manifest(change: Change, message: str) -> None:
    written = json.loads(MANIFEST.to_bytes())
    del written["sha256"]
    change(written)
    with pytest.raises(CorruptCheckpoint, match=message):
        Manifest.from_bytes(sealed_bytes(json.dumps(written).encode()[:-1]))


@pytest.mark.parametrize("version", [1, 2, 5, 99])
def test_an_index_of_an_unknown_version_is_refused_by_name(version: int) -> None:
    other = GOLDEN_INDEX.replace(b'"version":4', f'"version":{version}'.encode())
    with pytest.raises(IncompatibleCheckpoint, match=f"has version {version}, .*versions 3 and 4"):
        ShardIndex.from_bytes(other)


@pytest.mark.parametrize("version", [1, 5, 99])
def test_a_manifest_of_an_unknown_version_is_refused_by_name(version: int) -> None:
    content, _, _digest = MANIFEST.to_bytes().rpartition(b',"sha256"')
    other = sealed_bytes(content.replace(b'"version":3', f'"version":{version}'.encode()))
    with pytest.raises(
        IncompatibleCheckpoint, match=f"has version {version}, .*versions 2, 3 and 4"
    ):
        Manifest.from_bytes(other)


def test_the_manifest_and_the_index_name_one_base() -> None:
    for base in (None, OTHER):
        with pytest.raises(CorruptCheckpoint, match="another base than the manifest"):
            replace(WRITER, base=base).parse_index(GOLDEN_INDEX, NONCE)


def crcs_of(content: bytes) -> tuple[int, ...]:
    return tuple(crc32(content[at : at + 4096]) for at in range(0, len(content), 4096))


def is_difference_of(index: ShardIndex, base: ShardIndex) -> bool:
    return index.is_difference_from(base)


def test_a_difference_is_proved_by_checksums() -> None:
    """Of blocks that are full, and of the last one; whichever byte of one of the three differs."""
    rng = random.Random(1)
    whole, base = rng.randbytes(4160), rng.randbytes(4160)
    stored = bytes(a ^ b for a, b in zip(whole, base, strict=True))
    of_base = replace(INDEX, delta=None, block_crcs=crcs_of(base))
    index = replace(INDEX, block_crcs=crcs_of(stored), delta=Delta(BASE, crcs_of(whole)))
    assert is_difference_of(index, of_base)
    assert is_difference_of(index, replace(INDEX, delta=Delta(OTHER, crcs_of(base))))
    for at in (0, 4095, 4096, 4159):
        for name, content in (("whole", whole), ("base", base), ("stored", stored)):
            other = bytearray(content)
            other[at] ^= 1 << rng.randrange(8)
            changed = {
                "whole": (replace(index, delta=Delta(BASE, crcs_of(other))), of_base),
                "base": (index, replace(of_base, block_crcs=crcs_of(other))),
                "stored": (replace(index, block_crcs=crcs_of(other)), of_base),
            }
            assert not is_difference_of(*changed[name]), (at, name)
    (piece,) = INDEX.pieces
    for pieces in ((), (piece._replace(key="v"),), (piece._replace(dtype="I32"),)):
        assert not is_difference_of(index, replace(of_base, pieces=pieces))
