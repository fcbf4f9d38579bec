"""The manifest of a step directory, which is its commit record, with one line for each writer.

Responsible for the manifest's bytes (docs/reference/format.md), and for finding the writers that a
reader can skip. It must not know files, ranks at run time, or how tensors are split.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import struct
import zlib
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import pairwise
from math import isfinite
from typing import Any, NamedTuple

from fastckpt.errors import CorruptCheckpoint, ensure
from fastckpt.formats.shard_index import (
    INDEX_BYTES_MAX,
    ShardIndex,
    check_file_name,
    check_nonce,
    check_version,
    crc_digits,
    lines,
)
from fastckpt.formats.step_names import OURS
from fastckpt.formats.strict_json import check_members, check_texts, decode, encode, shown
from fastckpt.plan.boxes import span

FORMAT, VERSION = "fastckpt-step", 2
DELTA_VERSION = 3  # of the manifest of a step that has files with differences
LATER_VERSION = 4  # of the manifest of a step that has metadata, or files for parts of the state
MANIFEST, OBJECTS = "manifest.json", "objects.pt"
MANIFEST_BYTES_MAX = 1 << 28
WRITER_BYTES_MAX = 1536
KEYS_MAX = 128
METRICS_MAX, METRIC_CHARS_MAX = 256, 256
METADATA_BYTES_MAX = 1 << 16
SEQUENCE_MAX = 1 << 62  # half of what fits: whatever a step claims, numbers are left for later ones

_BEGINNING = f'{{"format":"{FORMAT}",'.encode()  # of each version
_CRC = re.compile("[0-9a-f]{8}")
_SHA256 = re.compile("[0-9a-f]{64}")
_CREATED = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d{1,6})?(Z|\+00:00)", re.ASCII)
# The digest covers all bytes before this.
_CLOSING = re.compile(rb',"sha256":"([0-9a-f]{64})"}\n')
_CLOSING_BYTES = 78
# Keys of the state that may have files of their own, whose names contain the key.
PART = re.compile(r"\w[\w.-]{0,63}", re.ASCII)
_VERSIONS = (VERSION, DELTA_VERSION, LATER_VERSION)


@dataclass(frozen=True)
class Writer:
    """The manifest's record of one writer, which that writer sends to rank 0.

    Attributes:
        rank: the writer's rank.
        file, nbytes: the name and stored size of its safetensors file.
        index, index_nbytes, index_sha256: the name, size and hex digest of its index.
        span: the lowest and highest bound of its pieces, by boxes.span(); 0 and 0 if there are
            none.
        keys: the key_hash() of its pieces' keys, ascending and unique; None if there are more than
            KEYS_MAX.
        base: the nonce of the step from which its file is a difference; None if the file holds the
            pieces themselves.
        part: the key of the state under which all pieces of its file are; None if the file holds
            pieces of any key that has no file of its own.
    """

    rank: int
    file: str
    nbytes: int
    index: str
    index_nbytes: int
    index_sha256: str
    span: tuple[float, float]
    keys: tuple[int, ...] | None
    base: str | None = None
    part: str | None = None

    @classmethod
    def of(cls, index: ShardIndex, name: str, content: bytes, part: str | None = None) -> Writer:
        """Returns the record for an index, given the name and content of the index's file."""
        spans = [span(piece.box, piece.shape) for piece in index.pieces if piece.box.numel]
        lows, highs = zip(*spans, strict=True) if spans else ((0.0,), (0.0,))
        keys = tuple(sorted({key_hash(piece.key) for piece in index.pieces}))
        return cls(
            rank=index.rank,
            file=index.file,
            nbytes=index.file_nbytes,
            index=name,
            index_nbytes=len(content),
            index_sha256=hashlib.sha256(content).hexdigest(),
            span=(min(lows), max(highs)),
            keys=keys if len(keys) <= KEYS_MAX else None,
            base=None if index.delta is None else index.delta.base,
            part=part,
        )

    def to_bytes(self) -> bytes:
        """Encodes the record as JSON, at most WRITER_BYTES_MAX bytes; raises like validate()."""
        written = self._written()
        _validate_writer(written)
        content = encode(written).encode()
        ensure(len(content) <= WRITER_BYTES_MAX, "the record must not exceed the readers' limit")
        return content

    @classmethod
    def from_bytes(cls, content: bytes) -> Writer:
        """Decodes the result of to_bytes(). Raises CorruptCheckpoint if it is malformed."""
        if len(content) > WRITER_BYTES_MAX:
            raise CorruptCheckpoint(f"{len(content)} bytes are too many for a writer's record")
        try:
            written = decode(content)
            _validate_writer(written)
        except (ValueError, RecursionError) as error:
            raise CorruptCheckpoint(f"a writer's record is malformed: {error}") from None
        return cls._of_written(written)

    def parse_index(self, content: bytes, nonce: str) -> ShardIndex:
        """Verifies the content of the writer's index by this record, and parses it.

        Args:
            content: the content of the index's file.
            nonce: the manifest's nonce.

        Raises:
            CorruptCheckpoint: the index is damaged or malformed, or belongs to another save.
            IncompatibleCheckpoint: it has another version.
        """
        if len(content) != self.index_nbytes:
            raise CorruptCheckpoint(
                f"the index has {len(content)} bytes, must have {self.index_nbytes}"
            )
        if hashlib.sha256(content).hexdigest() != self.index_sha256:
            raise CorruptCheckpoint("the index is damaged: its SHA-256 does not match the manifest")
        index = ShardIndex.from_bytes(content)
        identity = (index.nonce, index.rank, index.file, index.file_nbytes)
        if identity != (nonce, self.rank, self.file, self.nbytes):
            raise CorruptCheckpoint(
                "the index belongs to another save or writer than the manifest: it has "
                f"nonce {index.nonce}, rank {index.rank} and {index.file} of {index.file_nbytes} "
                "bytes"
            )
        if self.base != (None if index.delta is None else index.delta.base):
            raise CorruptCheckpoint("the index names another base than the manifest")
        return index

    def _written(self) -> dict[str, Any]:
        keys = None
        if self.keys is not None:
            packed = struct.pack(f"<{len(self.keys)}I", *self.keys)
            keys = base64.b64encode(packed).decode()
        written = vars(self) | {"span": [*self.span], "keys": keys}
        absent = [name for name in _OPTIONAL if written[name] is None]
        return {name: value for name, value in written.items() if name not in absent}

    @classmethod
    def _of_written(cls, written: Any) -> Writer:
        keys = None if written["keys"] is None else _unpacked(written["keys"])
        return cls(**written | {"span": tuple(written["span"]), "keys": keys})


class ObjectsFile(NamedTuple):
    """The torch zip of all values that are not in shards; `crc32` is in its closing comment."""

    file: str
    nbytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """The commit record of a step: the step exists if and only if this exists and is valid.

    Attributes:
        step: the number of the step.
        nonce: the save's nonce, which is also in every index.
        sequence: a number that grows with each commit.
        world_size: the number of ranks of the job that saved.
        created: UTC in ISO 8601, such as "2026-01-31T12:00:00Z".
        objects: the file of all values that are not in shards.
        writers: the writers by ascending rank, without ranks that stored nothing.
        metrics: the metrics passed to save(), by name: finite numbers or texts.
        metadata: the metadata passed to save(), a JSON value; None if there is none.
        kept: the keys of the state that a thinned step still has, ascending; None if the step is
            whole.
    """

    step: int
    nonce: str
    sequence: int
    world_size: int
    created: str
    objects: ObjectsFile
    writers: tuple[Writer, ...]
    metrics: Mapping[str, float | str] = field(default_factory=dict, hash=False)
    metadata: Any = field(default=None, hash=False)
    kept: tuple[str, ...] | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each file of the step, except the manifest."""
        sizes = {self.objects.file: self.objects.nbytes}
        for writer in self.writers:
            sizes |= {writer.index: writer.index_nbytes, writer.file: writer.nbytes}
        return sizes

    @property
    def parts(self) -> frozenset[str]:
        """The keys of the state that have files of their own."""
        return frozenset(writer.part for writer in self.writers if writer.part is not None)

    @property
    def thinnable(self) -> frozenset[str]:
        """The keys of the state that the step can be thinned to."""
        return self.parts if self.kept is None else frozenset(self.kept)

    def superfluous(self, names: Collection[str]) -> list[str]:
        """Returns those of the names in the step's directory that are shards or indexes, but not of
        this step.
        """
        ours = [name for name in names if name.startswith("rank-") and OURS.fullmatch(name)]
        sizes = self.sizes
        return [name for name in ours if name not in sizes]

    def writers_of(self, rank: int) -> list[Writer]:
        """Returns the records of the files that a rank wrote."""
        return [writer for writer in self.writers if writer.rank == rank]

    def thinned(self, parts: Collection[str]) -> Manifest:
        """Returns the manifest of this step without the files of all other keys of the state.

        Args:
            parts: some of the keys that the step can be thinned to.
        """
        ensure(self.thinnable.issuperset(parts), "a step is thinned to what it has")
        writers = tuple(writer for writer in self.writers if writer.part in parts)
        return replace(self, writers=writers, kept=tuple(sorted(parts)))

    @property
    def bases(self) -> frozenset[str]:
        """The nonces of the steps from which files of this one are differences."""
        return frozenset(writer.base for writer in self.writers if writer.base is not None)

    def to_bytes(self) -> bytes:
        """Returns the content of the manifest's file. Raises ValueError like validate()."""
        objects = self.objects._asdict() | {"crc32": crc_digits(self.objects.crc32)}
        written = {
            "format": FORMAT,
            "version": self._version,
            "step": self.step,
            "nonce": self.nonce,
            "sequence": self.sequence,
            "world_size": self.world_size,
            "created": self.created,
            "metrics": self.metrics,
            "objects": objects,
        }
        if self.metadata is not None:
            written["metadata"] = self.metadata
        if self.kept is not None:
            written["kept"] = [*self.kept]
        written["writers"] = [writer._written() for writer in self.writers]
        content = lines(written)
        digest = hashlib.sha256(content).hexdigest()
        validate(written | {"sha256": digest})
        content += f',"sha256":"{digest}"}}\n'.encode()
        if len(content) > MANIFEST_BYTES_MAX:
            raise ValueError(
                f"a manifest has {len(content)} bytes, must have at most {MANIFEST_BYTES_MAX}"
            )
        return content

    @property
    def _version(self) -> int:
        if self.parts or self.kept is not None or self.metadata is not None:
            return LATER_VERSION
        return DELTA_VERSION if self.bases else VERSION

    @classmethod
    def from_bytes(cls, content: bytes) -> Manifest:
        """Verifies and parses a manifest.

        Raises:
            CorruptCheckpoint: it is truncated, damaged, edited or malformed.
            IncompatibleCheckpoint: it has another version.
        """
        if len(content) > MANIFEST_BYTES_MAX:
            raise CorruptCheckpoint(f"{len(content)} bytes are too many for a manifest")
        closing = _CLOSING.fullmatch(content, max(0, len(content) - _CLOSING_BYTES))
        if closing is None:
            raise CorruptCheckpoint(
                "the manifest is truncated or damaged: it does not end in a digest"
            )
        if hashlib.sha256(content[: closing.start()]).hexdigest().encode() != closing[1]:
            raise CorruptCheckpoint(
                "the manifest is damaged: its SHA-256 does not match the digest at its end"
            )
        try:
            written: Any = decode(content)
            check_version(written, FORMAT, _VERSIONS)
            validate(written)
        except (ValueError, RecursionError) as error:
            raise CorruptCheckpoint(f"the manifest is malformed: {error}") from None
        objects = written["objects"]
        return cls(
            step=written["step"],
            nonce=written["nonce"],
            sequence=written["sequence"],
            world_size=written["world_size"],
            created=written["created"],
            objects=ObjectsFile(objects["file"], objects["nbytes"], int(objects["crc32"], 16)),
            writers=tuple(map(Writer._of_written, written["writers"])),
            metrics=written["metrics"],
            metadata=written.get("metadata"),
            kept=tuple(written["kept"]) if "kept" in written else None,
        )


def validate(manifest: Any) -> None:
    """Raises ValueError unless this is a manifest's JSON; writers and readers use this check."""
    kinds: dict[str, type | tuple[type, ...]] = {
        **dict.fromkeys(("format", "nonce", "created", "sha256"), str),
        **dict.fromkeys(("version", "step", "sequence", "world_size"), int),
        **dict.fromkeys(("metrics", "objects"), dict),
        "writers": list,
    }
    is_thinned = isinstance(manifest, dict) and "kept" in manifest
    has_metadata = isinstance(manifest, dict) and "metadata" in manifest
    kinds |= {"kept": list} if is_thinned else {}
    others = manifest
    if has_metadata:  # any JSON value
        others = {name: value for name, value in manifest.items() if name != "metadata"}
    check_members(others, kinds, "it")
    if manifest["format"] != FORMAT or manifest["version"] not in _VERSIONS:
        raise ValueError(f"it is a {shown(manifest['format'])} of version {manifest['version']}")
    validate_metrics(manifest["metrics"])
    if manifest["sequence"] > SEQUENCE_MAX:
        raise ValueError(f"sequence {manifest['sequence']} is above {SEQUENCE_MAX}")
    check_nonce(manifest["nonce"])
    _check_time(manifest["created"])
    objects = manifest["objects"]
    check_members(objects, {"file": str, "nbytes": int, "crc32": str}, "objects")
    check_file_name(objects["file"])
    if _CRC.fullmatch(objects["crc32"]) is None:
        raise ValueError(f"crc32 of objects is {shown(objects['crc32'])}, must be 8 hex digits")
    names, last = {MANIFEST, objects["file"]}, (-1, "")
    for writer in manifest["writers"]:
        _validate_writer(writer)
        this = writer["rank"], writer.get("part", "")
        if not last < this < (manifest["world_size"],):
            raise ValueError(f"rank {writer['rank']} must be ascending and below the world size")
        last = this
        names |= {writer["file"], writer["index"]}
    if len(names) != 2 + 2 * len(manifest["writers"]):
        raise ValueError("a file is named twice")
    has_base = any("base" in writer for writer in manifest["writers"])
    is_later = is_thinned or has_metadata
    is_later = is_later or any("part" in writer for writer in manifest["writers"])
    fitting = LATER_VERSION if is_later else DELTA_VERSION if has_base else VERSION
    if manifest["version"] != fitting or (has_base and is_later):
        raise ValueError(f"version {manifest['version']} does not fit to its other members")
    if has_metadata:
        validate_metadata(manifest["metadata"])
    if is_thinned:
        _validate_kept(manifest)


def validate_metadata(value: object) -> None:
    """Raises ValueError unless a manifest can hold this metadata."""
    try:
        content = encode(value).encode()
        is_same = decode(content) == value
        json.dumps(value, ensure_ascii=False).encode()  # raises if a text is not Unicode
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the metadata is not a JSON value: {error}") from None
    if not is_same:  # such as keys that are numbers, or a tuple
        raise ValueError(
            "the metadata is not a JSON value: it may consist of dicts with texts as keys, lists, "
            "texts, numbers, True, False and None"
        )
    if len(content) > METADATA_BYTES_MAX:
        raise ValueError(
            f"the metadata has {len(content)} bytes as JSON, must have at most {METADATA_BYTES_MAX}"
        )


def validate_metrics(metrics: Mapping[str, object]) -> None:
    """Raises ValueError unless a manifest can hold these metrics."""
    if len(metrics) > METRICS_MAX:
        raise ValueError(f"there are {len(metrics)} metrics, must be at most {METRICS_MAX}")
    for name, value in metrics.items():
        if type(value) not in (float, str) or (type(value) is float and not isfinite(value)):
            raise ValueError(
                f"the metric {shown(name)} is {shown(value)}, must be a number or a string"
            )
        texts = [name, value] if isinstance(value, str) else [name]
        if max(map(len, texts)) > METRIC_CHARS_MAX:
            raise ValueError(
                f"the metric {shown(name)} has more than {METRIC_CHARS_MAX} characters"
            )
        check_texts(texts)


def _validate_kept(manifest: dict[str, Any]) -> None:
    """Raises ValueError unless every file of a thinned step belongs to a key that is kept."""
    keys = manifest["kept"]
    if not all(type(key) is str for key in keys) or sorted({*keys}) != keys:
        raise ValueError(f"kept is {shown(keys)}, must be ascending texts")
    check_texts(keys)
    if not {writer.get("part") for writer in manifest["writers"]} <= {*keys}:
        raise ValueError(f"kept is {shown(keys)}, but a writer has a file for another part")


_OPTIONAL = ("base", "part")
_WRITER_KINDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("rank", "nbytes", "index_nbytes"), int),
    **dict.fromkeys(("file", "index", "index_sha256"), str),
    "span": list,
    "keys": (str, type(None)),
}


def _validate_writer(writer: Any) -> None:
    """Raises ValueError unless this is a writer's record, either separate or in a manifest."""
    extra = [name for name in _OPTIONAL if isinstance(writer, dict) and name in writer]
    check_members(writer, _WRITER_KINDS | dict.fromkeys(extra, str), "a writer")
    if "base" in writer:
        check_nonce(writer["base"])
    if "part" in writer and PART.fullmatch(writer["part"]) is None:
        raise ValueError(f"part is {shown(writer['part'])}, must match {PART.pattern}")
    check_file_name(writer["file"])
    check_file_name(writer["index"])
    if writer["index_nbytes"] > INDEX_BYTES_MAX:
        raise ValueError(f"{writer['index_nbytes']} bytes are too many for an index")
    if _SHA256.fullmatch(writer["index_sha256"]) is None:
        raise ValueError(f"index_sha256 is {shown(writer['index_sha256'])}, must be 64 hex digits")
    bounds = writer["span"]
    if [type(bound) for bound in bounds] != [float, float] or not 0 <= bounds[0] <= bounds[1] <= 1:
        raise ValueError("span must be two ascending numbers from 0.0 to 1.0")
    if writer["keys"] is not None:
        keys = _unpacked(writer["keys"])
        if len(keys) > KEYS_MAX or any(a >= b for a, b in pairwise(keys)):
            raise ValueError(
                f"there are {len(keys)} keys; they must be ascending, and at most {KEYS_MAX}"
            )


def _unpacked(keys: str) -> tuple[int, ...]:
    packed = base64.b64decode(keys)  # raises ValueError; what it skips is noticed below
    if len(packed) % 4 or base64.b64encode(packed).decode() != keys:
        raise ValueError("keys must be 32-bit numbers in base64")
    return struct.unpack(f"<{len(packed) // 4}I", packed)


def _check_time(created: str) -> None:
    match = _CREATED.fullmatch(created)
    if match is None:
        raise ValueError(
            f"created is {shown(created)}, must be a time such as 2026-01-31T12:00:00Z"
        )
    datetime.fromisoformat(match[1])


def is_manifest(content: bytes) -> bool:
    """Returns whether a file begins like a manifest, since other programs also use its name."""
    return content.startswith(_BEGINNING)


def key_hash(key: str) -> int:
    """Returns the 32-bit hash of a tensor's key for Writer.keys."""
    return zlib.crc32(key.encode())


def may_hold(writer: Writer, keys: Set[int], low: float, high: float) -> bool:
    """Returns False if a writer's file surely has no element of these tensors within these bounds.

    Args:
        writer: the writer's record in the manifest.
        keys: the key_hash() of each tensor's key.
        low, high: bounds from boxes.span(), of one box or of several boxes combined.
    """
    meets = writer.span[0] < high and low < writer.span[1]
    return meets and (writer.keys is None or not keys.isdisjoint(writer.keys))
