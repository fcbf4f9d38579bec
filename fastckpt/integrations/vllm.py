"""Brings the versions of a WeightPublisher to vLLM: the weight transfer engine "fastckpt" of its
workers, and that of the trainer, which tells them what to load.

    vllm serve MODEL --weight-transfer-config '{"backend": "fastckpt"}'

    engine = TrainerEngine.trainer_init(  # on all ranks of the trainer
        TrainerInfo(rank=rank, root="s3://bucket/policy"), client=client, source=model
    )
    engine.publish(step)   # as WeightPublisher.publish; training goes on
    engine.prepare()       # when it is committed, the workers fetch it, and vLLM goes on serving
    engine.send_weights()  # while the caller has paused vLLM: they load what they have verified

Responsible for the two interfaces in vllm/distributed/weight_transfer/base.py.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import fastckpt
from fastckpt import CheckpointError, SaveHandle, WeightPublisher, WeightSubscriber
from fastckpt.arguments.checks import check_choice
from fastckpt.arguments.names import listed

try:
    from vllm.distributed.weight_transfer import base, factory
    from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine
except ImportError as error:
    raise ImportError(f"{__name__} needs vLLM 0.26 or newer: {error}") from error

BACKEND = "fastckpt"
FETCH, VERIFY, LOAD = "fetch", "verify", "load"
TIMEOUT_S = 200.0


@dataclass
class InitInfo(base.WeightTransferInitInfo):  # type: ignore[misc]
    """The facts that a worker receives once: `root` and `storage_options` as WeightSubscriber's;
    `timeout_s`: how long an update waits for its version, below the time-out of vLLM's HTTP client.
    """

    root: str
    storage_options: dict[str, Any] | None = None
    timeout_s: float = TIMEOUT_S


@dataclass
class UpdateInfo(base.WeightTransferUpdateInfo):  # type: ignore[misc]
    """A request to fetch a version in the background, to wait until it is verified, or to load it
    when it is.
    """

    version: int
    stage: str = LOAD

    def __post_init__(self) -> None:
        check_choice("stage", self.stage, (FETCH, VERIFY, LOAD))


class Engine(base.WeightTransferEngine):  # type: ignore[misc]
    """A worker's engine. It holds the tensors of the checkpoint in host memory, whole, since vLLM's
    loaders take whole ones. The model is unchanged until the version is verified.
    """

    init_info_cls, update_info_cls = InitInfo, UpdateInfo
    supports_draft_weight_update = False
    _subscriber: WeightSubscriber | None = None
    _fetched: Future[Any] | None = None  # of the last FETCH
    _is_loading = False
    _shapes: dict[str, Any] | None = None  # of the tensors that were loaded, by name

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.shutdown()
        root, self._timeout_s = init_info.root, init_info.timeout_s
        self._subscriber = WeightSubscriber(root, storage_options=init_info.storage_options)
        self._fetcher = ThreadPoolExecutor(1, "fastckpt-fetch")

    def start_weight_update(self) -> None:
        self._is_loading = False

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Raises CheckpointError if the version cannot be prepared, or has other tensors than the
        model's checkpoint or the version before: then the model is as before. Raises it also if
        loading fails; then the model has weights of two versions, until a version has been loaded.
        """
        if self._subscriber is None:
            raise CheckpointError("init_weight_transfer_engine() must be called before an update")
        version, stage = update_info.version, update_info.stage
        if stage == FETCH:
            self._fetched = self._fetcher.submit(self._subscriber.next)
            return
        if self._fetched is not None:
            wait([self._fetched])  # an error of it comes again
        update = self._subscriber.wait_for(version, timeout_s=self._timeout_s)
        shapes = {name: tuple(tensor.shape) for name, tensor in update}
        if differing := self._differing(shapes):
            raise CheckpointError(
                f"version {version} differs from the model in the names or shapes of "
                f"{listed(map(repr, sorted(differing)))}: publish all tensors of its checkpoint"
            )
        if stage == LOAD:
            self._load(version, iter(update))
            self._shapes = shapes

    def _differing(self, shapes: dict[str, Any]) -> set[str]:
        """Returns the names of tensors that do not fit: to those of the last version, or at first
        to the checkpoint that vLLM was started from, where it is a directory of this machine. vLLM
        itself does not notice that a part of a parameter is missing.
        """
        if self._shapes is not None:
            return {name for name, _shape in self._shapes.items() ^ shapes.items()}
        directory = getattr(self.model_config, "model", "")
        if not os.path.isdir(directory):
            return set()
        with fastckpt.open(directory) as saved:
            expected = {name: tuple(saved[name].shape) for name in saved}
        return {name for name, _shape in expected.items() - shapes.items()}

    def _load(self, version: int, tensors: Any) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        parameters = {name for name, _ in self.model.named_parameters()}
        self._is_loading = True
        try:
            initialize_layerwise_reload(self.model)
            loaded = self.model.load_weights(tensors)
            missing = parameters - (parameters if loaded is None else loaded)
            if missing and getattr(self.model_config, "quantization", None) is None:
                raise ValueError(f"the version lacks {listed(map(repr, sorted(missing)))}")
        except Exception as error:
            # Else the next load would count what this one has loaded, and leave out the rest.
            self.finish_weight_update()
            raise CheckpointError(
                f"version {version} is loaded in part, so this worker must not serve until a whole "
                f"version is loaded: {error}"
            ) from error

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if self._is_loading:
            self._is_loading = False
            finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        if self._subscriber is not None:
            self._fetcher.shutdown(cancel_futures=True)
            self._subscriber.close()
            self._subscriber = self._fetched = None


@dataclass
class TrainerInfo(TrainerInitInfo):  # type: ignore[misc]
    """How to make a trainer's engine: `root`, `storage_options` and `publisher` (further arguments)
    for its WeightPublisher; `timeout_s` as InitInfo's.
    """

    backend: ClassVar[str] = BACKEND
    root: str
    storage_options: dict[str, Any] | None = None
    timeout_s: float = TIMEOUT_S
    publisher: dict[str, Any] = field(default_factory=dict)


class TrainerEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    """The engine of each rank of the trainer; rank 0 alone talks to vLLM. `source` is the module or
    state dict to publish, whose names are those of the checkpoint that vLLM was started from; or a
    WeightSource, which each rank then copies to its host.
    """

    init_info_cls = TrainerInfo
    publisher: WeightPublisher
    _version = -1
    _handle: SaveHandle | None = None  # of a version that has not been sent
    _failure = ""  # of an update

    @classmethod
    def trainer_init(
        cls, init_info: TrainerInfo, *, client: Any, source: Any = None
    ) -> TrainerEngine:
        if source is None:
            raise ValueError("source must be the module or state dict to publish, not None")
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        root, options = init_info.root, init_info.storage_options
        engine.publisher = WeightPublisher(root, storage_options=options, **init_info.publisher)
        if engine.is_sender:
            client.init_weight_transfer_engine(asdict(InitInfo(root, options, init_info.timeout_s)))
        return engine

    def publish(self, version: int) -> SaveHandle:
        """As WeightPublisher.publish, with the source as state."""
        source = self.source
        if isinstance(source, base.WeightSource):
            source = {name: tensor.detach().cpu() for name, tensor in source}
        self._handle, self._version = self.publisher.publish(source, version), version
        return self._handle

    def prepare(self) -> None:
        """Waits until the version is committed, and tells the workers to fetch it. Raises as
        SaveHandle.result, and as send_weights.
        """
        handle = self.publish(self._version + 1) if self._handle is None else self._handle
        try:
            handle.result()
        except BaseException:
            self._handle = None
            raise
        self._tell(FETCH)

    def send_weights(self) -> None:
        """Loads the version in all workers, after all of them have verified it; publishes the next
        one first if this one has been sent. vLLM's weight_version is then its number.

        Raises:
            CheckpointError: on rank 0: this update has failed, or an earlier one. vLLM's workers
                may have answered in part, and the answers that are left would be taken for those
                to later calls: restart vLLM, and make another engine.
        """
        self.prepare()
        self._handle = None
        self._tell(VERIFY, LOAD, label=str(self._version))

    def _tell(self, *stages: str, label: str | None = None) -> None:
        if not self.is_sender:
            return
        if self._failure:
            raise CheckpointError(f"an earlier update has failed: {self._failure}; restart vLLM")
        stage = "start"
        try:
            self.client.start_weight_update()
            for stage in stages:
                self.client.update_weights(asdict(UpdateInfo(self._version, stage)))
            self.client.finish_weight_update(*[label] if label else [])
        except Exception as error:
            with suppress(Exception):  # a worker that has not failed has an open session
                self.client.finish_weight_update()
            state = "may be of two versions" if stage == LOAD else "are as before"
            self._failure = (
                f"version {self._version} at the stage {stage!r}: {error}; the weights {state}"
            )
            raise CheckpointError(f"the update has failed: {self._failure}") from error

    def shutdown(self) -> None:
        self.publisher.close()


def register() -> None:
    """Registers both engines. It is vLLM's plugin, which a process may call repeatedly."""
    for registry, engine in (
        (factory.WeightTransferEngineFactory, Engine),
        (factory.WeightTransferTrainerFactory, TrainerEngine),
    ):
        if BACKEND not in registry._registry:  # the factory refuses a second registration
            registry.register_engine(BACKEND, engine)


register()
