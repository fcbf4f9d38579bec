"""A second client of a torch.distributed store, beside the one that the training uses.

Responsible for opening it with every torch that is supported.
"""

from __future__ import annotations

import os
import socket
import threading
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import torch.distributed as dist

c10d: Any = dist  # stores, of which torch's type hints say too little

OPERATION_S = 30.0  # bounds one operation of the store, none of which waits for another rank


def own_client(store: Any) -> Any:
    """Returns a client whose calls do not hold up those of the given one, the training's."""
    base, timeout = store, timedelta(seconds=OPERATION_S)
    while isinstance(base, c10d.PrefixStore):
        base = base.underlying_store
    if isinstance(base, c10d.TCPStore):
        # A dead server refuses this at once; torch's client would try for the store's own timeout.
        socket.create_connection((base.host, base.port), OPERATION_S).close()
    if hasattr(store, "clone"):  # torch 2.8 and later
        client = _cloned(store) if isinstance(base, c10d.TCPStore) else store.clone()
        if isinstance(base, c10d.TCPStore | c10d.FileStore):
            client.set_timeout(timeout)
        return client
    # In older torch, two FileStores of a file end the process when both of their destructors remove
    # the file. No call of ours waits, so the training's own client serves.
    client = base
    if isinstance(base, c10d.TCPStore):
        client = c10d.TCPStore(base.host, base.port, timeout=timeout, wait_for_workers=False)
    if base is not store:  # its prefix cannot be read: clients that share it agree on another one
        prefix = store.compare_set("fastckpt/prefix", "", os.urandom(16).hex())
        client = c10d.PrefixStore(prefix.decode(), client)
    return client


def _cloned(store: Any) -> Any:
    """Returns store.clone(), on a thread of its own: if the server dies just before, torch's client
    tries for the store's own timeout, of minutes, and nothing can end it.
    """
    made: SimpleQueue[Any] = SimpleQueue()

    def clone() -> None:
        try:
            made.put((store.clone(), None))
        except (RuntimeError, OSError) as error:
            made.put((None, error))

    try:
        threading.Thread(target=clone, name="fastckpt-store", daemon=True).start()
    except RuntimeError:  # no thread can be started
        clone()
    try:
        client, error = made.get(timeout=OPERATION_S)
    except Empty:
        raise ConnectionError(f"no connection within {OPERATION_S:g} s") from None
    if error is not None:
        raise error
    return client
