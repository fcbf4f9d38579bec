"""What other programs keep in a bucket, and what is no store at all, never passes for a checkpoint,
for an empty root, or for an object that is not there.
"""

from __future__ import annotations

import errno
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastckpt
from fastckpt.arguments.urls import path_of
from fastckpt.cli import main
from fastckpt.errors import StorageError
from fastckpt.saving import pipeline
from fastckpt.steps import log
from tests.crews.group_crew import Crew, Member
from tests.kit.objects.proxy import Passage, Proxy, error_text
from tests.kit.objects.states import LARGE, SMALL, blank, state_of, step_of
from tests.kit.objects.stores import settle
from tests.kit.objects.weed import BUCKET, Weed, environment, options
from tests.kit.steps import record

ALWAYS = 1 << 30
HTML = [
    b"<!doctype html><html lang='en'><head><title>Console</title></head><body></body></html>",
    b"<html>portal</html>",
]
# Below a root: keys that no path of a client has.
FOREIGN = ["/x", "../x", "a\tb", "step-00000002//x", "zz/./x"]
COMMANDS = ("ls", "verify", "inspect", "repair")


def below(root: str) -> str:
    return root.removeprefix(f"s3://{BUCKET}/")


def calls(root: str, told: dict[str, Any]) -> list[Callable[[], Any]]:
    """Everything that asks what is in a root, or under a URL."""

    def of_a_root(call: Callable[[fastckpt.Checkpointer], Any]) -> Callable[[], Any]:
        def asked() -> Any:
            with fastckpt.Checkpointer(
                root, storage_options=told, options=fastckpt.SaveOptions(timeout_s=20)
            ) as checkpointer:
                return call(checkpointer)

        return asked

    url = f"{root}/a.pt"
    return [
        of_a_root(lambda it: it.latest()),
        of_a_root(lambda it: it.steps()),
        of_a_root(lambda it: it.restore(blank())),
        of_a_root(lambda it: it.save(1, state_of(1)).result()),
        lambda: fastckpt.load(url, storage_options=told, timeout_s=20),
        lambda: fastckpt.open(url, storage_options=told),
        lambda: fastckpt.save(
            state_of(1), url, storage_options=told, options=fastckpt.SaveOptions(timeout_s=20)
        ).result(),
        lambda: fastckpt.save(state_of(1, LARGE), url, storage_options=told).result(),
    ]


@pytest.mark.parametrize("number", range(8))
def test_a_page_of_html_is_no_store(
    weed: Weed, proxy: Proxy, root: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The port of a console, or a portal in between, answers every request with 200."""
    monkeypatch.setattr("fastckpt.storage.file_system.REREAD_PAUSES_S", (0.0,))
    headers = [("Content-Type", "text/html"), ("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")]
    page = HTML[number % len(HTML)]
    proxy.on("", lambda request: request.answer(200, page, headers), times=ALWAYS)
    with pytest.raises(StorageError) as raised:
        calls(root, options(proxy.port))[number]()
    assert not isinstance(raised.value, FileNotFoundError)
    assert raised.value.errno in (errno.EPROTO, errno.EIO), raised.value


@pytest.mark.parametrize("number", range(8))
def test_an_expired_token_is_told_where_the_answer_has_no_body(
    weed: Weed, proxy: Proxy, root: str, number: int
) -> None:
    """Amazon answers 400, and the answer to a HEAD holds no reason."""
    proxy.on("", lambda it: it.answer(400, error_text("ExpiredToken")), times=ALWAYS)
    with pytest.raises(StorageError, match="rejects the credentials") as raised:
        calls(root, options(proxy.port))[number]()
    assert raised.value.errno == errno.EKEYREJECTED and "ExpiredToken" in str(raised.value)


@pytest.mark.parametrize("endpoint", ["", " ", "not a url", "host:9000", "http://"])
@pytest.mark.parametrize("place", ["AWS_ENDPOINT_URL", "storage_options"])
def test_an_endpoint_that_is_no_url_is_refused(
    client: Any,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    endpoint: str,
    place: str,
) -> None:
    """Before the client meets it, which panics."""
    told = {"access_key_id": "a", "secret_access_key": "b", "region": "us-east-1"}
    if place == "storage_options":
        told["endpoint"] = endpoint
    else:
        monkeypatch.setenv(place, endpoint)
        told["region"] = f"for-{len(endpoint)}-alone"  # the client of these options is made now
    with pytest.raises(ValueError, match=f"{place}.* is {endpoint!r}, must be a URL"):
        fastckpt.load("s3://of-nobody/x.pt", storage_options=told)
    assert "panicked" not in capfd.readouterr().err


@pytest.fixture
def told_by_environment(monkeypatch: pytest.MonkeyPatch, proxy: Proxy) -> None:
    """Commands know the environment alone, and keep the clients that it has made."""
    monkeypatch.setattr("fastckpt.storage.object_urls._stores", {})
    for name, value in environment(proxy.port).items():
        monkeypatch.setenv(name, value)


def test_keys_that_are_no_paths_are_passed_over(
    told_by_environment: None, proxy: Proxy, root: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And named by `doctor`. All are listed at once: none of them may be met by anybody."""
    pytest.importorskip("botocore", reason="botocore is not installed")
    with fastckpt.Checkpointer(root) as saver:
        for step in (1, 2):
            saver.save(step, state_of(step)).result()
    keys = [f"{below(root)}/{suffix}" for suffix in FOREIGN]
    proxy.on("list", lambda passage: listed_with(passage, keys), times=ALWAYS)
    with fastckpt.Checkpointer(root, keep_last=2) as saver:
        into = blank()
        assert saver.restore(into) == step_of(into) == 2
        saver.save(3, state_of(3)).result()
        saver.save(4, state_of(4)).result()
    with fastckpt.Checkpointer(root) as reader:
        assert reader.steps() == [3, 4]
    for command in COMMANDS:
        assert main([command, root]) == 0, (command, capsys.readouterr())
    capsys.readouterr()
    assert main(["doctor", root]) == 0
    said = capsys.readouterr().out
    assert "which are ignored: " in said and all(repr(key) in said for key in keys), said


def listed_with(passage: Passage, keys: list[str]) -> None:
    """The server's listing, and more objects, which SeaweedFS would not take."""
    status, headers, body = passage.ask()
    asked = passage.request.query
    prefix = asked.get("prefix", "")
    after = asked.get("start-after", asked.get("continuation-token", ""))
    for key in keys:
        if not (key.startswith(prefix) and key > after):
            continue
        inner, slash, _rest = key[len(prefix) :].partition("/")
        if asked.get("delimiter") and slash:
            one = f"<CommonPrefixes><Prefix>{prefix}{inner}/</Prefix></CommonPrefixes>"
        else:
            one = (
                f"<Contents><Key>{key.replace(chr(9), '&#9;')}</Key><ETag>&quot;0&quot;</ETag>"
                "<LastModified>2024-01-01T00:00:00.000Z</LastModified><Size>1</Size></Contents>"
            )
        body = body.replace(b"</ListBucketResult>", one.encode() + b"</ListBucketResult>")
    passage.answer(status, body, headers)


def test_folders_of_consoles_are_no_objects(
    told_by_environment: None, weed: Weed, root: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A console marks a folder by an object of no bytes, whose key ends with a slash."""
    session = pytest.importorskip("botocore.session", reason="botocore is not installed")
    import botocore.config

    told = options(weed.port)
    store = session.get_session().create_client(
        "s3",
        endpoint_url=told["endpoint"],
        region_name=told["region"],
        aws_access_key_id=told["access_key_id"],
        aws_secret_access_key=told["secret_access_key"],
        config=botocore.config.Config(s3={"addressing_style": "path"}),
    )
    for folder in ("", "step-00000001/", "step-00000003/", "other/"):
        store.put_object(Bucket=BUCKET, Key=f"{below(root)}/{folder}", Body=b"")
    with fastckpt.Checkpointer(root) as saver:
        assert saver.latest() is None
        for step in (1, 2):
            saver.save(step, state_of(step)).result()
        into = blank()
        assert saver.restore(into) == step_of(into) == 2
    for command in (*COMMANDS, "doctor"):
        assert main([command, root]) == 0, (command, capsys.readouterr())


def test_a_safetensors_object_is_loaded(weed: Weed, root: str, bare: Any) -> None:
    from safetensors.torch import save

    tensors = {"w": torch.arange(5.0), "b": torch.ones(2, 3)}
    bare.put(f"{below(root)}/x.safetensors", save(tensors))
    found = fastckpt.load(f"{root}/x.safetensors", storage_options=options(weed.port))
    assert {*found} == {*tensors} and all(torch.equal(found[key], tensors[key]) for key in found)


def load(member: Member, url: str, told: dict[str, Any]) -> Any:
    try:
        return fastckpt.load(url, storage_options=told, group=member.group)["w"].tolist()
    except fastckpt.NoPath as error:
        return str(error)


@pytest.mark.multiprocess
def test_ranks_load_an_object_of_torch_together(
    crew: Callable[[int], Crew], weed: Weed, root: str, bare: Any
) -> None:
    written = io.BytesIO()
    torch.save({"w": torch.arange(5.0)}, written)
    bare.put(f"{below(root)}/x.pt", written.getvalue())
    told = options(weed.port)
    assert crew(2)(load, f"{root}/x.pt", told) == [torch.arange(5.0).tolist()] * 2
    for found in crew(2)(load, f"{root}/y.pt", told):
        assert "there is no such object" in found and f"{root}/y.pt" in found


@pytest.mark.parametrize("as_zip", [True, False])
@pytest.mark.parametrize("elements", [SMALL, LARGE])
def test_a_long_name_is_saved(
    weed: Weed, root: str, bare: Any, elements: int, as_zip: bool
) -> None:
    """As long as the server takes it, since nothing there gets another name; in parts, and by
    torch.save itself.
    """
    url, told = f"{root}/{'n' * 252}.pt", options(weed.port)
    how: dict[str, Any] = {"_use_new_zipfile_serialization": as_zip, "storage_options": told}
    fastckpt.save(state_of(1, elements), url, **how).result()
    assert step_of(fastckpt.load(url, storage_options=told)) == 1
    (found,) = bare.list(f"{below(root)}/").collect()
    assert found["path"].endswith("n.pt")


def test_a_key_that_no_store_takes_is_refused_before_the_upload(
    weed: Weed, proxy: Proxy, root: str
) -> None:
    told = options(proxy.port)
    for number, url in enumerate((f"{root}/{'d/' * 510}x", f"{root}/{'d/' * 490}run")):
        proxy.count()
        with pytest.raises(StorageError, match=r"its key has \d+ bytes") as raised:
            if number == 0:
                fastckpt.save(state_of(1, LARGE), url, storage_options=told).result()
            with fastckpt.Checkpointer(url, storage_options=told) as saver:
                saver.save(1, state_of(1, LARGE)).result()
        assert raised.value.errno == errno.ENAMETOOLONG
        assert proxy.count().bytes_in.total() < 1 << 16


def test_a_file_is_saved_by_who_may_only_put(
    weed: Weed, proxy: Proxy, root: str, client: Any, bare: Any
) -> None:
    """And lists nothing, whatever the bucket holds."""
    for kind in ("list", "head"):
        proxy.on(kind, lambda it: it.answer(403, error_text("AccessDenied")), times=ALWAYS)
    url = f"{root}/a.pt"
    fastckpt.save(state_of(1, LARGE), url, storage_options=options(proxy.port)).result()
    assert step_of(fastckpt.load(url, storage_options=options(weed.port))) == 1
    proxy.heal()
    proxy.count()
    fastckpt.save(state_of(2, LARGE), url, storage_options=options(proxy.port)).result()
    assert proxy.count().requests["list"] == 0


def test_the_log_of_saves_is_an_object_for_each(
    weed: Weed, proxy: Proxy, root: str, bare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which no other save reads or replaces; of many the last ones are reported."""
    told, steps = options(proxy.port), 5
    with fastckpt.Checkpointer(root, storage_options=told, log=True, keep_last=1) as saver:
        for step in range(steps):
            saver.save(step, state_of(step)).result()
    pipeline.current().drain()
    path = path_of("path", root, told)
    for place in (path, f"{path}/{log.NAME}"):
        found = [entry["step"] for entry in log.entries(pipeline.current().storage, place)]
        assert found == [*range(steps)]
    assert len(bare.list(f"{below(root)}/{log.NAME}").collect()) == steps
    asked = [kind for kind, key in proxy.asked if f"{log.NAME}/" in key]
    assert asked.count("put") == steps and "create" not in asked
    monkeypatch.setattr("fastckpt.steps.log._OBJECTS_MAX", 2)
    found = [entry["step"] for entry in log.entries(pipeline.current().storage, path)]
    assert found == [steps - 2, steps - 1]


def test_a_verdict_comes_before_what_others_keep_is_looked_at(
    told_by_environment: None,
    proxy: Proxy,
    root: str,
    bare: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And that is bounded: what was not looked at is said."""
    with fastckpt.Checkpointer(root) as saver:
        saver.save(1, state_of(1)).result()
    settle()
    for number in range(110):
        bare.put(f"{below(root)}/other-{number:04d}", b"x")
        bare.put(f"{below(root)}/dir-{number:04d}/x.bin", b"x")
    proxy.count()
    status = main(["verify", root])
    said = capsys.readouterr().out
    assert re.match(rf"ok        {re.escape(root)}/step-00000001-[0-9a-f]+: ", said), said
    assert "were not examined" in said and status == 4
    assert proxy.count().requests.total() < 1000


def test_verify_calls_removed_what_retention_removes_meanwhile(
    told_by_environment: None,
    weed: Weed,
    proxy: Proxy,
    root: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nothing locks a step of a bucket: that it goes while it is read is no damage."""
    with fastckpt.Checkpointer(root, storage_options=options(weed.port), keep_last=1) as saver:
        saver.save(1, state_of(1)).result()

    def overtaken(passage: Passage) -> None:
        with fastckpt.Checkpointer(root, storage_options=options(weed.port), keep_last=1) as saver:
            saver.save(2, state_of(2)).result()
        status, headers, body = passage.ask()
        passage.answer(status, body, headers)

    proxy.on("get", overtaken, key="/objects.pt")
    assert main(["verify", root]) == 0
    said = capsys.readouterr().out
    assert re.match(rf"removed   {re.escape(root)}/step-00000001-[0-9a-f]+: ", said), said


def test_repair_removes_what_a_killed_save_has_left(
    told_by_environment: None, root: str, bare: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless a job has the root: the save may be its own. What stays is no step, and no damage."""
    with fastckpt.Checkpointer(root) as saver:
        saver.save(1, state_of(1)).result()
    left = f"{below(root)}/step-00000009-0123456789ab"
    bare.put(f"{left}/objects.pt", b"x")
    other = record(space="of another machine", pid=7)
    bare.put(f"{below(root)}/lease.json", other.to_bytes())
    assert main(["repair", root]) == 0 and "nothing to repair" in capsys.readouterr().out
    bare.put(f"{below(root)}/lease.json", other._replace(is_over=True).to_bytes())
    assert main(["repair", root]) == 1 and "never committed" in capsys.readouterr().out
    assert main(["repair", root, "--yes"]) == 0 and "removed" in capsys.readouterr().out
    assert [each["path"] for each in bare.list(left).collect()] == [f"{left}/manifest.json"]
    for command in COMMANDS:
        assert main([command, root]) == 0, (command, capsys.readouterr())
    assert "step-00000009" not in capsys.readouterr().out
