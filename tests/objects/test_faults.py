"""Object stores that fail: what passes is tried again and leaves no trace in what is saved; what
does not is an error in words, in time; and what was there before stays.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import fastckpt
from fastckpt.arguments.urls import path_of
from fastckpt.cli import main
from fastckpt.errors import CheckpointError, CorruptCheckpoint, RootInUse, StorageError
from fastckpt.latch import call_aside
from fastckpt.saving import lease, pipeline
from fastckpt.steps import store as steps_store
from fastckpt.steps.root import store_at as steps_at
from tests.kit.objects import proxy as faults
from tests.kit.objects.proxy import Backwards, Fault, Passage, Proxy, Stall
from tests.kit.objects.states import LARGE, SMALL, blank, state_of, step_of
from tests.kit.objects.stores import settle, store_at
from tests.kit.objects.weed import BUCKET, SECRET, Weed, environment, options
from tests.kit.options import gathered
from tests.kit.steps import record

KINDS = ("begin", "part", "complete", "put", "create", "get", "head", "list", "delete")
TIMEOUT_S, GRACE_S = 1.0, 30.0  # of a save that has to fail; what a busy machine may add to that
ALWAYS = 1 << 30


@contextmanager
def saver_of(root: str, told: dict[str, Any], **how: Any) -> Iterator[fastckpt.Checkpointer]:
    with fastckpt.Checkpointer(root, storage_options=told, **gathered(**how)) as saver:
        yield saver


def restored(root: str, told: dict[str, Any], elements: int = LARGE) -> int:
    """The step that a new reader finds, all of which is there."""
    into = blank(elements)
    with saver_of(root, told) as reader:
        found = reader.restore(into)
    assert found is not None and step_of(into) == found
    return found


def failure(saver: fastckpt.Checkpointer, step: int) -> BaseException:
    """What a save that has to fail ends with, in time."""
    error = saver.save(step, state_of(step, LARGE)).exception(timeout=TIMEOUT_S + GRACE_S)
    assert error is not None
    return error


def impatient(port: int) -> dict[str, Any]:
    """Options of a client that asks again at once, and not often."""
    moment = timedelta(milliseconds=1)
    backoff = {"init_backoff": moment, "max_backoff": moment, "base": 2}
    retries = {"max_retries": 3, "retry_timeout": timedelta(seconds=60), "backoff": backoff}
    return options(port, retry_config=retries)


@pytest.mark.parametrize(
    "fault", [faults.busy, faults.cut, faults.lost], ids=lambda it: it.__name__
)
def test_what_passes_is_tried_again(weed: Weed, proxy: Proxy, root: str, fault: Fault) -> None:
    """Every kind of request meets the fault once, in a save and in a restore."""
    told = impatient(proxy.port)
    with saver_of(root, told, keep_last=1) as saver:
        saver.save(1, state_of(1, LARGE)).result()
        for kind in KINDS:
            proxy.on(kind, fault)
        saver.save(2, state_of(2, LARGE)).result()
        assert saver.steps()[-1] == 2
    proxy.heal()
    for kind in ("get", "head", "list"):
        proxy.on(kind, fault)
    assert restored(root, told) == 2


@pytest.mark.parametrize("number", range(3))
def test_lost_answers_to_conditional_puts(weed: Weed, proxy: Proxy, root: str, number: int) -> None:
    """The put was carried out, the client asks again, and hears that it is there: it is its own."""
    with saver_of(root, impatient(proxy.port)) as saver:
        saver.save(1, state_of(1)).result()
        proxy.on("create", faults.lost, skip=number)
        saver.save(2, state_of(2)).result()
    assert restored(root, options(weed.port), SMALL) == 2


def test_an_error_in_a_200(weed: Weed, proxy: Proxy, root: str) -> None:
    """Once it is tried again; if it stays, nothing is committed."""
    with saver_of(root, impatient(proxy.port)) as saver:
        proxy.on("complete", faults.error_in_200)
        saver.save(1, state_of(1, LARGE)).result()
        proxy.on("complete", faults.error_in_200, times=ALWAYS)
        assert "InternalError" in str(failure(saver, 2))
        assert restored(root, options(weed.port)) == 1
        proxy.heal()
        saver.save(3, state_of(3, LARGE)).result()
    assert restored(root, options(weed.port)) == 3


def test_parts_in_any_order(weed: Weed, proxy: Proxy, root: str) -> None:
    """But the last one, which is begun when the others have been sent."""
    backwards = Backwards(3)
    proxy.on("part", backwards, times=3)
    with saver_of(root, options(proxy.port)) as saver:
        saver.save(1, state_of(1, 3 * LARGE)).result()
    assert backwards.order == [*reversed(backwards.came)]
    assert restored(root, options(weed.port), 3 * LARGE) == 1


def test_a_part_that_stalls_is_sent_again(weed: Weed, proxy: Proxy, root: str) -> None:
    stall = Stall()
    proxy.on("part", stall)
    told = options(proxy.port, client_options={"allow_http": True, "timeout": "1s"})
    with saver_of(root, told) as saver:
        saver.save(1, state_of(1, LARGE)).result()
        assert stall.met.is_set()
    stall.over.set()
    assert restored(root, options(weed.port)) == 1


@pytest.mark.parametrize(
    "kind", ["part", "complete", "create", pytest.param("list", marks=pytest.mark.torture)]
)
def test_nothing_waits_longer_than_timeout_s(
    weed: Weed, proxy: Proxy, root: str, kind: str
) -> None:
    """A server that does not answer, and a client that would wait for a minute."""
    stall, told = Stall(), impatient(proxy.port)
    with saver_of(root, told) as saver:
        saver.save(1, state_of(1, LARGE)).result()
    with saver_of(root, told, timeout_s=TIMEOUT_S) as saver:
        proxy.on(kind, stall, key="" if kind == "list" else "step-", times=ALWAYS)
        error = failure(saver, 2)
        assert isinstance(error, CheckpointError) and root in str(error), error
        proxy.heal()
        stall.over.set()
    with saver_of(root, told) as saver:
        saver.save(3, state_of(3, LARGE)).result(timeout=GRACE_S)
    assert restored(root, options(weed.port)) == 3


def test_no_call_waits_longer_than_timeout_s(
    client: Any, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a server that accepts and never answers; all of them at once."""
    for module in (lease, steps_store):
        monkeypatch.setattr(module, "SERVER_S", 1000.0)
    how: dict[str, Any] = {"timeout_s": TIMEOUT_S}

    def of_saver(name: str, *given: Any) -> Callable[[], Any]:
        def call() -> None:
            with saver_of(f"{root}/{name}", how["storage_options"], timeout_s=TIMEOUT_S) as saver:
                answer = getattr(saver, name)(*given)
                return answer.result() if name == "save" else answer

        return call

    calls: dict[str, Callable[[], Any]] = {
        "save": of_saver("save", 1, state_of(1)),
        "restore": of_saver("restore", blank()),
        **{name: of_saver(name) for name in ("load", "steps", "latest")},
        "best": of_saver("best", "loss"),
        **{name: of_saver(name, 1) for name in ("delete", "pin", "unpin")},
        "save_file": lambda: fastckpt.save(state_of(1), f"{root}/a.pt", **gathered(**how)).result(),
        "load_file": lambda: fastckpt.load(f"{root}/b.pt", **how),
    }
    with socket.create_server(("127.0.0.1", 0)) as silent:
        how["storage_options"] = options(silent.getsockname()[1])
        ended = {name: call_aside(call) for name, call in calls.items()}
        errors = {name: each.exception(TIMEOUT_S + GRACE_S) for name, each in ended.items()}
    assert not [name for name, error in errors.items() if not isinstance(error, StorageError)], (
        errors
    )
    assert all(root in str(error) for error in errors.values()), errors


def test_what_is_left_over_delays_no_commit(weed: Weed, proxy: Proxy, root: str) -> None:
    """The step that retention removes, when the new one is there."""
    stall = Stall()
    with saver_of(root, options(proxy.port), keep_last=1) as saver:
        saver.save(1, state_of(1)).result()
        proxy.on("delete", stall, times=ALWAYS)
        for step in (2, 3):
            saver.save(step, state_of(step)).result(GRACE_S)
        assert stall.met.wait(GRACE_S)
        proxy.heal()
        stall.over.set()
        settle()
    assert restored(root, options(weed.port), SMALL) == 3


@pytest.mark.parametrize("kind", ["put", "complete"])
def test_a_file_whose_answer_is_lost(weed: Weed, proxy: Proxy, root: str, kind: str) -> None:
    """It is there, and the client is told at its next attempt that there is no such upload: what
    lies there tells whose it is. If no answer comes at all, the error says that it may be there.
    """
    url, told = f"{root}/a.pt", options(proxy.port)
    size = LARGE if kind == "complete" else SMALL
    proxy.on(kind, faults.lost)
    proxy.on(kind, faults.no_such_upload)
    fastckpt.save(state_of(1, size), url, storage_options=told).result()
    assert step_of(fastckpt.load(url, storage_options=told)) == 1
    proxy.on(kind, faults.no_such_upload)
    error = fastckpt.save(state_of(2, size), url, storage_options=told).exception()
    assert isinstance(error, StorageError) and not error.visible
    assert step_of(fastckpt.load(url, storage_options=told)) == 1
    proxy.on(kind, faults.lost, times=ALWAYS)
    told = impatient(proxy.port)
    error = fastckpt.save(state_of(3, size), url, storage_options=told).exception()
    assert isinstance(error, StorageError) and error.visible and error.in_doubt
    assert step_of(fastckpt.load(url, storage_options=told)) == 3


@pytest.mark.parametrize("kind", ["part", "complete"])
def test_a_conflict_that_is_told_of_an_upload_completes_nothing(
    weed: Weed, proxy: Proxy, root: str, kind: str
) -> None:
    url, told = f"{root}/a.pt", options(proxy.port)
    proxy.on(kind, lambda request: request.answer(409, faults.error_text("OperationAborted")))
    error = fastckpt.save(state_of(1, LARGE), url, storage_options=told).exception()
    assert isinstance(error, OSError), error
    with pytest.raises(fastckpt.NoPath):
        fastckpt.load(url, storage_options=told)


@pytest.mark.parametrize("skip", [0, 1])
def test_credentials_that_expire(weed: Weed, proxy: Proxy, root: str, skip: int) -> None:
    """After so many parts of the save: the step before stays, the next save works."""
    with saver_of(root, options(proxy.port)) as saver:
        saver.save(1, state_of(1, LARGE)).result()
        for kind in ("part", "complete", "create", "put"):
            proxy.on(kind, faults.expired, skip=skip, times=ALWAYS)
        error = failure(saver, 2)
        assert isinstance(error, StorageError) and "ExpiredToken" in str(error)
        assert "key " in str(error) and "after " in str(error), error
        assert restored(root, options(weed.port)) == 1
        proxy.heal()
        saver.save(3, state_of(3, LARGE)).result()
    assert restored(root, options(weed.port)) == 3


@pytest.mark.parametrize("full", [faults.over_quota, faults.full], ids=lambda it: it.__name__)
def test_a_full_quota(weed: Weed, proxy: Proxy, root: str, full: Fault) -> None:
    with saver_of(root, impatient(proxy.port)) as saver:
        saver.save(1, state_of(1, LARGE)).result()
        proxy.on("part", full, times=ALWAYS)
        error = failure(saver, 2)
        assert isinstance(error, StorageError) and error.errno == errno.EDQUOT, error
        assert "key " in str(error) and root in str(error), error
    assert restored(root, options(weed.port)) == 1


def test_what_cannot_be_reached_is_said(weed: Weed, root: str) -> None:
    """A bucket that there is not, a key that is not known, a server that is gone."""
    below = root.removeprefix(f"s3://{BUCKET}/")
    wrong = impatient(weed.port) | {"secret_access_key": SECRET + "?"}
    with Proxy(weed.port) as gone:
        nobody = impatient(gone.port)
    cases = [
        (f"s3://no-such-bucket/{below}", impatient(weed.port), "no-such-bucket"),
        (root, wrong, "403 Forbidden"),
        (root, nobody, "error sending request"),
    ]
    for url, told, words in cases:
        with saver_of(url, told) as saver:
            error = attempt(lambda saver=saver: saver.save(1, state_of(1)).result(GRACE_S))
        assert isinstance(error, StorageError), error
        assert words in str(error) and url in str(error), error
        assert below in str(error), error
        with pytest.raises(StorageError, match=words):
            fastckpt.save(state_of(1), f"{url}/a.pt", storage_options=told).result(GRACE_S)
        if url == root:
            with pytest.raises(StorageError, match=words):
                fastckpt.load(f"{url}/a.pt", storage_options=told)


@pytest.mark.parametrize("command", ["ls", "verify", "inspect", "repair", "report", "doctor"])
def test_commands_do_not_take_silence_for_nothing(
    client: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    with Proxy(0) as gone:
        told = environment(gone.port)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    url = "s3://of-nobody/run"
    path_of("path", url, timeout_s=TIMEOUT_S)
    assert main([command, url]) == (3 if command == "verify" else 1)
    said = capsys.readouterr()
    assert "ETIMEDOUT" in said.out + said.err and url in said.out + said.err


def attempt(action: Callable[[], Any]) -> Exception | None:
    try:
        action()
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("skip", [3, 4, 5])
def test_an_object_that_changes_while_it_is_read(
    weed: Weed, proxy: Proxy, root: str, skip: int
) -> None:
    """Its reader raises, or has the new one whole: never some blocks of each, nor a mix that its
    checksums call damage.
    """
    url, told = f"{root}/a.pt", options(proxy.port)
    fastckpt.save(state_of(1, LARGE), url, storage_options=told).result()
    changed = threading.Event()

    def change(passage: Any) -> None:
        """Before the checksums are read, or a block whose checksum was."""
        fastckpt.save(state_of(2, LARGE), url, storage_options=options(weed.port)).result()
        changed.set()
        status, headers, body = passage.ask()
        passage.answer(status, body, headers)

    proxy.on("get", change, skip=skip)
    found: list[Any] = []
    error = attempt(lambda: found.append(fastckpt.load(url, storage_options=told)))
    assert changed.is_set()
    if error is None:
        assert step_of(found[0]) in (1, 2)
    else:
        assert isinstance(error, CheckpointError) and url in str(error)
        assert not isinstance(error, CorruptCheckpoint)
    assert step_of(fastckpt.load(url, storage_options=told)) == 2


def test_a_manifest_that_comes_as_its_attempt_is_taken_for_dead(
    weed: Weed, proxy: Proxy, root: str, bare: Any
) -> None:
    """Before the mark that it is over: the step stays."""
    with saver_of(root, options(weed.port)) as saver:
        saver.save(1, state_of(1)).result()
    directory = path_of("root", root, options(proxy.port))
    steps = steps_at(pipeline.current().storage, directory)
    ((name, _manifest),) = steps.committed()[0]
    key = f"{root.partition(BUCKET + '/')[2]}/{name}/manifest.json"
    content = bytes(bare.get(key).bytes())
    bare.delete(key)
    assert steps.incomplete() == [name]

    def commit(passage: Passage) -> None:
        bare.put(key, content)
        status, headers, body = passage.ask()
        passage.answer(status, body, headers)

    proxy.on("create", commit, key="manifest.json")
    assert steps.remove_dead() == []
    assert restored(root, options(weed.port), SMALL) == 1


@pytest.mark.parametrize("part", ["objects.pt", ".safetensors"])
def test_a_step_that_is_removed_while_it_is_read(
    weed: Weed, proxy: Proxy, root: str, part: str
) -> None:
    """Nothing locks it: the newer one, for which it made room, is restored."""
    with saver_of(root, options(weed.port), keep_last=1) as saver:
        saver.save(1, state_of(1, LARGE)).result()

        def overtaken(passage: Passage) -> None:
            saver.save(2, state_of(2, LARGE)).result()
            status, headers, body = passage.ask()
            assert status == 404
            passage.answer(status, body, headers)

        proxy.on("get", overtaken, key=part)
        assert restored(root, options(proxy.port)) == 2


def test_who_takes_a_dead_job_s_lease_may_be_overtaken(weed: Weed, proxy: Proxy, root: str) -> None:
    """Of two jobs that find it, one removes what the other one is looking at."""
    with saver_of(root, options(weed.port)) as saver:
        saver.save(1, state_of(1)).result()
    store = store_at(weed.port)
    key = f"{root.partition(BUCKET + '/')[2]}/lease.json"
    store.put(key, b"the lease of nobody")

    def overtaken(passage: Passage) -> None:
        store.delete(key)
        status, headers, body = passage.ask()
        passage.answer(status, body, headers)

    proxy.on("get", overtaken, key="lease.json")
    with saver_of(root, options(proxy.port)) as other:
        other.save(2, state_of(2)).result()
    assert restored(root, options(weed.port), SMALL) == 2


def test_urls_that_name_nothing_are_refused(weed: Weed) -> None:
    told = options(weed.port)
    for path in ("/s3:/bucket/../other/x", "/s3:nope/bucket/x", "/s3:", "s3://me:secret@bucket/x"):
        with pytest.raises(ValueError, match=r"must be a path|credentials") as caught:
            fastckpt.load(path)
        assert "secret" not in str(caught.value)
    for path in ("s3://bucket/../x", "s3://bucket/a\\b", "s3://bucket/a\tb", "s3://bucket/a\x7f"):
        with pytest.raises(ValueError, match="must be a URL"):
            fastckpt.load(path)
    assert path_of("path", "s3://bucket", told) + "/run" == path_of("path", "s3://bucket/run", told)
    with pytest.raises(StorageError) as failed:
        endpoint = "http://me:secret@127.0.0.1:9"
        told = {**told, "endpoint": endpoint}
        fastckpt.load("s3://bucket/x", storage_options=told, timeout_s=TIMEOUT_S)
    assert "secret" not in str(failed.value)


def test_a_lease_ages_by_the_store_s_clock(
    weed: Weed, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of this machine may be hours ahead."""
    key = f"{root.partition(BUCKET + '/')[2]}/lease.json"
    far = record(space="of another machine", pid=7).to_bytes()
    store_at(weed.port).put(key, far)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3 * record().lasts_s)
    told = {**options(weed.port), "client_options": {"allow_http": True, "user_agent": "ahead"}}
    with saver_of(root, told) as saver:
        error = saver.save(1, state_of(1)).exception(GRACE_S)
    assert type(error) is RootInUse


@pytest.mark.parametrize("source", ["a function", "a program of a profile"])
def test_credentials_that_never_come(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are waited for as long as a server is, and said to be missing."""
    told: dict[str, Any] = {"region": "us-east-1"}
    never = threading.Event()
    if source == "a function":
        told["credential_provider"] = never.wait
    else:
        pytest.importorskip("botocore", reason="botocore is not installed")
        config = tmp_path / "config"
        os.mkfifo(tmp_path / "keys")  # nobody writes there
        config.write_text(f"[profile mine]\ncredential_process = cat {tmp_path}/keys\n")
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
        monkeypatch.setenv("AWS_PROFILE", "mine")
    try:
        with pytest.raises(StorageError, match="credentials were not available") as caught:
            fastckpt.load("s3://bucket/a.pt", storage_options=told, timeout_s=0.5)
        assert caught.value.errno == errno.ETIMEDOUT
        with (
            saver_of("s3://bucket/run", told, timeout_s=0.5) as saver,
            pytest.raises(StorageError, match="credentials were not available"),
        ):
            saver.restore(blank(SMALL))
    finally:
        never.set()
        if source != "a function":  # ends the programs
            os.close(os.open(tmp_path / "keys", os.O_WRONLY | os.O_NONBLOCK))
