"""A built wheel, tried as a user meets it: in a fresh environment, without a compiler.

    python tests/project/check_wheel.py --python python3.12 [--beside .venv/bin/python] WHEEL

The Python that runs this needs pip and auditwheel; the one that the wheel is for needs nothing but
venv. The engine of the installed wheel is loaded without torch. If the one after `--beside` has the
same version, and torch, the package also saves and loads next to that torch. The exit status is 1
if something is not as it should be. `make wheels` runs this for each wheel.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

ENGINE = """
import importlib.metadata, importlib.util, json, shutil
assert not any(map(shutil.which, ("cc", "c++", "gcc", "g++", "clang")))
package = importlib.metadata.distribution("fastckpt-torch")
(path,) = (package.locate_file(file) for file in package.files if file.suffix == ".so")
spec = importlib.util.spec_from_file_location("fastckpt._engine", path)
engine = importlib.util.module_from_spec(spec)
spec.loader.exec_module(engine)
assert engine.crc32(b"123456789") == 0xCBF43926
try:
    ring = engine.uring_backend(8).name
except engine.BackendUnavailable as error:
    ring = str(error)
print(json.dumps({"path": str(path), "version": package.version, "ring": ring}))
"""

ROUND_TRIP = """
import sys, torch, fastckpt
assert fastckpt.__file__.startswith(sys.prefix), fastckpt.__file__
state = {"weights": torch.randn(3 << 20), "step": 7}
stats = fastckpt.save(state, "a.pt", options=fastckpt.SaveOptions(backend=sys.argv[1])).result(60)
for load in (fastckpt.load, torch.load):
    loaded = load("a.pt")
    assert loaded["step"] == 7 and torch.equal(loaded["weights"], state["weights"])
checkpointer = fastckpt.Checkpointer("run", options=fastckpt.SaveOptions(backend=sys.argv[1]))
checkpointer.save(7, state).result(60)
weights = state["weights"].clone()
state["weights"].zero_()
assert checkpointer.restore(state) == 7 and torch.equal(state["weights"], weights)
checkpointer.close()
print(f"torch {torch.__version__}, {stats.backend}")
"""


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Returns what a program prints; it finds no other programs and no variables of ours."""
    environment = {"PATH": "", "LANG": "C.UTF-8"}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def require(holds: bool, what: str) -> None:
    if not holds:
        raise SystemExit(what)


def written_version() -> str:
    text = (ROOT / "fastckpt" / "__init__.py").read_text("utf-8")
    (version,) = re.findall(r'^__version__ = "(.*)"$', text, re.MULTILINE)
    return version


def check_files(wheel: Path) -> None:
    """The package as it is in the tree, one extension, and no libraries of others."""
    package = {
        path.relative_to(ROOT).as_posix()
        for pattern in ("*.py", "*.pyi", "py.typed")
        for path in (ROOT / "fastckpt").rglob(pattern)
    }
    names = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}
    others = {name for name in names - package if ".dist-info/" not in name}
    require(package <= names, f"{wheel.name} lacks {sorted(package - names)}")
    is_engine = [re.fullmatch(r"fastckpt/_engine\.[\w-]+\.so", name) is not None for name in others]
    require(is_engine == [True], f"{wheel.name} also has {sorted(others)}")


def check_engine(wheel: Path, python: Path) -> str:
    """Loads the installed engine without torch; returns which backend it has for io_uring."""
    told = json.loads(run(python, "-I", "-c", ENGINE))
    require(told["version"] == written_version(), f"{wheel.name} has version {told['version']}")
    require("without liburing" not in told["ring"], told["ring"])
    libraries = run(shutil.which("ldd") or "ldd", told["path"])
    faults = [line for line in libraries.splitlines() if re.search("uring|not found", line)]
    require(not faults, f"{wheel.name} needs{' and'.join(faults)}")
    return str(told["ring"])


def version_and_packages(python: Path) -> tuple[str, str]:
    """Returns an interpreter's version, as 3.11, and where its packages lie."""
    program = "import sys, sysconfig; print(*sys.version_info[:2], sysconfig.get_path('purelib'))"
    major, minor, packages = run(python, "-c", program).split(maxsplit=2)
    return f"{major}.{minor}", packages.strip()


def check_beside_torch(python: Path, other: Path, ring: str, folder: Path) -> str:
    """Saves and loads with the torch of another environment; returns what was used."""
    version, packages = version_and_packages(python)
    version_of_other, packages_of_other = version_and_packages(other)
    if version != version_of_other:
        return f"not tried beside torch of Python {version_of_other}"
    Path(packages, "beside.pth").write_text(packages_of_other, "utf-8")
    backend = "io_uring" if ring == "io_uring" else "auto"
    used = run(python, "-I", "-c", ROUND_TRIP, backend, cwd=folder)
    told = run(python.parent / "fastckpt", "--version", cwd=folder)
    require(told == f"fastckpt {written_version()}\n", told)
    return used.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--python", required=True, help="the Python that the wheel is for")
    parser.add_argument("--beside", help="a Python that has torch")
    arguments = parser.parse_args()
    wheel = arguments.wheel.absolute()
    check_files(wheel)
    audit = run(sys.executable, "-m", "auditwheel", "show", wheel)
    tags = re.findall(r'"(manylinux_\w+)"', audit)
    require(bool(tags), audit)
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder, "venv", "bin", "python")
        venv = [arguments.python, "-m", "venv", "--without-pip", python.parents[1]]
        subprocess.run(venv, check=True)
        pip = [sys.executable, "-m", "pip", "--python", str(python)]
        run(*pip, "install", "-q", "--no-index", "--no-deps", wheel)
        ring = check_engine(wheel, python)
        told = [f"{wheel.name}: {wheel.stat().st_size >> 10} KiB", tags[0], ring]
        if arguments.beside:
            other = Path(arguments.beside).absolute()
            told.append(check_beside_torch(python, other, ring, Path(folder)))
    print(", ".join(told))


if __name__ == "__main__":
    main()
