"""The command line: `paceline generate`, `chat`, `tune`, `train`, `export`, `audit`, `bench`, `pull` and `info`.

Turns arguments into calls of the package and errors into one line; `terminal` shows. Imports nothing heavy: a command
brings in what it needs when it runs, so that `paceline --help` answers at once.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paceline import __version__
from paceline.bench import bench
from paceline.bench import commands as bench_commands
from paceline.options import (
    AnswerOptions,
    AuditOptions,
    CompareOption,
    CompletionOptions,
    JsonLinesOption,
    JsonOption,
    ModelOptions,
    SamplingOptions,
    ShowDraftOption,
    SystemOption,
    TargetOptions,
    TrainingOptions,
    TunedOptions,
    flattened,
    size,
)

if TYPE_CHECKING:
    from paceline.checkpoints.load import Inspection
    from paceline.engine.llm import LLM
    from paceline.engine.outputs import Completion
    from paceline.sampling.params import SamplingParams
    from paceline.terminal import Screen

Message = dict[str, str]

app = typer.Typer(
    name="paceline",
    help="A language model answers faster, with its distribution unchanged: exact speculative sampling.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


app.add_typer(bench)


def main() -> None:
    # Read when torch is imported. OpenMP's threads wait for each other busily, by default so long that other processes
    # which want the same processors can make a pass many times slower; this bounds the wait (benchmarks/contention.py).
    os.environ.setdefault("GOMP_SPINCOUNT", "4000")
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # what a terminal cannot spell ends no run
    app()


def command(function: Callable[..., None], *, group: typer.Typer = app, name: str | None = None) -> Callable[..., None]:
    """Make a function a command: its parameters, and the fields of those that are dataclasses, are the flags.

    What people can cause ends in one line on stderr and exit code 2, Ctrl-C in 130.
    """
    flat = flattened(function)

    @wraps(flat)
    def run(**given: Any) -> None:
        from paceline.terminal import complain

        try:
            flat(**given)
        except BrokenPipeError:
            raise  # the reader of our output left: nobody to tell
        except (ValueError, OSError) as error:
            complain(error)
            raise typer.Exit(2) from error
        except KeyboardInterrupt as interrupt:
            raise typer.Exit(130) from interrupt

    group.command(name)(run)
    return function


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"paceline {__version__}")
        raise typer.Exit()


@app.callback()
def _paceline(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@command
def generate(
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="- reads one from stdin.", show_default=False)
    ] = None,
    *,
    file: Annotated[
        Path | None,
        typer.Option(help='More prompts: one {"prompt": ...} a line of a .jsonl; any other file is one whole prompt.'),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Put the prompt into the model's chat template, or continue it as it is.",
            show_default="--chat where the model has a template",
        ),
    ] = None,
    system: SystemOption = None,
    model: ModelOptions,
    sampling: CompletionOptions,
    show_draft: ShowDraftOption = False,
    as_json: JsonLinesOption = False,
    compare: CompareOption = False,
) -> None:
    """Complete prompts, or answer them.

    Prompts come from arguments, a file, or stdin. One prompt is written as it is generated; several run as a batch.
    A newline at the very end of a file or of stdin is not part of the prompt.
    """
    if sampling.logprobs is not None and not as_json:
        raise ValueError("--logprobs shows in JSON only: add --json")
    if compare and (model.draft == "none" or model.k == 0):
        raise ValueError("--compare needs a draft to compare with: leave out --draft none, and give -k at least 1")
    params = sampling.params()
    texts = _read_prompts(prompts or [], file)

    from paceline.decoding.stats import Stats
    from paceline.terminal import Screen, note, stats_line

    llm = model.load()
    if chat is None:
        chat = llm.tokenizer.chat_template is not None
    if system is not None and not chat:
        raise ValueError("--system needs a chat template, and this prompt is continued as it is: drop --system")
    inputs: list[str | list[int]] = [
        llm.tokenizer.encode_chat([*_system(system), _message("user", text)]) if chat else text for text in texts
    ]
    screen = Screen(show_draft=show_draft)
    if show_draft and not as_json:
        screen.legend()
    if len(inputs) == 1 and params.n == 1 and not as_json:
        completions = [_stream(llm, inputs[0], params, screen)]
    else:
        completions = _batch(llm, texts, inputs, params, screen, as_json)
    if not as_json:
        note(stats_line(sum((completion.stats for completion in completions), Stats())))
    if compare:
        _compare(
            llm,
            inputs,
            params,
            completions,
            exact_text=params.temperature == 0 or model.verify == "coupled",
            as_json=as_json,
        )


@command
def chat(
    *,
    system: SystemOption = None,
    model: ModelOptions,
    sampling: AnswerOptions,
    show_draft: ShowDraftOption = False,
) -> None:
    """Talk with a model. Ctrl-C stops an answer; Ctrl-D or /exit leaves; /help lists the other commands."""
    from paceline.conversation import Conversation
    from paceline.terminal import Screen

    params = sampling.params()
    conversation = Conversation(model.load(), params, Screen(show_draft=show_draft), _system(system))
    conversation.run()


@command
def tune(
    prompts: Annotated[
        Path | None,
        typer.Argument(
            help='Prompts like yours: one {"prompt": ...} a line of a .jsonl.', show_default="a few of all kinds"
        ),
    ] = None,
    *,
    target: TargetOptions,
    draft: Annotated[
        list[str] | None,
        typer.Option(
            help="One to be judged, named as for generate; may be repeated.",
            show_default="ngram, and auto if it is more",
        ),
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(help="Predict for so many sequences at once; may be repeated.", show_default="1, 2, 4, 8"),
    ] = None,
    sampling: TunedOptions,
    as_json: JsonOption = False,
) -> None:
    """Does speculation pay here? Measure costs and acceptance, say so, and keep them for generate and chat.

    What is kept belongs to this model, draft, format, device and number of threads; "-k auto" then chooses by it.
    """
    from paceline.checkpoints.drafts import shipped_draft
    from paceline.evaluation.prompts import PROMPTS
    from paceline.evaluation.tune import choice
    from paceline.evaluation.tune import tune as measured
    from paceline.terminal import advice_table, note, tracked

    if batch and min(batch) < 1:
        raise ValueError(f"--batch is {min(batch)}, it must be at least 1")
    params = sampling.params()
    texts = _read_prompts([], prompts) if prompts else list(PROMPTS)
    llm = target.load()
    chat = llm.tokenizer.chat_template is not None
    asked = [
        llm.tokenizer.encode_chat([_message("user", text)]) if chat else llm.tokenizer.encode(text) for text in texts
    ]
    found = []
    with tracked() as track:
        drafts = draft or (["ngram", "auto"] if shipped_draft(target.model) else ["ngram"])
        for advice in measured(llm, drafts, asked, params, batches=batch or [1, 2, 4, 8], track=track):
            found.append(advice)
            if as_json:
                print(json.dumps(advice.record()), flush=True)
            else:
                advice_table(advice)
    if not as_json:
        if len(found) > 1:
            typer.echo(choice(found))
        note("generate and chat use what was measured wherever K is auto")


@command
def train(
    target: Annotated[str, typer.Argument(help="Named as --model for generate.", show_default=False)],
    *,
    prompts: Annotated[
        Path,
        typer.Option(help='One {"prompt": ...} a line, answered by the target; or {"text": ...}, read as it is.'),
    ],
    out: Annotated[Path, typer.Option(help="A folder for the draft and all that is needed to go on.")],
    training: TrainingOptions,
) -> None:
    """Make a draft for a model out of its own answers.

    Ctrl-C keeps what is done, and the same command goes on. `torchrun --nproc-per-node N -m paceline train ...` uses N
    devices.
    """
    from paceline.terminal import note
    from paceline.training.command import measured
    from paceline.training.command import train as make_draft

    asked = vars(training) | {"cache_features": size(training.cache_features)}
    make_draft(target, prompts, out, **asked, say=note, measure=measured)


@command
def export(
    draft: Annotated[str, typer.Argument(help="A trained draft, named as for generate.", show_default=False)],
    *,
    format: Annotated[
        Literal["hf", "vllm-eagle3", "vllm-eagle", "vllm-medusa"],
        typer.Option(help="For drafts of kind shallow, eagle3, eagle1 and heads, in this order."),
    ],
    out: Annotated[Path, typer.Option(help="A new folder.")],
    target: Annotated[
        str | None, typer.Option(help="What it drafts for, named as for generate.", show_default="as the draft says")
    ] = None,
) -> None:
    """Write a draft as transformers, vLLM and SGLang load it, check it, and say how to run it there."""
    from paceline.checkpoints.export import export as write

    for line in write(draft, format, out, target=target):
        typer.echo(line)


@command
def audit(
    target: Annotated[str | None, typer.Argument(help="In place of --model.", show_default=False)] = None,
    *,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help='One {"prompt": ...} a line of a .jsonl; any other file is one whole prompt.',
            show_default="a small set of our own",
        ),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Put prompts into the model's chat template, or continue them as they are.",
            show_default="--chat where the model has a template",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="A folder for the page, the JSON and the steps done.")] = Path(
        "certificate"
    ),
    size: AuditOptions,
    model: ModelOptions,
    sampling: SamplingOptions,
) -> None:
    """Check that speculation keeps the model's distribution, and certify it.

    For this pair, these parameters, this device and format: by identity, by replay and by statistics, each beside
    deliberately wrong variants that it has to catch. Exit code 0: exact; 1: not exact; 3: the audit proves nothing.
    Ctrl-C keeps what is done, and the same command goes on.
    """
    from paceline.audit import audit as run

    code = run(
        target,
        None if prompts is None else _read_prompts([], prompts),
        chat,
        out,
        size=size,
        model=model,
        sampling=sampling,
    )
    raise typer.Exit(code)


@command
def pull(
    name: Annotated[str, typer.Argument(help="A built-in name or a hub id.", show_default=False)],
) -> None:
    """Fetch a model, if it is not on this machine yet, and say where it is."""
    from rich.filesize import decimal

    from paceline.checkpoints.resolve import resolve

    source = resolve(name)
    typer.echo(f"{source.path} ({decimal(source.size)})")


@command
def info(
    model: Annotated[str, typer.Argument(help="Named as for generate.", show_default=False)],
    *,
    draft: Annotated[str | None, typer.Option(help="Say also whether this can draft for it, named as there.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Describe a model without reading its weights."""
    from paceline.checkpoints.load import inspect as inspect_model
    from paceline.terminal import fit_rows, inspection_record, inspection_rows, rows

    found, fit = inspect_model(model), None
    if draft is not None:
        from paceline.checkpoints.drafts import find_draft

        folder = find_draft(draft)
        fit = _fit_trained(found, folder, draft) if folder else _fit(found, inspect_model(draft))
    if as_json:
        typer.echo(json.dumps(inspection_record(found) | ({"draft": fit} if fit else {})))
        return
    rows(inspection_rows(found))
    if fit:
        rows(fit_rows(fit))


def _read_prompts(arguments: list[str], file: Path | None) -> list[str]:
    if not arguments and file is None:
        if sys.stdin.isatty():
            raise ValueError("no prompt: give one as an argument, with --file, or through stdin")
        arguments = ["-"]
    prompts = [_text(sys.stdin.buffer.read(), "stdin") if item == "-" else item for item in arguments]
    if file is None:
        return prompts
    text = _text(file.read_bytes(), str(file))
    if file.suffix != ".jsonl":
        return [*prompts, text]
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError, RecursionError):
            prompt = None
        if not isinstance(prompt, str):
            raise ValueError(f'{file}, line {number}: not of the form {{"prompt": "text"}}')
        prompts.append(prompt)
    if not prompts:
        raise ValueError(f"{file} holds no prompt")
    return prompts


def _text(data: bytes, origin: str) -> str:
    try:
        return data.decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{origin} is not UTF-8 text: byte {error.start} is {data[error.start]:#04x}") from error


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _system(text: str | None) -> list[Message]:
    return [] if text is None else [_message("system", text)]


def _stream(llm: LLM, prompt: str | list[int], params: SamplingParams, screen: Screen) -> Completion:
    completion = None
    try:
        for chunk in llm.stream(prompt, params):
            screen.write((token.provenance.value, token.text) for token in chunk.tokens)
            completion = chunk.completion
    finally:
        screen.end_line()
    assert completion is not None
    return completion


def _batch(
    llm: LLM,
    texts: Sequence[str],
    inputs: Sequence[str | list[int]],
    params: SamplingParams,
    screen: Screen,
    as_json: bool,
) -> list[Completion]:
    """Every completion as soon as it is there: an interruption keeps those that are."""
    from paceline.terminal import completion_record, note, pieces

    found: dict[int, Completion] = {}
    try:
        with closing(llm.as_completed(inputs, params, progress=sys.stderr.isatty())) as results:
            for index, completion in results:
                for output in completion.outputs:
                    if as_json:
                        print(json.dumps(completion_record(index, texts[index], output)), flush=True)
                        continue
                    which = f"{index + 1}" if params.n == 1 else f"{index + 1}.{output.index + 1}"
                    screen.heading(f"[{which}] {texts[index]}")
                    screen.write(pieces(llm.tokenizer, completion, output))
                    screen.end_line()
                found[index] = completion
    except KeyboardInterrupt:
        note(f"interrupted: {len(found)} of {len(texts)} prompts are finished")
        raise
    return [found[index] for index in sorted(found)]


def _compare(
    llm: LLM,
    inputs: Sequence[str | list[int]],
    params: SamplingParams,
    completions: Sequence[Completion],
    *,
    exact_text: bool,
    as_json: bool,
) -> None:
    """Run the same once more without drafting. `exact_text`: it has to give the same text, not only the same law."""
    from paceline.decoding.stats import Stats
    from paceline.terminal import comparison, comparison_record, note

    note("the same without a draft")
    llm.draft_tokens = 0
    seeded = [replace(params, seed=completion.outputs[0].seed) for completion in completions]
    again = llm.generate(inputs, seeded, progress=sys.stderr.isatty() and len(inputs) > 1)
    same_text = None
    if exact_text:
        both = zip(completions, again, strict=True)
        same_text = all([o.token_ids for o in a.outputs] == [o.token_ids for o in b.outputs] for a, b in both)
    speculative, plain = (sum((c.stats for c in found), Stats()) for found in (completions, again))
    if as_json:
        print(json.dumps(comparison_record(speculative, plain, same_text)), flush=True)
    else:
        comparison(speculative, plain, same_text)


def _fit_trained(target: Inspection, draft: Path, name: str) -> dict[str, Any]:
    """Whether the trained draft in this folder is one for `target`. `name`: what the user called it."""
    from paceline.checkpoints.drafts import describe_draft

    fit: dict[str, Any] = {"name": name}
    if target.config is None:
        return fit | {"fits": False, "reason": "it is for a target that Paceline's own decoder runs"}
    try:
        kind, parameters, tokens = describe_draft(draft, target.config)
    except ValueError as error:
        return fit | {"fits": False, "reason": str(error)}
    return fit | {
        "fits": True,
        "kind": kind,
        "parameters": parameters,
        "parameter_ratio": parameters / target.parameters,
        "context": target.config.context,
        "same_tokens": tokens is None,
        "share": 1.0 if tokens is None else tokens / target.config.vocab_size,
    }


def _fit(target: Inspection, draft: Inspection) -> dict[str, Any]:
    """Whether `draft` can draft for `target`."""
    from paceline.proposers.vocabulary import VocabularyMap

    def size(found: Inspection) -> int:
        return found.config.vocab_size if found.config else found.tokenizer.vocab_size

    fit = {
        "name": draft.source.name,
        "parameters": draft.parameters,
        "parameter_ratio": draft.parameters / target.parameters,
        "context": draft.config.context if draft.config else None,
    }
    try:
        vocabulary = VocabularyMap(
            target.tokenizer.tokens(),
            draft.tokenizer.tokens(),
            partial(draft.tokenizer.encode, add_special_tokens=False),
            target_size=size(target),
            draft_size=size(draft),
        )
    except ValueError as error:
        return fit | {"fits": False, "reason": str(error)}
    return fit | {"fits": True, "same_tokens": vocabulary.identical, "share": vocabulary.share}


for name, function in bench_commands().items():
    command(function, group=bench, name=name)
