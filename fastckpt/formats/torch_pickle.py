"""What torch's pickler makes of an object: the records of a torch zip, tensors by reference.

Responsible for the only private entry point of torch that saving needs, and for noting which
tensors were met. It must not know the bytes of a file.
"""

from __future__ import annotations

import io
import types
import zipfile
from dataclasses import dataclass, field
from typing import Any

import torch


class SkipData(Exception):
    """torch.serialization.skip_data() is active: there is nothing to stage."""


@dataclass
class Capture:
    """What torch's pickler made of an object: the records of the zip, in their order.

    Attributes:
        records: name and content; content is bytes, or a CPU storage that the record is copied
        from.
        tensors: the tensors met while pickling and their version counters at that moment.
    """

    records: list[tuple[str, bytes | torch.UntypedStorage]] = field(default_factory=list)
    tensors: list[tuple[torch.Tensor, int]] = field(default_factory=list)

    # torch.serialization._save calls this; the content arrives as str, bytes or storage.
    def write_record(self, name: str, content: Any, nbytes: int) -> None:
        if isinstance(content, str):
            content = content.encode()
        assert isinstance(content, torch.UntypedStorage) or len(content) == nbytes
        self.records.append((name, content))

    def write_record_metadata(self, name: str, nbytes: int) -> None:
        raise SkipData


def capture(
    obj: object,
    pickle_module: Any,
    pickle_protocol: int,
    disable_byteorder_record: bool,
    observe_tensors: bool,
) -> Capture:
    """Pickles obj as torch.save does and notes which storages it consists of; copies no tensor on
    the CPU.

    Args:
        obj, pickle_module, pickle_protocol, disable_byteorder_record: as torch.save's arguments.
        observe_tensors: also note every tensor and its version counter.

    Raises:
        SkipData: torch.serialization.skip_data() is active.
        Exception: whatever torch.save raises for an object that cannot be pickled.
    """
    captured = Capture()
    module = _observing(pickle_module, captured.tensors) if observe_tensors else pickle_module
    save = getattr(torch.serialization, "_save", None)
    if (
        save is None
    ):  # a torch whose private entry point moved: correct, but holds a copy of everything
        return _capture_by_copy(obj, pickle_module, pickle_protocol)
    save(obj, captured, module, pickle_protocol, disable_byteorder_record)
    return captured


def _observing(pickle_module: Any, tensors: list[tuple[torch.Tensor, int]]) -> Any:
    """pickle_module with a Pickler that notes the tensors it meets and otherwise does the same."""
    base: Any = pickle_module.Pickler
    inherited = getattr(base, "reducer_override", None)

    class Pickler(base):  # type: ignore[misc]
        def reducer_override(self, obj: object) -> Any:
            if isinstance(obj, torch.Tensor) and not obj.is_inference():
                tensors.append((obj, obj._version))
            return NotImplemented if inherited is None else inherited(self, obj)

    return types.SimpleNamespace(Pickler=Pickler)


def _capture_by_copy(obj: object, pickle_module: Any, pickle_protocol: int) -> Capture:
    """The slow way to the same records: torch.save to memory and read the zip back."""
    buffer = io.BytesIO()
    torch.save(obj, buffer, pickle_module, pickle_protocol)
    captured = Capture()
    skipped = {"version", ".data/serialization_id"}  # layout() writes these itself
    with zipfile.ZipFile(buffer) as archive:
        for name in archive.namelist():
            short = name.split("/", 1)[1]
            if short not in skipped:
                captured.records.append((short, archive.read(name)))
    return captured
