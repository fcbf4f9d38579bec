"""What rename= refuses to split or join is named, before anything is read or written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fastckpt
from fastckpt.plan.layouts import source
from fastckpt.state.fit import Fit
from fastckpt.state.layouts import Misfit, Named

PACKED = getattr(torch, "float4_e2m1fn_x2", torch.quint4x2)
JOIN = {("q", "k"): fastckpt.join(0, "qk")}
STACK = {"e{}": fastckpt.join(0, "e")}
MISFITS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "sizes": (
        {"m": fastckpt.split(0, {"a": 3, "b": 4})},
        {"l/m.w": (5, 2)},
        r"splits 'l/m.w', of shape \[5, 2\], along dimension 0 into 3 \+ 4 = 7, which is not 5",
    ),
    "equal sizes": (
        {"m": fastckpt.split(1, ["a", "b"])},
        {"m": (6, 3)},
        "dimension 1 into 2 equal parts, which is not 3",
    ),
    "no such dimension": (
        {"m": fastckpt.split(-3, "m.{}")},
        {"m": (6, 3)},
        r"'m', of shape \[6, 3\], has no dimension -3",
    ),
    "a missing part": (JOIN, {"a.q": (2,)}, "joins 'a.q' into 'a.qk', for which .* like 'k'"),
    "a missing number": (STACK, {"e0": (2,), "e2": (2,)}, "'e0', 'e2' into 'e', .* the number 1"),
    "two sources": (
        {"x|y": "q", **JOIN},
        {"x": (2,), "y": (2,), "k": (2,)},
        "makes both 'q' and 'q' part 0 of 'qk'",
    ),
    "other shapes": (JOIN, {"q": (2, 3), "k": (3, 2)}, r"'q' \(float32 \[2, 3\]\) and 'k' \("),
    "other shapes to stack": (STACK, {"e0": (2,), "e1": (3,)}, r"'e1' \(float32 \[3\]\) .* differ"),
    "other dtypes": (
        JOIN,
        {"q": (2,), "k": torch.float16},
        r"'k' \(float16 \[2\]\) .* they differ",
    ),
    "a name that there is not": (
        {r"^model/encodr\.": "", "m": "n"},
        {"model/encoder.w": (2,), "step": (2,), "head": (1,), "model/b": (1,)},
        r"rename has '\^model/encodr\\\\\.', which fits no name \(the nearest are "
        "'model/encoder.w', 'model/b', '.*: correct it, or leave it out",
    ),
    "a name that a rule has changed": (
        {"^a": "b", "a$": "c"},
        {"a": (2,)},
        r"rename has 'a\$', which fits no name \(the nearest are 'b'\)",
    ),
    "nothing to split": (
        {"q": fastckpt.split(0, ["a", "b"])},
        {"m": (2,)},
        r"rename has 'q', which fits no name \(the nearest are 'm'\)",
    ),
    "nothing to join": (JOIN, {"m": (2,)}, r"rename has \('q', 'k'\), which fits no name"),
    "nothing to stack": (STACK, {"e": (2,)}, r"rename has 'e\{\}', which fits no name"),
    "packed": (
        {"m": fastckpt.split(0, ["a", "b"])},
        {"m": PACKED},
        f"'m' is of {PACKED}, which is quantized or packed",
    ),
}


@pytest.mark.parametrize("what", MISFITS)
def test_what_cannot_be_split_or_joined_is_named(what: str) -> None:
    rename, tensors, told = MISFITS[what]
    named = []
    for name, its in tensors.items():
        dtype, shape = (torch.float32, its) if isinstance(its, tuple) else (its, (2,))
        named.append(Named(name, dtype, source(name, shape)))
    with pytest.raises(Misfit, match=told):
        Fit(rename=rename).arranged(named)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: fastckpt.split(0, "m"), "must have {} where"),
        (lambda: fastckpt.split(0, []), "names no part"),
        (lambda: fastckpt.split(0, {"a": 1.5}), "a size is 1.5"),  # type: ignore[dict-item]
        (lambda: fastckpt.split("0", ["a"]), "dim is '0'"),  # type: ignore[arg-type]
        (lambda: fastckpt.join(0, ["a"]), "into is list"),  # type: ignore[arg-type]
        (lambda: Fit(rename={("a", "b"): "c"}), "several patterns"),
        (lambda: Fit(rename={"a": fastckpt.join(0, "b")}), "must be a tuple of patterns"),
        (lambda: Fit(rename={"a(": fastckpt.split(0, ["b"])}), "no regular expression"),
        (lambda: Fit(rename={"q_proj": r"\1x"}), "'q_proj', no replacement of it: invalid group"),
        (lambda: Fit(rename={"a": 5}), "rename has int for 'a'"),
    ],
)
def test_rules_that_say_nothing_are_refused(make: Any, told: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        make()
    assert told in str(caught.value)


def test_parts_of_what_was_split_are_joined_as_they_were() -> None:
    there = [Named("m", torch.complex64, source("m", (4, 6, 2)))]
    rename = {"m": fastckpt.split(1, "m.{}"), "m.{}": fastckpt.join(1, "m")}
    (found,) = Fit(rename=rename).arranged(there)
    assert found.name == "m" and found.form.shape == (4, 6, 2)
    assert [each.box.offsets for each in found.form.slices] == [(0, n, 0) for n in range(6)]
    assert [each.at for each in found.form.slices] == [(0, n, 0) for n in range(6)]
