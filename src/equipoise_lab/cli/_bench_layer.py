# SPDX-License-Identifier: Apache-2.0
"""`equipoise bench layer`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from equipoise_lab.cli._bench import run_benchmark, set_threads

_THREADS = (1, 2)


def layer(
    out: Annotated[Path, typer.Option(help="Folder for the results.", file_okay=False)] = Path("out/bench-layer"),
    grid: Annotated[
        Literal["quick", "full"],
        typer.Option(help="Size of the layer: quick takes a minute or two, full a quarter of an hour."),
    ] = "full",
    threads: Annotated[
        list[int] | None, typer.Option(min=1, help="Threads for torch; repeat it for several. [default: 1 and 2]")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of each comparison; the best time counts.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Seed of parameters, tokens and noise.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Keep what a run that ended has measured too.")] = False,
) -> None:
    """Time the layer against a dense one, Switch and Hugging Face transformers.

    One forward and backward pass of `eq.nn.MoE` with every router, with the share that the router takes; `gm-iw` and
    `skip-iw` against `switch`; `topk` against `MixtralSparseMoeBlock` of transformers with the same parameters, in the
    fastest of its modes (without it: `pip install 'equipoise[transformers]'`, the rest runs); peak memory against the
    dense layer of the same active size. Layers that are compared take turns. Each figure is held against a stated
    limit.

    Writes `bench-layer.json` (after every measurement), `bench-layer.svg` and
    `bench-layer.png`.

    When it is interrupted, the same command goes on from what is measured; after it has ended, it starts anew.

    For a first impression: `equipoise bench layer --grid quick`.
    """
    wanted = tuple(threads) if threads else _THREADS
    set_threads(max(wanted))

    from equipoise_lab.bench import layer_benchmark, layer_recipe

    recipe = layer_recipe(grid, threads=wanted, repeats=repeats, seed=seed)
    run_benchmark(layer_benchmark(recipe), out, resume=resume)
