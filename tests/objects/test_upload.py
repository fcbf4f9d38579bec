"""An upload: what completes it, and what does not; blocks that wait for their turn end anyway."""

from __future__ import annotations

import errno
import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import pytest

from fastckpt import _engine
from fastckpt.plan.image import BLOCK_BYTES, address_of
from fastckpt.storage import object_upload
from fastckpt.storage.object_upload import Upload

WAIT_S = 60.0
MEMORY = bytearray(b"".join(bytes([number]) * BLOCK_BYTES for number in range(4)))


def upload_to(client: Any, store: Any, key: str, nbytes: int) -> Upload:
    return Upload(partial(client.put, store, key), nbytes)


def block(number: int) -> memoryview:
    return memoryview(MEMORY)[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]


@contextmanager
def writing(
    upload: Upload, nbytes: int, offset: int = 0, bytes_per_s: float = 0
) -> Iterator[_engine.WriteJob]:
    """A job of MEMORY's first bytes, with staging memory for two blocks."""
    engine, threads = _engine.Engine(2 * BLOCK_BYTES, BLOCK_BYTES, 1), _engine.threads_backend(1)
    bucket = _engine.TokenBucket(bytes_per_s, 3 << 20) if bytes_per_s else None
    job = None
    try:
        segments = array("Q", [0, nbytes, address_of(MEMORY)])
        job = engine.stage(segments, array("Q"), _engine.Allowance(2), 1)
        job.write_to(0, offset, upload.sink(threads), False, bucket=bucket)
        yield job
    finally:
        upload.give_up()
        assert job is None or job.wait_written(WAIT_S)
        engine.close()
        threads.close()


def test_blocks_may_come_in_any_order(client: Any, bare: Any, root: str) -> None:
    key = f"{root.rsplit('/', 1)[1]}/any"
    upload = upload_to(client, bare, key, 3 * BLOCK_BYTES)
    for number in (2, 0, 1):
        upload.write_at(block(number), number * BLOCK_BYTES)
    upload.finish()
    assert bytes(client.get(bare, key).bytes()) == MEMORY[: 3 * BLOCK_BYTES]


@pytest.mark.parametrize("bytes_per_s", [0, 1e12], ids=["whole", "paced"])
def test_blocks_of_the_engine_and_what_is_written_after_them(
    bytes_per_s: float, client: Any, bare: Any, root: str
) -> None:
    key, nbytes = f"{root.rsplit('/', 1)[1]}/engine", 3 * BLOCK_BYTES + 1000
    upload = upload_to(client, bare, key, nbytes + 4)
    with writing(upload, nbytes, bytes_per_s=bytes_per_s) as job:
        assert job.wait_written(WAIT_S)
        assert job.failure() is None and job.blocks_held_max() <= 2
        upload.write_at(memoryview(b"tail"), nbytes)
        upload.finish()
    assert bytes(client.get(bare, key).bytes()) == MEMORY[:nbytes] + b"tail"


def test_an_upload_that_lacks_a_block_completes_nothing(client: Any, bare: Any, root: str) -> None:
    key = f"{root.rsplit('/', 1)[1]}/gap"
    upload = upload_to(client, bare, key, 3 * BLOCK_BYTES)
    upload.write_at(block(0), 0)
    upload.write_at(block(2)[:100], 2 * BLOCK_BYTES)
    with pytest.raises(OSError) as told:
        upload.finish()
    assert told.value.errno == errno.ESPIPE
    with pytest.raises(FileNotFoundError):
        client.head(bare, key)


def test_who_waits_for_an_upload_that_is_given_up_goes_on(
    client: Any, bare: Any, root: str
) -> None:
    key, failures = f"{root.rsplit('/', 1)[1]}/given-up", list[OSError]()
    upload = upload_to(client, bare, key, 100 * BLOCK_BYTES)

    def write() -> None:
        try:
            for number in range(2, 100):  # more than may wait for the blocks before them
                upload.write_at(block(0), number * BLOCK_BYTES)
        except OSError as error:
            failures.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    with writing(upload, 3 * BLOCK_BYTES, BLOCK_BYTES) as job:
        upload.give_up()
        assert job.wait_written(WAIT_S)
        assert (job.failure() or ())[2] == errno.ECANCELED
    thread.join(WAIT_S)
    assert not thread.is_alive() and [error.errno for error in failures] == [errno.ECANCELED]
    with writing(upload, BLOCK_BYTES) as late:
        assert late.wait_written(WAIT_S)
        assert (late.failure() or ())[2] == errno.ECANCELED
    with pytest.raises(OSError, match="canceled"):
        upload.finish()
    with pytest.raises(FileNotFoundError):
        client.head(bare, key)


def test_a_job_that_is_given_up_leaves_its_blocks() -> None:
    upload = Upload(lambda parts, **_how: [*parts], 4 * BLOCK_BYTES)
    with writing(upload, 3 * BLOCK_BYTES, BLOCK_BYTES) as job:  # which wait for the one before them
        job.give_up()
        assert job.wait_written(WAIT_S)
        assert (job.failure() or ())[2] == errno.ECANCELED


def test_a_block_is_the_clients_until_it_lets_go_of_it_and_its_error_is_the_jobs() -> None:
    taken, go_on, seen = threading.Event(), threading.Event(), list[bytes]()

    def put(parts: Iterator[memoryview], **_how: Any) -> None:
        held = [*islice(parts, 2)]
        taken.set()
        go_on.wait(WAIT_S)
        seen.extend(map(bytes, held))
        held.clear()  # or the error would hold it
        raise OSError(errno.EDQUOT, "no room")

    upload = Upload(put, 4 * BLOCK_BYTES)
    with writing(upload, 4 * BLOCK_BYTES) as job:
        assert taken.wait(WAIT_S)
        assert job.nbytes_written() == 0 and not job.wait_staged(0)
        go_on.set()
        assert job.wait_written(WAIT_S)
        assert (job.failure() or ())[2] == errno.EDQUOT
    assert seen == [block(0), block(1)]
    assert upload.refusal().endswith("no room")


def test_parts_grow_with_the_object(
    client: Any, bare: Any, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert object_upload.part_bytes(1) == BLOCK_BYTES
    assert object_upload.part_bytes(9_999 * BLOCK_BYTES) == BLOCK_BYTES
    assert object_upload.part_bytes(9_999 * BLOCK_BYTES + 1) == 2 * BLOCK_BYTES
    monkeypatch.setattr(object_upload, "PARTS_MAX", 3)
    key = f"{root.rsplit('/', 1)[1]}/large-parts"
    upload = upload_to(client, bare, key, 3 * BLOCK_BYTES)
    for number in range(3):
        upload.write_at(block(number), number * BLOCK_BYTES)
    upload.finish()
    assert bytes(client.get(bare, key).bytes()) == MEMORY[: 3 * BLOCK_BYTES]
