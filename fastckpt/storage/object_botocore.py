"""Listings of S3 that the object store's client does not support, made with botocore if it is
installed: unfinished uploads, and foreign objects whose keys are not paths.
"""

from __future__ import annotations

import errno
import importlib.util
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from fastckpt.arguments.urls import divided
from fastckpt.errors import StorageError, telling
from fastckpt.storage.object_urls import botocore_client

log = logging.getLogger("fastckpt")

_PAGES_MAX = 100  # of 1,000 keys each, that foreign_keys() reads
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_REFUSED = re.compile("Denied|Forbidden|Expired|Invalid(AccessKeyId|Token)|SignatureDoesNotMatch")


def is_foreign(key: str) -> bool:
    """Returns whether the object store's client rejects a key as a path. We never write such
    keys.
    """
    parts = key.removesuffix("/").split("/")
    return bool(_CONTROL.search(key)) or any(part in ("", ".", "..") for part in parts)


def page(
    path: str, after: str | None, why: StorageError
) -> tuple[list[dict[str, Any]], str | None]:
    """Returns one page of the objects below a path, without keys that are not paths. The second
    value is the last key of the page if there may be more, else None.

    Args:
        after: the last key before the page; None: the first page.
        why: the client's error.

    Raises:
        StorageError: the objects cannot be listed.
    """
    answer = _list_page(path, why, {"StartAfter": after} if after is not None else {})
    content = answer.get("Contents", ())
    objects = [_described(each) for each in content if not is_foreign(each["Key"])]
    return objects, content[-1]["Key"] if answer["IsTruncated"] else None


def listed(path: str, why: StorageError) -> dict[str, Any]:
    """Returns the objects and directories in a directory, in the client's form, without keys that
    are not paths. For errors see page().
    """
    objects, below, how = list[dict[str, Any]](), list[str](), {"Delimiter": "/"}
    while True:
        answer = _list_page(path, why, how)
        content = answer.get("Contents", ())
        objects += [_described(each) for each in content if not is_foreign(each["Key"])]
        prefixes = (each["Prefix"] for each in answer.get("CommonPrefixes", ()))
        below += [each.removesuffix("/") for each in prefixes if not is_foreign(each)]
        if not answer["IsTruncated"]:
            return {"objects": objects, "common_prefixes": below}
        how["ContinuationToken"] = answer["NextContinuationToken"]


def foreign_keys(root: str) -> list[str]:
    """Returns keys below a URL's path that are not paths; for a large bucket, only the first ones.
    Returns none if the store is not S3 or botocore is not installed. For errors see page().
    """
    keys, after = list[str](), None
    if not root.startswith("/s3:") or importlib.util.find_spec("botocore") is None:
        return keys
    for _ in range(_PAGES_MAX):
        answer = _list_page(root, None, {"StartAfter": after} if after is not None else {})
        content = [each["Key"] for each in answer.get("Contents", ())]
        keys += filter(is_foreign, content)
        if not answer["IsTruncated"]:
            break
        after = content[-1]
    return keys


def _described(each: dict[str, Any]) -> dict[str, Any]:
    key, when = each["Key"].removesuffix("/"), each["LastModified"]
    return {"path": key, "size": each["Size"], "e_tag": each["ETag"], "last_modified": when}


def _list_page(path: str, why: StorageError | None, how: dict[str, str]) -> Any:
    _mount, bucket, prefix = divided(path)
    if why is not None and not path.startswith("/s3:"):
        raise why
    with _as_storage_error(path, why):
        client = botocore_client(path)
        below = f"{prefix}/" if prefix else ""
        return client.list_objects_v2(Bucket=bucket, Prefix=below, **how)


@telling
def _as_storage_error(error: BaseException, path: str, why: StorageError | None) -> None:
    """Converts the body's error to a StorageError."""
    if isinstance(error, ImportError) and why is not None:
        cure = (
            "an object of another program there has an unsupported key: remove it, or install "
            "botocore to ignore it"
        )
        raise StorageError("list", path, errno.EILSEQ, detail=f"{cure}; {why.detail}") from None
    if isinstance(error, Exception):
        number = errno.EKEYREJECTED if _REFUSED.search(str(error)) else errno.EIO
        raise StorageError("list", path, number, detail=str(error)) from error


class StaleUpload(NamedTuple):
    """An unfinished upload: the path of its object, its bytes, its age, and a function that aborts
    it.
    """

    path: str
    nbytes: int
    age_s: float
    abort: Callable[[], bool]


def stale_uploads(root: str, after_s: float) -> Iterator[StaleUpload]:
    """Yields the unfinished uploads below a URL's path that are older than after_s. Yields none
    without botocore, and none for stores other than S3, which drop old uploads themselves.
    """
    mount, bucket, prefix = divided(root)
    if not mount.startswith("/s3:"):
        return
    try:
        client = botocore_client(root)
    except ImportError:
        log.warning(
            "unfinished uploads below %r can only be listed with botocore: install it", root
        )
        return
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
    with suppress(client.exceptions.NoSuchUpload):  # it has ended in the meantime
        client.abort_multipart_upload(**what)
    return True
