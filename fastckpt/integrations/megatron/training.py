"""install(), which makes Megatron's own training loop save and load with fastckpt.

Responsible for the names in megatron.training that are replaced. Everything else, such as flags,
the tracker, retention, prints, hooks and random numbers, is Megatron's own code.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from functools import partial
from types import ModuleType
from typing import Any

from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

from fastckpt.arguments.options import SaveOptions, check_options
from fastckpt.integrations.megatron.calls_queue import Queue
from fastckpt.integrations.megatron.megatron_loads import AgreeingLoadStrategy, MegatronLoads
from fastckpt.integrations.megatron.strategies import SaveStrategy

log = logging.getLogger("fastckpt")

_CHECKPOINTING, _ASYNC = "megatron.training.checkpointing", "megatron.training.async_utils"
_READS = ("_load_base_checkpoint", "_load_global_dist_base_checkpoint", "generate_state_dict")
# The names of the strategies and the queue, before and since Megatron 0.17.
_STRATEGIES = (
    ("get_default_save_sharded_strategy", "get_default_load_sharded_strategy"),
    ("TorchDistSaveShardedStrategy", "TorchDistLoadShardedStrategy"),
)
_QUEUES, _QUEUE = ("get_async_strategy", "AsyncCallsQueue"), "_async_calls_queue"


def install(
    *,
    options: SaveOptions = SaveOptions(on_error="warn"),
    weights_only: bool = True,
) -> None:
    """Makes Megatron's pretrain() save and load with fastckpt. Call it before pretrain().

    Megatron's flags keep their meaning. With `--async-save`, saves are written and committed in the
    background, without an extra process and without a collective in a training step.

    Args:
        options: the fence, how errors are handled, and how files are written (see SaveOptions), for
            asynchronous saves. With on_error="warn", a failed save leaves the tracker unchanged,
            and training continues; with "raise", the failure ends training on all ranks. A failed
            synchronous save always ends training. Loads use `timeout_s`.
        weights_only: whether objects in checkpoints are loaded with torch.load's weights_only=True,
            which then also allows the classes that Megatron allows. False runs code from the files,
            like Megatron itself.

    Raises:
        ImportError: megatron.training cannot be imported or lacks a name that install() replaces.
            The message gives the name, and nothing was replaced.
    """
    checkpointing, queues = _module(_CHECKPOINTING), _module(_ASYNC)
    strategies = next(
        (each for each in _STRATEGIES if all(hasattr(checkpointing, name) for name in each)), None
    )
    queue = next((each for each in _QUEUES if hasattr(queues, each)), None)
    missing = [f"{_CHECKPOINTING}.{name}" for name in _READS if not hasattr(checkpointing, name)]
    if strategies is None:
        lacking = (
            ", ".join(name for name in names if not hasattr(checkpointing, name))
            for names in _STRATEGIES
        )
        missing.append(f"{_CHECKPOINTING}.({' or '.join(lacking)})")
    if queue is None or not hasattr(queues, _QUEUE):
        missing.append(f"{_ASYNC}.({' or '.join(_QUEUES)}) or .{_QUEUE}")
    if missing or strategies is None or queue is None:
        raise ImportError(
            f"fastckpt.integrations.megatron.install() does not support this Megatron, which has "
            f"no {' and no '.join(missing)}"
        )
    timeout_s = check_options(options).timeout_s
    save = partial(_save_strategy, options)
    reading = partial(AgreeingLoadStrategy, weights_only=weights_only, timeout_s=timeout_s)
    loads = MegatronLoads(checkpointing, weights_only, timeout_s)
    in_place: list[tuple[ModuleType, str, Any]] = [
        (checkpointing, strategies[0], save),
        (
            checkpointing,
            strategies[1],
            partial(_load_strategy, getattr(checkpointing, strategies[1]), reading),
        ),
        (checkpointing, "_load_base_checkpoint", loads.load_base_checkpoint),
        (checkpointing, "generate_state_dict", loads.generate_state_dict),
        *_queue_names(queues, queue, options),
    ]
    for module, name, value in in_place:
        setattr(module, name, value)
    log.info("%s saves and loads with fastckpt", _CHECKPOINTING)


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"fastckpt.integrations.megatron.install() needs {name}. Before 0.17 the megatron-core "
            "package lacks this module: add Megatron-LM's repository to PYTHONPATH "
            f"({error})"
        ) from error


def _save_strategy(options: SaveOptions, *_given: Any, **_named: Any) -> SaveStrategy:
    """Replaces Megatron's class or function, whose arguments only configure its own writer."""
    return SaveStrategy(options=options)


def _load_strategy(megatrons: Any, ours: Any, *given: Any, **named: Any) -> Any:
    """Replaces Megatron's class, or its function, which may return a strategy for another
    format.
    """
    if inspect.isclass(megatrons):
        return ours()
    strategy = megatrons(*given, **named)
    return ours() if isinstance(strategy, TorchDistLoadShardedStrategy) else strategy


def _queue_names(queues: Any, name: str, options: SaveOptions) -> list[tuple[ModuleType, str, Any]]:
    """Returns the replacements that make Megatron use our queue: one for its class (since 0.17, for
    the function that returns the class), and one for an existing queue.
    """
    megatrons = getattr(queues, name)

    class AsyncCallsQueue(Queue):
        """Our queue, with the constructor of Megatron's."""

        def __init__(
            self, persistent: bool = False, cpu_shm_mode: Any = None, **_others: Any
        ) -> None:
            super().__init__(lambda: class_of_others()(persistent=persistent), options)

    if inspect.isclass(megatrons):

        def class_of_others() -> Any:
            return megatrons

        in_place: Any = AsyncCallsQueue
    else:

        def class_of_others() -> Any:
            return megatrons(getattr(queues.get_args(), "async_strategy", "nvrx"))[1][
                "AsyncCallsQueue"
            ]

        ours = {"AsyncCallsQueue": AsyncCallsQueue, "get_write_results_queue": _no_queue}

        def in_place(async_strategy: str = "nvrx", module: str | None = None) -> tuple[str, Any]:
            names = _Names(ours, lambda: megatrons(async_strategy)[1])
            return async_strategy, names if module is None else names[module]

    found = [(queues, name, in_place)]
    if getattr(queues, _QUEUE) is not None:
        found.append((queues, _QUEUE, AsyncCallsQueue()))
    return found


def _no_queue(mp_mode: str = "spawn") -> None:
    """Replaces the function that starts a process for the results of Megatron's writers."""


class _Names(dict[str, Any]):
    """The names that we replace. Other names are looked up in Megatron's module, which may need a
    missing package.
    """

    def __init__(self, ours: dict[str, Any], megatrons: Any) -> None:
        super().__init__(ours)
        self._megatrons = megatrons

    def __missing__(self, name: str) -> Any:
        return self._megatrons()[name]
