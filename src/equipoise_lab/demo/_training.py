# SPDX-License-Identifier: Apache-2.0
"""The part of the tour that trains: eight experts learn a picture that is too much for one of them."""

from contextlib import nullcontext
from typing import Any

import torch
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from torch import Tensor

import equipoise as eq
from equipoise_lab._style import GREY, add_grid, new_figure, row, stack, style
from equipoise_lab.demo._page import Part

_BALANCED = "#8c2d04"
_PANES, _HIDDEN, _ROWS, _SIDE = 8, 8, 128, 160
_AVERAGED = 20


class Window:
    """A picture like stained glass: eight panes of equal area, each with a colour that changes across it."""

    def __init__(self) -> None:
        """Draws the panes; the exact assignment makes them equally large."""
        generator = torch.Generator().manual_seed(5)
        self._centres = torch.rand(_PANES, 2, generator=generator) * 2 - 1
        points = torch.rand(128, 2, generator=generator) * 2 - 1
        for _ in range(20):
            a = eq.assign(-torch.cdist(points, self._centres).square())
            self._centres = torch.stack([points[a.z == pane].mean(0) for pane in range(_PANES)])
        self._prices = eq.assign(-torch.cdist(points, self._centres).square()).prices.float()
        self._colours = torch.rand(_PANES, 3, generator=generator) * 1.4 - 0.7
        self._slopes = torch.randn(_PANES, 2, 3, generator=generator) * 0.9

    def __call__(self, points: Float[Tensor, "n 2"]) -> Float[Tensor, "n 3"]:
        """Returns the colour at each point, red, green and blue, about -1 to 1."""
        pane = (-torch.cdist(points, self._centres).square() - self._prices).argmax(-1)
        across = torch.einsum("nd,ndc->nc", points - self._centres[pane], self._slopes[pane])
        return self._colours[pane] + across


def with_one(points: Float[Tensor, "n 2"]) -> Float[Tensor, "n 3"]:
    """Returns what the networks see of a point: its place, and a 1 so that the router can move its boundaries."""
    return torch.cat([2.0 * points, torch.ones(len(points), 1)], -1)


def train(
    network: torch.nn.Module, optimizer: torch.optim.Optimizer, window: Window, steps: int
) -> tuple[list[float], list[list[int]]]:
    """Trains a network, or a mixture and its router together.

    Returns:
        The mean squared error of every batch, and how many points of it each expert had, where there are experts.
    """
    routed, surrogate = isinstance(network, eq.nn.MoE), eq.nn.Surrogate()
    errors: list[float] = []
    loads: list[list[int]] = []
    for _ in range(steps):
        points = torch.rand(_ROWS, 2) * 2 - 1
        with eq.nn.capture(network, optimizer) if routed else nullcontext(()) as routings:
            losses = (network(with_one(points)) - window(points)).square()
        losses = losses.mean(-1) if routed else losses  # a surrogate takes one for each point
        loss = surrogate(losses, routings) if routed else losses.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        errors.append(losses.mean().item())
        loads += [routing.stats.load.tolist() for routing in routings]
    return errors, loads


@torch.no_grad()
def show_training(steps: int = 800) -> Part:
    """Compares eight balanced experts with one expert of the same size, which does the same work for a point."""
    axis = (torch.arange(_SIDE) + 0.5) / _SIDE * 2 - 1
    grid = torch.cartesian_prod(-axis, axis).flip(-1)  # rows of pixels from above, each from the left
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        window = Window()
        one = torch.nn.Sequential(torch.nn.Linear(3, _HIDDEN), torch.nn.GELU(), torch.nn.Linear(_HIDDEN, 3))
        one_errors, _ = train(one, torch.optim.Adam(one.parameters(), lr=0.03), window, steps)
        how: dict[str, Any] = {"router": "gm-iw-mix", "capacity_factor": 1.0, "eps": 0.05}
        moe = eq.nn.MoE(3, _PANES, hidden_dim=_HIDDEN, marginal_entropy=0.01, **how)
        groups = eq.nn.parameter_groups(moe, lr=0.03, router_lr_scale=3.0)
        errors, loads = train(moe, torch.optim.Adam(groups), window, steps)
    target = window(grid)
    pictures = {"the picture": target}
    wrong: dict[str, float] = {}
    for name, network in {"one expert": one, "eight experts": moe.eval()}.items():
        drawn = network(with_one(grid))
        wrong[name] = (drawn - target).square().mean().item()
        pictures[f"{name}: error {wrong[name]:.3f}"] = drawn
    experts = moe.router(with_one(grid)).indices.squeeze(-1)
    figure = _draw(pictures, experts, {"one expert": one_errors, "eight experts": errors})
    even = all(load == loads[0] for load in loads)
    return Part(
        title="Train a mixture of experts",
        code='moe = eq.nn.MoE(3, 8, hidden_dim=8, router="gm-iw-mix", capacity_factor=1.0)\n'
        "with eq.nn.capture(moe, optimizer) as routings:\n    losses = (moe(x) - y).square().mean(-1)\n"
        "surrogate(losses, routings).backward()",
        found=(
            f"After {steps} steps the squared error of eight experts is {wrong['eight experts']:.3f}. "
            f"One expert of the same size does the same work for a point, and has {wrong['one expert']:.3f}.",
            f"Every expert had {loads[0][0]} of {_ROWS} points in every step: nothing was dropped."
            if even
            else "The load differed between experts.",
        ),
        figure=figure,
        caption="A picture of eight panes, as one expert and as eight learn it. The fourth picture shows the regions "
        "that the router gave to the experts. Below, the error of the batches in training, where experts are drawn at "
        f"random (mean of {_AVERAGED} steps).",
    )


def _draw(pictures: dict[str, Tensor], experts: Int[Tensor, "n"], curves: dict[str, list[float]]) -> Figure:
    """Draws the pictures, named by their titles, in a row, and the errors below."""
    with style():
        figure = new_figure(7.0, 4.3)
        above, below = stack(figure, 1.0, 1.05)
        *places, last = row(above, 4)
        for axes, (title, drawn) in zip(places, pictures.items(), strict=True):
            axes.imshow((drawn.reshape(_SIDE, _SIDE, 3) / 2 + 0.5).clamp(0, 1).numpy())
            axes.set_title(title)
        last.imshow(experts.reshape(_SIDE, _SIDE).numpy(), cmap="cividis", interpolation="nearest")
        last.set_title("expert of each point")
        for axes in (*places, last):
            axes.set(xticks=[], yticks=[])
        (axes,) = row(below, 1)
        for name, errors in curves.items():
            colour = _BALANCED if name == "eight experts" else GREY
            width = min(_AVERAGED, len(errors))
            smooth = torch.tensor(errors).unfold(0, width, 1).mean(-1)
            steps = range(width, len(errors) + 1)
            axes.plot(steps, smooth.tolist(), color=colour, label=name)
            axes.annotate(name, (len(errors), float(smooth[-1])), (5, 0), textcoords="offset points", color=colour)
        axes.set(xlabel="step", ylabel="mean squared error", xlim=(0, 1.18 * len(curves["one expert"])), ylim=(0, None))
        add_grid(axes, "y")
    return figure
