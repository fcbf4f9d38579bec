"""The versions of frameworks that the integrations are tested with: the oldest that each supports,
and the newest.

    python -m tests.versions                           # all of them: make test-versions
    python -m tests.versions lightning-floor           # some
    python -m tests.versions --write                   # only the table in docs/project/versions.md

Each environment is a venv below build/versions, made once; `rm -r` one for a newer newest. It lies
on top of the packages of the Python that runs this, but for a torch of its own, which has an
environment of its own. The extension of the tree serves all, since it contains nothing of torch.
The outcome goes to tests/versions.json, of which the table is made.

Must not know how an integration is tested.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kit.paths import ROOT

ENVIRONMENTS = ROOT / "build" / "versions"
RECORD = ROOT / "tests" / "versions.json"
PAGE = ROOT / "docs" / "project" / "versions.md"
MARKED = re.compile(r"(<!-- versions -->\n).*?(<!-- versions end -->)", re.DOTALL)
OF_TESTS = ("pytest>=9", "pytest-timeout", "pytest-xdist", "hypothesis", "numpy")
OF_FASTCKPT = ("safetensors>=0.4.2", "zstandard>=0.22", "pybind11>=3", "setuptools>=77")
TESTS_S = 3600


@dataclass(frozen=True)
class Framework:
    """A framework, and the tests of its integration.

    Attributes:
        floor: what pip installs of the oldest version that is supported.
        newest: the distributions of which pip installs the newest version.
        tests: below tests/.
        on_top: whether its environment lies on the packages of the Python that runs this.
    """

    floor: tuple[str, ...]
    newest: tuple[str, ...]
    tests: tuple[str, ...]
    on_top: bool = True


FRAMEWORKS = {
    "transformers": Framework(
        ("transformers==4.52.4", "accelerate==1.7.0"),
        ("transformers", "accelerate"),
        ("integrations/test_transformers.py", "integrations/test_accelerate.py"),
    ),
    "lightning": Framework(
        ("lightning==2.5.0", "pytorch-lightning==2.5.0"),
        ("lightning", "pytorch-lightning"),
        ("integrations/test_lightning.py",),
    ),
    "deepspeed": Framework(
        ("deepspeed==0.16.0",), ("deepspeed",), ("integrations/test_deepspeed.py",)
    ),
    "torchtitan": Framework(
        ("torchtitan==0.3.0",), ("torchtitan",), ("integrations/test_torchtitan.py",)
    ),
    "megatron": Framework(
        ("megatron-core==0.16.1",),
        ("megatron-core",),
        (
            "integrations/test_megatron.py",
            "integrations/test_megatron_install.py",
            "integrations/test_megatron_layouts.py",
            "integrations/test_megatron_parts.py",
        ),
    ),
    "torch": Framework(
        ("torch==2.6.0",),
        ("torch",),
        ("integrations/test_dcp.py", "integrations/test_dcp_plan_exchange.py", "state"),
        on_top=False,
    ),
}


def names() -> list[str]:
    """Returns the names of all environments."""
    return [f"{framework}-{which}" for framework in FRAMEWORKS for which in ("floor", "newest")]


def wanted(name: str) -> tuple[str, ...]:
    """Returns what pip is to install in an environment."""
    framework, _, which = name.partition("-")
    asked: tuple[str, ...] = getattr(FRAMEWORKS[framework], which)
    return asked


def environment(name: str) -> Path:
    """Returns the Python of an environment, which is made if it is missing."""
    home, framework = ENVIRONMENTS / name, FRAMEWORKS[name.partition("-")[0]]
    shared = sysconfig.get_path("purelib")
    contents = "\n".join([sys.version, shared, *wanted(name)])
    stamp, python = home / "stamp", home / "bin" / "python"
    if stamp.exists() and stamp.read_text() == contents:
        return python
    shutil.rmtree(home, ignore_errors=True)
    venv.create(home, symlinks=True)
    asked = [*wanted(name)]
    if framework.on_top:
        (packages,) = home.glob("lib/python*/site-packages")
        # What a path file names comes after the environment's own packages: those win.
        (packages / "shared.pth").write_text(shared + "\n")
        import torch

        asked.append(f"torch=={torch.__version__}")  # or pip takes another one
    else:
        asked += [*OF_TESTS, *OF_FASTCKPT]
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--upgrade"]
    subprocess.run([*pip, *asked], check=True)
    stamp.write_text(contents)
    return python


def versions(python: Path, name: str) -> dict[str, str]:
    """Returns the versions of the distributions that are tried in an environment."""
    framework = FRAMEWORKS[name.partition("-")[0]]
    found = [*framework.newest, "torch"] if framework.on_top else [*framework.newest]
    code = f"import importlib.metadata as m; print(*map(m.version, {found!r}))"
    told = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    return dict(zip(found, told.stdout.split(), strict=True))


def run(name: str) -> dict[str, Any]:
    """Runs the tests in one environment; returns what is recorded of it."""
    python = environment(name)
    framework = FRAMEWORKS[name.partition("-")[0]]
    tests = [f"tests/{each}" for each in framework.tests]
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    log = ENVIRONMENTS / f"{name}.log"
    with log.open("w") as file:
        variables = os.environ | {"PYTHONPATH": str(ROOT)}
        subprocess.run(
            command, cwd=ROOT, env=variables, stdout=file, stderr=file, timeout=TESTS_S, check=False
        )
    return {"versions": versions(python, name)} | outcome(log.read_text())


def outcome(text: str) -> dict[str, Any]:
    """Returns how many tests passed and failed, and why others were skipped, as pytest says it."""
    ends = [line for line in text.splitlines() if re.search(r" in [\d.]+s", line)]
    last = ends[-1] if ends else ""
    counts = Counter({what: int(count) for count, what in re.findall(r"(\d+) (\w+)", last)})
    skipped: Counter[str] = Counter()
    for count, reason in re.findall(r"^SKIPPED \[(\d+)\] \S+: (.*)$", text, re.MULTILINE):
        skipped[reason] += int(count)
    passed, failed = counts["passed"], counts["failed"] + counts["errors"] + counts["error"]
    return {"passed": passed, "failed": failed if passed else 1, "skipped": dict(skipped)}


def line(name: str, record: dict[str, Any]) -> str:
    """Returns the record of an environment in one line."""
    found = ", ".join(f"{what} {version}" for what, version in record["versions"].items())
    skipped = sum(record["skipped"].values())
    counts = f"{record['passed']} passed, {record['failed']} failed, {skipped} skipped"
    return f"{name}: {found}: {counts}"


def table(records: dict[str, dict[str, Any]]) -> str:
    """Returns the table for docs/project/versions.md."""
    lines = ["| environment | versions | tests | skipped, and why |", "|---|---|---|---|"]
    for name in names():
        if name not in records:
            continue
        record = records[name]
        found = ", ".join(f"{what} {version}" for what, version in record["versions"].items())
        reasons = "; ".join(f"{count}: {why}" for why, count in sorted(record["skipped"].items()))
        result = f"{record['passed']} pass"
        result += f", {record['failed']} fail" if record["failed"] else ""
        lines.append(f"| {name} | {found} | {result} | {reasons or 'none'} |")
    return "\n".join(lines) + "\n"


def page(records: dict[str, dict[str, Any]]) -> str:
    """Returns docs/project/versions.md with the table of these records."""
    return MARKED.sub(lambda match: match[1] + table(records) + match[2], PAGE.read_text())


def recorded() -> dict[str, Any]:
    """Returns what was recorded, by environment."""
    found: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Run integrations' tests at floor and newest.")
    parser.add_argument("names", nargs="*", choices=[*names(), []], help="default: all")
    parser.add_argument("--write", action="store_true", help="write the table alone")
    options = parser.parse_args()
    failed = 0
    for name in [] if options.write else options.names or names():
        record = run(name)
        print(line(name, record), flush=True)
        if record["failed"]:
            print(f"  see {ENVIRONMENTS / name}.log")
        failed += record["failed"]
        RECORD.write_text(json.dumps(recorded() | {name: record}, indent=1) + "\n")
    records = recorded()
    PAGE.write_text(page(records))
    print(table(records))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
