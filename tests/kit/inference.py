"""Inference engines that load published weights: vLLM's and verl's interfaces, which are the real
ones where they are installed, else doubles of their signatures; and a server that loads as SGLang's
does.

The doubles follow vLLM 0.32 (vllm/distributed/weight_transfer, vllm/v1/worker/gpu_worker.py), verl
0.9.1 (verl/checkpoint_engine/base.py) and SGLang 0.5.23 (srt/managers/io_struct.py). Must not know
fastckpt's adapters.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, Generic, TypeVar

import safetensors.torch
import torch

T, U = TypeVar("T"), TypeVar("U")


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@contextmanager
def importable(modules: dict[str, dict[str, Any]], package: str) -> Iterator[None]:
    """The modules can be imported: doubles, unless the real package is installed."""
    made = {} if installed(package) else {name: ModuleType(name) for name in modules}
    for name, module in made.items():
        vars(module).update(modules[name])
        parent, _, last = name.rpartition(".")
        if parent in made:
            setattr(made[parent], last, module)
    sys.modules.update(made)
    try:
        yield
    finally:
        for name in made:
            del sys.modules[name]


class WeightTransferInitInfo(ABC):  # noqa: B024
    pass


class WeightTransferUpdateInfo(ABC):  # noqa: B024
    pass


class WeightTransferEngine(ABC, Generic[T, U]):
    init_info_cls: type[T]
    update_info_cls: type[U]
    supports_draft_weight_update = True

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        self.config, self.vllm_config, self.device, self.model = config, vllm_config, device, model
        self.parallel_config = vllm_config.parallel_config
        self.model_config = vllm_config.model_config

    def reset_weight_update_target(self) -> None:
        pass

    def parse_init_info(self, init_dict: dict[str, Any]) -> T:
        return parsed(self.init_info_cls, init_dict)

    def parse_update_info(self, update_dict: dict[str, Any]) -> U:
        return parsed(self.update_info_cls, update_dict)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    @abstractmethod
    def init_transfer_engine(self, init_info: T) -> None: ...

    @abstractmethod
    def start_weight_update(self) -> None: ...

    @abstractmethod
    def finish_weight_update(self) -> None: ...

    @abstractmethod
    def receive_weights(self, update_info: U) -> None: ...

    @abstractmethod
    def shutdown(self) -> None: ...


def parsed(kind: type[T], members: dict[str, Any]) -> T:
    try:
        return kind(**members)
    except TypeError as error:
        raise ValueError(f"Invalid: {error}") from error


class WeightSource(ABC):
    @abstractmethod
    def metadata(self) -> list[Any]: ...

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]: ...


@dataclass
class TrainerInitInfo:
    backend: ClassVar[str]
    rank: int = field(kw_only=True)

    @property
    def is_sender(self) -> bool:
        return self.rank == 0


class TrainerWeightTransferEngine(ABC, Generic[T]):
    def __init__(self, *, client: Any, source: Any = None, is_sender: bool = True) -> None:
        self.is_sender, self.client, self.source = is_sender, client, source

    @classmethod
    @abstractmethod
    def trainer_init(cls, init_info: T, *, client: Any, source: Any = None) -> Any: ...

    @abstractmethod
    def send_weights(self) -> None: ...

    def shutdown(self) -> None:
        pass


class Registry:
    _registry: ClassVar[dict[str, Any]]

    @classmethod
    def register_engine(cls, name: str, engine: Any) -> None:
        if name in cls._registry:
            raise ValueError(f"Weight transfer engine '{name}' is already registered.")
        cls._registry[name] = lambda: engine


class Engines(Registry):
    _registry: ClassVar[dict[str, Any]] = {}

    @classmethod
    def create_engine(cls, config: Any, vllm_config: Any, device: Any, model: Any) -> Any:
        return cls._registry[config.backend]()(config, vllm_config, device, model)


class Trainers(Registry):
    _registry: ClassVar[dict[str, Any]] = {}

    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Any:
        engine = cls._registry[init_info.backend]()
        return engine.trainer_init(init_info, client=client, source=source)


def initialize_layerwise_reload(model: Any) -> None:
    model.reloads.append("initialize")


def finalize_layerwise_reload(model: Any, model_config: Any) -> None:
    model.reloads.append("finalize")


OWN = "vllm.distributed.weight_transfer"
VLLM: dict[str, dict[str, Any]] = {
    "vllm": {},
    "vllm.distributed": {},
    OWN: {},
    f"{OWN}.base": {
        each.__name__: each
        for each in (
            WeightTransferInitInfo,
            WeightTransferUpdateInfo,
            WeightTransferEngine,
            WeightSource,
            TrainerInitInfo,
            TrainerWeightTransferEngine,
        )
    },
    f"{OWN}.factory": {
        "WeightTransferEngineFactory": Engines,
        "WeightTransferTrainerFactory": Trainers,
    },
    "vllm.model_executor": {},
    "vllm.model_executor.model_loader": {},
    "vllm.model_executor.model_loader.reload": {
        each.__name__: each for each in (initialize_layerwise_reload, finalize_layerwise_reload)
    },
}


class PackedModel(torch.nn.Module):
    """A model of an inference engine: it packs the checkpoint's "q" and "k" into one parameter.

    Attributes:
        fails_after: how many tensors load_weights takes before it raises; None: all.
        reloads: vLLM's calls around a load.
    """

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.qk = torch.nn.Parameter(torch.zeros(2 * rows, 8), requires_grad=False)
        self.norm = torch.nn.Parameter(torch.zeros(8), requires_grad=False)
        self.fails_after: int | None = None
        self.reloads: list[str] = []

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded, rows = set[str](), len(self.qk) // 2
        for number, (name, tensor) in enumerate(weights):
            if number == self.fails_after:
                raise RuntimeError("the loader fails")
            if name == "norm":
                loaded.add("norm")
                self.norm.copy_(tensor)
            else:
                loaded.add("qk")
                self.qk[:rows].copy_(tensor) if name == "q" else self.qk[rows:].copy_(tensor)
        return loaded


class Worker:
    """A vLLM worker, by the rules of its sessions; it is the client of a trainer, too.

    Attributes:
        label: the weight_version.
    """

    def __init__(self, engines: Any, model: torch.nn.Module) -> None:
        config = SimpleNamespace(backend="fastckpt")
        parallel = SimpleNamespace(rank=0, world_size=1, data_parallel_index=0)
        around = SimpleNamespace(
            parallel_config=parallel, model_config=SimpleNamespace(quantization=None)
        )
        self.engine = engines.create_engine(config, around, torch.device("cpu"), model)
        self.label = "default"
        self._is_active = False

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.engine.init_transfer_engine(self.engine.parse_init_info(init_info))

    def start_weight_update(self) -> None:
        assert not self._is_active, "an update is active"
        self.engine.start_weight_update()
        self._is_active = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        assert self._is_active, "no update is active"
        try:
            info = self.engine.parse_update_info(json.loads(json.dumps(update_info)))
            self.engine.receive_weights(info)
        except BaseException:
            self._is_active = False
            raise

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        assert self._is_active, "no update is active"
        self.engine.finish_weight_update()
        self._is_active = False
        self.label = weight_version or self.label


class CheckpointEngineRegistry:
    _registry: ClassVar[dict[str, Any]] = {}

    @staticmethod
    def register(backend: str) -> Any:
        def wrapper(engine: Any) -> Any:
            CheckpointEngineRegistry._registry[backend] = engine
            return engine

        return wrapper

    @classmethod
    def new(cls, backend: str, *args: Any, **kwargs: Any) -> Any:
        return cls._registry[backend](*args, **kwargs)


class CheckpointEngineWithCache(ABC):
    wire_format = "named_tensors"

    @abstractmethod
    def prepare(self) -> dict[str, Any]: ...

    @classmethod
    @abstractmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: Any
    ) -> Any: ...

    @abstractmethod
    def init_process_group(self, **kwargs: Any) -> None: ...

    @abstractmethod
    def finalize(self) -> None: ...

    @abstractmethod
    async def send_weights(self, weights: Any, global_steps: int | None = None) -> Any: ...

    @abstractmethod
    async def receive_weights(self, global_steps: int | None = None) -> Any: ...

    @abstractmethod
    async def get_weights(self) -> Any: ...


VERL: dict[str, dict[str, Any]] = {
    "verl": {},
    "verl.checkpoint_engine": {},
    "verl.checkpoint_engine.base": {
        each.__name__: each for each in (CheckpointEngineRegistry, CheckpointEngineWithCache)
    },
}

# The members of SGLang's UpdateWeightFromDiskReqInput.
REQUEST = {
    "model_path",
    "load_format",
    "abort_all_requests",
    "weight_version",
    "is_async",
    "torch_empty_cache",
    "keep_pause",
    "recapture_cuda_graph",
    "token_step",
    "flush_cache",
    "manifest",
}


class DiskLoader:
    """A server that loads a directory of safetensors files on request.

    Attributes:
        weights: what it serves.
        requests: the bodies that came, in order.
        refusal: the message of a load that fails; "": loads succeed.
    """

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.requests: list[dict[str, Any]] = []
        self.refusal = ""
        loader = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                loader.requests.append(body)
                is_known = self.path == "/update_weights_from_disk" and body.keys() <= REQUEST
                message = loader.refusal if is_known else f"unknown request {self.path}: {body}"
                if not message:
                    loader._load(Path(body["model_path"]))
                answer = {"success": not message, "message": message, "num_paused_requests": 0}
                self.send_response(400 if message else 200)
                self.end_headers()
                self.wfile.write(json.dumps(answer).encode())

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def _load(self, directory: Path) -> None:
        files = sorted(directory.glob("*.safetensors"))
        loaded = [safetensors.torch.load_file(file) for file in files]
        self.weights = {name: tensor for each in loaded for name, tensor in each.items()}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
