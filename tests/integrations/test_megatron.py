"""Megatron-core: its real models and optimizers on the CPU, saved and loaded by ranks over gloo.

Responsible for what must come of it: what stock Megatron saves is loaded and the other way round,
on any parallelism and bit for bit; and whatever goes wrong, the last good iteration is found. What
the ranks do stands in crews/megatron_bodies.py.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

from fastckpt import CheckpointError, CorruptCheckpoint, IncompatibleCheckpoint
from fastckpt.integrations import dcp
from fastckpt.integrations.megatron import strategies
from fastckpt.saving.lease import LEASE_FILE
from tests.crews import megatron_bodies as bodies
from tests.crews.group_crew import Crew, Nursery, RankDied
from tests.kit import interpreters, jobs
from tests.kit.noise import flip
from tests.kit.paths import ROOT

TRACKER = "latest_checkpointed_iteration.txt"
VERSION = TorchVersion(importlib.metadata.version("megatron-core"))
# What Megatron's own save, asked to save by our strategy, has made of common state; it is in an
# object from 0.19 on.
COMMON = ["common.pt"] if VERSION < "0.19" else []
pytestmark = pytest.mark.multiprocess
RANKS_IMPORT = "tests.crews.megatron_imports"


@pytest.fixture
def crew(nursery: Nursery) -> Crew:
    return nursery.lasting_crew(2)


def iterations(disk: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in disk.glob("iter_*"))


# Resharding: bit for bit, for every tensor of model and optimizer.


BF16 = {"bf16": True, "buckets": 3000}


@pytest.mark.parametrize(
    ("save", "load", "options"),
    [
        ((2, 1), (2, 1), {}),
        ((2, 1), (1, 1), {}),
        ((1, 2), (1, 1), {}),
        ((2, 1), (1, 2), {}),
        ((1, 1), (2, 1), BF16),
        ((1, 1), (1, 2), BF16),
        ((1, 2), (2, 1), BF16),
    ],
    ids=lambda given: "tp{}pp{}".format(*given) if isinstance(given, tuple) else "",
)
def test_any_parallelism_loads_any(
    save: Any, load: Any, options: Any, crew: Crew, disk: Path
) -> None:
    crew(bodies.save_numbered, str(disk), *save, options, {})
    for found, wrong in crew(bodies.load_numbered, str(disk), *load, options):
        assert (found, wrong) == ((1, 5), [])


@pytest.mark.parametrize("load", [(2, 1), (1, 1)])
def test_what_megatron_lays_out_for_any_parallelism_is_loaded(
    load: Any, crew: Crew, disk: Path
) -> None:
    how = {"distrib_optim_sharding_type": "fully_reshardable"}
    crew(bodies.save_numbered, str(disk), 2, 1, {}, how)
    assert crew(bodies.load_numbered, str(disk), *load, {}) == [((1, 5), [])] * 2


@pytest.mark.parametrize(
    ("save", "load"),
    [((2, 1), (1, 1)), pytest.param((1, 2), (1, 1), marks=pytest.mark.torture)],
)
def test_resharding_reads_little_more_than_it_needs(
    save: Any, load: Any, crew: Crew, disk: Path
) -> None:
    for took, needed in crew(bodies.bytes_of_reshard, str(disk), save, load):
        assert needed > 50 << 20
        assert needed <= took <= 1.3 * needed


# Training goes on.


@pytest.mark.parametrize(("bf16", "fence"), [(False, "call"), (True, "step")])
def test_training_goes_on_bit_by_bit(bf16: bool, fence: str, crew: Crew, disk: Path) -> None:
    saved = crew(bodies.train_save_train, str(disk), 2, bf16, fence)
    loaded = crew(bodies.load_and_train, str(disk), 2, bf16)
    for (losses, numbers, _stall), (found, again, drawn) in zip(saved, loaded, strict=True):
        assert found == (3, 77)
        assert again == losses
        assert drawn == numbers
    assert saved[0][1] != saved[1][1]


def test_training_goes_on_elsewhere_within_rounding(crew: Crew, disk: Path) -> None:
    ((losses, _, _), _) = crew(bodies.train_save_train, str(disk), 2, False, "call")
    ((found, again, _), _) = crew(bodies.load_and_train, str(disk), 1, False)
    assert found == (3, 77)
    assert [float.fromhex(loss) for loss in again] == pytest.approx(
        [float.fromhex(loss) for loss in losses], rel=1e-4
    )


def test_training_goes_on_bit_by_bit_from_what_stock_saved(crew: Crew, disk: Path) -> None:
    for losses, again in crew(bodies.train_on_from_stock, str(disk)):
        assert again == losses


# Strategies.


def expected_small(rank: int, value: float) -> dict[str, Any]:
    mine = value + rank
    return {
        "split": [[mine] * 5] * 3,
        "layer": [mine] * 4,
        "same": [value],
        "cut": [[mine] * 2] * 8,
        "object": {"rank": rank, "value": value},
        "one": [value],
        "local": [-1.0],
        "common": {"value": value, "list": [1, 2.5, "three"]},
        3: {"integer key": [1.0, 1.0]},
    }


def test_strategies_exchange_with_stock(crew: Crew, disk: Path) -> None:
    for rank, found in enumerate(crew(bodies.exchange_with_stock, str(disk))):
        for saver in ("ours", "stock"):
            for loader in ("ours", "stock"):
                assert found[f"{saver} by {loader}"] == expected_small(rank, 2.0), (saver, loader)
        assert found["ours keys"] == found["stock keys"]
        assert "object/shard_1_2" in found["ours keys"]
        # 2.4 MB that both hold are written once, half of them by each.
        least, most = sorted(found["ours nbytes"])
        assert 1.2e6 < least <= most < 1.3e6
    config = json.loads((disk / "ours" / "metadata.json").read_text())
    assert config == json.loads((disk / "stock" / "metadata.json").read_text())


@pytest.mark.parametrize("wrapped", [False, True], ids=["", "wrapped"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_what_megatron_saves_by_our_strategy_is_ours(
    wrapped: bool, asynchronous: bool, crew: Crew, disk: Path
) -> None:
    outcomes = crew(bodies.save_through, str(disk / "a"), wrapped, asynchronous)
    for rank, (found, names) in enumerate(outcomes):
        assert found["ours"] == found["stock"] == expected_small(rank, 2.0)
        data = [name for name in names if name.endswith(".distcp")]
        assert data and all(re.fullmatch(r"__\d+_[0-9a-f]{40}\.distcp", name) for name in data)
        assert {".metadata", "metadata.json", *COMMON} == {*names} - {*data, LEASE_FILE}


def test_async_request_needs_no_process_and_commits_unfinalized(crew: Crew, disk: Path) -> None:
    for async_fn, preload_fn, names in crew(bodies.save_without_finalizing, str(disk / "a"), False):
        assert (async_fn, preload_fn) == (None, None)
        assert {".metadata", "metadata.json", *COMMON} < {*names}


def test_killed_before_finalizing_is_found(nursery: Nursery, disk: Path) -> None:
    with nursery.crew(2) as crew:
        died = crew(bodies.save_without_finalizing, str(disk / "iter_0000007"), True)
        assert all(isinstance(each, RankDied) for each in died)
    assert not (disk / TRACKER).exists()
    with nursery.crew(2) as crew:
        for told in crew(bodies.load_model, str(disk)):
            assert told == (7, 0)


# Iterations.


def test_tracker_retention_and_names(crew: Crew, disk: Path) -> None:
    how = {"keep_last": 2, "keep_every": 4}
    names = crew(bodies.save_many, str(disk), [2, 4, 6, 8, 9, 10], how)[0]
    assert names == ["iter_0000004", "iter_0000008", "iter_0000009", "iter_0000010", TRACKER]
    assert (disk / TRACKER).read_text() == "10"
    assert crew(bodies.load_any, str(disk), 8)[0].value == (8, 80)
    error = crew(bodies.load_any, str(disk), 6)[0].error
    assert isinstance(error, CheckpointError) and "no iteration 6" in str(error)


def test_a_run_that_went_back_goes_on_from_its_own_last_commit(crew: Crew, disk: Path) -> None:
    """Not from iterations with higher numbers that it had left behind; with damage from the commit
    before, of whichever number.
    """
    crew(bodies.save_many, str(disk), [1, 4], {})
    crew(bodies.save_many, str(disk), [5], {"non_persistent_ckpt": True})
    crew(bodies.save_many, str(disk), [2], {"non_persistent_ckpt": True})
    assert crew(bodies.load_any, str(disk))[0].value == (2, 20)
    crew(bodies.save_many, str(disk), [3], {})
    assert crew(bodies.load_any, str(disk))[0].value == (3, 30)
    tracker = disk / TRACKER
    tracker.rename(disk / "moved away")
    assert crew(bodies.load_any, str(disk))[0].value == (3, 30)
    tracker.write_text("3")
    (disk / "iter_0000003" / "common.pt").write_bytes(b"damage")
    assert crew(bodies.load_any, str(disk))[0].value == (2, 20)
    shutil.rmtree(disk / "non_persistent")
    assert crew(bodies.load_any, str(disk))[0].value == (4, 40)


def test_random_states_are_where_stock_looks_for_them(crew: Crew, disk: Path) -> None:
    crew(bodies.save_with_random_init, str(disk))
    path, key = str(disk / "iter_0000001"), "rng_state/shard_0.0_1.1"
    stored = strategies.read_objects(path, [key], True)[key]
    (states,) = strategies.unpickled(stored, key, True)
    assert len(states) == 2


def test_non_persistent_keeps_one_and_is_preferred_when_newer(crew: Crew, disk: Path) -> None:
    crew(bodies.save_many, str(disk), [5], {})
    crew(bodies.save_many, str(disk), [6, 7], {"non_persistent_ckpt": True})
    assert iterations(disk / "non_persistent") == [7]
    assert crew(bodies.load_any, str(disk))[0].value == (7, 70)
    crew(bodies.save_many, str(disk), [8], {})
    assert crew(bodies.load_any, str(disk))[0].value == (8, 80)


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_full_disk_is_not_fatal(on_error: str, crew: Crew, disk: Path) -> None:
    for told in crew(bodies.save_on_full_disk, str(disk), on_error):
        assert told["tracker"] == "1"
        assert told["error"] is None
        if on_error == "raise":
            assert told["again"] in ("StorageError", "PeerFailed")
        assert told["at"] == (3 if on_error == "warn" else 4)
    assert not (disk / "iter_0000002" / ".metadata").exists()


@pytest.fixture(scope="module")
def two(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with iterations 1 and 2."""
    root = tmp_path_factory.mktemp("two")
    nursery.lasting_crew(2)(bodies.save_many, str(root), [1, 2], {})
    return root


def damage_data(newest: Path) -> None:
    flip(max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size), 1000)


@pytest.mark.parametrize(
    "damage",
    [
        damage_data,
        lambda newest: flip(newest / ".metadata", 500),
        lambda newest: (newest / ".metadata").unlink(),
        lambda newest: flip(newest / "common.pt", 200),
        lambda newest: (newest / "common.pt").unlink(),
        lambda newest: (newest / "metadata.json").unlink(),
        lambda newest: next(newest.glob("__1_*.distcp")).unlink(),
        lambda newest: (newest.parent / TRACKER).write_text(""),
        lambda newest: (newest.parent / TRACKER).write_bytes(b"\xff garbage"),
        lambda newest: (newest.parent / TRACKER).unlink(),
    ],
    ids=[
        *("data flipped", "metadata flipped", "no metadata", "common flipped", "no common"),
        *("no config", "no data", "tracker empty", "tracker garbage", "no tracker"),
    ],
)
def test_damage_falls_back(damage: Any, crew: Crew, two: Path, disk: Path) -> None:
    shutil.copytree(two, disk, dirs_exist_ok=True)
    damage(disk / "iter_0000002")
    expected = (2, 20) if not is_whole_without(damage, disk) else (1, 10)
    for outcome in crew(bodies.load_any, str(disk)):
        assert outcome.error is None
        assert outcome.value == expected


def test_an_iteration_that_is_removed_is_no_damage(crew: Crew, two: Path, disk: Path) -> None:
    """Whoever removed it has committed a newer one, which is taken, and not the one before."""
    shutil.copytree(two, disk, dirs_exist_ok=True)
    for outcome in crew(bodies.load_what_is_removed, str(disk)):
        assert outcome.error is None and outcome.value == (3, 20)


def is_whole_without(damage: Any, disk: Path) -> bool:
    """Whether the damage is to the iteration and not to the tracker alone."""
    tracker = disk / TRACKER
    return tracker.exists() and tracker.read_bytes() == b"2"


def test_nothing_whole_is_an_error_and_nothing_at_all_is_none(crew: Crew, disk: Path) -> None:
    for outcome in crew(bodies.load_any, str(disk)):
        assert outcome.value == (0, 0)
    crew(bodies.save_many, str(disk), [1], {})
    damage_data(disk / "iter_0000001")
    for outcome in crew(bodies.load_any, str(disk)):
        assert isinstance(outcome.error, CorruptCheckpoint)
        assert "iter_0000001" in str(outcome.error)


def test_a_checkpoint_of_another_format_is_not_taken_for_damage(crew: Crew, disk: Path) -> None:
    state = {"model": {"decoder.weight": torch.ones(2)}, "optimizer": {"step": 1}}
    dcp.save(state, checkpoint_id=disk / "iter_0000002", no_dist=True)
    for outcome in crew(bodies.load_any, str(disk)):
        assert isinstance(outcome.error, IncompatibleCheckpoint)
        assert "fsdp_dtensor or torch_dcp" in str(outcome.error)


def test_a_model_in_megatron_fsdp_is_refused(crew: Crew, two: Path) -> None:
    for outcome in crew(bodies.load_into_fsdp, str(two)):
        assert isinstance(outcome.error, IncompatibleCheckpoint)
        assert "a model in Megatron-FSDP cannot load" in str(outcome.error)


def test_another_model_is_refused_and_not_taken_for_damage(crew: Crew, disk: Path) -> None:
    crew(bodies.save_numbered, str(disk), 2, 1, {"hidden": 64}, {})
    for outcome in crew(bodies.refuse, str(disk), 2, 1):
        assert "Global shape mismatch" in str(outcome.error)


STOCK = """
import sys
for name in [name for name in sys.modules if name.partition(".")[0] == "fastckpt"]:
    del sys.modules[name]
sys.modules["fastckpt"] = None  # not importable
sys.path[:0] = [{tests!r}, {examples!r}]
import os, zlib, torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
import megatron.core.dist_checkpointing as mdc
import megatron_gpt
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron_cpu import on_cpu
with on_cpu():
    model, optimizer, _ = megatron_gpt.build(1, 1, hidden=32)
    (one,) = optimizer.chained_optimizers
    one._init_optimizer_states_with_dummy_values()
    metadata = mdc.load_content_metadata({path!r})
    assert metadata["distrib_optim_sharding_type"] == "fully_reshardable", metadata
    metadata["dp_cp_group"] = parallel_state.get_data_parallel_group()
    state = {{"model": model.module.sharded_state_dict(metadata=metadata)}}
    kept = dict(state)
    state["optimizer"] = optimizer.sharded_state_dict(kept, is_loading=True, metadata=metadata)
    # Megatron calls missing what is in the checkpoint and was not asked for.
    state, unasked, not_there = mdc.load(state, {path!r}, strict="return_all")
    assert not not_there and {{key.partition("/")[0] for key in unasked}} == {rng}, unasked
    put = type(one)._set_main_param_and_optimizer_states
    # Stock Megatron cannot load this format with torch's Adam, whose "step" it leaves out.
    one._set_main_param_and_optimizer_states = lambda param, tensors: put(
        one, param, {{"step": torch.tensor(1.0), **tensors}}
    )
    with torch.no_grad():
        optimizer.load_state_dict(state["optimizer"])
    kept = {{"model": model.module.sharded_state_dict(metadata=metadata)}}
    with_values = optimizer.sharded_state_dict(kept, metadata=metadata)
    mdc.mapping.apply_factories(with_values)
    keys = set()
    for shard in nested_values(with_values):
        if isinstance(shard, mdc.ShardedTensor):
            name = shard.key.removeprefix("optimizer.state.param.").encode()
            seed = torch.Generator().manual_seed(zlib.crc32(name))
            whole = torch.randn(shard.global_shape, generator=seed)
            assert torch.equal(shard.data, whole[shard.global_slice()]), shard.key
            keys.add(shard.key)
    print(len(keys))
"""


@pytest.mark.parametrize(
    "save", [(2, 1), pytest.param((1, 2), marks=pytest.mark.torture)], ids=["tp2", "pp2"]
)
def test_stock_loads_without_fastckpt_what_is_laid_out_for_it(
    save: Any, crew: Crew, disk: Path
) -> None:
    how = {"distrib_optim_sharding_type": "fully_reshardable"}
    crew(bodies.save_numbered, str(disk), *save, {}, how)
    path = str(disk / "iter_0000001")
    rng = "{'rng_state', 'fastckpt.rng_state'}"
    code = STOCK.format(rng=rng, path=path, tests=str(ROOT), examples=str(ROOT / "examples"))
    done = interpreters.run(code, cwd=disk, imports=RANKS_IMPORT, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[-1]) > 20


# Versions.


def test_newer_versions_are_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = "fastckpt.integrations.megatron"
    real = importlib.metadata.version
    told = {"megatron-core": "0.97.5"}
    monkeypatch.setattr(importlib.metadata, "version", lambda p: told.get(p) or real(p))

    for module in [module for module in sys.modules if module.startswith(name)]:
        monkeypatch.delitem(sys.modules, module)
    assert importlib.import_module(name).TRIED in caplog.text and "0.97.5" in caplog.text


@pytest.mark.parametrize("version", ["0.15.9", "1.0"])
def test_other_versions_are_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "fastckpt.integrations.megatron"
    for module in [module for module in sys.modules if module.startswith(name)]:
        monkeypatch.delitem(sys.modules, module)
    real = importlib.metadata.version
    told = {"megatron-core": version}
    monkeypatch.setattr(importlib.metadata, "version", lambda p: told.get(p) or real(p))
    expected = f"{name} needs megatron-core >= 0.16.1, < 1; {version} is installed"
    with pytest.raises(ImportError, match=re.escape(expected)):
        importlib.import_module(name)
    assert IncompatibleCheckpoint  # the core is untouched


# The example.


def run_example(disk: Path, *options: object) -> tuple[int, str]:
    script, saving = "examples/megatron_gpt.py", ("--save", disk, *options)
    with jobs.Job(script, disk, *saving, ranks=2, imports=RANKS_IMPORT) as job:
        code, said = job.wait(), job.output
    (disk / "output").unlink()
    return code, said


def losses(text: str) -> dict[int, float]:
    found = re.findall(r"^iteration (\d+) loss (\S+)", text, re.MULTILINE)
    return {int(number): float.fromhex(loss) for number, loss in found}


def test_example_is_killed_and_goes_on_elsewhere(disk: Path) -> None:
    code, text = run_example(disk, "--tp", 2, "--iterations", 9, "--every", 3, "--kill-at", 8)
    assert code != 0
    before = losses(text)
    code, text = run_example(disk, "--tp", 1, "--iterations", 9, "--every", 3)
    assert code == 0, text
    after = losses(text)
    start = int(re.findall(r"starts at iteration (\d+)", text)[0])
    assert start in (3, 6)
    assert sorted(after) == [*range(start + 1, 10)]
    for number in range(start + 1, 9):
        if number in before:
            assert after[number] == pytest.approx(before[number], rel=1e-4)
