# SPDX-License-Identifier: Apache-2.0
"""Run in an interpreter of its own by test_dispatch: dispatch, experts and combine as one graph.

Dynamo traces the checking wrappers that the tests put around every function and dataclass, and cannot.
"""

import pytest
import torch
from torch import Tensor, nn

from equipoise.nn import LocalDispatcher
from equipoise.nn._experts import MLPExperts, SwiGLUExperts

E, DIM = 3, 8
DROPPED = torch.tensor([[2], [3], [0], [2], [0], [3]])
TWO = torch.tensor([[2, 0], [3, 3], [0, 1], [2, 3], [0, 2], [1, 0]])
BALANCED = torch.tensor([[2], [1], [0], [2], [1], [0]])


def main() -> None:
    # Beside this script, so that only a run of it finds them: pytest, which looks here for doctests, would not.
    from test_dispatch import layer, make_routing

    def run(experts: nn.Module, layout: str, x: Tensor, scores: Tensor, z: Tensor, **promises) -> Tensor:
        return layer(LocalDispatcher(layout), experts, x, make_routing(z, scores, **promises))

    torch.manual_seed(0)
    mlp, gated = MLPExperts(DIM, E, hidden_dim=4), SwiGLUExperts(DIM, E, hidden_dim=4)
    fused = MLPExperts(DIM, E, hidden_dim=4, compute="fused")
    parameters = [p for experts in (mlp, gated, fused) for p in experts.parameters()]

    def eager(x: Tensor, scores: Tensor, dropped: Tensor, two: Tensor, balanced: Tensor) -> Tensor:
        """One layer after the other, each with its own layout."""
        x = x + run(mlp, "ragged", x, scores[:, :1], dropped)
        x = x + run(gated, "padded", x, scores, two)
        return x + run(fused, "auto", x, scores[:, 1:], balanced, exactly_balanced=True)

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
        return run(mlp, "padded", x, torch.zeros(6, 1), DROPPED, capacity=1)

    message = "expert 0 has 2 rows where its capacity promises at most 1"
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        torch.compile(broken, fullgraph=True, backend="aot_eager")(torch.zeros(6, DIM))


if __name__ == "__main__":
    main()
