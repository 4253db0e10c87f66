# SPDX-License-Identifier: Apache-2.0
"""`equipoise audit`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from equipoise.audit import AuditResult

_LOG_WIDTH = 160


def audit(
    strategy: Annotated[
        list[str] | None,
        typer.Option(help="Name of a strategy, or package.module:name; may be repeated. [default: all]"),
    ] = None,
    baseline: Annotated[
        list[str] | None,
        typer.Option(
            help="Baseline for every strategy: none, ema, expert-mean, critic, residual, leave-one-out or draws; may "
            "be repeated. [default: none, and the others with three strategies]"
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the results.", file_okay=False)] = Path("out/audit"),
    n: Annotated[int, typer.Option("--n", help="Number of rows (datapoints).")] = 8,
    k: Annotated[int, typer.Option("--k", help="Number of experts.")] = 2,
    capacity: Annotated[int | None, typer.Option(help="Rows an expert may take. [default: n/k, rounded up]")] = None,
    capacity_factor: Annotated[
        float | None, typer.Option(help="Rows an expert may take, as a multiple of n/k.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="Temperature of the proposal.")] = 1.0,
    sharpness: Annotated[float, typer.Option(help="Standard deviation of the router's logits.")] = 1.0,
    row_effect: Annotated[
        float, typer.Option(help="Mean and standard deviation of the part of a row's loss that no expert changes.")
    ] = 1.0,
    eps: Annotated[
        float | None, typer.Option(help="Mixture weight, for strategies that mix. [default: the strategy's own]")
    ] = None,
    solves: Annotated[
        int | None, typer.Option(help="Solves, for strategies that average. [default: the strategy's own]")
    ] = None,
    draws: Annotated[int, typer.Option(help="Number of draws of the whole batch, for each strategy.")] = 500_000,
    seed: Annotated[int, typer.Option(help="Seed of the router, the losses and the noise.")] = 0,
    sinkhorn_first: Annotated[
        bool, typer.Option("--sinkhorn-first", help="Balance the proposal in expectation before sampling.")
    ] = False,
    no_importance: Annotated[
        bool, typer.Option("--no-importance", help="Leave the ratio p/q out of the weights.")
    ] = False,
) -> None:
    """Measure which gradient estimates are unbiased, and what each costs in variance and in time.

    Draws a small router and a loss for every row and expert, and computes the gradient of the expected loss exactly.
    Then compares it with the mean of many estimates, made by the code that training uses. The verdict is `biased` (with
    a false-alarm rate of one in a million), `unbiased` (a bias of a tenth of the gradient would have been found), or
    `undecided`, with the number of draws that would decide.

    Prints a table. Writes `audit.json` (all numbers, component by component), `audit.svg` and `audit.png` (bias against
    standard deviation), `audit-cost.svg` and `audit-cost.png` (variance against time). Takes about a minute, and some
    seconds more if the solver is not yet compiled.

    To audit your own strategy: `equipoise audit --strategy mypackage.mymodule:my_strategy --strategy sample`. To see a
    biased baseline, which depends on the other rows of the batch: `equipoise audit --baseline leave-one-out`.
    """
    from equipoise_lab._ledger import locked
    from equipoise_lab.audit import Audit, audit_table, measure, prepare, save_figures, verdict_text, write_figures
    from equipoise_lab.cli._progress import ProgressBar, make_console

    options = {} if not strategy else {"strategies": tuple(strategy)}
    run = Audit(
        **options,
        baselines=tuple(baseline) if baseline else None,
        n=n,
        k=k,
        capacity=capacity,
        capacity_factor=capacity_factor,
        temperature=temperature,
        sharpness=sharpness,
        row_effect=row_effect,
        eps=eps,
        solves=solves,
        draws=draws,
        seed=seed,
        sinkhorn_first=sinkhorn_first,
        importance=not no_importance,
    )
    with locked(out):
        console = make_console(_LOG_WIDTH)
        with console.status("drawing once from each (the first run on a machine compiles the solver)"):
            strategies = prepare(run)
        outcomes, cases = list["AuditResult"](), run.cases()
        with ProgressBar(console, sum(count for _, _, count in cases)) as bar:
            for number, (name, subtracted, count) in enumerate(cases, start=1):
                bar.show(name)
                outcome = measure(strategies[name], run, baseline=subtracted, draws=count, advance=bar.advance)
                outcomes.append(outcome)
                line = f"[{number}/{len(cases)}] {outcome.name}: {verdict_text(outcome)}"
                console.print(line, markup=False, highlight=False)
        console.print(audit_table(run, outcomes))
        for path in (write_figures(run, outcomes, out), *save_figures(run, outcomes, out)):
            console.print(f"wrote {path}", highlight=False)
