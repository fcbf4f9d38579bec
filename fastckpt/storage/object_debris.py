"""Uploads to S3 that have not ended, and that nobody will end: the client of objects cannot list
them, so this asks botocore, where that is installed. It must not know what was uploaded.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from fastckpt.arguments.urls import divided, options_of

log = logging.getLogger("fastckpt")

_NAMES = {
    "endpoint": "endpoint_url",
    "region": "region_name",
    "access_key_id": "aws_access_key_id",
    "secret_access_key": "aws_secret_access_key",
    "session_token": "aws_session_token",
}


class StaleUpload(NamedTuple):
    """An upload: the path that it would have, its bytes, its age, and what ends it."""

    path: str
    nbytes: int
    age_s: float
    abort: Callable[[], bool]


def stale_uploads(root: str, after_s: float) -> Iterator[StaleUpload]:
    """Yields the uploads below a path that stands for a URL, begun so long ago. None are found in
    other stores than S3's, which drop uploads by themselves, or without botocore.
    """
    mount, bucket, prefix = divided(root)
    if not mount.startswith("/s3:"):
        return
    try:
        import botocore.session
    except ImportError:
        log.warning("%r: uploads that have not ended are found with botocore installed", root)
        return
    options = options_of(mount)
    known = {_NAMES[key]: value for key, value in options.items() if key in _NAMES}
    client = botocore.session.get_session().create_client("s3", **known)
    pages = client.get_paginator("list_multipart_uploads")
    for page in pages.paginate(Bucket=bucket, Prefix=f"{prefix}/" if prefix else ""):
        for each in page.get("Uploads", ()):
            age_s = time.time() - each["Initiated"].timestamp()
            if age_s >= after_s:
                what = {"Bucket": bucket, "Key": each["Key"], "UploadId": each["UploadId"]}
                path = os.path.join(mount, bucket, each["Key"])
                abort = partial(_abort, client, what)
                yield StaleUpload(path, _nbytes(client, what), age_s, abort)


def _nbytes(client: Any, what: dict[str, str]) -> int:
    pages = client.get_paginator("list_parts").paginate(**what)
    return sum(part["Size"] for page in pages for part in page.get("Parts", ()))


def _abort(client: Any, what: dict[str, str]) -> bool:
    with suppress(client.exceptions.NoSuchUpload):  # it has ended meanwhile
        client.abort_multipart_upload(**what)
    return True
