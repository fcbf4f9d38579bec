"""Promise: the public surface is small enough to read in a minute."""

from __future__ import annotations

import inspect
from typing import get_args, get_type_hints

import fastckpt


def test_a_checkpointer_takes_few_arguments_and_each_of_them_chooses() -> None:
    arguments = [*inspect.signature(fastckpt.Checkpointer).parameters]
    assert len(arguments) <= 20, arguments
    for name, hint in get_type_hints(fastckpt.Checkpointer.__init__).items():
        values = [value for part in (hint, *get_args(hint)) for value in get_args(part)]
        texts = [value for value in values if isinstance(value, str)]
        assert len(texts) != 1, f"{name} has one value: it is a flag"
