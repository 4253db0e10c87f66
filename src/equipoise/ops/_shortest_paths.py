# SPDX-License-Identifier: Apache-2.0
"""All-pairs shortest paths on small dense graphs, and the walks that pointers describe, a batch at a time.

Legend: k nodes, ... batch dimensions. `[from, to]` is the order of every matrix.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ShortestPaths:
    """The shortest path between every pair of nodes.

    Attributes:
        cost: the cost of the shortest path `[from, to]`; +inf where there is none. The diagonal is 0 (the path that
        goes
            nowhere), or negative where a negative cycle runs through the node.
        next_node: the node after `from` on that path, so that repeating `j = next_node[j, to]` walks it; meaningless
            where `cost` is +inf. Where the diagonal is negative, `next_node[j, j]` is the first step of that cycle.
    """

    cost: Float[Tensor, "*batch k k"]
    next_node: Int[Tensor, "*batch k k"]


def floyd_warshall(cost: Float[Tensor, "*batch k k"], *, stop_below: float | None = None) -> ShortestPaths:
    r"""Finds the shortest path between every pair of nodes of a dense graph.

    Solves, for every pair (j, t) and over all paths j = v_0, v_1, ..., v_L = t of any length L >= 0,

    .. math::
        d^*_{jt} = \min_{v} \sum_{l=1}^{L} d_{v_{l-1} v_l}.

    The parallel form of the Floyd-Warshall algorithm: k sequential steps, and step m relaxes every pair of every
    problem at once with the paths that pass through node m, O(k^3) work a problem.

    A graph with a negative cycle has no shortest paths. With `stop_below`, a problem is frozen right after the first
    step that brings a diagonal entry below it: App. D.2, "stop as soon as a negative cycle is found". Following
    `next_node` from the node of that entry then runs into a negative cycle (see `assignment._cycle_cancelling`, which
    walks it). Without `stop_below` nothing is read back from the device, and the cycles of the graph must not be
    negative.

    Args:
        cost: the cost of each edge, `[from, to]`; +inf where there is none, never -inf. A positive diagonal is ignored.
        stop_below: freeze a problem once a diagonal entry is below this (a number <= 0); the loop ends when all are
            frozen. None: never.

    Returns:
        The costs, and the next node on each path.

    Example:
        >>> import torch
        >>> from equipoise.ops import floyd_warshall
        >>> inf = float("inf")
        >>> paths = floyd_warshall(torch.tensor([[0.0, 1.0, 9.0], [inf, 0.0, 1.0], [inf, inf, 0.0]]))
        >>> paths.cost[0].tolist(), paths.next_node[0, 2].item(), paths.cost[2, 0].item()
        ([0.0, 1.0, 2.0], 1, inf)

    References:
        R. W. Floyd, Algorithm 97: Shortest path. Communications of the ACM 5(6), 1962.
    """
    k = cost.shape[-1]
    paths = cost.clone()
    paths.diagonal(dim1=-2, dim2=-1).clamp_(max=0)
    next_node = torch.arange(k, device=cost.device).expand(cost.shape).clone()
    frozen = _frozen(paths, stop_below)
    for m in range(k):
        if frozen is not None and bool(frozen.all()):
            break
        # Every operand is read before anything is written, so this is one parallel step. inf + inf = inf is never
        # shorter than anything, so a missing edge never makes a path, and no difference of infinities is ever formed.
        through = paths[..., :, m : m + 1] + paths[..., m : m + 1, :]
        shorter = through < paths
        if frozen is not None:
            shorter &= ~frozen[..., None, None]
        next_node = torch.where(shorter, next_node[..., :, m : m + 1], next_node)
        paths = torch.where(shorter, through, paths)
        frozen = _frozen(paths, stop_below)
    return ShortestPaths(cost=paths, next_node=next_node)


def _frozen(paths: Float[Tensor, "*batch k k"], stop_below: float | None) -> Tensor | None:
    """Which problems have a diagonal entry below `stop_below`; None when nothing ever stops them."""
    if stop_below is None:
        return None
    return (paths.diagonal(dim1=-2, dim2=-1) < stop_below).any(-1)


def advance(pointer: Int[Tensor, "*batch k"], node: Int[Tensor, "*batch"], steps: int) -> Int[Tensor, "*batch"]:
    """Follows `pointer` from `node` for at least `steps` steps, in about log2(steps) operations.

    Args:
        pointer: the node that each node points to.
        node: where to start.
        steps: how far to go at least; rounded up to a power of two.

    Returns:
        The node arrived at. After k steps it is certainly on a cycle.

    Example:
        >>> advance(torch.tensor([1, 2, 3, 2]), torch.tensor(0), 4).item()
        2
    """
    jump = pointer
    while steps > 1:
        jump, steps = jump.gather(-1, jump), (steps + 1) // 2
    return jump.gather(-1, node.unsqueeze(-1)).squeeze(-1)


def visited(pointer: Int[Tensor, "*batch k"], node: Int[Tensor, "*batch"]) -> Bool[Tensor, "*batch k"]:
    """Marks `node` and every node that following `pointer` from it ever visits, in about log2(k) operations.

    Args:
        pointer: the node that each node points to.
        node: where to start.

    Returns:
        True for the nodes visited.

    Example:
        >>> visited(torch.tensor([1, 1, 0]), torch.tensor(0)).tolist()
        [True, True, False]
    """
    k = pointer.shape[-1]
    seen = torch.zeros_like(pointer).scatter_(-1, node.unsqueeze(-1), 1)
    jump, steps = pointer, 1
    while steps < k:
        # What t steps have visited, and the same t steps further on, is what 2 t steps visit.
        seen = seen.scatter_add(-1, jump, seen).clamp_(max=1)
        jump, steps = jump.gather(-1, jump), 2 * steps
    return seen.bool()
