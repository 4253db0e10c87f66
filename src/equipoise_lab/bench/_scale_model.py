# SPDX-License-Identifier: Apache-2.0
"""What one layer costs on many ranks: a model of bytes, messages, solver time and imbalance.

Legend: R ranks, N tokens of all ranks a step, n = N / R, k experts, K experts a token, d = dim, w bytes a number.
"""

import math
from dataclasses import dataclass

from equipoise.assignment._price_steps import STEPS
from equipoise.assignment._settle import EACH

# Passes over the rows: price steps, settling, the proof. Each ends in a sum over ranks; so do the largest scores and
# the number of rows. A sample and contested rows are gathered.
_PASSES, _SUMS, _GATHERINGS = STEPS + 2, STEPS + 4, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What a rank can do."""

    latency: float  # seconds that a message takes, however small
    bandwidth: float  # bytes a second that a rank sends
    flops: float  # multiplications and additions a second of experts, forward and backward
    pass_seconds: float  # of one pass of the solver over a number of the matrix
    solve_seconds: float  # of the exact solver for a number of a gathered row


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A layer and its batch."""

    ranks: int  # R; as many of them on the expert axis as there are experts at most, the rest hold copies
    rows: int  # n, tokens of a rank
    experts: int  # k
    top_k: int  # K
    dim: int  # d
    hidden: int  # features of an expert's hidden layer
    width: int = 4  # w


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Of one forward and backward pass of one layer, for one rank."""

    token_bytes: float | int  # that tokens, outputs and their gradients take to other ranks
    token_messages: float | int
    solver_bytes: float | int  # that the scope takes: sums, gathered rows
    solver_messages: float | int
    gathered: float | int  # rows that are solved on every rank
    compute: float | int  # seconds of the experts
    exchange: float | int  # seconds of the exchange
    solver: float | int  # seconds of the assignment

    @property
    def solver_share(self) -> float:
        """The part of the step that the assignment takes, with nothing overlapped."""
        return self.solver / (self.compute + self.exchange + self.solver)


def travelling_rows(rows: int, experts: int) -> int:
    """Rows that are solved for the prices of a sample and for those whose choice prices leave open.

    As many for each expert however many rows there are; all rows, if the open ones were half of them.
    """
    each = EACH * experts
    return 2 * each if rows > 2 * each else rows


def predict(layer: Layer, machine: Machine, *, scope: str, equal: bool) -> Cost:
    """Predicts the cost of one forward and backward pass of a layer.

    Args:
        layer: sizes.
        machine: speeds.
        scope: "local" or "global".
        equal: whether the splits are equal, so that no counts travel first.
    """
    k, others, expert_ranks = layer.experts, layer.ranks - 1, min(layer.ranks, layer.experts)
    slots, partners = layer.rows * layer.top_k, expert_ranks - 1
    # Tokens there, outputs back, and the gradients of both.
    token_bytes = 4 * slots * layer.dim * layer.width * partners / expert_ranks
    token_messages = 4 * partners + (0 if equal else partners)
    gathered = travelling_rows(layer.rows * (1 if scope == "local" else layer.ranks), k)
    solver_bytes, messages, travel = (others * 24.0, others, 0.0) if scope == "local" and equal else (0.0, 0, 0.0)
    if scope == "global" and others > 0:
        # A step sums counts, curvature, widths and rows; then counts of settled rows, the proof, the largest scores.
        numbers = STEPS * (k**2 + k + 2) + 3 * (k + 1) + 2
        solver_bytes = (2 * numbers * 8 + gathered * (k + 1) * layer.width) * others / layer.ranks
        # A tree: twice the logarithm of the ranks for a sum, once for a gathering.
        messages = (2 * _SUMS + _GATHERINGS) * math.ceil(math.log2(layer.ranks))
        travel = messages * machine.latency + solver_bytes / machine.bandwidth
    # Passes over a rank's own rows, and the exact solution of those that were gathered, which every rank repeats.
    passes = _PASSES * layer.rows * k * machine.pass_seconds
    return Cost(
        token_bytes=token_bytes,
        token_messages=token_messages,
        solver_bytes=solver_bytes,
        solver_messages=messages,
        gathered=gathered,
        compute=3 * 2 * 2 * slots * layer.dim * layer.hidden / machine.flops,
        exchange=token_messages * machine.latency + token_bytes / machine.bandwidth,
        solver=passes + gathered * k * machine.solve_seconds + travel,
    )
