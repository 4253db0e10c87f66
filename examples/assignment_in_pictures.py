# SPDX-License-Identifier: Apache-2.0
# %% [markdown]
# # Balanced assignment in pictures
#
# Handwritten digits, six experts, and a rule: every expert takes the same number of images. This page shows what the
# rule does to a routing decision, what prices are, and why the result is provably the best one.
#
# The data are scikit-learn's 1,797 digits, projected onto their first two principal components so that they can be
# drawn.

# %%
import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits

import equipoise as eq

pixels = torch.tensor(load_digits().data)
_, _, directions = torch.linalg.svd(pixels - pixels.mean(0), full_matrices=False)
points = (pixels - pixels.mean(0)) @ directions[:2].T
points = points / points.std(0)

# %% [markdown]
# ## Scores
#
# Each of six experts has a place in the plane. A row's score for an expert is minus the squared distance to it.
# Without a limit each row takes its best expert, `scores.argmax(-1)`.

# %%
experts = torch.tensor([[-1.3, -0.6], [-0.4, 1.3], [0.2, 0.2], [1.5, 0.9], [1.2, -0.8], [-0.2, -1.5]]).double()
scores = -torch.cdist(points, experts).square()
loads = scores.argmax(-1).bincount(minlength=6)
print("rows of each expert:", loads.tolist())
print("a fair share:       ", round(len(points) / 6, 1))

# %% [markdown]
# The busiest expert has more than twice the rows of the least busy one. On hardware that gives each expert the same
# room, the rows that do not fit are dropped, and the rest of the room stays empty.
#
# ## Prices
#
# Let every expert charge a price. A row now takes the expert where *score minus price* is largest. Raise the price of
# an expert that has too many rows, and those that lose least by moving go elsewhere. Repeat: the boundaries between
# experts shift until every expert has its share.

# %%
GRID = torch.tensor(np.stack(np.meshgrid(*[np.linspace(-2.6, 2.6, 400)] * 2), -1).reshape(-1, 2))
SCORES_ON_GRID = -torch.cdist(GRID, experts).square()
COLOURS = (
    np.array([[86, 180, 233], [230, 159, 0], [204, 204, 204], [0, 158, 115], [240, 228, 66], [204, 121, 167]]) / 255
)


def draw(axes, prices: torch.Tensor, title: str) -> None:
    """Colours the plane by the best offer at these prices, and writes the number of rows on each region."""
    regions = (SCORES_ON_GRID - prices).argmax(-1).reshape(400, 400).numpy()
    choice = (scores - prices).argmax(-1)
    axes.imshow(COLOURS[regions], extent=(-2.6, 2.6, -2.6, 2.6), origin="lower", alpha=0.6)
    axes.plot(points[:, 0], points[:, 1], ".", markersize=1.0, color="#333333")
    for expert in range(6):
        middle = points[choice == expert].median(0).values
        label = {"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none", "alpha": 0.9}
        axes.text(
            *middle, str((choice == expert).sum().item()), ha="center", va="center", fontweight="bold", bbox=label
        )
    axes.set(xlim=(-2.6, 2.6), ylim=(-2.6, 2.6), xticks=[], yticks=[], title=title)


share = len(points) / 6
prices = torch.zeros(6, dtype=torch.float64)
frames = {0: prices}
for step in range(1, 41):
    load = (scores - prices).argmax(-1).bincount(minlength=6)
    prices = prices + 0.6 * (load - share) / share * 0.5 ** (step / 12)
    frames[step] = prices - prices.min()

figure, axes = plt.subplots(1, 4, figsize=(11, 3.1), layout="constrained")
figure.set_label("Four frames: regions of the plane by expert, with the rows of each, as prices rise")
for place, step in zip(axes, (0, 2, 8, 40), strict=True):
    draw(place, frames[step], f"after {step} price changes")

# %% [markdown]
# The numbers are the rows that each expert has. Forty rounds of raising and lowering get close to 300 each, and a
# smaller step would get closer. But this is trial and error: it says neither when it is done nor how good the result
# is.
#
# ## The exact answer
#
# `eq.assign` finds the assignment of largest total score among all that respect the capacity, and the prices that
# prove it.

# %%
a = eq.assign(scores)
print("rows of each expert:", a.counts.tolist())
print("prices:             ", [round(price, 2) for price in a.prices.tolist()])
print("total score:        ", round(a.value.item(), 3))
print("left to gain:       ", a.gap.item())

# %% [markdown]
# `a.gap` is the *certificate*. For any prices, the sum of every row's best offer plus what all slots would cost is an
# upper bound on the value of every balanced assignment. At these prices the bound equals the value, so no assignment
# is better. The gap is computed from prices and scores, and anyone can compute it again:

# %%
best_offer = (scores - a.prices).max(-1).values.sum()
bound = best_offer + (a.capacity * a.prices).sum()
print("upper bound minus value:", (bound - a.value).item())

# %%
figure, axes = plt.subplots(1, 2, figsize=(7.2, 3.3), layout="constrained")
figure.set_label("Left: each row takes its best expert. Right: the best balanced assignment")
draw(axes[0], torch.zeros(6), "no limit: the best expert of each row")
draw(axes[1], a.prices, "the best balanced assignment")
moved = a.z != scores.argmax(-1)
print(f"{moved.sum()} of {len(points)} rows take another expert than their first choice")

# %% [markdown]
# Some regions count one row more or less in the picture than they have slots: at optimal prices a few rows are tied
# between two experts, and the assignment decides which one they take.
#
# ## What it costs to be balanced
#
# Capacity with some slack moves fewer rows. `capacity_factor` of a layer means the same: the capacity in units of the
# fair share.

# %%
free = scores.max(-1).values.sum()
for factor in (1.0, 1.1, 1.25, 1.5):
    b = eq.assign(scores, capacity=int(np.ceil(factor * share)), prices=a.prices)
    moved = (b.z != scores.argmax(-1)).double().mean()
    print(
        f"capacity factor {factor:4}: {moved:6.1%} of the rows move, {(free - b.value) / len(points):.3f} lost per row"
    )

# %% [markdown]
# ## Where to go next
#
# - [Prices and the dual](../concepts/prices.md) has the mathematics in one page.
# - [How the solver works](../assignment.md) explains why this takes milliseconds for 65,536 rows.
# - [Gumbel-Matching and importance weights](gumbel_matching.md) adds noise, and makes a gradient of it.
