"""The measurements of several ranks, one function each: what is run, in which order, how often.

Each returns its rows as they were measured and the lines of the table made of them. It must not
know how ranks save, how they are started, or what becomes of the lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from ceiling import Ceiling
from harness import Line, Row, at_most, by_round, goal, holds, progress, told
from rank_crew import Crew, crew
from storage import drop_page_cache, remove, size_of

from fastckpt.cli.bench.benchmark import rotated

PAIR = 2
FOUR = 4
CALL_ROUNDS = 12
CALL_WARM_UP = 3


@dataclass
class Surroundings:
    """Where and how much is measured.

    Attributes:
        nbytes: of the object that two ranks save; the other parts save fractions of it.
        rounds: how often.
        directory: on the file system to measure.
        missing: what was not measured, and why.
    """

    nbytes: int
    rounds: int
    directory: Path
    missing: dict[str, str] = field(default_factory=dict)

    @cached_property
    def ceiling(self) -> Ceiling:
        """What the disk can do, scanned once."""
        found = Ceiling(self.directory, self.nbytes, quick=True)
        if found.missing:
            self.missing["fio"] = found.missing
        return found


Part = Callable[[Surroundings], tuple[Row, list[Line]]]


def longest(rows: Iterable[Row], key: str) -> float:
    """Return the time of the slowest rank."""
    return max(float(row[key]) for row in rows)


def seconds(what: str, rows: list[Row], key: str) -> Line:
    """Tell times."""
    return told(what, [row[key] for row in rows], ".3f", " s")


def one_file(here: Surroundings) -> tuple[Row, list[Line]]:
    """Two ranks that hold the same object save it to one file, against rank 0's torch.save."""
    path, rows = here.directory / "object.pt", []
    with crew(PAIR) as ranks:
        ranks("hold_gpt", nbytes=here.nbytes)
        ways = {
            "fastckpt": partial(ranks, "save_file", path=str(path), fence="call"),
            "torch": partial(ranks, "torch_save", path=str(path)),
        }
        for number in range(-1, here.rounds):  # the first one is to warm up
            row: Row = {"round": number}
            for name in rotated([*ways], number):
                answers = ways[name]()
                row[f"{name}_s"] = longest(answers, "committed_s")
                if name == "fastckpt":
                    row |= {key: answers[0][key] for key in ("backend", "direct")}
                    row["returned_s"] = longest(answers, "returned_s")
                row["nbytes"] = size_of(path)
                remove(path)
            row["limit_bps"] = here.ceiling.measure(reading=False)["write"]
            progress(f"file {row}")
            rows.append(row)
    del rows[0]
    return {"rows": rows}, [
        told("saved object", f"{rows[0]['nbytes'] / 2**30:.2f} GiB"),
        seconds("the call, fence call", rows, "returned_s"),
        goal(
            "save(group=), committed",
            by_round(rows, "fastckpt_s"),
            (here.ceiling.name, {row["round"]: row["nbytes"] / row["limit_bps"] for row in rows}),
            ("rank 0 torch.save + fsync", by_round(rows, "torch_s")),
        ),
    ]


def call(here: Surroundings) -> tuple[Row, list[Line]]:
    """What coordination costs the training thread: the call under the step fence, by 4 ranks.

    Ranks call in turn, each when the one before has copied its state, as if each had its cores to
    itself.
    """
    directory, path = here.directory / "call", here.directory / "call.pt"
    directory.mkdir()
    rows: list[Row] = []
    with crew(FOUR) as ranks:
        ranks("hold_gpt", nbytes=here.nbytes // 8)
        for name, alone in (("together", False), ("alone", True)):
            root = str(directory / name)
            ranks("open_steps", name=name, root=root, alone=alone, fence="step", keep_last=1)
        for number in range(-CALL_WARM_UP, max(here.rounds, CALL_ROUNDS)):
            rows.append(one_call(ranks, number + CALL_WARM_UP, path))
            clocks = (f"{key} {value * 1e3:.2f}" for key, value in rows[-1].items())
            progress(f"call, ms: {', '.join(clocks)}")
        for name in ("together", "alone"):
            ranks("close_steps", name=name)
    remove(directory)
    remove(path.with_name(f"{path.name}.0"))
    remove(path)
    del rows[:CALL_WARM_UP]
    lines = []
    for what, key in (("Checkpointer.save()", "step"), ("save(group=)", "file")):
        more = [1e3 * (row[f"{key}_together"] - row[f"{key}_alone"]) for row in rows]
        lines.append(
            at_most(f"{what}: rank 0, with the others less alone", more, 2.0, ".2f", " ms")
        )
    return {"rows": rows}, lines


def one_call(ranks: Crew, step: int, path: Path) -> Row:
    """Time the calls of one round; each save is over before the next one begins."""

    def in_turn(count: int, call: str, /, **arguments: Any) -> float:
        answers = []
        for rank in range(count):
            answers += ranks(call, ranks=range(rank, rank + 1), in_turn=True, **arguments)
        ranks("finish", ranks=range(count))
        return float(answers[0]["returned_s"])  # like with like: it is the one that pickles

    file: Row = {"path": str(path), "fence": "step"}
    ways: dict[str, Callable[[], float]] = {
        "step_together": partial(in_turn, FOUR, "save_step", name="together", step=step),
        "step_alone": partial(in_turn, 1, "save_step", name="alone", step=step),
        "file_together": partial(in_turn, FOUR, "save_file", **file),
        "file_alone": partial(in_turn, 1, "save_file", alone=True, **file),
    }
    return {name: ways[name]() for name in rotated([*ways], step)}


def restore(here: Surroundings) -> tuple[Row, list[Line]]:
    """Two ranks restore, cold, what four had saved under FSDP2."""
    root, rows = here.directory / "restore", []
    with crew(FOUR) as ranks:
        ranks("hold_fsdp", nbytes=here.nbytes, filled=True)
        ranks("open_steps", name="steps", root=str(root))
        ranks("save_step", name="steps", step=7)
        ranks("close_steps", name="steps")
    with crew(PAIR) as ranks:
        needed = sum(ranks("hold_fsdp", nbytes=here.nbytes, filled=False))
        ranks("open_steps", name="steps", root=str(root))
        for number in range(here.rounds):
            cold = drop_page_cache(root)
            answers = ranks("restore", name="steps")
            row: Row = {
                "round": number,
                "cold_by": cold,
                "restored_s": longest(answers, "restored_s"),
                "bytes_read": sum(answer["bytes_read"] for answer in answers),
                "right": all(ranks("is_restored")),
            }
            row["limit_bps"] = here.ceiling.measure(reading=True)["read"]
            progress(f"restore {row}")
            rows.append(row)
        ranks("close_steps", name="steps")
    remove(root)
    excess = [row["bytes_read"] / needed for row in rows]
    limit = {row["round"]: needed / row["limit_bps"] for row in rows}
    lines = [
        told("restored", f"{needed / 2**30:.2f} GiB on 2 ranks, saved by 4"),
        holds("every byte is right", all(row["right"] for row in rows)),
        goal("cold restore", by_round(rows, "restored_s"), (here.ceiling.name, limit)),
    ]
    if any(row["bytes_read"] for row in rows):  # a file system in memory reads no device
        lines.append(at_most("bytes read from the device of needed", excess, 1.1, ".3f", " x"))
    return {"needed": needed, "rows": rows}, lines


PARTS: dict[str, tuple[str, Part]] = {
    "file": ("One object, one disk, 2 ranks", one_file),
    "call": ("The training thread, 4 ranks, fence step", call),
    "restore": ("Restore 2 <- 4 ranks, FSDP2, cold", restore),
}
