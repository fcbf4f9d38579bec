"""The manifest of a step that has files for parts of the state, and of one that was thinned to some
of them: version 4, byte by byte, and whatever does not follow its rules.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fastckpt.errors import CorruptCheckpoint
from fastckpt.formats.manifest import PART, Manifest, ObjectsFile, Writer
from fastckpt.formats.shard_index import index_name, shard_name
from fastckpt.formats.step_names import OURS
from tests.kit.forgeries import sealed_bytes

DIGEST = "ab" * 32


def writer(rank: int, part: str | None = None) -> Writer:
    return Writer(
        rank=rank,
        file=shard_name(rank, None, part),
        nbytes=4096,
        index=index_name(rank, part),
        index_nbytes=300,
        index_sha256=DIGEST,
        span=(0.0, 0.25),
        keys=None,
        part=part,
    )


MANIFEST = Manifest(
    step=100,
    nonce="0123456789abcdef",
    sequence=7,
    world_size=2,
    created="2026-01-31T12:00:00Z",
    objects=ObjectsFile("objects.pt", 1234, 0xBEEF),
    writers=(writer(0), writer(0, "ema"), writer(0, "model"), writer(1), writer(1, "model")),
)
THINNED = MANIFEST.thinned({"model"})
_REST = f'"index_nbytes":300,"index_sha256":"{DIGEST}","span":[0.0,0.25],"keys":null'
GOLDEN = (
    '{"format":"fastckpt-step","version":4,"step":100,"nonce":"0123456789abcdef","sequence":7,'
    '"world_size":2,"created":"2026-01-31T12:00:00Z","metrics":{},'
    '"objects":{"file":"objects.pt","nbytes":1234,"crc32":"0000beef"},"kept":["model"],'
    '"writers":[\n'
    '{"rank":0,"file":"rank-00000-model.safetensors","nbytes":4096,'
    f'"index":"rank-00000-model.json",{_REST},"part":"model"}},\n'
    '{"rank":1,"file":"rank-00001-model.safetensors","nbytes":4096,'
    f'"index":"rank-00001-model.json",{_REST},"part":"model"}}\n'
    '],"sha256":"@"}\n'
)
Change = Callable[[dict[str, Any]], object]


def sealed(written: dict[str, Any]) -> bytes:
    written = {name: value for name, value in written.items() if name != "sha256"}
    return sealed_bytes(json.dumps(written).encode()[:-1])


def test_the_manifest_to_the_byte() -> None:
    begin, _, _ = GOLDEN.partition(',"sha256"')
    assert THINNED.to_bytes() == sealed_bytes(begin.encode())
    assert Manifest.from_bytes(THINNED.to_bytes()) == THINNED
    whole = MANIFEST.to_bytes()
    assert b'"version":4' in whole and b'"kept"' not in whole
    assert Manifest.from_bytes(whole) == MANIFEST


def test_a_manifest_is_thinned() -> None:
    assert THINNED.kept == ("model",) and MANIFEST.kept is None
    assert MANIFEST.parts == {"model", "ema"} and THINNED.parts == {"model"}
    assert MANIFEST.thinned({"model", "ema"}).thinned({"model"}) == THINNED
    both = MANIFEST.thinned(["model", "ema"])
    assert both.kept == ("ema", "model")
    assert [(its.rank, its.part) for its in both.writers] == [
        *((0, "ema"), (0, "model"), (1, "model"))
    ]
    entries = [*MANIFEST.sizes, "manifest.json", "drained", "notes.txt", "rank-00000.txt"]
    going = {*entries} - {*THINNED.sizes, "manifest.json", "drained", "notes.txt"}
    assert {*THINNED.superfluous(entries)} == going - {"rank-00000.txt"}
    assert MANIFEST.superfluous([*MANIFEST.sizes]) == []


def test_the_version_is_the_lowest_that_says_it() -> None:
    """So that older releases read what they can."""
    plain = replace(MANIFEST, writers=(writer(0),))
    assert b'"version":2' in plain.to_bytes()
    based = replace(MANIFEST, writers=(replace(writer(0), base="0f" * 16),))
    assert b'"version":3' in based.to_bytes()
    empty = replace(plain, writers=(), kept=())
    assert b'"version":4' in empty.to_bytes() and Manifest.from_bytes(empty.to_bytes()) == empty


@pytest.mark.parametrize("codec", [None, "zstd", "planes"])
def test_file_names_are_files_of_ours(codec: str | None) -> None:
    for part in (None, "model", "a.b-c_9", "x" * 64):
        assert part is None or PART.fullmatch(part)
        for rank in (0, 12, 1234567):
            for name in (shard_name(rank, codec, part), index_name(rank, part)):
                assert OURS.fullmatch(name), name
                record = replace(writer(rank, part), file=name)
                assert Writer.from_bytes(record.to_bytes()) == record
    assert shard_name(0, "planes", "model") == "rank-00000-model.safetensors.planes"
    assert index_name(3, "model") == "rank-00003-model.json"


def put(*path: Any) -> Change:
    *inside, name, value = path

    def change(written: dict[str, Any]) -> None:
        place: Any = written
        for each in inside:
            place = place[each]
        place[name] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("version", 2), "version 2 does not fit"),
        (put("version", 3), "version 3 does not fit"),
        (put("writers", 0, "base", "0f" * 16), "version 4 does not fit"),
        (lambda its: [each.pop("part") for each in its["writers"]], "a file for another part"),
        (put("kept", ["ema"]), "a file for another part"),
        (put("kept", ["model", "ema"]), "must be ascending texts"),
        (put("kept", ["model", "model"]), "must be ascending texts"),
        (put("kept", [1]), "must be ascending texts"),
        (put("kept", ["model", None]), "must be ascending texts"),
        (put("kept", ["model", "\ud800"]), "Unicode"),
        (put("kept", "model"), "kept"),
        (put("kept", None), "kept"),
        (put("kept", {"model": 1}), "kept"),
        (put("writers", 0, "part", ""), "part is"),
        (put("writers", 0, "part", "a/b"), "part is"),
        (put("writers", 0, "part", ".a"), "part is"),
        (put("writers", 0, "part", "m\n"), "part is"),
        (put("writers", 0, "part", "\u0661"), "part is"),
        (put("writers", 0, "part", "x" * 65), "part is"),
        (put("writers", 0, "part", None), "part"),
        (put("writers", 1, "rank", 0), "rank 0 must be ascending"),
        (lambda its: its["writers"].reverse(), "rank 0 must be ascending"),
        (put("writers", 1, "rank", 2), "rank 2 must be ascending and below"),
        (put("writers", 1, "file", "rank-00000-model.safetensors"), "twice"),
        (lambda its: its.pop("kept"), ""),
    ],
)
def test_hostile_manifests(change: Change, message: str) -> None:
    written = json.loads(THINNED.to_bytes())
    assert Manifest.from_bytes(sealed(written)) == THINNED
    change(written)
    if not message:  # without the member, it is a whole step of this part alone
        assert Manifest.from_bytes(sealed(written)) == replace(THINNED, kept=None)
        return
    with pytest.raises(CorruptCheckpoint, match=message):
        Manifest.from_bytes(sealed(written))


def test_what_is_wrong_is_not_written() -> None:
    for wrong in (
        replace(MANIFEST, kept=("model",)),
        replace(THINNED, kept=("model", "ema")),
        replace(THINNED, writers=THINNED.writers[::-1]),
        replace(MANIFEST, writers=(replace(writer(0, "model"), base="0f" * 16),)),
        replace(MANIFEST, writers=(writer(0, "model"), writer(0, "ema"))),
    ):
        with pytest.raises(ValueError, match=r"kept|ascending|does not fit"):
            wrong.to_bytes()
