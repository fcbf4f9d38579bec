"""Loads the versions of a WeightPublisher in SGLang servers.

    subscriber = fastckpt.WeightSubscriber("s3://bucket/policy")
    update = subscriber.wait_for(step, timeout_s=600)
    load(update, ["http://10.0.0.5:30000"], "/dev/shm/policy")

Responsible for the request /update_weights_from_disk. SGLang itself is not imported.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastckpt import CheckpointError, WeightUpdate
from fastckpt.arguments.checks import check_deadline


def load(
    update: WeightUpdate,
    servers: Sequence[str],
    directory: str | os.PathLike[str],
    *,
    files: Sequence[str | os.PathLike[str]] = (),
    timeout_s: float = 600.0,
    headers: Mapping[str, str] | None = None,
    **request: Any,
) -> None:
    """Writes a version to a directory, and has all servers load it from there at the same time.

    Two directories below it take turns, each of which is replaced as a whole: while a version is
    written, and while servers load it, the version before is there, too.

    Args:
        update: what WeightSubscriber.next() or wait_for() returned, of whole tensors.
        servers: the URLs of the servers, such as "http://host:30000".
        directory: on a file system that all servers see by this path. Load into it from one process
            at a time.
        files: what the directory has besides weights, such as config.json; as fastckpt.export's.
        timeout_s: for how long a server may load.
        headers: further headers of the request, such as {"Authorization": "Bearer KEY"}.
        request: further members of the request, such as flush_cache=False; SGLang's defaults apply.
            weight_version is the number of the version.

    Raises:
        ValueError: a URL is none of HTTP.
        StorageError: the directory cannot be written; no server was asked.
        CheckpointError: at least one server has not loaded the version. Its weights are unknown:
            load a version again, or restart it.
    """
    deadline_s = check_deadline("timeout_s", timeout_s)
    for server in servers:
        if not server.startswith(("http://", "https://")):
            raise ValueError(f"server {server!r} must begin with http:// or https://")
    path = _older_of([os.path.join(os.path.abspath(directory), name) for name in ("0", "1")])
    update.to_directory(path, files=files)
    body = {"model_path": path, "weight_version": str(update.version), **request}

    def ask(server: str) -> str:
        url = f"{server.rstrip('/')}/update_weights_from_disk"
        content = {"Content-Type": "application/json", **(headers or {})}
        asked = urllib.request.Request(url, json.dumps(body).encode(), content, method="POST")
        try:
            with urllib.request.urlopen(asked, timeout=deadline_s) as response:
                answer = json.loads(response.read())
        except urllib.error.HTTPError as error:  # 400 if loading has failed
            with contextlib.suppress(OSError, http.client.HTTPException):
                return f"{server}: {error.read().decode(errors='replace') or error}"
            return f"{server}: {error}"
        except (OSError, ValueError, http.client.HTTPException) as error:
            return f"{server}: {error}"
        is_loaded = isinstance(answer, dict) and answer.get("success") is True
        return "" if is_loaded else f"{server}: {answer}"

    with ThreadPoolExecutor(max(1, len(servers))) as threads:
        failed = [answer for answer in threads.map(ask, servers) if answer]
    if failed:
        raise CheckpointError(
            f"version {update.version} was loaded by {len(servers) - len(failed)} of "
            f"{len(servers)} servers; the weights of the others are unknown: {'; '.join(failed)}"
        )


def _older_of(paths: Sequence[str]) -> str:
    """Returns the first path that does not exist, else the one that was replaced first."""

    def replaced(path: str) -> int:
        return os.stat(path).st_ctime_ns if os.path.exists(path) else 0

    return min(paths, key=replaced)
