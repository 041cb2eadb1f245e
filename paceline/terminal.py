"""What the command line shows: generated text with the origin of its tokens, notes, statistics, tables.

Formats what others counted; generates nothing and reads no files. Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.color import ColorSystem
from rich.console import Console
from rich.filesize import decimal
from rich.style import Style
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from paceline.checkpoints.load import Inspection
    from paceline.checkpoints.tokenizer import Tokenizer
    from paceline.decoding.stats import Stats
    from paceline.engine.outputs import Completion, CompletionOutput
    from paceline.evaluation.tune import Advice

Piece = tuple[str, str]
"""(where it came from, text)."""

LOOKS = {
    "accepted": (Style.parse("black on green"), "[]"),
    "recovered": (Style.parse("yellow"), "{}"),
    "bonus": (Style.parse("cyan"), "<>"),
    "plain": (Style.null(), ""),
}
"""By provenance: its style, and the marks around it where there are no colours."""

CONTROLS = {code: 0xFFFD for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""A model may write escape sequences; a terminal must not obey them."""


class Screen:
    """Writes generated text to stdout as it comes, marked by provenance where `show_draft` asks for it."""

    def __init__(self, *, show_draft: bool) -> None:
        console = Console()
        self.terminal = console.is_terminal
        self._show_draft = show_draft
        self._coloured = console.color_system is not None and not console.no_color and not console.legacy_windows
        self._line_open = False

    def legend(self) -> None:
        """What the marks mean, on stderr."""
        words = [
            (name, style) if self._coloured else (f"{marks[:1]}{name}{marks[1:]}", Style.null())
            for name, (style, marks) in LOOKS.items()
        ]
        _stderr().print(Text("tokens: ").append_text(Text(" ").join(Text(*word) for word in words)), soft_wrap=True)

    def write(self, pieces: Iterable[Piece]) -> None:
        pieces = [(provenance, text) for provenance, text in pieces if text]
        for provenance, run in groupby(pieces, key=lambda piece: piece[0]):
            text = "".join(text for _, text in run)
            self._line_open = not text.endswith("\n")
            sys.stdout.write(self._look(provenance, text.translate(CONTROLS) if self.terminal else text))
        sys.stdout.flush()

    def end_line(self) -> None:
        """Leave the cursor at the beginning of a line."""
        if self._line_open:
            self.new_line()

    def new_line(self) -> None:
        sys.stdout.write("\n")
        sys.stdout.flush()
        self._line_open = False

    def heading(self, text: str) -> None:
        first, _, more = text.strip().partition("\n")
        first = f"{first[:67]}..." if len(first) > 70 or more else first
        style = Style(bold=True)
        sys.stdout.write(style.render(first, color_system=ColorSystem.STANDARD) if self._coloured else first)
        sys.stdout.write("\n")

    def _look(self, provenance: str, text: str) -> str:
        style, marks = LOOKS[provenance]
        if not self._show_draft:
            return text
        if not self._coloured:
            return f"{marks[:1]}{text}{marks[1:]}"
        # A background that crosses the end of a line would colour the rest of it.
        return "\n".join(style.render(line, color_system=ColorSystem.STANDARD) for line in text.split("\n"))


def pieces(tokenizer: Tokenizer, completion: Completion, output: CompletionOutput) -> Iterator[Piece]:
    """The text of a finished output, token by token."""
    detokenizer = tokenizer.detokenizer(completion.prompt_token_ids)
    left = output.text
    for token, provenance in zip(output.token_ids, output.provenance, strict=True):
        # What a stop string cut off is in the tokens and not in the text.
        size = min(len(detokenizer.push(token)), len(left))
        yield provenance.value, left[:size]
        left = left[size:]
    # Half a character that nothing completed is certain only after the last token.
    yield output.provenance[-1].value, left


def note(text: str) -> None:
    _stderr().print(Text(text, "dim"), soft_wrap=True)


def complain(error: Exception) -> None:
    """One line, whatever the error has to say."""
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    _stderr().print(Text(f"error: {' '.join(text.split())}", "red"), soft_wrap=True)


def stats_line(stats: Stats) -> str:
    parts = [
        f"{stats.output_tokens} tokens, {stats.tokens_per_second:.1f} tokens/s{' each' * (stats.completions > 1)}"
        f" after {stats.prompt_tokens} prompt tokens ({stats.prefill_s:.2f} s)"
    ]
    if stats.drafts:
        parts.append(
            f"acceptance length {stats.acceptance_length:.2f},"
            f" {stats.accepted} of {stats.drafted} drafted tokens accepted"
        )
    else:
        parts.append("nothing drafted")
    if stats.rounds:
        ms = 1000 / stats.rounds
        parts.append(
            f"{ms * stats.decode_s:.1f} ms a round: draft {ms * stats.draft_s:.1f}, score {ms * stats.score_s:.1f},"
            f" verify {ms * stats.verify_s:.1f}, other {ms * stats.other_s:.1f}"
        )
    return " | ".join(parts)


def stats_record(stats: Stats) -> dict[str, Any]:
    return asdict(stats) | {
        "tokens_per_second": stats.tokens_per_second,
        "acceptance_length": stats.acceptance_length,
        "acceptance_rate": stats.acceptance_rate,
    }


def completion_record(index: int, prompt: str, output: CompletionOutput) -> dict[str, Any]:
    """One completion of the prompt at `index`, as JSON has it."""
    record = asdict(output)
    record["completion"] = record.pop("index")
    record["stats"] = stats_record(output.stats)
    return {"index": index, "prompt": prompt, **record}


def comparison_record(speculative: Stats, plain: Stats, same_text: bool | None) -> dict[str, Any]:
    return {
        "comparison": {
            "plain": stats_record(plain),
            "speculative": stats_record(speculative),
            "speedup": _speedup(speculative, plain),
            "same_text": same_text,
        }
    }


def comparison(speculative: Stats, plain: Stats, same_text: bool | None) -> None:
    """The two speeds side by side. `same_text` is None where the rule promises the distribution, not the text."""
    table = Table("", "tokens", "tokens/s", "tokens a round", "ms a round")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, stats in (("plain", plain), ("speculative", speculative)):
        rounds = max(stats.rounds, 1)
        table.add_row(
            name,
            str(stats.output_tokens),
            f"{stats.tokens_per_second:.1f}",
            f"{(stats.output_tokens - stats.completions) / rounds:.2f}",
            f"{1000 * stats.decode_s / rounds:.1f}",
        )
    verdict = {
        True: "the two texts are equal",
        False: "THE TWO TEXTS DIFFER",
        None: "two samples of one distribution: their texts may differ",
    }
    console = Console(highlight=False)
    console.print(table)
    speedup = _speedup(speculative, plain)
    console.print(f"{speedup:.2f} times the speed of plain decoding; {verdict[same_text]}", soft_wrap=True)


def inspection_record(found: Inspection) -> dict[str, Any]:
    """What `paceline info --json` says of a model."""
    config = asdict(found.config) if found.config else None
    return {
        "name": found.source.name,
        "path": str(found.source.path),
        "size": found.source.size,
        "architecture": found.architecture,
        "parameters": found.parameters,
        "config": config,
        "tokens": found.tokenizer.vocab_size,
        "eos_ids": sorted(found.eos_ids),
        "chat_template": found.tokenizer.chat_template is not None,
        "stored": dict(found.stored),
        "dtype": found.dtype,
        "weight_memory": found.weight_memory,
        "cache_memory_per_token": found.cache_memory,
        "notes": list(found.notes),
    }


def inspection_rows(found: Inspection) -> Iterator[tuple[str, str]]:
    """What `paceline info` says of a model, for people."""
    config = found.config
    yield "files", f"{found.source.path} ({decimal(found.source.size)})"
    yield "architecture", found.architecture + ("" if config else " (run by transformers)")
    yield "parameters", f"{found.parameters:,}"
    if config:
        windows = sorted({layer.window for layer in config.layers if layer.window})
        windowed = sum(layer.window is not None for layer in config.layers)
        yield "layers", f"{config.num_layers}" + (f", {windowed} with a window of {windows}" if windows else "")
        yield "width", f"{config.hidden_size} ({config.intermediate_size} in the MLP)"
        heads = f"{config.num_heads} of {config.head_dim}, {config.num_kv_heads} for keys and values"
        yield "heads", heads
        yield "context", f"{config.context:,} tokens"
    rows = f" ({config.vocab_size:,} rows, {'tied' if config.tied else 'untied'} head)" if config else ""
    yield "vocabulary", f"{found.tokenizer.vocab_size:,} tokens{rows}"
    ends = ", ".join(_spelled(found.tokenizer, id) for id in sorted(found.eos_ids))
    yield "ends with", ends or "nothing"
    yield "chat template", "yes" if found.tokenizer.chat_template else "no"
    stored = sorted(found.stored.items(), key=lambda item: -item[1])
    yield "weights on disk", ", ".join(f"{kind} {decimal(size)}" for kind, size in stored)
    yield "in memory", f"{decimal(found.weight_memory)} as {found.dtype}"
    if config and found.cache_memory is not None:
        whole = decimal(found.cache_memory * config.context)
        yield "KV cache", f"{found.cache_memory:,} bytes a token, {whole} for the whole context"
    for text in found.notes:
        yield "note", text


def fit_rows(fit: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What `paceline info --draft` says of a draft, for people."""
    if not fit["fits"]:
        yield "draft", f"{fit['name']} does not fit: {fit['reason']}"
        return
    share = "the same tokens" if fit["same_tokens"] else f"{fit['share']:.1%} of the target's tokens can be proposed"
    kind = f", of kind {fit['kind']}" if "kind" in fit else ""
    yield "draft", f"{fit['name']} fits{kind}: {share}"
    yield "size", f"{fit['parameters']:,} parameters, {fit['parameter_ratio']:.1%} of the target's"
    if fit["context"] is not None:
        yield "its context", f"{fit['context']:,} tokens; nothing is drafted beyond"


def rows(lines: Iterable[tuple[str, str]]) -> None:
    console = Console(highlight=False)
    for label, value in lines:
        console.print(Text(f"{label:<17}", "bold").append(value, "not bold"), soft_wrap=True)


def _speedup(speculative: Stats, plain: Stats) -> float:
    return speculative.tokens_per_second / plain.tokens_per_second if plain.tokens_per_second else 0.0


def _spelled(tokenizer: Tokenizer, id: int) -> str:
    return f"{tokenizer.token_bytes(id).decode(errors='replace')} ({id})"


def _stderr() -> Console:
    return Console(stderr=True, highlight=False)


@contextmanager
def tracked() -> Iterator[Callable[[int, str], Callable[[], None]]]:
    """Parts of a long work, each with a bar of its own on stderr while it lasts."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = _stderr()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:

        def track(total: int, what: str) -> Callable[[], None]:
            task = bar.add_task(what, total=total)
            return lambda: bar.advance(task)

        yield track


def advice_table(advice: Advice) -> None:
    """What `paceline tune` found of one draft: predictions by K and number of sequences, then the answer in words."""
    from paceline.evaluation.tune import words

    table = Table("sequences at once", *(f"K={k}" for k in range(1, len(advice.predictions[1]))))
    table.title = f"{advice.draft}: times the speed of plain decoding, predicted from measured costs and acceptance"
    for batch, by_k in advice.predictions.items():
        best, _ = advice.best(batch)
        table.add_row(str(batch), *(f"[bold]{x:.2f}[/]" if k == best else f"{x:.2f}" for k, x in enumerate(by_k) if k))
    console = Console()
    console.print(table)
    for sentence in words(advice):
        console.print(sentence, markup=False, highlight=False)
