# SPDX-License-Identifier: Apache-2.0
"""Run in an interpreter of its own by test_dispatch: dispatch, experts and combine as one graph.

Dynamo traces the checking wrappers that the tests put around every function and dataclass, and cannot.
"""

import pytest
import torch
from torch import Tensor

from equipoise.nn import Experts, LocalDispatcher, MLPExperts, Routing, SwiGLUExperts

E, DIM = 3, 8
DROPPED = torch.tensor([[2], [3], [0], [2], [0], [3]])
TWO = torch.tensor([[2, 0], [3, 3], [0, 1], [2, 3], [0, 2], [1, 0]])
BALANCED = torch.tensor([[2], [1], [0], [2], [1], [0]])


def routing(indices: Tensor, scores: Tensor, *, capacity: int | None, exactly_balanced: bool) -> Routing:
    rows = indices.shape[0]
    logits = scores.new_zeros(rows, E)
    return Routing(
        logits=logits,
        log_p=logits,
        indices=indices,
        scores=scores,
        weight=scores.new_ones(rows),
        kept=(indices < E).any(1),
        sample=None,
        prices=None,
        gap=None,
        work=None,
        capacity=capacity,
        mask=None,
        shape=(rows,),
        score_function=False,
        exactly_balanced=exactly_balanced,
        balance_losses={},
    )


def layer(experts: Experts, layout: str, x: Tensor, scores: Tensor, z: Tensor, **how) -> Tensor:
    dispatcher = LocalDispatcher(layout)
    groups, metadata = dispatcher.dispatch(x, routing(z, scores, **how))
    return dispatcher.combine(experts(groups), metadata)


def main() -> None:
    torch.manual_seed(0)
    mlp, gated = MLPExperts(DIM, E, hidden_dim=4), SwiGLUExperts(DIM, E, hidden_dim=4)
    fused = MLPExperts(DIM, E, hidden_dim=4, compute="fused")
    parameters = [p for experts in (mlp, gated, fused) for p in experts.parameters()]

    def eager(x: Tensor, scores: Tensor, dropped: Tensor, two: Tensor, balanced: Tensor) -> Tensor:
        """One layer after the other, each with its own layout."""
        x = x + layer(mlp, "ragged", x, scores[:, :1], dropped, capacity=None, exactly_balanced=False)
        x = x + layer(gated, "padded", x, scores, two, capacity=None, exactly_balanced=False)
        return x + layer(fused, "auto", x, scores[:, 1:], balanced, capacity=None, exactly_balanced=True)

    # One graph, or an error, for sizes that change.
    compiled = torch.compile(eager, fullgraph=True, dynamic=True, backend="aot_eager")
    for repeats in (1, 2):
        chosen = [z.repeat(repeats, 1) for z in (DROPPED, TWO, BALANCED)]
        x, scores = (f(6 * repeats, n).requires_grad_() for f, n in ((torch.randn, DIM), (torch.rand, 2)))
        found = []
        for function in (compiled, eager):
            y = function(x, scores, *chosen)
            found.append([y.detach(), *torch.autograd.grad(y.square().sum(), [x, scores, *parameters])])
        torch.testing.assert_close(*found)

    def broken(x: Tensor) -> Tensor:
        return layer(mlp, "padded", x, torch.zeros(6, 1), DROPPED, capacity=1, exactly_balanced=False)

    message = "expert 0 has 2 rows where its capacity promises at most 1"
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        torch.compile(broken, fullgraph=True, backend="aot_eager")(torch.zeros(6, DIM))


if __name__ == "__main__":
    main()
