"""The random generators of a process as one object of a state.

The module reads and sets generators of torch, NumPy and Python. Their states are tensors, numbers,
strings, lists and dicts, so that reading a file never runs code. It must not know data loaders.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch

from fastckpt.state.tree import PerRank

log = logging.getLogger("fastckpt")


class Generators:
    """The random generators of this process, as an entry of a Checkpointer's state.

    These are torch's generator for the CPU, the generators of all devices of an accelerator that is
    initialised (such as CUDA), Python's `random`, numpy.random if NumPy is imported, and the
    generators that you pass. Generators of worker processes are not among them.

    They differ between ranks, so each rank saves and restores its own, as with PerRank. On a rank
    that the saving job did not have, restore() leaves the generators as they are.

    The entry may be at any place in the state: restore() sets the generators after all other
    objects, so what these draw while they are restored changes nothing.

    Args:
        more: other generators: torch.Generator, numpy.random.Generator, numpy.random.RandomState or
            random.Random. A restore needs as many, of the same kinds and in the same order.

    Raises:
        TypeError: an argument is not a generator with a state.
    """

    # Template sets them last. Nothing else is right for any object: iter(loader) draws a seed and a
    # data set what it likes, both perhaps in a load_state_dict() that knows nothing of this class.
    __module__ = "fastckpt"

    def __init__(self, *more: Any) -> None:
        for each in more:
            if not is_generator(each):
                raise TypeError(
                    f"{each!r} is not a generator whose state can be saved: pass torch.Generator, "
                    "numpy.random.Generator, numpy.random.RandomState or random.Random"
                )
        self._more = more

    def state_dict(self) -> PerRank:
        """Returns a PerRank with the present states of the generators."""
        return PerRank(all_states(self._more))

    def load_state_dict(self, state_dict: Any, /) -> None:
        """Sets the generators.

        Args:
            state_dict: what state_dict() returned, or the value in it.

        Raises:
            ValueError: the states are of other generators.
        """
        if isinstance(state_dict, PerRank):
            if state_dict.found is False:
                return
            state_dict = state_dict.value
        set_all_states(self._more, state_dict)


def is_generator(value: object) -> bool:
    """Returns whether a value is a generator whose state can be read and set."""
    if isinstance(value, random.SystemRandom):
        return False
    numpy = sys.modules.get("numpy")
    kinds = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    return isinstance(value, (torch.Generator, random.Random, *kinds))


def all_states(more: Sequence[Any]) -> dict[str, Any]:
    """Returns the states of the process's generators and of others."""
    states = {"torch": _state(torch.default_generator), "python": _state(random)}
    if (numpy := sys.modules.get("numpy")) is not None:
        states["numpy"] = _state(numpy.random)
    accelerator = torch.accelerator.current_accelerator()
    kind = "" if accelerator is None else accelerator.type
    module: Any = getattr(torch, kind, None)
    is_initialized = getattr(module, "is_initialized", lambda: True)
    if hasattr(module, "get_rng_state") and is_initialized():
        devices = [module.get_rng_state(each) for each in range(module.device_count())]
        states |= {"accelerator": kind, "devices": devices}
    return states | {"more": [*map(_state, more)]}


def set_all_states(more: Sequence[Any], states: Any) -> None:
    """Sets what all_states() returned; raises ValueError if it is of other generators."""
    if not isinstance(states, dict) or not {"torch", "python", "more"} <= states.keys():
        raise ValueError("the value is not what Generators saved: leave it out of the restore")
    if len(more) != len(states["more"]):
        raise ValueError(
            f"{len(states['more'])} other generators were saved, but {len(more)} are here: pass as "
            "many as before, in the same order"
        )
    for generator, state in zip(more, states["more"], strict=True):
        _set_state(generator, state)
    _set_state(torch.default_generator, states["torch"])
    _set_state(random, states["python"])
    if "numpy" in states:  # imported later, it would begin with other numbers
        _set_state(import_module("numpy.random"), states["numpy"])
    if "devices" in states:
        module: Any = getattr(torch, states["accelerator"], None)
        devices = states["devices"]
        count = 0 if module is None else module.device_count()
        if count < len(devices):
            log.warning(
                "generators of %d %s devices were saved, but this process has %d: the others are "
                "not restored, and the run may differ from one without a restart",
                len(devices),
                states["accelerator"],
                count,
            )
        for number, state in enumerate(devices[:count]):
            module.set_rng_state(state, number)


def _state(generator: Any) -> Any:
    """Returns a generator's state; `random` and `numpy.random` are generators, too."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if hasattr(generator, "getstate"):
        version, numbers, gauss = generator.getstate()
        return [version, [*numbers], gauss]
    if hasattr(generator, "get_state"):
        return _plain(generator.get_state(legacy=False))
    return _plain(generator.bit_generator.state)


def _plain(state: Any) -> Any:
    """Returns the state of a NumPy generator with lists in place of arrays."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return state.tolist() if hasattr(state, "tolist") else state


def _set_state(generator: Any, state: Any) -> None:
    """Sets a generator's state; raises ValueError if it is that of another kind."""
    name = getattr(generator, "__name__", type(generator).__name__)
    is_torch, is_python = isinstance(generator, torch.Generator), hasattr(generator, "setstate")
    kind: Any = torch.Tensor if is_torch else list if is_python else dict
    if not isinstance(state, kind):
        raise ValueError(
            f"the saved state of {name} is a {type(state).__name__}, expected a {kind.__name__}: "
            "pass the same kinds of generators as before, in the same order"
        )
    if is_torch:
        generator.set_state(state)
    elif is_python:
        version, numbers, gauss = state
        generator.setstate((version, tuple(numbers), gauss))
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state
