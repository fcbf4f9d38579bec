"""Arguments of saves as tables of tests have them: flat, with what goes into SaveOptions beside the
rest.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from fastckpt import SaveOptions

NAMES = [field.name for field in fields(SaveOptions)]


def gathered(**given: Any) -> dict[str, Any]:
    """Returns the arguments with those of SaveOptions as one, `options`; without it if there are
    none.
    """
    of_save = {name: given.pop(name) for name in NAMES if name in given}
    return given | ({"options": SaveOptions(**of_save)} if of_save else {})
