# SPDX-License-Identifier: Apache-2.0
"""A proposal that chooses its own temperature and mixture weight, from the weights of past batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from equipoise._core import check_at_least, check_one_of
from equipoise.nn._bias_rules import WideBuffers, average
from equipoise.nn._router_checks import check_above_one, check_share
from equipoise.nn._routing import Routing


@dataclass(frozen=True)
class Range:
    """Where a parameter starts, and how far it may go; without need it goes to the least."""

    start: float
    least: float
    most: float


RANGES = {"eps": Range(0.2, 0.01, 0.5), "temperature": Range(1.0, 1.0, 10.0)}
"""What can choose itself. More eps bounds the weights, by about E/eps, but at 1 nobody asks the router. A temperature
above 1 flattens the proposal, which balancing then distorts less, but p/q is 1 only at temperature 1."""


class AutoProposal(WideBuffers):
    r"""Keeps the effective sample size of the weights above a target, by moving temperature, mixture weight, or both.

    The effective sample size of a batch is the fraction (sum w)^2 / (n sum w^2) of its rows. After every `window`
    batches, let e be its mean over them:

    - e < target: one parameter moves, multiplied by `step`, within its range. If e is smaller by more than `tolerance`
      than it was before the last such move, the parameter that moved then has gone too far, and from now on moves the
      other way. Where there are two parameters they take turns, eps first, so that each move can be judged.
    - e > target + `margin`: every parameter goes back towards its least, divided by `step`, and will next move upwards.
    - Otherwise nothing moves.

    Neither parameter helps without end (see `RANGES`), which is why the direction is tried and not assumed. Where the
    target is out of reach, the parameters walk to and fro around the best they can do, within their ranges. The mean
    over a window of small batches is noisy; `tolerance` should be above its standard deviation.

    Unbiased: what a batch is drawn with depends on batches before it alone; the weights hold for any proposal. The rule
    has no randomness of its own, and all it remembers is in `state_dict`.

    Example:
        >>> auto = AutoProposal(["eps"], target=0.5, window=1)
        >>> auto.move(torch.tensor(0.3))
        >>> auto.read("eps")
        tensor(0.2500)
    """

    values: Float[Tensor, " m"]
    directions: Float[Tensor, " m"]
    turn: Int[Tensor, ""]
    before: Float[Tensor, ""]
    total: Float[Tensor, ""]
    batches: Int[Tensor, ""]

    def __init__(
        self,
        names: Sequence[str],
        *,
        target: float = 0.5,
        window: int = 10,
        step: float = 1.25,
        margin: float = 0.1,
        tolerance: float = 0.01,
        device: torch.device | str | None = None,
    ) -> None:
        """Starts at the parameters' usual values.

        Args:
            names: what moves: "temperature", "eps" or both.
            target: the effective sample size to stay above, a fraction of the rows, in (0, 1).
            window: batches between moves.
            step: the factor of one move, above 1.
            margin: how far above the target is more than needed.
            tolerance: a fall of e that says nothing.
            device: of the buffers.
        """
        super().__init__()
        for name in names:
            check_one_of("names", name, tuple(RANGES))
        check_share("target_sample_size", target)
        check_at_least("window", window, 1)
        check_above_one("step", step)
        self.names = tuple(name for name in RANGES if name in names)
        self.target, self.window, self.step = target, window, step
        self.margin, self.tolerance = margin, tolerance
        for name, value in self._at_first().items():
            self.register_buffer(name, torch.tensor(value, device=device))

    def _at_first(self) -> dict[str, Any]:
        """Returns the start values of all buffers."""
        ranges = [RANGES[name] for name in self.names]
        return {
            "values": [r.start for r in ranges],
            "directions": [1.0 for _ in ranges],
            "turn": len(ranges) - 1,
            "before": -float("inf"),
            "total": 0.0,
            "batches": 0,
        }

    def reset_parameters(self) -> None:
        """Starts anew, at the usual values. Deferred initialisation calls this after `to_empty`."""
        for name, value in self._at_first().items():
            buffer = self.get_buffer(name)
            buffer.copy_(torch.tensor(value, dtype=buffer.dtype))

    def read(self, name: str) -> Float[Tensor, ""]:
        """Returns the value of a parameter, a copy: a record of this step may not change with the next.

        Args:
            name: one of `names`.
        """
        return self.values[self.names.index(name)].clone()

    def observe(self, routing: Routing) -> None:
        """Takes in a batch, after its step. A batch without rows changes nothing.

        Args:
            routing: what was drawn with the values that this holds.
        """
        rows = torch.as_tensor(routing.num_points, device=routing.logits.device)
        size, rows = average(routing.stats.effective_sample_size, rows, routing.scope)
        self.move(size, rows > 0)

    @torch.no_grad()
    def move(self, sample_size: Float[Tensor, ""], counts: Tensor | bool = True) -> None:
        """Takes in the effective sample size of a batch, and moves if that ends a window. Waits for no device.

        Args:
            sample_size: a fraction of the rows.
            counts: whether the batch had rows.
        """
        counts = torch.as_tensor(counts, device=self.total.device)
        self.total += torch.where(counts, sample_size.to(self.total), 0.0)
        self.batches += counts
        full = self.batches >= self.window
        e = self.total / self.window
        low, high = full & (e < self.target), full & (e > self.target + self.margin)
        number = torch.arange(len(self.names), device=e.device)

        fell = low & (e < self.before - self.tolerance) & (number == self.turn)
        self.directions.copy_(torch.where(high, 1.0, torch.where(fell, -self.directions, self.directions)))
        self.turn.copy_(torch.where(low, (self.turn + 1) % len(self.names), self.turn))
        exponent = torch.where(low & (number == self.turn), self.directions, torch.where(high, -1.0, 0.0))
        ends = torch.tensor([(RANGES[name].least, RANGES[name].most) for name in self.names], device=e.device)
        self.values.copy_((self.values * self.step**exponent).clamp(*ends.unbind(1)))
        self.before.copy_(torch.where(low, e, torch.where(full, -torch.inf, self.before)))
        self.total.masked_fill_(full, 0.0)
        self.batches.masked_fill_(full, 0)

    def extra_repr(self) -> str:
        """Shows the settings."""
        return f"{', '.join(self.names)}, target={self.target}, window={self.window}, step={self.step}"
