"""A bucket as the root of steps and as the place of files: what was saved comes back bit by bit, is
found by any other client, is kept and removed as ever, and costs no more requests than is told.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fastckpt
from fastckpt.errors import CheckpointError, StorageError
from fastckpt.formats.step_names import NAME
from fastckpt.formats.step_names import step_of as step_in
from tests.kit.interpreters import run
from tests.kit.objects.azure import AzureHandler
from tests.kit.objects.lax import Lax, S3Handler
from tests.kit.objects.proxy import Proxy
from tests.kit.objects.states import LARGE, blank, state_of, step_of
from tests.kit.objects.stores import settle
from tests.kit.objects.weed import BUCKET, KEY_ID, SECRET, Weed, environment, options
from tests.kit.options import gathered
from tests.kit.paths import ROOT

MIB = 1 << 20
REQUESTS_MAX = 20  # of a save, beside parts


def keys(store: Any, root: str) -> list[str]:
    """Names of the objects below a root."""
    prefix = root.removeprefix(f"s3://{BUCKET}/") + "/"
    found = store.list(prefix).collect()
    return sorted(each["path"].removeprefix(prefix) for each in found)


def directories_of(store: Any, root: str) -> dict[int, str]:
    """The directory of each step, one of each."""
    names = {key.split("/")[0] for key in keys(store, root) if NAME.match(key.split("/")[0])}
    found = {step_in(name): name for name in names}
    assert len(found) == len(names), names
    return found


def test_steps_come_back_bit_by_bit(
    weed: Weed, root: str, bare: Any, assert_same: Callable[[Any, Any], None]
) -> None:
    """And only what is committed lies there: no temporary, no claim that outlives its step."""
    told = options(weed.port)
    with fastckpt.Checkpointer(root, storage_options=told) as saver:
        for step in (1, 2):
            assert saver.save(step, state_of(step, LARGE)).result().nbytes > 4 * LARGE
        assert saver.steps() == [1, 2] and saver.latest() == 2
    for step in (1, None):
        into = blank(LARGE)
        with fastckpt.Checkpointer(root, storage_options=told) as reader:
            found = reader.restore(into, step)
            assert found == (step or 2)
            assert_same(into, state_of(found, LARGE))
            assert_same(reader.load(found), state_of(found, LARGE))
    settle()
    assert not [key for key in keys(bare, root) if key.endswith(".tmp") or ".probe" in key]


def test_files_are_torch_s_own(
    weed: Weed, root: str, bare: Any, client: Any, assert_same: Callable[[Any, Any], None]
) -> None:
    told, url, state = options(weed.port), f"{root}/a.pt", state_of(3, LARGE)
    for size in (10, LARGE):  # put as a whole, and in parts
        state = state_of(size, size)
        fastckpt.save(state, url, storage_options=told).result()
        content = bytes(client.get(bare, url.removeprefix(f"s3://{BUCKET}/")).bytes())
        assert_same(torch.load(io.BytesIO(content)), state)
        assert_same(fastckpt.load(url, storage_options=told), state)
    with fastckpt.open(url, storage_options=told) as file:
        assert torch.equal(file["weights"][LARGE - 5 :], state["weights"][-5:])
    model = torch.nn.Linear(3, 2)
    fastckpt.save(model.state_dict(), url, storage_options=told).result()
    other = torch.nn.Linear(3, 2)
    fastckpt.load_into(other, url, storage_options=told)
    assert_same(other.state_dict(), model.state_dict())
    assert keys(bare, root) == ["a.pt"]


def test_what_is_kept(weed: Weed, root: str, bare: Any) -> None:
    kept = {"keep_last": 2, "keep_every": 4, "keep_best": ("loss", "min", 1)}
    with fastckpt.Checkpointer(root, storage_options=options(weed.port), **kept) as saver:
        for step, loss in enumerate([9.0, 1.0, 5.0, 4.0, 3.0, 2.0, 8.0, 7.0]):
            saver.save(step, state_of(step), metrics={"loss": loss}).result()
            if step == 3:
                saver.pin(2)
        assert saver.best() == 1
    with fastckpt.Checkpointer(root, storage_options=options(weed.port), **kept) as saver:
        assert saver.steps() == [0, 1, 2, 4, 6, 7]
        saver.unpin(2)
        saver.delete(4)
        saver.save(8, state_of(8)).result()
    assert {*directories_of(bare, root)} == {0, 1, 7, 8}


def test_a_tier_on_the_node_is_drained_to_the_bucket(
    weed: Weed,
    root: str,
    disk: Path,
    assert_same: Callable[[Any, Any], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    told: dict[str, Any] = {"storage_options": options(weed.port), "local": disk / "tier"}
    caplog.set_level("INFO", "fastckpt")
    with fastckpt.Checkpointer(root, keep_last=2, **told) as saver:
        for step in (1, 2, 3):
            handle = saver.save(step, state_of(step))
            handle.wait_local()
            handle.result()
        into = blank()
        assert saver.restore(into) == 3
        assert all(path.startswith(str(disk)) for path in saver.restored_from.values())
    shutil.rmtree(disk / "tier")
    with fastckpt.Checkpointer(root, **told) as reader:
        into = blank()
        assert reader.restore(into) == 3 and reader.steps() == [2, 3]
        assert all(path.startswith("s3://") for path in reader.restored_from.values())
        assert_same(into, state_of(3))
    told_from = [each for each in caplog.messages if "files read from" in each]
    assert [re.findall(r"\d+ (?=files read|from)", each) for each in told_from] == [
        ["1 ", "0 "],
        ["0 ", "1 "],
    ]


def test_options_that_cannot_be_are_told(client: Any, weed: Weed, root: str) -> None:
    """Never as an object that is not there, which a job that resumes may take for a first start."""
    url = f"{root}/a.pt"
    unknown, no_http = {"regoin": "x"}, {"client_options": {}}
    calls: list[Callable[[dict[str, Any]], Any]] = [
        lambda told: fastckpt.load(url, storage_options=told),
        lambda told: fastckpt.open(url, storage_options=told),
        lambda told: fastckpt.save({}, url, storage_options=told).result(),
        lambda told: fastckpt.Checkpointer(root, storage_options=told).save(1, {}).result(),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="regoin"):
            call(options(weed.port) | unknown)
        with pytest.raises(StorageError, match="set AWS_ALLOW_HTTP=true"):
            call(options(weed.port) | no_http)
    reader = fastckpt.Checkpointer(root, storage_options=options(weed.port))
    with reader, pytest.raises(CheckpointError, match="there is no object below it"):
        reader.restore({}, required=True)


def test_requests_of_a_save(proxy: Proxy, root: str) -> None:
    """Once the root is known; they do not become more with the steps that are there."""
    counted = []
    with fastckpt.Checkpointer(root, storage_options=options(proxy.port)) as saver:
        for step in range(4):
            saver.save(step, state_of(step, LARGE)).result()
            settle()
            requests = proxy.count().requests
            assert requests.pop("part") == 2
            counted.append(requests)
    assert counted[-1].total() <= REQUESTS_MAX, counted[-1]
    assert counted[-1].total() == counted[2].total(), counted
    told = (ROOT / "docs" / "guides" / "objects.md").read_text()
    in_table = dict(re.findall(r"^\| `(\w+)`.* \| (\d+) \|", told, re.MULTILINE))
    assert {kind: str(count) for kind, count in counted[-1].items()} == in_table


def test_the_manifest_is_put_last_and_only_if_there_is_none(proxy: Proxy, root: str) -> None:
    with fastckpt.Checkpointer(root, storage_options=options(proxy.port)) as saver:
        saver.save(1, state_of(1, LARGE)).result()
        asked = [(kind, key.rpartition("/")[2]) for kind, key in proxy.asked]
    at = asked.index(("create", "manifest.json"))
    behind = {kind for kind, _ in asked[at + 1 :]}
    assert not behind & {"put", "part", "begin", "complete", "create"}


COMMANDS = """
import sys
from fastckpt.cli import main
for command in sys.argv[1].split(";"):
    print("==", command, main(command.split()), flush=True)
"""


def test_commands_take_urls(weed: Weed, root: str, disk: Path, bare: Any) -> None:
    """With the client's own conventions for what it has to know."""
    with fastckpt.Checkpointer(root, storage_options=options(weed.port), log=True) as saver:
        for step in (1, 2):
            saver.save(step, state_of(step)).result()
    fastckpt.export(state_of(2), disk / "export").result()
    for file in (disk / "export").iterdir():
        for name in ("copied", "damaged"):
            content = file.read_bytes()
            if name == "damaged" and file.suffix == ".safetensors":
                content = content[:-1] + bytes([content[-1] ^ 1])
            bare.put(f"{root.partition(BUCKET + '/')[2]}-{name}/{file.name}", content)
    url = f"{root}/a.pt"
    fastckpt.save(state_of(1), url, storage_options=options(weed.port)).result()
    directories = directories_of(bare, root)
    one, two = (f"{root}/{directories[step]}" for step in (1, 2))
    commands = {
        f"ls {root}": 0,
        f"verify {root}": 0,
        f"verify {url}": 0,
        f"verify {root}-copied": 0,
        f"verify {root}-damaged": 1,
        f"inspect {one}": 0,
        f"inspect {url}": 0,
        f"diff {one} {one}": 0,
        f"diff {one} {two}": 1,
        f"convert --to pt {one} {disk}/one.pt": 0,
        f"repair {root}": 0,
        f"report {root}": 0,
        f"doctor {root}": 0,
    }
    variables: dict[str, str | None] = {**environment(weed.port)}
    done = run(COMMANDS, ";".join(commands), variables=variables, cwd=disk)
    statuses = re.findall(r"^== (.*) (\d+)$", done.stdout, re.MULTILINE)
    assert {name: int(status) for name, status in statuses} == commands, done.stdout + done.stderr
    assert f"{root}" in done.stdout and "/s3:" not in done.stdout + done.stderr
    assert torch.equal(torch.load(disk / "one.pt")["weights"], state_of(1)["weights"])


def test_a_model_in_a_bucket(proxy: Proxy, root: str, disk: Path, bare: Any) -> None:
    """Its small tensors come from a block that is read once, and its config is brought along."""
    state = {f"w{number}": torch.full((99,), float(number)) for number in range(200)}
    fastckpt.export(state, disk / "export").result()
    (disk / "export" / "config.json").write_text('{"dtype": "float16"}')
    for name in ("model.safetensors", "config.json"):
        key = f"{root.partition(BUCKET + '/')[2]}/{name}"
        bare.put(key, (disk / "export" / name).read_bytes())
    with fastckpt.open(root, storage_options=options(proxy.port)) as tensors:
        proxy.count()
        assert all(torch.equal(tensors[name][...], state[name]) for name in reversed(state))
        assert proxy.count().requests.total() == 1
    variables: dict[str, str | None] = {**environment(proxy.port)}
    done = run(COMMANDS, f"convert --to hf {root} {disk}/hf", variables=variables, cwd=disk)
    assert "/hf 0" in done.stdout, done.stdout + done.stderr
    assert json.loads((disk / "hf" / "config.json").read_bytes()) == {"dtype": "float32"}


@pytest.mark.parametrize("asked", [{"staging": "gds"}, {"backend": "io_uring"}], ids=str)
def test_what_only_files_can_have_is_refused(client: Any, root: str, asked: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cannot be used with a URL"):
        fastckpt.Checkpointer(root, **gathered(**asked))


def test_a_store_that_ignores_conditions_is_refused(lax: Lax) -> None:
    with (
        fastckpt.Checkpointer("s3://lax/run", storage_options=options(lax.port)) as saver,
        pytest.raises(StorageError, match="ignores conditions") as raised,
    ):
        saver.save(1, state_of(1)).result()
    assert "s3://lax/run" in str(raised.value)
    settle()
    assert not [key for key in lax.objects if "manifest" in key or "probe" in key]


def test_a_forked_child_refuses(weed: Weed, root: str) -> None:
    """Its parent's client would hang there."""
    told = options(weed.port)
    with fastckpt.Checkpointer(root, storage_options=told) as saver:
        saver.save(1, state_of(1)).result()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        try:
            fastckpt.load(f"{root}/a.pt", storage_options=told)
        except StorageError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        assert "forked" in said.read()
    assert os.waitpid(pid, 0)[1] == 0


STAGED = """
import sys, json, torch, fastckpt
from tests.kit.objects.weed import options
def peak():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM")) << 10
def reset():
    open("/proc/self/clear_refs", "w").write("5")
root, port = sys.argv[1], int(sys.argv[2])
state = {"weights": torch.ones(24 << 20)}  # 96 MiB
told = options(port)
with fastckpt.Checkpointer(root, storage_options=told) as saver:
    saver.save(0, {"weights": torch.ones(1)}).result()  # what is made once
    reset()
    before = peak()
    stats = saver.save(1, state).result()
    saved = peak() - before
    into = {"weights": torch.zeros(24 << 20)}
    into["weights"].fill_(2)
    reset()
    before = peak()
    assert saver.restore(into) == 1
    print(json.dumps([saved, peak() - before, stats.staged_bytes_max]))
"""


def test_memory_is_bounded_by_the_staging_budget(weed: Weed, root: str) -> None:
    """Measured at the process. The client's buffers come on top: of what is read, a part each."""
    budget = 48 * MIB
    done = run(STAGED, root, weed.port, variables={"FASTCKPT_STAGING_BYTES": str(budget)})
    assert done.returncode == 0, done.stderr
    saved, restored, staged = json.loads(done.stdout)
    assert staged <= budget
    assert saved <= budget + 8 * MIB, saved >> 20
    assert restored <= budget, restored >> 20


def test_credentials_from_a_function(weed: Weed, root: str) -> None:
    """As those of a profile are, which the client asks for when it needs them."""
    told = options(weed.port)
    asked = []

    def provide() -> dict[str, Any]:
        asked.append(True)
        return {
            "access_key_id": KEY_ID,
            "secret_access_key": SECRET,
            "token": None,
            "expires_at": None,
        }

    del told["access_key_id"], told["secret_access_key"]
    told["credential_provider"] = provide
    fastckpt.save(state_of(1), f"{root}/a.pt", storage_options=told).result()
    assert step_of(fastckpt.load(f"{root}/a.pt", storage_options=told)) == 1
    assert asked


def test_credentials_of_a_profile(
    weed: Weed, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the user's own file, by a program, with the server that it names."""
    pytest.importorskip("botocore", reason="botocore is not installed")
    keys = {"Version": 1, "AccessKeyId": KEY_ID, "SecretAccessKey": SECRET}
    (tmp_path / "keys").write_text(json.dumps(keys))
    (tmp_path / "config").write_text(
        f"[profile mine]\ncredential_process = cat {tmp_path}/keys\nregion = us-east-1\n"
        f"endpoint_url = http://127.0.0.1:{weed.port}\n"
    )
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    told = {"client_options": {"allow_http": True, "user_agent": "profile"}}
    fastckpt.save(state_of(1), f"{root}/a.pt", storage_options=told).result()
    assert step_of(fastckpt.load(f"{root}/a.pt", storage_options=told)) == 1


def google(port: int) -> dict[str, Any]:
    key = {"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
    key["gcs_base_url"] = f"http://127.0.0.1:{port}"
    return {"service_account_key": json.dumps(key), "client_options": {"allow_http": True}}


def azure(port: int) -> dict[str, Any]:
    told = {"account_name": "tests", "skip_signature": True, "client_options": {"allow_http": True}}
    return {**told, "endpoint": f"http://127.0.0.1:{port}"}


@pytest.mark.parametrize(
    ("scheme", "kind", "options_of"), [("gs", S3Handler, google), ("az", AzureHandler, azure)]
)
def test_other_dialects(
    client: Any,
    scheme: str,
    kind: type[S3Handler],
    options_of: Callable[[int], dict[str, Any]],
) -> None:
    """Of stubs, with conditions of their own."""
    root = f"{scheme}://bucket/run"
    with Lax(heeds=True, kind=kind) as stub:
        told = options_of(stub.port)
        with fastckpt.Checkpointer(root, storage_options=told, keep_last=2) as saver:
            for step in (1, 2, 3):
                saver.save(step, state_of(step, LARGE)).result()
        into = blank(LARGE)
        with fastckpt.Checkpointer(root, storage_options=told) as reader:
            assert reader.steps() == [2, 3] and reader.restore(into) == 3 and step_of(into) == 3
        fastckpt.save(state_of(4), f"{root}/a.pt", storage_options=told).result()
        assert step_of(fastckpt.load(f"{root}/a.pt", storage_options=told)) == 4
    with Lax(kind=kind) as stub:
        told = options_of(stub.port)
        with (
            fastckpt.Checkpointer(root, storage_options=told) as saver,
            pytest.raises(StorageError, match="ignores conditions"),
        ):
            saver.save(1, state_of(1)).result()


@pytest.mark.parametrize("told", ["x", [1], 5, {1: 2}], ids=str)
def test_options_have_names(told: Any, root: str) -> None:
    with pytest.raises(TypeError, match="storage_options is"):
        fastckpt.load(f"{root}/a.pt", storage_options=told)
