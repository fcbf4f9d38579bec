"""Layouts on Lustre: their bytes, which one a file gets, and what is done when a server refuses.
Runs on a model of Lustre's client (lustre_double.py), for want of a Lustre.
"""

from __future__ import annotations

import errno
import os
import random
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastckpt
from fastckpt.arguments.checks import check_stripe
from fastckpt.errors import CorruptCheckpoint, StorageError
from fastckpt.plan.image import BLOCK_BYTES
from fastckpt.plan.rank_intervals import bounds
from fastckpt.saving.pipeline import Pipeline
from fastckpt.storage import lustre, lustre_layout
from fastckpt.storage.file_system import Storage
from fastckpt.storage.lustre_layout import (
    ALL_STRIPES,
    Layout,
    Purpose,
    decide,
    elsewhere,
    encoded,
    grain_bytes,
    parsed,
)
from tests.kit.doubles import save_through
from tests.kit.lustre_double import LustreClient, lustre_client, plain, progressive

__all__ = ["lustre_client"]
GIB, MIB = 1 << 30, 1 << 20
WAIT_S = 60.0
ONE = Layout(1, MIB)


@pytest.fixture(autouse=True)
def nothing_is_left(disk: Path) -> Iterator[None]:
    yield
    assert not list(disk.rglob(".*.tmp"))


# Bytes.


def test_the_bytes_are_those_of_the_header_file() -> None:
    """struct lov_user_md_v1 by hand: magic, pattern RAID0, no object, size, count, any OST."""
    assert encoded(Layout(4, 8 * MIB)) == bytes.fromhex(
        "d00bd10b 01000000 00000000000000000000000000000000 00008000 0400 ffff"
    )
    assert len(encoded(Layout(4, 8 * MIB, "flash"))) == 48
    specific = encoded(Layout(2, MIB, "", (7, 3)))
    assert len(specific) == 48 + 2 * 24 and specific[:4] == bytes.fromhex("d00bd50b")
    assert specific[30:32] == b"\x07\x00", "the first OST is where it begins"


layouts = st.builds(
    lambda count, size, pool, osts: Layout(len(osts) or count, size << 16, pool, tuple(osts)),
    st.integers(1, 2000),
    st.integers(1, 65535),
    st.text("abcdefghij_-0123456789", max_size=15),
    st.lists(st.integers(0, 65535), max_size=50, unique=True),
)


@given(layouts)
def test_what_is_encoded_is_parsed(layout: Layout) -> None:
    assert parsed(encoded(layout)) == layout


@given(st.binary(max_size=200))
def test_other_bytes_are_refused_or_parsed(content: bytes) -> None:
    try:
        parsed(content)
    except CorruptCheckpoint:
        return
    assert content[1:2] == b"\x0b"


def test_what_clients_answer_is_parsed() -> None:
    assert parsed(plain(2, MIB, (5, 9))) == Layout(2, MIB, "", (5, 9))
    assert parsed(plain(3, MIB)) == Layout(3, MIB), "a directory's has no objects"
    assert parsed(plain(3, MIB, pool="flash")).pool == "flash"
    assert parsed(plain(ALL_STRIPES, MIB)).stripes == ALL_STRIPES
    assert parsed(progressive()).is_composite


def test_cut_off_bytes_are_refused() -> None:
    for content in (b"", plain(1, MIB)[:20], plain(1, MIB, pool="a")[:40], progressive()[:10]):
        with pytest.raises(CorruptCheckpoint):
            parsed(content)


# The argument.


@pytest.mark.parametrize("stripe", ["auto", "keep", (1, 65536), (2000, 4 << 30 - 12), (8, 3 << 16)])
def test_arguments_that_are_taken(stripe: object) -> None:
    assert check_stripe(stripe) == stripe


def test_a_size_may_be_a_text() -> None:
    assert check_stripe((4, "4MiB")) == (4, 4 * MIB)


# Decisions.


@pytest.mark.parametrize(
    ("gib", "stripes"), [(4, 0), (5, 2), (15, 2), (24, 3), (31, 3), (64, 8), (1000, 8)]
)
def test_a_ranks_own_file_is_widened_by_its_size(gib: int, stripes: int) -> None:
    layout, why = decide(ONE, Purpose(gib * GIB), 100)
    assert (layout.stripes if layout else 0) == stripes and why
    assert layout is None or layout.stripe_bytes == BLOCK_BYTES
    fewer, _why = decide(ONE, Purpose(gib * GIB), 1)
    assert fewer is None or fewer.stripes == 1, "not more stripes than OSTs"


@pytest.mark.parametrize(
    ("gib", "ranks", "osts", "expected"),
    [
        (1, 8, 100, None),
        (2, 8, 100, (48, 8 * MIB)),
        (64, 8, 100, (48, 32 * MIB)),
        (64, 64, 100, (48, 16 * MIB)),
        (64, 8, 10, (10, 32 * MIB)),
        (64, 8, None, (48, 32 * MIB)),
    ],
)
def test_a_shared_file_goes_over_all_osts(
    gib: int, ranks: int, osts: int | None, expected: tuple[int, int] | None
) -> None:
    layout, _why = decide(ONE, Purpose(gib * GIB, ranks), osts)
    assert (layout and layout[:2]) == expected


@pytest.mark.parametrize("writers", [1, 64])
def test_what_the_directory_says_is_kept(writers: int) -> None:
    big = Purpose(1000 * GIB, writers)
    for kept in (Layout(0, 0, is_composite=True), Layout(4, MIB), Layout(ALL_STRIPES, MIB)):
        layout, why = decide(kept, big, 100)
        assert layout is None and "kept" in why
    pooled, _why = decide(Layout(1, MIB, "flash"), big, 100)
    assert pooled is not None and pooled.pool == "flash"
    assert decide(ONE, big._replace(stripe="keep"), 100)[0] is None
    wanted, _why = decide(Layout(0, 0, is_composite=True), big._replace(stripe=(5, MIB)), 100)
    assert wanted == Layout(5, MIB), "who says it outright gets it"


@given(
    st.integers(1, 1 << 44),
    st.integers(2, 5000),
    st.one_of(
        st.just("auto"),
        st.just("keep"),
        st.tuples(st.integers(1, 2000), st.integers(1, 65535).map(lambda n: n << 16)),
    ),
)
def test_ranks_cut_along_stripes(nbytes: int, ranks: int, stripe: str | tuple[int, int]) -> None:
    grain = grain_bytes(nbytes, ranks, stripe)
    layout, _why = decide(ONE, Purpose(nbytes, ranks, stripe), 100)
    cuts = bounds(nbytes, ranks, grain=grain)
    assert cuts[0] == 0 and cuts[-1] == nbytes and cuts == sorted(cuts)
    assert all(cut % BLOCK_BYTES == 0 for cut in cuts[:-1] if cut != nbytes)
    if stripe == "auto" and layout is not None:
        assert grain % layout.stripe_bytes == 0
        assert all(cut % layout.stripe_bytes == 0 for cut in cuts if cut != nbytes)
    longest = max(end - begin for begin, end in pairwise(cuts))
    assert longest <= nbytes / ranks + 2 * grain
    if isinstance(stripe, tuple) and grain % stripe[1]:
        assert 8 * ranks * stripe[1] > nbytes // (BLOCK_BYTES // 65536), "long enough to be cut so"


def test_another_layout_takes_other_osts() -> None:
    free = {ost: ost << 30 for ost in range(8)}
    assert elsewhere(Layout(2, MIB, "", (6, 7)), free).osts == (5, 4)
    assert set(elsewhere(Layout(6, MIB, "", (0, 1, 2, 3, 4, 5)), free).osts) == set(range(2, 8))
    assert elsewhere(Layout(2, MIB, "", (6, 7)), {}) == Layout(4, MIB)
    assert elsewhere(Layout(2, MIB, "flash", (6, 7)), free) == Layout(4, MIB, "flash")


# Files.


def created(path: Path, purpose: Purpose | None) -> str:
    """Makes a file; returns why it is as it is."""
    storage = Storage()
    fd = storage.create(str(path), 0o600, purpose)
    storage.write_at(fd, b"x", 0)
    why = storage.policy(fd)[1].why
    storage.close(fd)
    return why


def test_a_layout_is_set_when_a_file_is_made(lustre_client: LustreClient, disk: Path) -> None:
    why = created(disk / "a", Purpose(40 * GIB))
    assert lustre_client.layout(disk / "a")[:2] == (5, BLOCK_BYTES)
    assert lustre_client.set_by == ["ioctl"] and "5 stripes of 8192 KiB" in why
    lustre_client.calls.clear()
    created(disk / "b", Purpose(40 * GIB))
    assert lustre_client.calls == ["create", "ioctl", "getxattr"], "the directory was asked once"
    created(disk / "c", Purpose(1 * GIB))
    assert lustre_client.layout(disk / "c")[:2] == (1, MIB)
    created(disk / "d", None)
    assert lustre_client.layout(disk / "d")[:2] == (1, MIB)


@pytest.mark.parametrize("default", [progressive(), plain(4, MIB)], ids=["composite", "four"])
def test_the_directorys_layout_is_left_alone(
    lustre_client: LustreClient, disk: Path, default: bytes
) -> None:
    lustre_client.defaults[str(disk)] = default
    why = created(disk / "a", Purpose(400 * GIB))
    assert lustre_client.set_by == [] and "kept" in why
    (disk / "run").mkdir()
    why = created(disk / "run" / "b", Purpose(400 * GIB))
    assert lustre_client.set_by == [] and "kept" in why, "set on the root of the file system"


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM])
def test_the_administrators_layout_wins(lustre_client: LustreClient, disk: Path, code: int) -> None:
    lustre_client.ioctl_error = code
    why = created(disk / "a", Purpose(40 * GIB))
    assert lustre_client.layout(disk / "a")[:2] == (1, MIB) and os.strerror(code) in why
    assert (disk / "a").read_bytes() == b"x"
    assert lustre_client.calls.count("ioctl") == 1 and "setxattr" not in lustre_client.calls
    why = created(disk / "b", Purpose(40 * GIB))
    assert lustre_client.calls.count("ioctl") == 1, "asked once"
    assert "administrator" in why


@pytest.mark.parametrize("ioctl_error", [0, errno.ENOTTY])
def test_a_layout_that_was_silently_not_set_is_a_refusal(
    lustre_client: LustreClient, disk: Path, ioctl_error: int
) -> None:
    """What is reserved for a group (enable_setstripe_gid) is answered with "done" to others."""
    lustre_client.restricted, lustre_client.ioctl_error = True, ioctl_error
    state = {"w": torch.ones(3 * MIB)}
    stats = fastckpt.save(state, disk / "a.pt", stripe=(3, 2 * MIB)).result(WAIT_S)
    assert lustre_client.layout(disk / "a.pt")[:2] == (1, MIB)
    assert "the server refused 3 stripes of 2048 KiB" in stats.why
    assert os.listdir(disk) == ["a.pt"]
    assert bool((fastckpt.load(disk / "a.pt")["w"] == 1).all())
    lustre_client.calls.clear()
    (disk / "other").mkdir()
    stats = fastckpt.save(state, disk / "other" / "b.pt", stripe=(3, 2 * MIB)).result(WAIT_S)
    assert "ioctl" not in lustre_client.calls, "it is remembered, for all of the mount"
    assert lustre_client.calls.count("create") == 1 and "administrator" in stats.why


@pytest.mark.parametrize("code", [errno.ENOTTY, errno.EOPNOTSUPP])
def test_the_attribute_is_the_other_way(lustre_client: LustreClient, disk: Path, code: int) -> None:
    lustre_client.ioctl_error = code
    created(disk / "a", Purpose(40 * GIB))
    assert lustre_client.set_by == ["xattr"]
    assert lustre_client.layout(disk / "a")[:2] == (5, BLOCK_BYTES)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ERANGE, errno.EIO])
def test_a_refusal_gives_the_default(lustre_client: LustreClient, disk: Path, code: int) -> None:
    lustre_client.ioctl_error, lustre_client.setxattr_error = errno.ENOTTY, code
    why = created(disk / "a", Purpose(40 * GIB))
    assert lustre_client.layout(disk / "a")[:2] == (1, MIB) and "refused" in why
    assert os.listdir(disk) == ["a"]


def test_a_layout_that_is_there_already_is_no_failure(
    lustre_client: LustreClient, disk: Path
) -> None:
    lustre_client.ioctl_error = errno.EEXIST
    created(disk / "a", Purpose(40 * GIB))
    assert lustre_client.calls.count("create") == 1


def test_elsewhere_nothing_of_it_happens(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("this is no Lustre")

    monkeypatch.setattr(lustre, "create", never)
    created(disk / "a", Purpose(400 * GIB, stripe=(4, MIB)))
    stats = fastckpt.save({"w": torch.ones(10)}, disk / "b.pt", stripe=(4, MIB)).result(WAIT_S)
    assert "stripe" not in stats.why


# Saves.


def test_a_save_stripes_and_tells(lustre_client: LustreClient, disk: Path) -> None:
    stats = fastckpt.save({"w": torch.ones(3 * MIB)}, disk / "a.pt", stripe=(3, 2 * MIB)).result(
        WAIT_S
    )
    assert lustre_client.layout(disk / "a.pt")[:2] == (3, 2 * MIB)
    assert "3 stripes of 2048 KiB: as requested" in stats.why and stats.why.startswith("lustre")
    assert stats.backend == "threads"
    assert bool((fastckpt.load(disk / "a.pt")["w"] == 1).all())


def test_steps_ask_the_root_once(
    lustre_client: LustreClient, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lustre_layout, "OWN_BIG_BYTES", MIB)
    with fastckpt.Checkpointer(disk / "run") as checkpointer:
        for step in range(3):
            checkpointer.save(step, {"w": torch.ones(3 * MIB)}).result(WAIT_S)
        restored = {"w": torch.zeros(3 * MIB)}
        assert checkpointer.restore(restored) == 2 and bool((restored["w"] == 1).all())
    shards = sorted((disk / "run").glob("step-*/*.safetensors"))
    assert len(shards) == 3
    assert {lustre_client.layout(shard)[:2] for shard in shards} == {(2, BLOCK_BYTES)}
    assert lustre_client.calls.count("ioctl") == 3
    asked = 3 + 2  # each shard, whose layout is read back; the root of the run and of the mount
    assert lustre_client.calls.count("getxattr") <= asked


class FullOsts(Storage):
    """An allocation fails where a file has an object on a full OST."""

    def __init__(self, client: LustreClient, full: set[int]) -> None:
        self._client, self._full = client, full

    def allocate(self, fd: int, nbytes: int) -> None:
        _count, _size, osts = self._client.layout(f"/proc/self/fd/{fd}")
        if self._full & set(osts):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().allocate(fd, nbytes)


def saved_on(storage: Storage, path: Path) -> fastckpt.SaveHandle:
    pipeline = Pipeline(storage=storage, budget_bytes=64 * MIB)
    try:
        handle = save_through(pipeline, {"w": torch.ones(3 * MIB)}, path)
        handle.exception(WAIT_S)
        return handle
    finally:
        pipeline.close()


def test_a_full_ost_is_left_for_others(lustre_client: LustreClient, disk: Path) -> None:
    handle = saved_on(FullOsts(lustre_client, {0}), disk / "a.pt")
    stats = handle.result(WAIT_S)
    assert lustre_client.layout(disk / "a.pt")[2] == (5,), "the one that has most room"
    assert "no room with the first layout" in stats.why
    assert os.listdir(disk) == ["a.pt"]
    assert bool((fastckpt.load(disk / "a.pt")["w"] == 1).all())


def test_osts_that_are_all_full_are_named(lustre_client: LustreClient, disk: Path) -> None:
    handle = saved_on(FullOsts(lustre_client, set(range(6))), disk / "a.pt")
    error = handle.exception(WAIT_S)
    assert isinstance(error, StorageError) and error.errno == errno.ENOSPC
    assert error.op == "allocate" and "OST0005 (6291456 MiB free)" in str(error)
    assert re.search(r"12\.0 MiB are needed, but .* are free on the file system; ", str(error))
    assert lustre_client.calls.count("create") == 2, "once more, and not again"
    assert os.listdir(disk) == []


def test_a_write_that_meets_a_full_ost_names_it(lustre_client: LustreClient, disk: Path) -> None:
    class Full(Storage):
        def transfer(self, kind: str, _fd: int, _memory: memoryview, _offset: int) -> int:
            raise OSError(errno.ENOSPC, kind)

    error = saved_on(Full(), disk / "a.pt").exception(WAIT_S)
    assert isinstance(error, StorageError) and error.op == "write"
    assert "OST0000 (1048576 MiB free)" in str(error)


def test_free_space_is_told_where_it_is_known(
    lustre_client: LustreClient, monkeypatch: pytest.MonkeyPatch, disk: Path
) -> None:
    assert lustre.free_bytes("scratch") == lustre_client.free
    assert lustre.free_bytes("other") == {}
    monkeypatch.setattr(lustre, "TREES", (str(disk / "nowhere"),))
    created(disk / "a", Purpose(1))
    with (disk / "a").open() as file:
        assert lustre.targets_text(file.fileno()) == "the file is on OST0000"


def test_a_crowd_of_seeds_is_cut_alike() -> None:
    """Every rank comes to the same cuts from what all know."""
    rng = random.Random(1)
    for _ in range(100):
        nbytes, ranks = rng.randrange(1, 1 << 42), rng.randrange(2, 1000)
        assert grain_bytes(nbytes, ranks, "auto") == grain_bytes(nbytes, ranks, "keep")
