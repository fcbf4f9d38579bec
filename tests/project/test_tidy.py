"""Style as a test: what CONTRIBUTING.md asks of every file and a machine can see.

Each rule is a pure function from a file to the lines that break it. Every rule is run twice: on the
tree, where it must find nothing, and on a planted fault, which it must find. Nothing here imports
the package; how modules may depend on each other is tests/project/test_dependencies.py's business.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.kit.paths import ROOT

LINE_COLUMNS_MAX = 100
FUNCTION_LINES_MAX = 100
FILE_LINES_MAX = 700
OPENING_CHARS_MIN = 40
# Words that say nothing about what a thing is.
BANNED_WORDS = {"manager", "helper", "utils", "util", "factory"}
# Names that others gave and that we have to spell as they do.
OTHERS_NAMES = {"tmp_path_factory"}
# Joined here, for this file keeps its own rules.
LEFT_OVERS = tuple(map("".join, [("TO", "DO"), ("FIX", "ME"), ("X", "XX"), ("HA", "CK")]))
# These run tests of other modules, on a GPU and with NVIDIA's own cuFile.
RERUNS = {"tests/gpu/test_gpu_real.py", "tests/gpu/nvidias_cufile.py"}
ENVIRONMENT_READER = "fastckpt/arguments/environment.py"

# Functions of torch that put what they make on the default device, which is meta where big models
# are built.
MAKE_TENSORS = {"arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "ones"}
MAKE_TENSORS |= {"linspace", "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor"}
MAKE_TENSORS |= {"zeros"}

Node = TypeVar("Node", bound=ast.AST)
Fault = tuple[int, str]  # line number counted from 1, what is wrong with it


@dataclass(frozen=True)
class Source:
    """One file of the tree: its path relative to the root, and its text."""

    path: str
    text: str = field(repr=False)

    @property
    def suffix(self) -> str:
        return Path(self.path).suffix

    @property
    def is_python(self) -> bool:
        return self.suffix in (".py", ".pyi")

    @property
    def is_cpp(self) -> bool:
        return self.suffix in (".cc", ".h")

    @property
    def is_library(self) -> bool:
        return self.path.startswith(("fastckpt/", "csrc/"))

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def comments(self) -> set[int]:
        """The lines that have a comment."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return {token.start[0] for token in tokens if token.type == tokenize.COMMENT}

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @cached_property
    def cpp_code(self) -> str:
        """The C++ without comments, literals and preprocessor lines; line breaks stay in place."""
        token = re.compile(
            r'R"(\w*)\((?:.|\n)*?\)\1"|//[^\n]*|/\*(?:.|\n)*?\*/|"(?:\\.|[^"\\\n])*"'
            r"|(?<!\w)'(?:\\.|[^'\\\n])+'|^[ \t]*#(?:\\\n|[^\n])*",
            re.MULTILINE,
        )
        return token.sub(lambda match: "\n" * match.group().count("\n"), self.text)

    def imports(self) -> Iterator[tuple[int, str]]:
        """The line and dotted name of each import; `from a import b` gives a.b."""
        for plain in self.walk(ast.Import):
            yield from ((plain.lineno, alias.name) for alias in plain.names)
        for node in self.walk(ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)

    def walk(self, kind: type[Node]) -> Iterator[Node]:
        """The nodes of this kind; none when the file is not Python."""
        return iter(self._nodes.get(kind, []))

    @cached_property
    def _nodes(self) -> dict[type, list[Any]]:
        """As ast.walk() has them, but for the contexts of names."""
        found: dict[type, list[Any]] = {}
        ahead: list[Any] = [self.tree] if self.is_python else []
        for node in ahead:  # which grows meanwhile
            found.setdefault(type(node), []).append(node)
            for name in node._fields:
                value = getattr(node, name, None)
                if isinstance(value, list):
                    ahead += [each for each in value if isinstance(each, ast.AST)]
                elif isinstance(value, ast.AST) and name != "ctx":
                    ahead.append(value)
        return found

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        return chain(self.walk(ast.FunctionDef), self.walk(ast.AsyncFunctionDef))


def is_table_row(source: Source, line: str) -> bool:
    return source.suffix == ".md" and line.lstrip().startswith("|")


def long_lines(source: Source) -> Iterator[Fault]:
    for number, line in enumerate(source.lines, 1):
        is_a_word = source.path.endswith(".md") and " " not in line  # such as a command's option
        if len(line) > LINE_COLUMNS_MAX and not is_table_row(source, line) and not is_a_word:
            yield number, f"{len(line)} columns, at most {LINE_COLUMNS_MAX}"


def tab_indentation(source: Source) -> Iterator[Fault]:
    for number, line in enumerate(source.lines, 1):
        if re.match(r"[ ]*\t", line):
            yield number, "indented by a tab"


def long_python_functions(source: Source) -> Iterator[Fault]:
    if source.path.startswith("fastckpt/"):
        for node in source.functions():
            count = (node.end_lineno or node.lineno) - node.lineno + 1
            if ast.get_docstring(node) is not None:  # a contract may be as long as it needs
                docstring = node.body[0]
                count -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
            if count > FUNCTION_LINES_MAX:
                yield node.lineno, f"{node.name} has {count} lines, at most {FUNCTION_LINES_MAX}"


def long_cpp_functions(source: Source) -> Iterator[Fault]:
    """Counts braces: the outermost block whose head has a parenthesis is a function's body."""
    if not (source.is_cpp and source.path.startswith("csrc/")):
        return
    code = source.cpp_code
    in_body: list[bool] = []  # for each open brace: is it, or is it inside, a function's body
    head_start = body_start = 0
    for match in re.finditer(r"(?<=\w)\{[^{}]*\}|[{};]", code):
        if match.end() - match.start() > 1:  # a{1}: an initializer, part of the head it stands in
            continue
        if match.group() == "{":
            head = re.sub(r"alignas\([^)]*\)", "", code[head_start : match.start()]).strip()
            opens_body = "(" in head and not head.endswith("=") and not any(in_body)
            if opens_body:
                body_start = match.start() - len(code[head_start : match.start()].lstrip())
            in_body.append(opens_body or any(in_body))
        elif match.group() == "}" and in_body and in_body.pop() and not any(in_body):
            count = code.count("\n", body_start, match.end()) + 1
            if count > FUNCTION_LINES_MAX:
                number = code.count("\n", 0, body_start) + 1
                yield number, f"a function of {count} lines, at most {FUNCTION_LINES_MAX}"
        head_start = match.end()


def missing_opening(source: Source) -> Iterator[Fault]:
    """A file begins by saying what it is responsible for and what it must not know."""
    if not source.is_library:
        return
    if source.is_cpp:
        comment = re.match(r"\s*((?://[^\n]*\n)+|/\*(?:.|\n)*?\*/)", source.text)
        opening = comment.group(1) if comment else ""
    elif source.is_python:
        opening = ast.get_docstring(source.tree) or ""
    else:
        return
    if len(opening) < OPENING_CHARS_MIN:
        yield 1, "does not open with a paragraph that says what the file is responsible for"


def defined_names(source: Source) -> Iterator[tuple[int, str]]:
    """The names a file introduces; names it only uses (torch.utils) are others' choice."""
    yield 1, Path(source.path).stem
    if source.is_cpp:
        for number, line in enumerate(source.cpp_code.splitlines(), 1):
            yield from ((number, name) for name in re.findall(r"[A-Za-z_]\w*", line))
    for definition in chain(source.functions(), source.walk(ast.ClassDef)):
        yield definition.lineno, definition.name
    for argument in source.walk(ast.arg):
        yield argument.lineno, argument.arg
    for name in source.walk(ast.Name):
        if isinstance(name.ctx, ast.Store):
            yield name.lineno, name.id
    for attribute in source.walk(ast.Attribute):
        if isinstance(attribute.ctx, ast.Store) and ast.unparse(attribute.value) == "self":
            yield attribute.lineno, attribute.attr


def banned_names(source: Source) -> Iterator[Fault]:
    for number, name in defined_names(source):
        if name in OTHERS_NAMES:
            continue
        for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name):
            if word.lower() in BANNED_WORDS or word.lower().rstrip("s") in BANNED_WORDS:
                yield number, f"'{name}': '{word}' does not say what it is"


def prints(source: Source) -> Iterator[Fault]:
    if source.path.startswith("fastckpt/") and not source.path.startswith("fastckpt/cli"):
        for node in source.walk(ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id == "print":
                yield node.lineno, "print(): a library logs or raises; only the CLI prints"


def swallowed_errors(source: Source) -> Iterator[Fault]:
    """An error that is dropped says why, where it is dropped."""
    why = "drops an error without a comment saying why"
    if source.is_cpp:
        for match in re.finditer(r"catch\s*\([^)]*\)\s*\{\s*\}", source.text):
            yield source.text.count("\n", 0, match.start()) + 1, why
    if not source.is_python:
        return
    for handler in source.walk(ast.ExceptHandler):
        dropped = len(handler.body) == 1 and isinstance(handler.body[0], ast.Pass)
        span = range(handler.lineno, handler.body[0].lineno + 1)
        if dropped and source.comments.isdisjoint(span):
            yield handler.lineno, why
    for block in source.walk(ast.With):
        calls = " ".join(ast.unparse(item.context_expr) for item in block.items)
        span = range(block.lineno - 1, block.body[0].lineno + 1)
        if re.search(r"\bsuppress\(", calls) and source.comments.isdisjoint(span):
            yield block.lineno, why


def errors_replaced_in_generators(source: Source) -> Iterator[Fault]:
    """What becomes of a body's error is told by errors.telling, since a generator that replaces or
    drops it leaves a cycle that keeps the frames of all callers. Of the tools the process ends.
    """
    if not (source.is_library and source.is_python) or source.path.startswith("fastckpt/cli/"):
        return
    for block in source.walk(ast.FunctionDef):
        if not any("contextmanager" in ast.unparse(each) for each in block.decorator_list):
            continue
        for guarded in (node for node in ast.walk(block) if isinstance(node, ast.Try)):
            body = chain.from_iterable(map(ast.walk, guarded.body))
            if not any(isinstance(node, ast.Yield) for node in body):
                continue
            for handler in guarded.handlers:
                raises = [node for node in ast.walk(handler) if isinstance(node, ast.Raise)]
                last = handler.body[-1]
                if not isinstance(last, ast.Raise) or any(each.exc for each in raises):
                    yield handler.lineno, "a generator replaces or drops an error of its body"


def environment_reads(source: Source) -> Iterator[Fault]:
    """Arguments configure the library; what the environment may say is read in one place."""
    if not source.is_library or source.path == ENVIRONMENT_READER:
        return
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "setenv", "secure_getenv"}
    message = f"the environment is read in {ENVIRONMENT_READER} only"
    if source.is_cpp:
        for number, line in enumerate(source.cpp_code.splitlines(), 1):
            if names & set(re.findall(r"\w+", line)):
                yield number, message
    for read in source.walk(ast.Attribute):
        if read.attr in names and isinstance(read.value, ast.Name) and read.value.id == "os":
            yield read.lineno, message
    for taken in source.walk(ast.ImportFrom):
        if taken.module == "os" and names & {alias.name for alias in taken.names}:
            yield taken.lineno, message


def raw_file_changes(source: Source) -> Iterator[Fault]:
    """What changes names or contents goes through the seam, so that crash tests reach it."""
    if not source.path.startswith("fastckpt/integrations/"):
        return
    changing = {"link", "makedirs", "mkdir", "remove", "rename", "replace", "rmdir", "symlink"}
    changing |= {"fsync", "truncate", "unlink", "write", "rmtree", "move", "copytree"}
    for call in source.walk(ast.Call):
        module, _, name = ast.unparse(call.func).rpartition(".")
        if module in ("os", "shutil") and name in changing:
            yield call.lineno, f"{module}.{name}: files are changed through storage/"


def tensors_without_device(source: Source) -> Iterator[Fault]:
    """The library's own tensors lie where it says, whatever the process's default device is."""
    if not source.path.startswith("fastckpt/"):
        return
    for call in source.walk(ast.Call):
        made = ast.unparse(call.func).removeprefix("torch.")
        named = any(keyword.arg in ("device", None) for keyword in call.keywords)
        if made in MAKE_TENSORS and ast.unparse(call.func) != made and not named:
            yield call.lineno, f"torch.{made}() without device= obeys the caller's default device"


def late_bound_torch_io(source: Source) -> Iterator[Fault]:
    """A program may put fastckpt.save in the place of torch.save: what we call then is torch's."""
    if source.path.startswith("fastckpt/"):
        for call in source.walk(ast.Call):
            names = [ast.unparse(node) for node in (call.func, *call.args[:1])]
            if {"torch.save", "torch.load"} & set(names):
                yield call.lineno, "call torch_save or torch_load of formats/torch_pickle.py"


def titles(source: Source) -> Iterator[Fault]:
    if source.suffix != ".md":
        return
    fence = ""
    found = []
    for number, line in enumerate(source.lines, 1):
        mark = re.match(r"\s*(```+|~~~+)", line)
        if mark and not fence:
            fence = mark.group(1)
        elif mark and mark.group(1).startswith(fence):
            fence = ""
        elif not fence and line.startswith("# "):
            found.append(number)
    if len(found) != 1:
        yield (found or [1])[-1], f"{len(found)} titles ('# ...'), exactly one wanted"


def left_overs(source: Source) -> Iterator[Fault]:
    pattern = re.compile(r"\b(?:" + "|".join(LEFT_OVERS) + r")\b")
    for number, line in enumerate(source.lines, 1):
        if match := pattern.search(line):
            yield number, f"left over: {match.group()}"


def long_files(source: Source) -> Iterator[Fault]:
    if source.is_library and len(source.lines) > FILE_LINES_MAX:
        yield FILE_LINES_MAX + 1, f"{len(source.lines)} lines, at most {FILE_LINES_MAX}"


def asserts_of_bytes(source: Source) -> Iterator[Fault]:
    """`python -O` drops asserts: in the package, they only tell the type checker what it misses."""
    if source.path.startswith("fastckpt/"):
        for node in source.walk(ast.Assert):
            if not _narrows(node.test):
                yield node.lineno, "an assert that python -O drops: use errors.ensure()"


def _narrows(test: ast.expr) -> bool:
    if isinstance(test, ast.BoolOp):
        return all(map(_narrows, test.values))
    if isinstance(test, ast.Compare):
        return ast.unparse(test).endswith("is not None") and len(test.ops) == 1
    return isinstance(test, ast.Call) and ast.unparse(test.func) == "isinstance"


def unpacked_tuples(source: Source) -> Iterator[Fault]:
    """A call passes its arguments, and unpacks no tuple that its function made for it."""
    if not source.path.startswith("fastckpt/"):
        return
    for function in source.functions():
        nodes = [*ast.walk(function)]
        made = {
            target.id
            for node in nodes
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple | ast.IfExp)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for argument in (
            each for node in nodes if isinstance(node, ast.Call) for each in node.args
        ):
            value = argument.value if isinstance(argument, ast.Starred) else None
            if isinstance(value, ast.Name) and value.id in made:
                yield argument.lineno, f"*{value.id} was made for this call: pass the arguments"


def imports_of_tests(source: Source) -> Iterator[Fault]:
    """What tests share lies in tests/kit: nobody imports a test module or a conftest."""
    if not source.is_python or source.path in RERUNS:
        return
    for line, name in source.imports():
        for part in name.split(".")[1:] if name.startswith("tests.") else ():
            if part.startswith("test_") or part == "conftest":
                yield line, f"imports {name}: move what is shared to tests/kit"


Rule = Callable[[Source], Iterator[Fault]]

LONG_CPP = "// {}\nnamespace a {{\nint f(int x) {{\n{}}}\n}}\n".format
# Every rule, and for each kind of file it judges a path and a text that break it.
FAULTS: dict[Rule, list[tuple[str, str]]] = {
    long_lines: [("a.md", "x " * 51), ("csrc/a.cc", "|" * 101)],
    tab_indentation: [("fastckpt/a.py", "if a:\n\tb()\n"), ("csrc/a.h", "  \tint a;\n")],
    long_python_functions: [("fastckpt/a.py", "def f():\n" + "    g()\n" * 100)],
    long_cpp_functions: [
        ("csrc/a.cc", LONG_CPP("a function", "if (x) { g(); }\n" * 99)),
        ("csrc/a.cc", "A::A(int x)\n    : b_{1},\n      c_(x) {\n" + "g();\n" * 100 + "}\n"),
        ("csrc/a.cc", "struct alignas(64) A {\nint f() const {\n" + "g('{');\n" * 100 + "}\n};\n"),
    ],
    missing_opening: [
        ("fastckpt/a.py", "import os\n"),
        ("csrc/a.h", "#pragma once\n// Too late.\n"),
    ],
    banned_names: [
        ("fastckpt/io_utils.py", ""),
        ("fastckpt/a.py", "class FileManager: ...\n"),
        ("tests/a.py", "def make(block_factory): ...\n"),
        ("fastckpt/a.py", "self.helpers = []\n"),
        ("csrc/a.h", "struct IOManager;\n"),
    ],
    prints: [("fastckpt/a.py", "print('saved')\n")],
    swallowed_errors: [
        ("fastckpt/a.py", "try:\n    f()\nexcept Exception:\n    pass\n# too late\n"),
        ("fastckpt/a.py", "a = 1\nwith suppress(OSError):\n    f()\n"),
        ("csrc/a.cc", "try {\n} catch (const E& e) {\n}\n"),
    ],
    errors_replaced_in_generators: [
        (
            "fastckpt/a.py",
            "@contextmanager\ndef f():\n    try:\n        yield\n    except A as a:\n" + tail,
        )
        for tail in ("        raise B from a\n", "        g(a)\n")
    ],
    environment_reads: [
        ("fastckpt/a.py", "import os\na = os.environ.get('A')\n"),
        ("fastckpt/cli/a.py", "from os import getenv\n"),
        ("csrc/a.cc", 'auto a = std::getenv("A");\n'),
    ],
    raw_file_changes: [
        ("fastckpt/integrations/a.py", "import os\nos.replace(a, b)\n"),
        ("fastckpt/integrations/a/b.py", "import shutil\nshutil.rmtree(a)\n"),
    ],
    tensors_without_device: [("fastckpt/a.py", "import torch\na = torch.empty(3)\n")],
    late_bound_torch_io: [
        ("fastckpt/a.py", "torch.save(1, f)\n"),
        ("fastckpt/a.py", "g = partial(torch.load, f)\n"),
    ],
    asserts_of_bytes: [
        ("fastckpt/a.py", "assert written == planned\n"),
        ("fastckpt/a.py", "assert a is not None and a > 1\n"),
    ],
    titles: [("a.md", "text\n"), ("a.md", "# One\n```sh\n# no title\n```\n# Two\n")],
    left_overs: [("a.md", f"# T\n\n{LEFT_OVERS[0]}: write\n"), ("setup.py", f"# {LEFT_OVERS[1]}")],
    unpacked_tuples: [("fastckpt/a.py", "def f():\n    how = (1, 2)\n    g(0, *how)\n")],
    imports_of_tests: [
        ("tests/a.py", "def f():\n    from tests.steps.test_steps import g\n"),
        ("tests/steps/a.py", "from tests.steps import test_steps\n"),
        ("tests/a.py", "import tests.conftest\n"),
    ],
    long_files: [("fastckpt/a.py", "a = 1\n" * 701), ("csrc/a.cc", "\n" * 701)],
}

# Close to a fault and none: what a rule that is too eager would report.
BLAMELESS = [
    ("a.md", "# One\n\n```sh\n# a comment\n```\n| " + "x" * 101 + " |\n"),
    ("tests/a.py", "import torch.utils\nfrom a import b\nb(default_factory=list)\nassert b == 1\n"),
    (
        "fastckpt/a.py",
        '"""A file that opens by saying what it does and must not know."""\n'
        "assert a is not None and isinstance(b, int)\n",
    ),
    (
        "fastckpt/a.py",
        '"""A file that opens by saying what it does and must not know."""\n'
        "try:\n    f()\nexcept OSError:  # the file may be gone, and then all is well\n    pass\n",
    ),
    (
        "fastckpt/a.py",
        '"""A file that opens by saying what it does and must not know."""\n@contextmanager\n'
        "def f():\n    try:\n        yield\n    except A as a:\n        g(a)\n        raise\n",
    ),
    (
        "csrc/a.cc",
        "// A file that opens by saying what it does; environ and { stay unread in comments.\n"
        "namespace a {\n"
        + "int f() { return 1; }\n" * 80
        + "const int b[] = {\n"
        + "    1,\n" * 80
        + "};\n}\n",
    ),
]


def tree_paths() -> list[str]:
    """The files git knows or would add; without git, every file that is not hidden or built."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        paths = [path for path in listed.stdout.split("\0") if (ROOT / path).is_file()]
    except (OSError, subprocess.CalledProcessError):
        paths = []
    if not paths:
        relative = [path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file()]
        skipped = {"build", "dist", "__pycache__"}
        paths = [
            path.as_posix()
            for path in relative
            if not any(part.startswith(".") or part in skipped for part in path.parts)
        ]
    return sorted(paths)


@pytest.fixture(scope="module")
def sources() -> list[Source]:
    found = [
        Source(path, (ROOT / path).read_text(encoding="utf-8"))
        for path in tree_paths()
        if Path(path).suffix in (".py", ".pyi", ".cc", ".h", ".md")
    ]
    assert any(source.path == "tests/project/test_tidy.py" for source in found)
    return found


@pytest.mark.parametrize("rule", FAULTS, ids=lambda rule: rule.__name__)
def test_tree_obeys(rule: Rule, sources: list[Source]) -> None:
    faults = [
        f"{source.path}:{number}: {message}"
        for source in sources
        for number, message in rule(source)
    ]
    assert not faults, "\n" + "\n".join(faults)


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [(rule, *case) for rule, cases in FAULTS.items() for case in cases],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_rule_finds_fault(rule: Rule, path: str, text: str) -> None:
    assert list(rule(Source(path, text)))


@pytest.mark.parametrize(("path", "text"), BLAMELESS)
def test_rules_spare_the_blameless(path: str, text: str) -> None:
    source = Source(path, text)
    assert [(rule.__name__, fault) for rule in FAULTS for fault in rule(source)] == []
