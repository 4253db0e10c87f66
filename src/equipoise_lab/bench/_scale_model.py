# SPDX-License-Identifier: Apache-2.0
"""What one layer costs on many ranks: a model of bytes, messages, solver time and imbalance.

Legend: R ranks, N tokens of all ranks a step, n = N / R, k experts, K experts a token, d = dim, w bytes a number.
"""

import math
from dataclasses import dataclass

# Contested rows of Gumbel-perturbed logits with popular experts: 4.5%, 2.6%, 1.7% of 16,384, 65,536, 262,144 rows.
_CONTESTED, _AT_ROWS, _EXPONENT = 0.045, 16_384, -0.35
# Passes over the rows that prices take, and sums besides: counts, proof, number of rows.
_PASSES, _SUMS_BESIDES = 20, 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What a rank can do."""

    latency: float  # seconds that a message takes, however small
    bandwidth: float  # bytes a second that a rank sends
    flops: float  # multiplications and additions a second of experts, forward and backward
    pass_seconds: float  # of one pass of the solver over a number of the matrix
    solve_seconds: float  # of the exact solver for a number of a contested row


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
    solver_bytes: float | int  # that the scope takes: counts, sums, contested rows
    solver_messages: float | int
    contested: float | int  # rows that are gathered and solved on every rank
    compute: float | int  # seconds of the experts
    exchange: float | int  # seconds of the exchange
    solver: float | int  # seconds of the assignment

    @property
    def solver_share(self) -> float:
        """The part of the step that the assignment takes, with nothing overlapped."""
        return self.solver / (self.compute + self.exchange + self.solver)


def contested_rows(rows: float | int, experts: int) -> float:
    """Rows whose choice prices leave open: a power law through what was measured at 64 experts, at most all.

    At 256 experts the fraction is about 1.2 times that at 64.
    """
    if rows == 0:
        return 0.0
    fraction = _CONTESTED * (rows / _AT_ROWS) ** _EXPONENT * (experts / 64) ** 0.15
    return rows * min(fraction, 1.0)


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
    if scope == "local":
        contested = contested_rows(layer.rows, k)
        solver_bytes, messages, travel = (others * 24.0, others, 0.0) if equal else (0.0, 0, 0.0)
    else:
        contested = contested_rows(layer.ranks * layer.rows, k)
        numbers = _PASSES * (k**2 + k) + _SUMS_BESIDES * k + k**2
        sums = 2 * numbers * 8 * others / layer.ranks
        solver_bytes = sums + contested * (k + 1) * layer.width * others / layer.ranks
        # A tree: twice the logarithm of the ranks for a sum, once for a gathering.
        messages = (2 * (_PASSES + _SUMS_BESIDES) + 1) * math.ceil(math.log2(layer.ranks)) if layer.ranks > 1 else 0
        travel = messages * machine.latency + solver_bytes / machine.bandwidth
    # Passes over a rank's own rows, and the exact solution of contested ones, which every rank repeats.
    passes = _PASSES * layer.rows * k * machine.pass_seconds
    return Cost(
        token_bytes=token_bytes,
        token_messages=token_messages,
        solver_bytes=solver_bytes,
        solver_messages=messages,
        contested=contested,
        compute=3 * 2 * 2 * slots * layer.dim * layer.hidden / machine.flops,
        exchange=token_messages * machine.latency + token_bytes / machine.bandwidth,
        solver=passes + contested * k * machine.solve_seconds + travel,
    )
