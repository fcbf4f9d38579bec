"""Optimizers that step, are saved and restored, by one process or by the ranks of FSDP2.

Responsible for what a rank does, and for what it then finds to differ from a run that nothing
interrupted. Must not know which optimizers have to go on: that is for the test to compare.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._python_dispatch import return_and_correct_aliasing

from fastckpt import Checkpointer
from fastckpt.errors import IncompatibleCheckpoint
from tests.crews.group_crew import Member

ROWS, COLUMNS = 12, 2048  # divided evenly by 1, 2 and 3; enough for torchao to quantize each part
STEPS = 3  # before the save, and after it
WAYS = ("object", "wrapper", "state_dict")
GOES_ON = "goes on"


class Factored(torch.optim.Optimizer):
    """Keeps means of rows and of columns, as Adafactor does: of no parameter's shape."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state, squares = self.state[p], p.grad.square() + 1e-6
                means = [squares.mean(-1, keepdim=True), squares.mean(0, keepdim=True)]
                if isinstance(p, DTensor):
                    means[1] = means[1].redistribute(placements=[Replicate()])
                for name, mean in zip(("row", "column"), means, strict=True):
                    state[name] = state.get(name, torch.zeros_like(mean)) * 0.9 + mean * 0.1
                p.sub_(p.grad / (state["row"] * state["column"]).sqrt() * group["lr"])


class MuonLike(torch.optim.Optimizer):
    """Orthogonalizes whole momenta, on each rank, and keeps them in nests."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["buffers"] = {"momentum": [torch.zeros_like(p)]}
                momentum = state["buffers"]["momentum"][0]
                momentum.mul_(0.9).add_(p.grad)
                is_whole = not isinstance(p, DTensor)
                full = momentum if is_whole else momentum.full_tensor()
                update = full / full.norm()
                for _ in range(3):
                    update = 1.5 * update - 0.5 * (update @ update.T) @ update
                p.sub_((update if is_whole else _part_beside(p, update)) * group["lr"])


class Codes(torch.Tensor):
    """A tensor of float32, kept as integers and one scale; copy_() rounds."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Any:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        made.codes, made.scale = codes, scale
        return made

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        pass

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, _context: Any, _size: Any, _stride: Any) -> Any:
        return cls(parts["codes"], parts["scale"])

    @classmethod
    def __torch_dispatch__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        mine = args[0]
        if f is aten.copy_.default and isinstance(mine, Codes):
            values = args[1].real() if isinstance(args[1], Codes) else args[1]
            mine.scale.fill_(values.abs().max() / 120)
            mine.codes.copy_((values / mine.scale).round())
            return mine
        if f in (aten.detach.default, aten.view.default, aten.clone.default):
            new = cls(f(mine.codes, *args[1:], **(kwargs or {})), mine.scale.clone())
            return return_and_correct_aliasing(f, args, kwargs or {}, new)
        plain = [each.real() if isinstance(each, Codes) else each for each in args]
        return f(*plain, **(kwargs or {}))

    def real(self) -> torch.Tensor:
        return self.codes.float() * self.scale


class Coded(torch.optim.Optimizer):
    """SGD whose momenta are tensors of a subclass."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                here = p.to_local() if isinstance(p, DTensor) else p
                grad = p.grad.to_local() if isinstance(p, DTensor) else p.grad
                if p not in self.state:
                    made: Any = Codes(torch.zeros(here.shape, dtype=torch.int8), torch.ones(()))
                    if isinstance(p, DTensor):
                        made = DTensor.from_local(
                            made, p.device_mesh, p.placements, shape=p.shape, stride=p.stride()
                        )
                    self.state[p]["momentum"] = made
                its = self.state[p]["momentum"]
                momentum = its.to_local() if isinstance(its, DTensor) else its
                momentum.copy_(momentum.real() * 0.9 + grad)
                here.sub_(momentum.real() * group["lr"])


class Wrapped:
    """An object that has an optimizer and is none."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.calls = optimizer, 0

    def state_dict(self) -> dict[str, Any]:
        return {"inner": {"optimizer": self.optimizer.state_dict()}, "calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["inner"]["optimizer"])
        self.calls = state["calls"]


def _torch(name: str, **arguments: Any) -> Callable[[Any], Any]:
    return lambda params: getattr(torch.optim, name)(params, **arguments)


def _torchao(name: str) -> Callable[[Any], Any]:
    def make(params: Any) -> Any:
        torch.compiler.set_stance("force_eager")  # its steps would be compiled
        return getattr(__import__("torchao.optim").optim, name)(params, lr=0.01)

    return make


def _schedule_free(name: str) -> Callable[[Any], Any]:
    return lambda params: getattr(__import__("schedulefree"), name)(params, lr=0.01)


def _wrapped_schedule_free(params: Any) -> Any:
    return __import__("schedulefree").ScheduleFreeWrapper(
        _torch("SGD", lr=0.01, momentum=0.9)(params)
    )


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "ASGD": _torch("ASGD"),
    "Adadelta": _torch("Adadelta"),
    "Adafactor": _torch("Adafactor"),
    "Adagrad": _torch("Adagrad"),
    "Adam": _torch("Adam", amsgrad=True),
    "AdamW": _torch("AdamW"),
    "Adamax": _torch("Adamax"),
    "LBFGS": _torch("LBFGS", max_iter=2, lr=0.01),
    "Muon": _torch("Muon"),
    "NAdam": _torch("NAdam"),
    "RAdam": _torch("RAdam"),
    "RMSprop": _torch("RMSprop", momentum=0.9, centered=True),
    "Rprop": _torch("Rprop"),
    "SGD": _torch("SGD", momentum=0.9),
    "SparseAdam": _torch("SparseAdam"),
    "AdamW8bit": _torchao("AdamW8bit"),
    "AdamW4bit": _torchao("AdamW4bit"),
    "AdamWFp8": _torchao("AdamWFp8"),
    "AdamWScheduleFree": _schedule_free("AdamWScheduleFree"),
    "RAdamScheduleFree": _schedule_free("RAdamScheduleFree"),
    "SGDScheduleFree": _schedule_free("SGDScheduleFree"),
    "ScheduleFreeWrapper": _wrapped_schedule_free,
    "Coded": Coded,
    "Factored": Factored,
    "MuonLike": MuonLike,
}
PACKAGES = {name: "torchao" for name in OPTIMIZERS if re.search("W(8bit|4bit|Fp8)", name)}
PACKAGES |= {name: "schedulefree" for name in OPTIMIZERS if "ScheduleFree" in name}
_OF_MATRICES = ("Muon", "MuonLike", "Factored")


@functools.cache
def _mesh(ranks: int) -> Any:
    return init_device_mesh("cpu", (ranks,))


class Run:
    """A model and its optimizer. With ranks, the model is under FSDP2; 0: it is plain."""

    def __init__(self, name: str, ranks: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.name = name
        self.model: Any = torch.nn.Linear(COLUMNS, ROWS, bias=name not in _OF_MATRICES)
        if ranks:
            fully_shard(self.model, mesh=_mesh(ranks))
        self.optimizer = OPTIMIZERS[name](self.model.parameters())
        self.wrapped = Wrapped(self.optimizer)

    def go_on(self, first: int, last: int) -> None:
        """Makes steps with gradients that follow from their numbers."""
        self._mode("train")
        for step in range(first, last):
            for number, parameter in enumerate(self.model.parameters()):
                seed = torch.Generator().manual_seed(1000 * step + number)
                gradient = torch.randn(parameter.shape, generator=seed)
                if self.name == "SparseAdam":
                    parameter.grad = gradient.to_sparse()
                elif isinstance(parameter, DTensor):
                    parameter.grad = _part_beside(parameter, gradient)
                else:
                    parameter.grad = gradient
            if self.name == "LBFGS":
                self.optimizer.step(lambda: torch.tensor(1.0))
            else:
                self.optimizer.step()
            self.wrapped.calls += 1
        self._mode("eval")

    def _mode(self, mode: str) -> None:
        if "ScheduleFree" in self.name:
            getattr(self.optimizer, mode)()

    def state(self, *ways: str) -> dict[str, Any]:
        every = {
            "object": self.optimizer,
            "wrapper": self.wrapped,
            "state_dict": self.optimizer.state_dict(),
        }
        return {"model": self.model, **{way: every[way] for way in ways}}

    def restore(self, root: str, way: str) -> None:
        """Raises IncompatibleCheckpoint as restore() does."""
        state = self.state(way)
        with Checkpointer(root) as checkpointer:
            checkpointer.restore(state, unexpected="ignore")
        if way == "state_dict":
            self.optimizer.load_state_dict(state["state_dict"])

    def held(self) -> dict[str, Any]:
        """Every value of parameters and optimizer, of tensors what this rank holds."""
        return dict(_values({"model": self.model.state_dict(), "o": self.optimizer.state_dict()}))


def _part_beside(parameter: Any, whole: torch.Tensor) -> DTensor:
    """A whole tensor, spread as a parameter is, without communication."""
    mesh, (placement,) = parameter.device_mesh, parameter.placements
    part = whole.chunk(mesh.size(), placement.dim)[mesh.get_local_rank()].contiguous()
    return DTensor.from_local(part, mesh, [placement], run_check=False)


def _values(nest: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every value with its name; of tensors their kind and, of what they are made of, the bits."""
    if isinstance(nest, DTensor):
        yield f"{name} placements", (tuple(nest.placements), tuple(nest.shape))
        yield from _values(nest.to_local(), f"{name}, local")
    elif isinstance(nest, torch.Tensor):
        yield f"{name} kind", (type(nest).__name__, nest.dtype, tuple(nest.shape))
        if hasattr(nest, "__tensor_flatten__"):
            for part in nest.__tensor_flatten__()[0]:
                yield from _values(getattr(nest, part), f"{name}, {part}")
        else:
            yield name, nest.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(nest, dict):
        for key, item in nest.items():
            yield from _values(item, f"{name}/{key}")
    elif isinstance(nest, list | tuple):
        for key, item in enumerate(nest):
            yield from _values(item, f"{name}/{key}")
    else:
        yield name, nest


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    return sorted(
        name
        for name in found.keys() | expected.keys()
        if name not in found or name not in expected or found[name] != expected[name]
    )


class _Whole(NamedTuple):
    """A DTensor that was put together, and how it was spread."""

    tensor: torch.Tensor
    placements: tuple[Any, ...]


def _whole(nest: Any) -> Any:
    """A copy of a nest with whole tensors in place of DTensors."""
    if isinstance(nest, DTensor):
        return _Whole(nest.full_tensor().detach().clone(), tuple(nest.placements))
    if isinstance(nest, torch.Tensor):
        return nest.detach().clone()
    if isinstance(nest, dict):
        return {key: _whole(item) for key, item in nest.items()}
    return [_whole(item) for item in nest] if isinstance(nest, list) else nest


def _spread(nest: Any, ranks: int, rank: int) -> Any:
    """What _whole() was given, on so many ranks; put together by nobody but DTensor and chunk()."""
    if isinstance(nest, _Whole):
        (placement,), part = nest.placements, nest.tensor
        if placement.is_shard():
            part = part.chunk(ranks, placement.dim)[rank].contiguous()
        return DTensor.from_local(part.clone(), _mesh(ranks), [placement], run_check=False)
    if isinstance(nest, torch.Tensor):
        return nest.clone()
    if isinstance(nest, dict):
        return {key: _spread(item, ranks, rank) for key, item in nest.items()}
    return [_spread(item, ranks, rank) for item in nest] if isinstance(nest, list) else nest


def train_and_save(member: Member | None, root: str, name: str) -> str:
    """Saves in the midst of a run; leaves what its end is beside the steps. Returns GOES_ON, or
    why this optimizer cannot be trained, or saved, so.
    """
    ranks, rank = (member.world_size, member.rank) if member else (0, 0)
    run = Run(name, ranks, seed=1)
    try:
        run.go_on(0, STEPS)
    except Exception as error:
        return f"does not step: {type(error).__name__}"
    with Checkpointer(root) as checkpointer:
        try:
            checkpointer.save(STEPS, run.state(*WAYS)).result()
        except TypeError as error:
            return f"is not saved: {error}"
    middle = None
    if ranks and not _is_quantized(run):
        middle = _whole([run.model.state_dict(), run.optimizer.state_dict()])
    run.go_on(STEPS, 2 * STEPS)
    torch.save(run.held(), Path(root, f"end-{rank}.pt"))
    if rank == 0:
        torch.save(middle, Path(root, "middle.pt"))
    if member:
        dist.barrier(member.group)
    return GOES_ON


def _is_quantized(run: Run) -> bool:
    return any(re.search("OptimState|Codes", str(value)) for value in run.held().values())


def _expected(root: str, name: str, ranks: int, rank: int, is_same: bool) -> dict[str, Any] | None:
    """What a run holds at its end, by those that no checkpoint of ours interrupted."""
    if is_same:
        return torch.load(Path(root, f"end-{rank}.pt"), weights_only=False)
    middle = torch.load(Path(root, "middle.pt"), weights_only=False)
    if middle is None:
        return None
    run = Run(name, ranks, seed=1)
    model, optimizer = _spread(middle, ranks, rank)
    run.model.load_state_dict(model)
    run.optimizer.load_state_dict(optimizer)
    run.go_on(STEPS, 2 * STEPS)
    return run.held()


def restored(member: Member | None, root: str, name: str, is_same: bool) -> dict[str, str]:
    """What becomes of each way to restore, into an optimizer that was made now and into one that
    was used: GOES_ON, the error of restore(), or what differs at the end.
    """
    with torch.serialization.safe_globals([Codes, *_quantized()]):
        return _restored(member, root, name, is_same)


def _quantized() -> list[Any]:
    """The classes of torchao's states, which it allows itself, but not for every test."""
    modules = [
        its for name, its in sys.modules.items() if name.startswith("torchao.optim.subclass")
    ]
    named = (each for module in modules for each in vars(module).items())
    return [kind for name, kind in named if name.startswith("OptimState")]


def _restored(member: Member | None, root: str, name: str, is_same: bool) -> dict[str, str]:
    ranks, rank = (member.world_size, member.rank) if member else (0, 0)
    expected = _expected(root, name, ranks, rank, is_same)
    outcomes = {}
    for way in WAYS:
        for age in ("fresh", "used"):
            run = Run(name, ranks, seed=2)
            if age == "used":
                run.go_on(70, 72)
            try:
                run.restore(root, way)
            except IncompatibleCheckpoint as error:
                outcomes[f"{way}, {age}"] = f"refused: {error}"
                continue
            outcomes[f"{way}, {age}"] = GOES_ON
            run.go_on(STEPS, 2 * STEPS)
            if found := differences(run.held(), expected or {}):
                outcomes[f"{way}, {age}"] = f"differs in {found[:5]}"
    return outcomes


for module in ("torchao.optim", "schedulefree"):
    with suppress(ImportError):  # then the test is skipped
        __import__(module)
