"""The commands of `paceline bench`: the paper's tables and its figure on this machine, and the page that shows them.

Arguments in, calls of `evaluation` out. Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.options import ModelOptions

bench = typer.Typer(
    name="bench",
    help="Measure quality and speed, plain and speculative side by side: the paper's tables and figure.",
    no_args_is_help=True,
)

TASKS = {
    "xsum": "ROUGE-2 of summaries of XSum articles, nucleus sampling and greedy (the paper's Table 1).",
    "humaneval": "pass@k of HumanEval's problems (the paper's Table 1). Generated programs run in a sandbox.",
    "gsm8k": "Exact match on GSM8K's questions, greedy.",
    "spec-bench": "Speed-up on Spec-Bench's prompts by kind of task, and answers that its own script reads.",
}

DataOption = Annotated[Path, typer.Option(help="The items: the file of this data set.", exists=True, dir_okay=False)]
OutOption = Annotated[Path, typer.Option(help="A folder for the results. The same command goes on where it ended.")]
LimitOption = Annotated[int | None, typer.Option(help="So many items, drawn at random.", show_default="all")]
SamplesOption = Annotated[
    int | None, typer.Option("-n", help="Completions of each item, where they are sampled.", show_default="1")
]
BatchOption = Annotated[int, typer.Option(help="Completions at once, of those whose time is not measured.")]
SeedOption = Annotated[int, typer.Option(help="Of the items drawn, the completions and the intervals.")]


def commands() -> dict[str, Callable[..., None]]:
    """By name."""
    return {name: _task(name, about) for name, about in TASKS.items()} | {"sweep": sweep, "report": report}


def sweep(
    data: Annotated[
        list[str], typer.Argument(metavar="TASK=FILE", help="xsum=..., humaneval=..., gsm8k=..., spec-bench=...")
    ],
    *,
    out: OutOption,
    most: Annotated[int, typer.Option(help="The largest K.")] = 8,
    tokens: Annotated[int, typer.Option(help="Of every completion; the end of a text is ignored.")] = 128,
    limit: Annotated[int, typer.Option(help="So many items of each task, drawn at random.")] = 40,
    seed: SeedOption = 0,
    model: ModelOptions,
) -> None:
    """What a round costs and gives for K = 0, 1, 2, ... (the paper's Figure 1), as figures and JSON.

    Ctrl-C keeps what is done, and the same command goes on.
    """
    files = {}
    for text in data:
        name, equals, file = text.partition("=")
        if not equals or name in files:
            raise ValueError(f"{text!r} is not of the form TASK=FILE with each task once")
        files[name] = Path(file)
    if model.draft == "none":
        raise ValueError("there is nothing to draft with: leave out --draft none")
    if model.draft_tokens != ModelOptions.draft_tokens:
        raise ValueError(f"--draft-tokens is {model.draft_tokens}, and every K is measured: give the largest as --most")

    from paceline.evaluation import command

    # A number, so that no costs are measured for choosing K by.
    llm, record = replace(model, draft_tokens=str(most)).load(), _record(model)
    record.pop("draft_tokens")
    with _telling(out):
        for line in command.run_sweep(files, out, llm, record, most=most, tokens=tokens, limit=limit, seed=seed):
            typer.echo(line)


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR", help="What `paceline bench` wrote.")],
    *,
    out: Annotated[Path, typer.Option(help="The page.")] = Path("report.html"),
) -> None:
    """Make one self-contained HTML page of finished runs."""
    from paceline.evaluation.report import page

    out.write_text(page(folders), encoding="utf-8", errors="replace")
    typer.echo(out)


def _task(name: str, about: str) -> Callable[..., None]:
    def run(
        *,
        data: DataOption,
        out: OutOption,
        limit: LimitOption = None,
        n: SamplesOption = None,
        seed: SeedOption = 0,
        batch: BatchOption = 16,
        model: ModelOptions,
    ) -> None:
        from paceline.evaluation import command
        from paceline.terminal import note

        llm = _load(model, batch)
        with _telling(out):
            typer.echo(command.run(name, data, out, llm, _record(model), limit=limit, n=n, seed=seed, say=note))

    run.__doc__ = f"{about}\n\nCtrl-C keeps what is done, and the same command goes on."
    return run


@contextmanager
def _telling(out: Path) -> Iterator[None]:
    """Says after Ctrl-C what is kept."""
    try:
        yield
    except KeyboardInterrupt:
        from paceline.terminal import note

        note(f"interrupted: {out} keeps what is done, and the same command goes on")
        raise


def _load(model: ModelOptions, batch: int) -> Any:
    if model.draft == "none" or model.k == 0:
        raise ValueError("there is nothing to compare: leave out --draft none, and give -k at least 1")
    return model.load(max_num_seqs=batch)


def _record(model: ModelOptions) -> dict[str, Any]:
    """How the model was loaded, and what it is held as."""
    from paceline.checkpoints.load import inspect

    format = inspect(model.model, dtype=model.dtype, quantize=model.quantize).dtype
    return asdict(model) | {"draft_tokens": model.k, "format": format}
