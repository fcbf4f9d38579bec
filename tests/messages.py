"""Lists the texts that users may read: exceptions, warnings, log lines and the command line's.

    python -m tests.messages [ROOM ...]

Prints one line for each text of several words, with its file, its line and the call that it is an
argument of. An expression inside a text is shortened to its name. A room is a folder or a module
of the package; without one, the whole package is listed.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.kit.paths import ROOT

PACKAGE = ROOT / "fastckpt"
# Calls whose argument is a text for users. Classes, which begin with a capital, count as well.
LOG_CALLS = {"debug", "info", "warning", "error", "exception", "log", "log_aside", "warn"}
PRINT_CALLS = {"print", "write", "exit", "add_argument", "add_parser"}
WORDS_MIN = 3


@dataclass(frozen=True)
class Message:
    """A text, the line it begins in, and the call that takes it."""

    line: int
    call: str
    text: str


def name_of(node: ast.expr) -> str:
    """Returns the last name of an expression: x for a.x and for a.x(b)."""
    if isinstance(node, ast.Call):
        return name_of(node.func)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "?")


def text_of(node: ast.expr) -> str:
    """Returns the text that an expression builds; it is empty where the expression builds none."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    if isinstance(node, ast.FormattedValue):
        return text_of(node.value) or "{" + name_of(node.value) + "}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    if isinstance(node, ast.IfExp):
        return f"<{text_of(node.body)} | {text_of(node.orelse)}>"
    return ""


class Texts(ast.NodeVisitor):
    """The texts of several words in one module, docstrings left out."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._call = "text"

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        outer, name = self._call, name_of(node.func)
        if name[:1].isupper() or name in LOG_CALLS or name in PRINT_CALLS:
            self._call = name
        self.generic_visit(node)
        self._call = outer

    def visit_Constant(self, node: ast.Constant) -> None:
        self._add(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        self._add(node)

    def _add(self, node: ast.expr) -> None:
        text = text_of(node)
        if len(text.split()) >= WORDS_MIN:
            self.messages.append(Message(node.lineno, self._call, text))


def modules(room: str) -> list[Path]:
    """Returns the modules of a room: one of the package's folders or modules, or "" for all."""
    path = PACKAGE / room
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def messages(path: Path) -> Iterator[Message]:
    """Yields the texts of a module in the order of its lines."""
    texts = Texts()
    texts.visit(ast.parse(path.read_text()))
    yield from texts.messages


def main() -> int:
    for room in sys.argv[1:] or [""]:
        for path in modules(room):
            for message in messages(path):
                place = f"{path.relative_to(PACKAGE)}:{message.line}"
                print(f"{place}: {message.call}: {message.text!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
