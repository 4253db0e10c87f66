# SPDX-License-Identifier: Apache-2.0
"""Everything that a run needs to go on, in the form that `torch.distributed.checkpoint` saves and loads."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer


class TrainingState:
    """Model, optimiser, surrogate and random numbers of a run, for `torch.distributed.checkpoint`.

    The same checkpoint loads on another number of ranks: experts and what the optimiser keeps of them are spread anew.
    Random streams are saved rank by rank; a rank that the saved run did not have goes on with the stream that it has.

    Args:
        model: parallelised or not, with FSDP2, with DDP, or as it is.
        optimizer: of the model's parameters.
        others: what else has a state, by name, such as `surrogate=surrogate`, `schedule=schedule`.

    Example:
        Every rank calls::

            state = TrainingState(model, optimizer, surrogate=surrogate)
            dcp.save({"run": state}, checkpoint_id=folder)
            dcp.load({"run": state}, checkpoint_id=folder)
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, **others: Any) -> None:
        """Keeps what to save; nothing is read yet."""
        self.model, self.optimizer, self.others = model, optimizer, others

    def state_dict(self) -> dict[str, Any]:
        """Returns the state; called by `dcp.save`, and by `dcp.load` for the shapes."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        others = {name: module.state_dict() for name, module in self.others.items()}
        return {"model": model, "optimizer": optimizer, "others": others, **_random_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a saved state; called by `dcp.load`.

        Args:
            state: from `state_dict`, filled from the checkpoint.
        """
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        for name, module in self.others.items():
            module.load_state_dict(state["others"][name])
        for name in _random_state():
            if name.startswith("device"):
                torch.get_device_module().set_rng_state(state[name])
            else:
                torch.set_rng_state(state[name])


def _random_state() -> dict[str, torch.Tensor]:
    """Returns the states of this rank's global streams, of the CPU and of its device, under names of their own."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    states = {f"random-{rank}": torch.get_rng_state()}
    if torch.accelerator.is_available():
        states[f"device-random-{rank}"] = torch.get_device_module().get_rng_state()
    return states
