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
    """What a rank can do.

    Attributes:
        latency: seconds that a message takes, however small.
        bandwidth: bytes a second that a rank sends.
        flops: multiplications and additions a second of experts, forward and backward.
        pass_seconds: of one pass of the solver over a number of the matrix.
        solve_seconds: of the exact solver for a number of a contested row.
    """

    latency: float
    bandwidth: float
    flops: float
    pass_seconds: float
    solve_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A layer and its batch.

    Attributes:
        ranks: R; as many of them on the expert axis as there are experts at most, the rest hold copies.
        rows: n, tokens of a rank.
        experts: k.
        top_k: K.
        dim: d.
        hidden: features of an expert's hidden layer.
        width: w.
    """

    ranks: int
    rows: int
    experts: int
    top_k: int
    dim: int
    hidden: int
    width: int = 4

    @property
    def expert_ranks(self) -> int:
        """The size of the expert axis."""
        return min(self.ranks, self.experts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Of one forward and backward pass of one layer, for one rank.

    Attributes:
        token_bytes: bytes that tokens, outputs and their gradients take to other ranks.
        token_messages: messages for them.
        solver_bytes: bytes that the scope takes: counts, sums, contested rows.
        solver_messages: messages for them.
        contested: rows that are gathered and solved on every rank.
        compute: seconds of the experts.
        exchange: seconds of the exchange.
        solver: seconds of the assignment.
    """

    token_bytes: float | int
    token_messages: float | int
    solver_bytes: float | int
    solver_messages: float | int
    contested: float | int
    compute: float | int
    exchange: float | int
    solver: float | int

    @property
    def seconds(self) -> float:
        """The step, with nothing overlapped."""
        return self.compute + self.exchange + self.solver

    @property
    def solver_share(self) -> float:
        """The part of it that the assignment takes."""
        return self.solver / self.seconds


def contested_rows(rows: float | int, experts: int) -> float:
    """Rows whose choice prices leave open: a power law through what was measured at 64 experts, at most all.

    Args:
        rows: N.
        experts: k; at 256 the fraction is about 1.2 times that at 64.
    """
    if rows == 0:
        return 0.0
    fraction = _CONTESTED * (rows / _AT_ROWS) ** _EXPONENT * (experts / 64) ** 0.15
    return rows * min(fraction, 1.0)


def predict(layer: Layer, machine: Machine, *, scope: str, equal: bool) -> Cost:
    """Predicts the cost of a layer.

    Args:
        layer: sizes.
        machine: speeds.
        scope: "local" or "global".
        equal: whether the splits are equal, so that no counts travel first.

    Returns:
        The cost of one forward and backward pass.
    """
    others, partners = layer.ranks - 1, layer.expert_ranks - 1
    slots = layer.rows * layer.top_k
    # Tokens there, outputs back, and the gradients of both.
    token_bytes = 4 * slots * layer.dim * layer.width * partners / layer.expert_ranks
    token_messages = 4 * partners + (0 if equal else partners)
    compute = 3 * 2 * 2 * slots * layer.dim * layer.hidden / machine.flops
    exchange = token_messages * machine.latency + token_bytes / machine.bandwidth
    if scope == "local":
        own = contested_rows(layer.rows, layer.experts)
        solver = _solve_seconds(layer.rows, own, layer.experts, machine)
        sizes = others * 24.0 if equal else 0.0
        return Cost(
            token_bytes=token_bytes,
            token_messages=token_messages,
            solver_bytes=sizes,
            solver_messages=others if equal else 0,
            contested=own,
            compute=compute,
            exchange=exchange,
            solver=solver,
        )
    rows = layer.ranks * layer.rows
    open_rows = contested_rows(rows, layer.experts)
    numbers = _PASSES * (layer.experts**2 + layer.experts) + _SUMS_BESIDES * layer.experts + layer.experts**2
    sums = 2 * numbers * 8 * others / layer.ranks
    gathered = open_rows * (layer.experts + 1) * layer.width * others / layer.ranks
    # A tree: twice the logarithm of the ranks for a sum, once for a gathering.
    hops = (2 * (_PASSES + _SUMS_BESIDES) + 1) * math.ceil(math.log2(layer.ranks)) if layer.ranks > 1 else 0
    solver = _solve_seconds(layer.rows, open_rows, layer.experts, machine)
    solver += hops * machine.latency + (sums + gathered) / machine.bandwidth
    return Cost(
        token_bytes=token_bytes,
        token_messages=token_messages,
        solver_bytes=sums + gathered,
        solver_messages=hops,
        contested=open_rows,
        compute=compute,
        exchange=exchange,
        solver=solver,
    )


def _solve_seconds(rows: float | int, contested: float, experts: int, machine: Machine) -> float:
    """Passes over a rank's own rows, and the exact solution of contested ones, which every rank repeats."""
    return _PASSES * rows * experts * machine.pass_seconds + contested * experts * machine.solve_seconds
