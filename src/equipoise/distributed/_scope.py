# SPDX-License-Identifier: Apache-2.0
"""The scope of a layer whose rows are spread over ranks.

Legend: n rows (datapoints) of this rank, k columns (experts).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from equipoise._core import Capacity, check_capacity
from equipoise.assignment import Assignment
from equipoise.balancing import Balanced
from equipoise.distributed._ranks import Ranks
from equipoise.distributed._shared_solvers import gather_matrix, shared_assign, shared_detours, shared_sinkhorn
from equipoise.ops import count_groups, rank_within_groups
from equipoise.sampling import Scope

# Odd numbers with well mixed bits (Steele, Lea, Flood, Fast splittable pseudorandom number generators, 2014).
_STEP, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_BITS = (1 << 64) - 1


@dataclass(frozen=True)
class _Facts:
    """What a rank tells the others when a forward pass begins."""

    rows: int
    whole: bool
    training: bool


class MeshScope(Scope):
    """The rows of a layer on the ranks of a mesh.

    With `shared` a decision is made over the rows of all ranks, as if they were in one process, rank after rank.
    Without, over this rank's; what is learnt from past batches is averaged over all ranks either way.
    """

    def __init__(self, peers: Ranks, *, shared: bool, facts: Callable[[], list[list[int]]] | None = None) -> None:
        """Sets up the scope.

        Args:
            peers: of the mesh.
            shared: whether rows of all ranks share the capacity.
            facts: waits for what every rank said when this forward pass began; None outside of one.
        """
        self.peers, self.shared = peers, shared
        self.ranks = peers.size if shared else 1
        self._wait, self._facts = facts, None

    def begin(self, num_rows: int, *, whole: bool, training: bool, exact: bool) -> Scope:
        """Tells the other ranks how many rows there are, while the router works; see `Scope`."""
        if self.peers.size == 1 or not (self.shared or exact):
            return self
        return MeshScope(self.peers, shared=self.shared, facts=self.peers.gather_numbers([num_rows, whole, training]))

    @property
    def facts(self) -> list[_Facts]:
        """What every rank said."""
        if self._facts is None:
            assert self._wait is not None, "a scope outside of a forward pass knows no other rank's rows"
            self._facts = [_Facts(rows, bool(whole), bool(training)) for rows, whole, training in self._wait()]
            if len({fact.training for fact in self._facts}) > 1:
                modes = ["training" if fact.training else "evaluation" for fact in self._facts]
                raise ValueError(
                    f"the layers of all ranks must be in one mode, got {modes} by rank: call model.train() or "
                    "model.eval() on all of them"
                )
        return self._facts

    @property
    def alike(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether all ranks have as many rows, none of them masked."""
        if self.peers.size == 1:
            return True
        return (
            self._wait is not None
            and len({fact.rows for fact in self.facts}) == 1
            and all(fact.whole for fact in self.facts)
        )

    def generator(self, given: torch.Generator | None, device: torch.device) -> torch.Generator | None:
        """Derives this rank's own stream from one number of the given one: independent, though seeds be equal.

        The number comes from the given stream or the global one of the CPU, which activation checkpointing restores.
        """
        where = torch.device("cpu") if given is None else given.device
        seed = int(torch.randint(2**62, [], generator=given, device=where))
        return torch.Generator(device).manual_seed(stream_seed(seed, self.peers.rank))

    def count(self, num_rows: int) -> int:
        """Adds up the rows of the scope; see `Scope`."""
        if self.ranks == 1:
            return num_rows
        if self._wait is None:  # outside of a forward pass
            return sum(rows for (rows,) in self.peers.gather_numbers([num_rows])())
        return sum(fact.rows for fact in self.facts)

    def slots(self, capacity: Capacity, shape: Sequence[int], mask: Tensor | None, device: torch.device) -> Tensor:
        """Turns a capacity into int64 [..., k]; see `Scope`."""
        *batch, n, k = shape
        if capacity is None and self.ranks > 1:
            rows = torch.full(batch, n, device=device) if mask is None else mask.sum(-1)
            return (-(-self.total(rows) // k)).unsqueeze(-1).expand(*batch, k).contiguous()
        return check_capacity(capacity, batch, n, k, mask, device)

    def first(self, x: Tensor) -> Tensor:
        """Returns the first rank's value; see `Scope`."""
        if self.ranks == 1:
            return x
        x = x.clone()
        self.peers.broadcast(x)
        return x

    def total(self, x: Tensor) -> Tensor:
        """Adds up over the scope; see `Scope`."""
        if self.ranks == 1:
            return x
        return _Total.apply(x, self.peers) if x.requires_grad else self.peers.all_reduce(x)  # pyright: ignore

    def largest(self, x: Tensor) -> Tensor:
        """Returns the largest over the scope; see `Scope`."""
        return x if self.ranks == 1 else self.peers.all_reduce(x, "max")

    def everywhere(self, x: Tensor) -> Tensor:
        """Adds up over all ranks; see `Scope`."""
        return x if self.peers.size == 1 else self.peers.all_reduce(x)

    def rows(self, x: Tensor) -> Tensor:
        """Gathers the rows of the scope; see `Scope`."""
        return x if self.ranks == 1 else torch.cat(self.peers.all_gather(x))

    def assign(self, scores: Tensor, capacity: Any = None, **how: Any) -> Assignment:
        """Solves the assignment of the scope's rows; see `Scope`."""
        if self.ranks == 1:
            return super().assign(scores, capacity, **how)
        return shared_assign(self.peers, scores, capacity, **how)

    def detour_costs(self, scores: Tensor, a: Assignment) -> Tensor:
        """Computes path costs over the scope's rows; see `Scope`."""
        return super().detour_costs(scores, a) if self.ranks == 1 else shared_detours(self.peers, scores, a)

    def sinkhorn(self, logits: Tensor, capacity: Any = None, **how: Any) -> Balanced:
        """Balances the scope's rows in expectation; see `Scope`."""
        if self.ranks == 1:
            return super().sinkhorn(logits, capacity, **how)
        return shared_sinkhorn(self.peers, logits, capacity, **how)

    def rank_within_groups(self, groups: Tensor, keys: Tensor, counts: Tensor) -> Tensor:
        """Ranks rows among the scope's; see `Scope`. A label and a key of each row travel."""
        if self.ranks == 1:
            return rank_within_groups(groups, keys, counts)
        pairs = torch.stack([groups.double(), keys.double()], -1)  # both are exact in float64
        every, own = gather_matrix(self.peers, pairs, -2)
        labels = every[..., 0].long()
        ranked = rank_within_groups(labels, every[..., 1].to(keys.dtype), count_groups(labels, counts.shape[-1]))
        return ranked[..., own]

    def __repr__(self) -> str:
        """Shows the kind, and the ranks."""
        return f"MeshScope({'global' if self.shared else 'local'}, {self.peers!r})"


def stream_seed(seed: int, rank: int) -> int:
    """Mixes a number that ranks may share with the rank: seeds of streams that have nothing to do with each other.

    Args:
        seed: any non-negative number.
        rank: of the mesh.

    Returns:
        An integer in [0, 2^63).

    Example:
        >>> stream_seed(0, 0) != stream_seed(0, 1)
        True
    """
    x = (seed + (rank + 1) * _STEP) & _BITS
    x = ((x ^ (x >> 30)) * _MIX_1) & _BITS
    x = ((x ^ (x >> 27)) * _MIX_2) & _BITS
    return (x ^ (x >> 31)) >> 1


class _Total(Function):
    """A sum over ranks; the gradient of this rank's part, times the number of ranks (see `Scope.total`)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Ranks) -> Tensor:
        ctx.size = peers.size
        return peers.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.size, None
