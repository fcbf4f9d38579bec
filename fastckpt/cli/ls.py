"""`fastckpt ls`: lists the steps of a Checkpointer, and checkpoints of transformers' Trainer,
without reading their data.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

from fastckpt.arguments.quantities import shown_size, shown_time
from fastckpt.cli.directory_files import trainer_rows
from fastckpt.cli.local_tiers import tiers_of
from fastckpt.cli.shared_arguments import real_root, shown_name
from fastckpt.errors import CheckpointError, StorageError
from fastckpt.formats import file_list
from fastckpt.formats.manifest import Manifest
from fastckpt.saving import pipeline
from fastckpt.steps.no_steps import holds_export, steps_at, what_is_there
from fastckpt.steps.pins import is_pinned
from fastckpt.steps.root import store_at
from fastckpt.steps.store import StepStore


def run(arguments: argparse.Namespace) -> int:
    storage = pipeline.current().storage
    root = real_root(arguments.root)
    rows = [*_rows(steps_at(storage, root), is_local=False)]
    for tier in tiers_of(storage, root, arguments.local):
        rows += _rows(tier, is_local=True)
    rows += trainer_rows(storage, root)
    if not rows:
        raise CheckpointError(f"{root!r} holds no step: {what_is_there(store_at(storage, root))}")
    if arguments.json:
        print(json.dumps({"root": root, "steps": rows}, indent=1))
    else:
        _print(rows)
    return int(any(row["state"] in ("damaged", "unreadable") for row in rows))


def _rows(steps: StepStore, *, is_local: bool) -> Iterator[dict[str, Any]]:
    infos, faults = steps.committed()
    numbers = {manifest.nonce: manifest.step for _name, manifest in infos}
    whole = set[str]()  # nonces of steps whose bases are all there
    for _name, manifest in reversed(infos):  # the oldest first, so bases before differences
        if manifest.bases <= whole:
            whole.add(manifest.nonce)
    for name, manifest in infos:
        wrong = _wrong(steps, name, manifest, is_local)
        if not is_local and manifest.nonce not in whole:
            wrong = wrong or "a step from which it is built is missing"
        yield {
            **_row(steps, name, is_local),
            "state": "damaged" if wrong else "committed",
            "why": wrong,
            "step": manifest.step,
            "nbytes": _nbytes(manifest),
            "saved": manifest.created,
            "ranks": manifest.world_size,
            "bases": sorted(numbers[base] for base in manifest.bases if base in numbers),
            "metrics": manifest.metrics,
            "kept": manifest.kept,
            "metadata": manifest.metadata,
            "pinned": is_pinned(steps, name),
        }
    for fault in faults:
        state = "unreadable" if isinstance(fault.error, StorageError) else "damaged"
        yield {**_row(steps, fault.name, is_local), "state": state, "why": str(fault.error)}
    for name in steps.incomplete():
        if holds_export(steps, name):
            continue
        yield {**_row(steps, name, is_local), "state": "not committed", "why": ""}


def _row(steps: StepStore, name: str, is_local: bool) -> dict[str, Any]:
    path = steps.path(name)
    return {"path": path, "name": os.path.basename(path), "where": "local" if is_local else "root"}


def _nbytes(manifest: Manifest) -> int:
    return sum(manifest.sizes.values())


def _wrong(steps: StepStore, name: str, manifest: Manifest, is_local: bool) -> str:
    """Returns a description of the first missing file of a step, or the first with a wrong size; or
    "".
    """
    for file, nbytes in manifest.sizes.items():
        try:
            status = steps.storage.status(steps.path(name, file))
        except OSError as error:
            return f"{file} cannot be examined: {error}"
        if status is None and not is_local:  # a local tier has only its node's files
            return f"{file} is missing"
        if status is not None and status.st_size != nbytes:
            return f"{file} has {status.st_size} bytes, must have {nbytes}"
    return ""


def _print(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        state = f"{row['state']}: {row['why']}" if row["why"] else row["state"]
        facts = [row["name"], row["where"]]
        if "saved" in row:
            facts += [shown_size(row["nbytes"]), f"{_age(row['saved'])} old"]
        if row.get("listed_files"):
            facts.append(f"{row['listed_files']} files in {file_list.NAME}")
        if "ranks" in row:
            facts.append(f"{row['ranks']} rank{'s' if row['ranks'] != 1 else ''}")
            facts += [f"difference from step {base}" for base in row["bases"]]
            facts += [_metric(*each) for each in row["metrics"].items()]
            facts += [f"thinned to {', '.join(row['kept'])}"] if row["kept"] is not None else []
            facts += ["pinned"] * row["pinned"]
        print("  ".join([*facts, state]))


def _metric(name: str, value: float | str) -> str:
    text = value if isinstance(value, str) else f"{value:.6g}"
    return f"{shown_name(name)} {shown_name(text)}"


def _age(saved: str) -> str:
    at = datetime.fromisoformat(saved.replace("Z", "+00:00"))
    if at.tzinfo is None:
        at = at.replace(tzinfo=timezone.utc)
    return shown_time(max(0.0, time.time() - at.timestamp()))
