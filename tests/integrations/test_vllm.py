"""vLLM's contract of a weight transfer engine, on both sides: a worker's model is of one version,
whatever fails before the first weight is written, and says so if something fails afterwards.

On vLLM's own classes where it is installed, else on doubles of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import safetensors.torch
import torch

from fastckpt import CheckpointError, WeightPublisher
from tests.kit.inference import VLLM, PackedModel, Worker, importable, installed
from tests.kit.paths import ROOT
from tests.kit.weights import FAST, shard

ROWS = 5
PUBLISHER = {"options": FAST}
RELOAD = "vllm.model_executor.model_loader.reload"


@pytest.fixture(scope="module")
def vllm() -> Iterator[ModuleType]:
    """fastckpt's adapter."""
    with importable(VLLM, "vllm"):
        from fastckpt.integrations import vllm

        yield vllm
    del sys.modules[vllm.__name__]


@pytest.fixture
def worker(vllm: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    reload = ModuleType(RELOAD)
    vars(reload).update(VLLM[RELOAD])
    monkeypatch.setitem(sys.modules, RELOAD, reload)
    worker = Worker(vllm.factory.WeightTransferEngineFactory, PackedModel(ROWS))
    yield worker
    worker.engine.shutdown()


@pytest.fixture
def trainer(vllm: ModuleType, worker: Worker, memory: Path) -> Iterator[Any]:
    info = vllm.TrainerInfo(
        rank=0, root=str(memory / "run"), timeout_s=0.0, publisher={"keep": 9, **PUBLISHER}
    )
    made = vllm.factory.WeightTransferTrainerFactory.trainer_init(
        info, client=worker, source=checkpoint(0)
    )
    yield made
    made.shutdown()


def checkpoint(version: int) -> dict[str, torch.Tensor]:
    def of(number: int, *shape: int) -> torch.Tensor:
        return torch.full(shape, 100.0 * version + number)

    return {"q": of(1, ROWS, 8), "k": of(2, ROWS, 8), "norm": of(3, 8)}


def assert_serves(worker: Worker, version: int) -> None:
    expected = checkpoint(version)
    model = worker.engine.model
    assert torch.equal(model.qk, torch.cat([expected["q"], expected["k"]]))
    assert torch.equal(model.norm, expected["norm"])


def send(trainer: Any, version: int, source: Any = None) -> None:
    trainer.source = checkpoint(version) if source is None else source
    trainer.publish(version)
    trainer.send_weights()


def update(worker: Worker, *infos: dict[str, Any]) -> None:
    worker.start_weight_update()
    for info in infos:
        worker.update_weights(info)
    worker.finish_weight_update()


def test_each_version_is_loaded_in_place(trainer: Any, worker: Worker) -> None:
    model = worker.engine.model
    memory = [parameter.data_ptr() for parameter in model.parameters()]
    for version in (4, 5):
        send(trainer, version)
        assert_serves(worker, version)
        assert worker.label == str(version)
        assert model.reloads == ["initialize", "finalize"]
        model.reloads.clear()
    trainer.source = checkpoint(6)
    trainer.send_weights()
    assert worker.label == "6", "the version after the one that was sent"
    assert_serves(worker, 6)
    assert [parameter.data_ptr() for parameter in model.parameters()] == memory


def test_a_version_is_fetched_while_the_one_before_is_served(trainer: Any, worker: Worker) -> None:
    send(trainer, 1)
    worker.engine.model.reloads.clear()
    trainer.source = checkpoint(2)
    trainer.publish(2)
    trainer.prepare()
    update(worker, {"version": 2, "stage": "verify"})
    assert_serves(worker, 1)
    assert worker.label == "1" and worker.engine.model.reloads == []
    assert worker.engine._subscriber._update.version == 2
    trainer.send_weights()
    assert_serves(worker, 2)


def test_a_version_that_is_not_there_leaves_the_model_as_it_is(
    trainer: Any, worker: Worker
) -> None:
    send(trainer, 1)
    for stage in ("verify", "load"):
        with pytest.raises(CheckpointError, match="must be version 2; found version 1"):
            update(worker, {"version": 2, "stage": stage})
        assert_serves(worker, 1)
    send(trainer, 2)
    assert_serves(worker, 2)


def again(vllm: ModuleType, trainer: Any, worker: Worker, memory: Path) -> Any:
    """The engine that a trainer makes after an update that failed."""
    info = vllm.TrainerInfo(rank=0, root=str(memory / "run"), timeout_s=0.0, publisher=PUBLISHER)
    trainer.publisher.close()
    made = vllm.TrainerEngine.trainer_init(info, client=worker, source=trainer.source)
    trainer.publisher = made.publisher  # which is closed at the end
    return made


def test_a_damaged_version_is_not_loaded(trainer: Any, worker: Worker, memory: Path) -> None:
    send(trainer, 1)
    trainer.source = checkpoint(2)
    trainer.publish(2).result()
    path = shard(memory / "run", 2)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="must be version 2"):
        trainer.send_weights()
    assert_serves(worker, 1)


def test_a_load_that_fails_is_told_and_the_next_one_is_whole(
    vllm: ModuleType, trainer: Any, worker: Worker, memory: Path
) -> None:
    send(trainer, 1)
    worker.engine.model.fails_after = 1
    with pytest.raises(
        CheckpointError, match=r"2 is loaded in part.*the loader fails.*may be of two"
    ):
        send(trainer, 2)
    assert worker.label == "1" and worker.engine.model.reloads[-2:] == ["initialize", "finalize"]
    worker.engine.model.fails_after = None
    with pytest.raises(CheckpointError, match=r"an earlier update has failed.*restart vLLM"):
        send(trainer, 3)
    send(again(vllm, trainer, worker, memory), 4)
    assert_serves(worker, 4)
    assert worker.label == "4"


def test_a_session_of_a_worker_that_has_not_failed_is_ended(
    vllm: ModuleType, trainer: Any, worker: Worker, memory: Path
) -> None:
    """As with several workers, of which another one has failed."""
    send(trainer, 1)
    with pytest.MonkeyPatch.context() as patched:

        def fails(_info: dict[str, Any]) -> None:
            raise RuntimeError("another worker has failed")

        patched.setattr(worker, "update_weights", fails)
        with pytest.raises(CheckpointError, match=r"another worker has failed; .* are as before"):
            send(trainer, 2)
    send(again(vllm, trainer, worker, memory), 3)
    assert_serves(worker, 3)


def test_a_first_version_that_lacks_a_tensor_of_the_checkpoint_is_refused(
    trainer: Any, worker: Worker, memory: Path
) -> None:
    """A part of a packed parameter, of which the loader does not tell that it is missing."""
    (memory / "base").mkdir()
    safetensors.torch.save_file(checkpoint(0), memory / "base" / "model.safetensors")
    worker.engine.model_config.model = str(memory / "base")
    source = {name: each for name, each in checkpoint(1).items() if name != "k"}
    with pytest.raises(CheckpointError, match=r"names or shapes of 'k'.*are as before"):
        send(trainer, 1, source)
    assert worker.engine.model.reloads == []


def test_a_first_version_without_a_parameter_is_told(trainer: Any, worker: Worker) -> None:
    with pytest.raises(CheckpointError, match=r"'load': .*1 is loaded in part.*lacks 'norm'"):
        send(trainer, 1, {name: checkpoint(1)[name] for name in ("q", "k")})


@pytest.mark.parametrize("change", [{"norm": None}, {"more": torch.ones(3)}, {"k": torch.ones(2)}])
def test_other_tensors_than_before_are_refused_before_one_is_written(
    trainer: Any, worker: Worker, change: dict[str, torch.Tensor | None]
) -> None:
    send(trainer, 1)
    changed: dict[str, Any] = {**checkpoint(2), **change}
    source = {name: each for name, each in changed.items() if each is not None}
    with pytest.raises(CheckpointError, match=f"names or shapes of '{next(iter(change))}'"):
        send(trainer, 2, source)
    assert_serves(worker, 1)


def test_wrong_information_is_refused(vllm: ModuleType, worker: Worker, memory: Path) -> None:
    with pytest.raises(ValueError, match="unknown"):
        worker.init_weight_transfer_engine({"root": str(memory), "unknown": 1})
    with pytest.raises(CheckpointError, match="must be called before an update"):
        update(worker, {"version": 1})
    worker.init_weight_transfer_engine({"root": str(memory)})
    for wrong in ({}, {"version": 1, "unknown": 2}, {"version": 1, "stage": "boot"}):
        with pytest.raises(ValueError, match=r"version|unknown|stage"):
            update(worker, wrong)
    with pytest.raises(ValueError, match="source must be"):
        vllm.TrainerEngine.trainer_init(vllm.TrainerInfo(rank=0, root=str(memory)), client=worker)


def test_a_worker_may_be_told_another_root(trainer: Any, worker: Worker, memory: Path) -> None:
    send(trainer, 1)
    with WeightPublisher(memory / "other", options=FAST) as publisher:
        publisher.publish(checkpoint(9), 1).result()
    worker.init_weight_transfer_engine({"root": str(memory / "other")})
    update(worker, {"version": 1})
    assert_serves(worker, 9)


def test_other_ranks_of_the_trainer_only_publish(vllm: ModuleType, memory: Path) -> None:
    info = vllm.TrainerInfo(rank=1, root=str(memory / "run"), publisher=PUBLISHER)
    silent = vllm.TrainerEngine.trainer_init(info, client=None, source=checkpoint(1))
    silent.send_weights()
    silent.shutdown()
    assert json.loads((memory / "run/step-00000000/manifest.json").read_bytes())["step"] == 0


def test_a_source_of_vllms_is_published_by_its_names(
    vllm: ModuleType, trainer: Any, worker: Worker
) -> None:
    class Source(vllm.base.WeightSource):  # type: ignore[misc, name-defined]
        def metadata(self) -> list[Any]:
            return []

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from checkpoint(7).items()

    send(trainer, 7, Source())
    assert_serves(worker, 7)


def test_the_plugin_may_be_called_again(vllm: ModuleType) -> None:
    vllm.register()
    with pytest.raises(ValueError, match="already registered"):
        vllm.factory.WeightTransferEngineFactory.register_engine("fastckpt", vllm.Engine)


@pytest.mark.skipif(not installed("vllm"), reason="vLLM is not installed")
def test_a_real_vllm_generates_what_the_trained_model_does(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.crews.vllm_life", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout.strip().rpartition("\n")[2])
    assert told["generated"] == [*told["expected"], told["expected"][-1]]
    assert told["meanwhile"] == told["expected"][:-1], "fetching changes nothing"
    assert len({*map(tuple, told["expected"])}) == 4
    assert "names or shapes of 'model.layers.1.mlp.up_proj.weight'" in told["refused"]
