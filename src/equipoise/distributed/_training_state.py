# SPDX-License-Identifier: Apache-2.0
"""Everything that a run needs to go on, in the form that `torch.distributed.checkpoint` saves and loads."""

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer


class TrainingState:
    """Model, optimiser, surrogate and random numbers of a run, for `torch.distributed.checkpoint`.

    The same checkpoint loads on another number of ranks: experts and what the optimiser keeps of them are spread anew.
    Random streams are saved rank by rank; a rank that the saved run did not have keeps the stream that it has.

    Args:
        model: the model, parallelised or not, with or without FSDP2 or DDP.
        optimizer: the optimiser of the model's parameters.
        others: other objects with a state, by name, such as `surrogate=surrogate`, `schedule=schedule`.

    Example:
        Every rank makes the same calls; one process needs no process group. The object meets `Stateful`, for your own
        calls of `dcp.save({"run": state}, ...)`.

        >>> import tempfile
        >>> import equipoise as eq
        >>> model, surrogate = eq.nn.MoE(8, 4), eq.nn.Surrogate()
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> state = TrainingState(model, optimizer, surrogate=surrogate)
        >>> before = model.router.weight.detach().clone()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     state.save(folder)
        ...     _ = nn.init.zeros_(model.router.weight)
        ...     state.load(folder)
        >>> torch.equal(model.router.weight, before)
        True
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, **others: Any) -> None:
        """Keeps what to save; nothing is read yet."""
        self.model, self.optimizer, self.others = model, optimizer, others

    def save(self, folder: str | Path) -> None:
        """Writes a checkpoint; every rank writes its own part.

        Args:
            folder: a folder that all ranks can read. Use a new one for each checkpoint.
        """
        with _single_process_is_fine():
            save({"run": self}, checkpoint_id=folder)

    def load(self, folder: str | Path) -> None:
        """Restores a checkpoint, on any number of ranks.

        Args:
            folder: the folder of a `save`.

        Raises:
            ValueError: the checkpoint lacks a part of the model.
        """
        reader = FileSystemReader(folder)
        known = set(reader.read_metadata().state_dict_metadata)
        wanted = [name for name, x in get_model_state_dict(self.model).items() if isinstance(x, Tensor)]
        missing = [name for name in wanted if f"run.model.{name}" not in known]
        if missing:
            raise ValueError(
                f"the checkpoint in {folder} must hold every tensor of the model, but has no {missing[0]!r}: build the "
                "model as it was when it was saved"
            )
        # Streams of ranks that the saved run did not have, and moments of parameters without gradients, may be absent.
        with _single_process_is_fine():
            load({"run": self}, storage_reader=reader, planner=DefaultLoadPlanner(allow_partial_load=True))

    def state_dict(self) -> dict[str, Any]:
        """Returns the state; called by `dcp.save`, and by `dcp.load` for the shapes."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        others = {name: module.state_dict() for name, module in self.others.items()}
        return {"model": model, "optimizer": optimizer, "others": others, **_random_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a saved state; called by `dcp.load`.

        Args:
            state: the result of `state_dict`, filled from the checkpoint.
        """
        set_model_state_dict(self.model, state["model"])
        # A parameter that never had a gradient has nothing to save.
        lenient = StateDictOptions(strict=False)
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"], options=lenient)
        for name, module in self.others.items():
            module.load_state_dict(state["others"][name])
        for name in _random_state():
            if name.startswith("device"):
                torch.get_device_module().set_rng_state(state[name])
            else:
                torch.set_rng_state(state[name])


@contextmanager
def _single_process_is_fine() -> Generator[None]:
    """Keeps torch from warning that there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _random_state() -> dict[str, Tensor]:
    """Returns the states of this rank's global streams, of the CPU and of its device, under names of their own."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    states = {f"random-{rank}": torch.get_rng_state()}
    if torch.accelerator.is_available():
        states[f"device-random-{rank}"] = torch.get_device_module().get_rng_state()
    return states
