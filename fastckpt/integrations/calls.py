"""Functions of a framework that write files, replaced for the calls of one thread.

Responsible for a replacement that ends with a block and that other threads never see. It must not
know what is replaced.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_lock = threading.RLock()  # two blocks that overlap would put back what the other had replaced


@contextmanager
def replaced(module: Any, name: str, by: Callable[..., Any]) -> Iterator[None]:
    """While the body runs, what this thread calls by module.name is replaced.

    Frameworks have no place to say who writes a file: a function that they import by name is one.

    Args:
        module: which has it.
        name: of a function.
        by: gets the function that was replaced, then the arguments of the call.

    Raises:
        AttributeError: the module has nothing of that name.
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
