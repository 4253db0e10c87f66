# SPDX-License-Identifier: Apache-2.0
"""`equipoise audit`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

# Without a terminal rich assumes 80 columns, too few for the table.
_LOG_WIDTH = 132


def audit(
    strategy: Annotated[
        list[str] | None,
        typer.Option(help="A strategy's name, or package.module:name; may be repeated. [default: the paper's six]"),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the results.", file_okay=False)] = Path("out/audit"),
    n: Annotated[int, typer.Option("--n", help="Rows (datapoints).")] = 8,
    k: Annotated[int, typer.Option("--k", help="Experts.")] = 2,
    capacity: Annotated[int | None, typer.Option(help="Rows an expert may process. [default: n/k, rounded up]")] = None,
    temperature: Annotated[float, typer.Option(help="Temperature of the proposal.")] = 1.0,
    sharpness: Annotated[float, typer.Option(help="Standard deviation of the router's logits.")] = 1.0,
    draws: Annotated[int, typer.Option(help="Draws of the whole batch, for each strategy.")] = 500_000,
    seed: Annotated[int, typer.Option(help="Seed of router, losses and noise.")] = 0,
    sinkhorn_first: Annotated[
        bool, typer.Option("--sinkhorn-first", help="Balance the proposal in expectation before sampling.")
    ] = False,
    no_importance: Annotated[
        bool, typer.Option("--no-importance", help="Leave the ratio p/q out of the weights.")
    ] = False,
    baseline: Annotated[
        Literal["none", "leave-one-out"],
        typer.Option(help="Subtract the mean loss of the other rows: biased wherever rows compete for capacity."),
    ] = "none",
) -> None:
    """Show which gradient estimates are unbiased, and what each costs in variance.

    Draws a small router and a loss for every row and expert, computes the gradient of the expected loss exactly, and
    compares it with the mean of many estimates, made by the code that training uses. A verdict is `biased` (with a
    false-alarm rate of one in a million), `unbiased` (a bias of a tenth of the gradient would have been found), or
    `undecided`, with the number of draws that are missing.

    Prints a table; writes `audit.json` (every figure, component by component), `audit.svg` and `audit.png` (bias
    against standard deviation). Takes about 20 seconds, and half a minute more where the solver is
    not yet compiled.

    A strategy of your own: `equipoise audit --strategy mypackage.mymodule:my_strategy --strategy sample`. Where rows
    compete, a baseline that sees the rest of the batch is biased: `equipoise audit --baseline leave-one-out`.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    from equipoise.experiments.audit import (
        Audit,
        Outcome,
        audit_table,
        draw_problem,
        judge_outcome,
        measure,
        prepare,
        save_figure,
        verdict_text,
        write_figures,
    )

    options = {} if not strategy else {"strategies": tuple(strategy)}
    run = Audit(
        **options,
        n=n,
        k=k,
        capacity=capacity,
        temperature=temperature,
        sharpness=sharpness,
        draws=draws,
        seed=seed,
        sinkhorn_first=sinkhorn_first,
        importance=not no_importance,
        baseline=baseline,
    )
    out.mkdir(parents=True, exist_ok=True)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_LOG_WIDTH)
    problem = draw_problem(run)
    with console.status("drawing once from each (the first run on a machine compiles the solver)"):
        strategies = prepare(run, problem)
    outcomes: list[Outcome] = []
    columns = (BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(strategies) * run.draws)
        for number, each in enumerate(strategies, start=1):
            progress.update(task, description=each.name)
            outcomes.append(measure(each, run, problem, lambda made: progress.advance(task, made)))
            verdict = verdict_text(run, judge_outcome(outcomes[-1]))
            console.print(f"[{number}/{len(strategies)}] {each.name}: {verdict}", markup=False, highlight=False)
    console.print(audit_table(run, outcomes))
    for path in (write_figures(run, problem, outcomes, out), *save_figure(run, outcomes, out)):
        console.print(f"wrote {path}", highlight=False)
