"""What a pickle makes, without its memo's numbers: two pickles of equal objects are equal here."""

from __future__ import annotations

import pickletools
from typing import Any

_REPEATS = {"GET", "BINGET", "LONG_BINGET"}
_KEEPS = {"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"}
_FILLS = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"}
_IGNORED = {"PROTO", "FRAME"}
_MARK = object()


def operations(content: bytes) -> list[Any]:
    """The operations of a pickle as a list of their names and arguments. Where an object that was
    made before is repeated, the list has its number in the order of the first times; texts, numbers
    and names of classes are written out each time.
    """
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    for operation, argument, _place in pickletools.genops(content):
        name = operation.name
        if name in _KEEPS:
            memo[len(memo) if argument is None else argument] = stack[-1]
        elif name in _REPEATS:
            stack.append(memo[argument])
        elif name == "MARK":
            stack.append(_MARK)
        elif name not in _IGNORED | {"STOP"}:
            inputs = operation.stack_before
            if pickletools.markobject in inputs:
                begin = len(stack) - 1 - stack[::-1].index(_MARK)
                used = stack[begin + 1 :]
                del stack[begin:]
                if inputs[0] is not pickletools.markobject:  # a container below the mark
                    used.insert(0, stack.pop())
            else:
                used = [stack.pop() for _ in inputs][::-1]
            if name in _FILLS:
                used[0].append([name, *used[1:]])
                stack.append(used[0])
            else:
                stack.append([name, repr(argument), *used])  # no NaN is equal to itself
    (whole,) = stack
    numbers: dict[int, int] = {}

    def written(node: Any) -> Any:
        if not isinstance(node, list):
            return node
        if id(node) in numbers:
            return ["AGAIN", numbers[id(node)]]
        if len(node) > 2 or (node[0].startswith("EMPTY") and node[0] != "EMPTY_TUPLE"):
            numbers[id(node)] = len(numbers)
        return [written(part) for part in node]

    result: list[Any] = written(whole)
    return result
