"""Documents: their examples run, and their links lead somewhere."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.interpreters import LEAVE, TRAINING, Program, run
from tests.kit.paths import ROOT
from tests.kit.saves import wait_until

DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
# Their examples are run from the first to the last, in one program.
RUN = (
    "README.md",
    "training.md",
    "stopping.md",
    "resume.md",
    "ranks.md",
    "inspect.md",
    "migration.md",
    "fsdp2.md",
    "monitoring.md",
    "other.md",
)
_BLOCK = re.compile(r"^```python( notest)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)

PRELUDE = """
import os
import sys
for name in [name for name in sys.modules if name.startswith("fastckpt.integrations")]:
    del sys.modules[name]  # examples import what they need of it
import torch
import torch.distributed as dist
import fastckpt

store = dist.FileStore(os.path.abspath("store"), 1)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)

def build():
    global model, optimizer, scheduler, state
    model = torch.nn.Sequential()
    model.add_module("head", torch.nn.Linear(8, 2000))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    state = {"model": model.state_dict(), "weights": torch.randn(600_000)}

def train_step():
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

def train():
    for _ in range(3):
        train_step()

build()
start, steps, resume = 0, 101, False
device, every = "cpu", 50
dataset = torch.randn(40, 8)

def loss_of(batch):
    return model(batch).square().mean()

def evaluate(model):
    return loss_of(dataset).item()

os.mkdir("run")
"""
BEFORE = {
    "fsdp2.md": """
from torch.distributed.fsdp import fully_shard
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
train()
real_restore = fastckpt.Checkpointer.restore

def restore_of_a_new_job(checkpointer, state):
    moments = optimizer.state[model.head.weight]
    moments["exp_avg"].zero_()
    optimizer.param_groups[0]["lr"] = 0.1
    if state["optimizer"] is not optimizer:
        state["optimizer"]["param_groups"][0]["lr"] = 0.1
    return real_restore(checkpointer, state)

fastckpt.Checkpointer.restore = restore_of_a_new_job
""",
    "inspect.md": """
with fastckpt.Checkpointer("run") as checkpointer:
    checkpointer.save(1, {"model": model})
""",
}
BEFORE["monitoring.md"] = """
import queue, types
step, calls = 1, queue.Queue()
wandb = types.SimpleNamespace(log=lambda found: calls.put(("wandb", *found)))
mlflow = types.SimpleNamespace(log_metrics=lambda found, step: calls.put(("mlflow", *found)))
writer = types.SimpleNamespace(add_scalar=lambda name, value, step: calls.put(("board", name)))
"""
END = {
    "monitoring.md": """
checkpointer.close()
newest = Path("newest.txt").read_text()
assert newest.startswith(f"1 {os.path.abspath('run')}/step-00000001"), newest
found = sorted(calls.get(timeout=60) for _ in range(5))
names = ("stall_s", "durable_s", "bytes")
wanted = [("board", f"checkpoint/{name}") for name in sorted(names)]
wanted.append(("mlflow", *(f"checkpoint.{name}" for name in names)))
wanted.append(("wandb", *(f"checkpoint/{name}" for name in names)))
assert found == sorted(wanted), found
""",
    "fsdp2.md": """
assert optimizer.param_groups[0]["lr"] == 0.5
assert optimizer.state[model.head.weight]["exp_avg"].full_tensor().any()
""",
}
AFTER = f"""
torch.save, torch.load  # still there
dist.destroy_process_group()
print("ran")
{LEAVE}"""


def blocks(document: Path, *, every: bool) -> Iterator[str]:
    for match in _BLOCK.finditer(document.read_text()):
        if every or not match[1]:
            yield match[2]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_examples_are_python(document: Path) -> None:
    for block in blocks(document, every=True):
        ast.parse(block)


@pytest.mark.parametrize("name", RUN)
def test_examples_run(name: str, disk: Path) -> None:
    if name == "monitoring.md":
        pytest.importorskip("opentelemetry")
    (document,) = (path for path in DOCUMENTS if path.name == name)
    examples = [*blocks(document, every=False)]
    assert examples
    text = "\n".join([PRELUDE, BEFORE.get(name, ""), *examples, END.get(name, ""), AFTER])
    ran = run(text, cwd=disk, imports=TRAINING, timeout=120)
    assert ran.returncode == 0 and ran.stdout.endswith("ran\n"), ran.stderr


WHOLE_RUN = """
import hashlib, os, random, signal, sys
import numpy
import torch
import fastckpt
from fastckpt.saving import pipeline

steps, every, killed_at = 12, 5, int(sys.argv[1])
device, calls = "cpu", 0
for seed in (torch.manual_seed, numpy.random.seed, random.seed):
    seed(1 if killed_at else 2)  # what a resumed run begins with does not matter
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(8, 9), torch.nn.Dropout(), torch.nn.Linear(9, 1))
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
torch.manual_seed(1 if killed_at else 2)

class Augmented(torch.utils.data.Dataset):
    def __len__(self):
        return 50

    def __getitem__(self, index):
        noise = torch.rand(8) + numpy.random.rand() + random.random()
        return torch.full((8,), index / 50) + noise.float()

dataset = Augmented()

def loss_of(batch):
    global calls
    calls += 1
    if calls == killed_at:
        pipeline.current().drain()
        os.kill(os.getpid(), signal.SIGKILL)
    return model(batch).square().mean()
"""
DIGEST = """
import pprint  # which sorts the keys of dicts: their order is no state
whole = [model.state_dict(), ema.state_dict(), optimizer.state_dict(), scheduler.state_dict()]
whole += [scaler.state_dict(), state["best"], state["generators"].state_dict().value]
whole += [batches.state_dict().value]
plain = torch.utils._pytree.tree_map(
    lambda each: each.numpy().tobytes() if isinstance(each, torch.Tensor) else each, whole
)
print(start, hashlib.sha256(pprint.pformat(plain).encode()).hexdigest())
"""


def test_training_resumes_bit_by_bit(disk: Path) -> None:
    """Of a run that was killed in its second epoch, in the midst of a save's interval."""
    (example,) = (
        each
        for each in blocks(ROOT / "docs" / "guides" / "resume.md", every=False)
        if "ResumableLoader" in each
    )
    text = WHOLE_RUN + example + DIGEST
    told = []
    for folder, killed_at in (("straight", 99), ("resumed", 8), ("resumed", 0)):
        (disk / folder).mkdir(exist_ok=True)
        ran = run(text, killed_at, cwd=disk / folder, imports=TRAINING, timeout=120)
        assert ran.returncode == (-9 if killed_at == 8 else 0), ran.stderr
        told.append(ran.stdout.split())
    (begin, straight), killed, (resumed_at, resumed) = told
    assert (begin, killed, resumed_at) == ("0", [], "5")
    assert resumed == straight


def test_the_data_of_the_document_are_the_example_s() -> None:
    """Whose jobs on other numbers of ranks tests/project/test_dataloader.py runs."""
    told = (ROOT / "docs" / "guides" / "resume.md").read_text()
    (feed,) = re.findall(r"^class Feed:\n.*?\n(?=\n\n)", told, re.MULTILINE | re.DOTALL)
    assert feed in (ROOT / "examples" / "train_dataloader.py").read_text()


COMMAND = "import sys; from fastckpt.cli import main; sys.exit(main(sys.argv[1:]))"


def done(line: str, disk: Path, running: list[Program]) -> str:
    """Does a line of the quickstart's shell, by interpreters that have imported torch; returns what
    it said. A line that is none of these has to be added here.
    """
    words = shlex.split(line, comments=True)
    match words:
        case ["python", script, "&"]:
            running.append(Program((disk / script).read_text(), cwd=disk, imports=TRAINING))
        case ["until", "test", "-e", path, "do", "sleep", _, "done"]:
            wait_until((disk / path.rstrip(";")).exists, f"{path} was there", limit_s=200)
        case ["kill", "-9", "$!"]:
            assert running[-1].poll() is None
            running[-1].kill()
            running[-1].wait()
        case ["python" | "fastckpt", *arguments]:
            text = COMMAND
            if words[0] == "python":
                text, arguments = (disk / arguments[0]).read_text(), []
            ran = run(text, *arguments, cwd=disk, imports=TRAINING, timeout=120)
            assert ran.returncode == 0, (line, ran.stderr)
            return ran.stdout
        case _:
            assert not words, f"{line!r} is not known here"
    return ""


def test_the_quickstart_runs_as_it_is_printed(disk: Path) -> None:
    """Its blocks from the first to the last; a program that names its file is written to that."""
    text = (ROOT / "docs" / "start" / "quickstart.md").read_text()
    found = re.findall(r"^```(sh|python)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    running: list[Program] = []
    said = ""
    try:
        for place, (kind, block) in enumerate(found):
            named = re.match(r"# (\S+\.py)\n", block)
            lines = block.splitlines()
            if kind == "python":
                name = named[1] if named else f"block-{place}.py"
                (disk / name).write_text(block)
                lines = [] if named else [f"python {name}"]
            said += "".join(done(line, disk, running) for line in lines)
    finally:
        for program in running:
            program.__exit__()
    (resumed,) = re.findall(r"begins at step (\d+)", said)
    assert int(resumed) >= 300 and int(resumed) % 100 == 0
    assert said.count("ended") == 1
    assert (disk / "model.safetensors").exists()


def test_the_pictures_are_those_of_the_script() -> None:
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs" / "pictures.py")
    assert spec is not None and spec.loader is not None
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    for name, draw in pictures.PICTURES.items():
        picture = draw()
        assert (pictures.IMAGES / f"{name}.svg").read_text() == picture, "python docs/pictures.py"
        frame, *boxes = re.findall(r'<rect (?:x="(\S+)" y="\S+" )?width="(\S+)"', picture)
        for x, width in boxes:
            assert float(width) > 0 and float(x) + float(width) <= float(frame[1]), name


def anchors(text: str) -> set[str]:
    """Returns the anchors of the headings of a document, as GitHub makes them."""
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in _HEADING.findall(text))
    return {heading.strip().replace(" ", "-") for heading in words}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    broken = []
    for link in _LINK.findall(document.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            broken.append(link)
    assert not broken


def test_every_page_is_two_clicks_from_the_index() -> None:
    reached = {ROOT / "docs" / "index.md"}
    for _ in range(2):
        links = [(page, link) for page in reached for link in _LINK.findall(page.read_text())]
        targets = {(page.parent / link.partition("#")[0]).resolve() for page, link in links}
        reached |= {target for target in targets if target.suffix == ".md" and target.exists()}
    assert {*(ROOT / "docs").rglob("*.md")} <= reached


def test_every_document_is_reached_from_the_readme() -> None:
    reached = {ROOT / "README.md"}
    ahead = [ROOT / "README.md"]
    while ahead:
        document = ahead.pop()
        for link in _LINK.findall(document.read_text()):
            target = (document.parent / link.partition("#")[0]).resolve()
            if target.suffix == ".md" and target.exists() and target not in reached:
                reached.add(target)
                ahead.append(target)
    assert {*DOCUMENTS} <= reached


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
