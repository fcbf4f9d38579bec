"""An upload: what completes it, and what does not; whoever waits for a part goes on in the end."""

from __future__ import annotations

import errno
import threading
from functools import partial
from typing import Any

import pytest

from fastckpt.plan.image import BLOCK_BYTES
from fastckpt.storage import object_upload
from fastckpt.storage.object_upload import WRITERS, Upload

WAIT_S = 60.0


def upload_to(client: Any, store: Any, key: str, nbytes: int) -> Upload:
    put = partial(client.put, store, key)
    return Upload(put, nbytes, threading.BoundedSemaphore(WRITERS - 1))


def block(number: int) -> memoryview:
    return memoryview(bytes([number]) * BLOCK_BYTES)


def writing(upload: Upload, number: int, failures: list[OSError]) -> threading.Thread:
    """Writes a block on a thread of its own."""

    def write() -> None:
        try:
            assert upload.write(block(number), number * BLOCK_BYTES) == BLOCK_BYTES
        except OSError as error:
            failures.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    return thread


def test_blocks_may_come_in_any_order(client: Any, bare: Any, root: str) -> None:
    key, failures = f"{root.rsplit('/', 1)[1]}/any", list[OSError]()
    upload = upload_to(client, bare, key, 3 * BLOCK_BYTES)
    threads = [writing(upload, number, failures) for number in (2, 0, 1)]
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    upload.finish()
    assert not failures
    assert bytes(client.get(bare, key).bytes()) == b"".join(block(i) for i in range(3))


def test_an_upload_that_lacks_a_block_completes_nothing(client: Any, bare: Any, root: str) -> None:
    key, failures = f"{root.rsplit('/', 1)[1]}/gap", list[OSError]()
    upload = upload_to(client, bare, key, 3 * BLOCK_BYTES)
    writing(upload, 0, failures).join(WAIT_S)
    upload.write(block(2)[:100], 2 * BLOCK_BYTES)
    with pytest.raises(OSError) as told:
        upload.finish()
    assert told.value.errno == errno.ESPIPE
    with pytest.raises(FileNotFoundError):
        client.head(bare, key)


def test_who_waits_for_an_upload_that_is_given_up_goes_on(
    client: Any, bare: Any, root: str
) -> None:
    key, failures = f"{root.rsplit('/', 1)[1]}/given-up", list[OSError]()
    upload = upload_to(client, bare, key, 3 * BLOCK_BYTES)
    thread = writing(upload, 1, failures)  # which waits for the block before it
    upload.give_up()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert [error.errno for error in failures] == [errno.ECANCELED]
    with pytest.raises(OSError, match="canceled"):
        upload.finish()
    with pytest.raises(FileNotFoundError):
        client.head(bare, key)


def test_parts_grow_with_the_object(
    client: Any, bare: Any, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert object_upload.part_bytes(1) == BLOCK_BYTES
    assert object_upload.part_bytes(9_999 * BLOCK_BYTES) == BLOCK_BYTES
    assert object_upload.part_bytes(9_999 * BLOCK_BYTES + 1) == 2 * BLOCK_BYTES
    monkeypatch.setattr(object_upload, "PARTS_MAX", 3)
    key = f"{root.rsplit('/', 1)[1]}/large-parts"
    upload = upload_to(client, bare, key, 3 * BLOCK_BYTES)
    for number in range(3):  # by one thread, which no block may hold up then
        upload.write(block(number), number * BLOCK_BYTES)
    upload.finish()
    assert bytes(client.get(bare, key).bytes()) == b"".join(block(i) for i in range(3))
