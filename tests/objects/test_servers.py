"""What the other tests of object stores stand on: the real server keeps the promises of S3, the lax
one does not, and faults are as they are said to be.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from tests.kit.objects import proxy as faults
from tests.kit.objects.lax import Lax
from tests.kit.objects.proxy import Backwards, Proxy
from tests.kit.objects.stores import store_at
from tests.kit.objects.weed import BUCKET, SECRET, Weed, options

PART = 5 << 20


def retrying(client: Any, port: int, retries: int = 4) -> Any:
    from obstore.store import S3Store

    config = options(port, client_options={"allow_http": True, "timeout": "2s"})
    retry = {
        "max_retries": retries,
        "retry_timeout": timedelta(seconds=20),
        "backoff": {
            "init_backoff": timedelta(milliseconds=1),
            "max_backoff": timedelta(milliseconds=5),
            "base": 2,
        },
    }
    return S3Store(BUCKET, retry_config=retry, **config)


def upload(client: Any, store: Any, key: str, parts: list[bytes]) -> Any:
    return client.put(store, key, iter(parts), chunk_size=PART, max_concurrency=len(parts))


def test_the_server_heeds_conditions_ranges_and_signatures(
    client: Any, weed: Weed, bare: Any
) -> None:
    from obstore import exceptions

    client.put(bare, "conditions", b"first", mode="create")
    with pytest.raises(exceptions.AlreadyExistsError):
        client.put(bare, "conditions", b"second", mode="create")
    with pytest.raises(exceptions.PreconditionError):
        client.get(bare, "conditions", options={"if_match": '"0123"'})
    assert bytes(client.get_range(bare, "conditions", start=1, end=4)) == b"irs"
    thief = options(weed.port, secret_access_key=SECRET + "?")
    from obstore.store import S3Store

    with pytest.raises(exceptions.PermissionDeniedError):
        client.put(S3Store(BUCKET, **thief), "stolen", b"")
    with pytest.raises(FileNotFoundError):
        client.put(store_at(weed.port, "no-such-bucket"), "nowhere", b"")


def test_the_lax_server_accepts_every_condition(client: Any, lax: Lax) -> None:
    store = store_at(lax.port)
    client.put(store, "a/k", b"first", mode="create")
    client.put(store, "a/k", b"second", mode="create")
    assert bytes(client.get(store, "a/k").bytes()) == b"second"
    parts = [b"1" * PART, b"2" * PART, b"3"]
    upload(client, store, "a/large", parts)
    assert bytes(client.get_range(store, "a/large", start=PART - 1, end=PART + 1)) == b"12"
    found = client.list_with_delimiter(store, "")
    assert found["common_prefixes"] == ["a"] and not found["objects"]
    assert [each["path"] for each in client.list(store, "a").collect()] == ["a/k", "a/large"]
    client.delete(store, ["a/k", "a/large"])
    assert not lax.objects


@pytest.mark.parametrize("kind", ["part", "complete", "begin"])
@pytest.mark.parametrize("fault", [faults.busy, faults.cut], ids=["busy", "cut"])
def test_what_the_client_survives(client: Any, proxy: Proxy, kind: str, fault: Any) -> None:
    store = retrying(client, proxy.port)
    parts = [bytes([i]) * PART for i in range(3)]
    proxy.on(kind, fault, times=2)
    upload(client, store, f"{kind}-{fault.__name__}", parts)
    assert proxy.traffic.requests[kind] == {"part": 5, "complete": 3, "begin": 3}[kind]
    proxy.heal()
    got = client.get(store, f"{kind}-{fault.__name__}").bytes()
    assert bytes(got) == b"".join(parts)


def test_a_lost_answer_to_a_conditional_put(client: Any, proxy: Proxy, bare: Any) -> None:
    from obstore import exceptions

    proxy.on("create", faults.lost)
    with pytest.raises(exceptions.AlreadyExistsError):
        client.put(retrying(client, proxy.port), "lost", b"mine", mode="create")
    assert bytes(client.get(bare, "lost").bytes()) == b"mine"


def test_expired_credentials_are_told_by_name(client: Any, proxy: Proxy) -> None:
    from obstore import exceptions

    proxy.on("", faults.expired, times=1000)
    with pytest.raises(exceptions.PermissionDeniedError, match="ExpiredToken"):
        client.put(retrying(client, proxy.port), "late", b"")


def test_parts_may_come_in_any_order(client: Any, proxy: Proxy) -> None:
    parts = [bytes([i]) * PART for i in range(3)]
    backwards = Backwards(3)
    proxy.on("part", backwards, times=3)
    store = retrying(client, proxy.port)
    upload(client, store, "order", parts)
    assert len(backwards.order) == 3
    assert bytes(client.get(store, "order").bytes()) == b"".join(parts)


def test_a_cut_answer_is_not_a_whole_one(client: Any, proxy: Proxy) -> None:
    store = retrying(client, proxy.port)
    client.put(store, "half", b"1" * PART)
    proxy.count()
    proxy.on("get", faults.cut)
    assert bytes(client.get_range(store, "half", start=0, end=PART)) == b"1" * PART
    assert proxy.traffic.requests["get"] == 2


@pytest.mark.torture
@pytest.mark.multiprocess
def test_a_server_comes_back_with_what_it_had(client: Any, tmp_path: Any) -> None:
    """Killed, all of it but the master, which holds nothing."""
    with Weed(tmp_path / "weed", volumes_max=8, volume_mib=16) as server:
        store = retrying(client, server.port)
        upload(client, store, "kept", [b"1" * PART, b"2" * PART])
        server.kill()
        server.start()
        assert bytes(client.get(store, "kept").bytes()) == b"1" * PART + b"2" * PART
