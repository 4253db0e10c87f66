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
        cost: the cost of the shortest path `[from, to]`; +inf where there is none. The diagonal is 0.
        next_node: the node after `from` on that path, so that repeating `j = next_node[j, to]` walks it; meaningless
            where `cost` is +inf.

    Example:
        >>> import torch
        >>> from equipoise.ops import floyd_warshall
        >>> paths = floyd_warshall(torch.tensor([[0.0, 1.0, 9.0], [9.0, 0.0, 1.0], [9.0, 9.0, 0.0]]))
        >>> paths.cost[0, 2].item(), paths.next_node[0, 2].item()
        (2.0, 1)
    """

    cost: Float[Tensor, "*batch k k"]
    next_node: Int[Tensor, "*batch k k"]


def floyd_warshall(cost: Float[Tensor, "*batch k k"]) -> ShortestPaths:
    r"""Finds the shortest path between every pair of nodes of a dense graph.

    Solves, for every pair (j, t) and over all paths j = v_0, v_1, ..., v_L = t of any length L >= 0,

    .. math::
        d^*_{jt} = \min_{v} \sum_{l=1}^{L} d_{v_{l-1} v_l}.

    The parallel form of the Floyd-Warshall algorithm: k sequential steps, and step m relaxes every pair of every
    problem at once with the paths that pass through node m, O(k^3) work a problem. Nothing is read back from the
    device.

    Args:
        cost: the cost of each edge, `[from, to]`; +inf where there is none, never -inf. A positive diagonal is ignored.
            No cycle may be negative: a graph with a negative cycle has no shortest paths.

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
    for m in range(k):
        # Every operand is read before anything is written, so this is one parallel step. inf + inf = inf is never
        # shorter than anything, so a missing edge never makes a path, and no difference of infinities is ever formed.
        through = paths[..., :, m : m + 1] + paths[..., m : m + 1, :]
        shorter = through < paths
        next_node = torch.where(shorter, next_node[..., :, m : m + 1], next_node)
        paths = torch.where(shorter, through, paths)
    return ShortestPaths(cost=paths, next_node=next_node)


def negative_cycles(cost: Float[Tensor, "*batch k k"]) -> Int[Tensor, "*batch k"]:
    """Finds negative cycles of a dense graph that have no node in common, at least one if there is any.

    Bellman-Ford from all nodes at once. h(x) is the cost of the cheapest walk found so far that starts at x, 0 at
    first, and a round sets h(x) = min_y d(x, y) + h(y) for every x. Where that lowers h(x), x points to the y of the
    minimum. A graph stops at the first round after which its pointers run in a cycle. Each node has one pointer, so
    all such cycles are disjoint.

    **They are negative.** h never rises, so h(x) >= d(x, y) + h(y) for every pointer x -> y, and summed over a cycle
    the h cancel: its cost is at most 0. Take a cycle that was closed in the last round. If all its nodes fell in that
    round, each pointer x -> y was set with the h(y) of the round before, which was larger. If only some did, one of
    them, y, has a predecessor x that did not fall, and h(x) >= d(x, y) + h(y) held before h(y) fell. In both cases one
    of the inequalities is strict.

    **There is one if any cycle is negative.** Without a cycle of pointers, following them from x is a path of at most
    k - 1 edges that costs at most h(x). After k - 1 rounds h(x) is at most the cost of every such path, so round k
    lowers nothing, and then no cycle is negative.

    All of this needs exact sums of up to k costs: round them to integers if need be.

    Args:
        cost: the cost of each edge, `[from, to]`; +inf where there is none, never -inf; the diagonal is not negative.

    Returns:
        The next node for those on the cycles, k for all others.

    Example:
        >>> import torch
        >>> from equipoise.ops import negative_cycles
        >>> cost = torch.full([5, 5], 9.0)
        >>> cost[0, 1], cost[1, 0], cost[3, 4], cost[4, 3] = -2.0, 1.0, -3.0, 1.0
        >>> negative_cycles(cost).tolist()
        [1, 0, 5, 4, 3]

    References:
        B. V. Cherkassky, A. V. Goldberg, Negative-cycle detection algorithms. Mathematical Programming 85, 1999.
    """
    k = cost.shape[-1]
    own = torch.arange(k, device=cost.device).expand(cost.shape[:-1])
    pointer, on_cycle = own, torch.zeros_like(own, dtype=torch.bool)
    walk = cost.new_zeros(cost.shape[:-1])
    for _ in range(k):
        least, towards = (cost + walk.unsqueeze(-2)).min(-1)
        fell = (least < walk) & ~on_cycle.any(-1, keepdim=True)
        if not bool(fell.any()):
            break
        walk, pointer = least.where(fell, walk), towards.where(fell, pointer)
        on_cycle = _ends(pointer) & (pointer != own)
    return pointer.where(on_cycle, k)


def _ends(pointer: Int[Tensor, "*batch k"]) -> Bool[Tensor, "*batch k"]:
    """Marks the nodes where walks of at least k steps end: those on cycles, and those that point to themselves."""
    jump, steps = pointer, 1
    while steps < pointer.shape[-1]:
        jump, steps = jump.gather(-1, jump), 2 * steps
    return torch.zeros_like(pointer, dtype=torch.bool).scatter_(-1, jump, True)


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
