"""Functions of a framework that write files, replaced for the calls of one thread.

Responsible for a replacement that ends with a block and that other threads never see.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_lock = threading.RLock()  # two blocks that overlap would put back what the other had replaced


@contextmanager
def replaced(module: Any, name: str, by: Callable[..., Any]) -> Iterator[None]:
    """Replaces module.name for the calls of this thread while the body runs.

    Frameworks have no other place to say who writes a file.

    Args:
        module, name: the function to replace.
        by: called with the function that it replaces, then the arguments of the call.
    """
    caller = threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != caller:
            return original(*args, **kwargs)
        return by(original, *args, **kwargs)

    with _lock:
        original = getattr(module, name)
        setattr(module, name, call)
        try:
            yield
        finally:
            setattr(module, name, original)
