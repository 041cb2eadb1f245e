"""What a pass over M tokens costs, and how fast text comes: Paceline beside llama.cpp, transformers and OpenVINO GenAI.

    python benchmarks/weights.py FOLDER
    python benchmarks/speed.py FOLDER --plot speed.svg

Everything is interleaved: in each repeat every side takes every prompt in turn, and what memory and processors give is
measured right before every few passes that are held against it. Sides that cannot run here are left out with one line.
Ctrl-C ends the measuring and keeps what there is. Tables on stderr, one JSON line on stdout.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from drafts import PROMPTS
from peers import DRAFT_TOKENS, Run, Side, some_tokens
from rich.console import Console
from rich.progress import track
from rich.table import Table

from paceline.checkpoints.load import Inspection, inspect

COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
PASSES = 5
"""Of each count in one repeat."""
SETTLE_S = 0.05
"""The threads of OpenMP spin for some 20 ms behind their work, and take the next side's processors."""
PREFILL = 512
FORMATS = {
    "paceline": ("f32", "bf16", "f16", "q8_0", "q4_1", "q4_0"),
    "paceline-int8": ("q8_0", "q4_1", "q4_0"),
    "llama.cpp": ("f16", "q8_0", "q4_1", "q4_0"),
    "transformers": ("bf16",),
    "openvino": ("int8",),
}
MODES = {
    "paceline": ("plain", "ngram", "trained", "draft"),
    "paceline-int8": ("plain", "ngram", "trained", "draft"),
    "transformers": ("plain", "draft"),
}
"""Of the others: plain. trained: what draft="auto" is for the built-in model, K chosen for every round."""
OURS = ("paceline", "paceline-int8")
FOLDERS = ("bf16", "int8")
"""Formats that are no GGUF file."""

PARTS = ("decode", "prefill", "passes", "memory")
Job = tuple[str, Callable[[], None]]
"""Whose it is, and what to do."""
console = Console(stderr=True, width=None if sys.stderr.isatty() else 170)


@dataclass
class Contestant:
    """A side with everything measured of it so far."""

    name: str
    engine: str
    format: str
    models: dict[str, Path]
    """The target and perhaps a draft."""
    side: Side
    facts: dict[str, Inspection]
    """Of the models, where it is Paceline."""
    runs: dict[str, dict[str, list[Run]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    """By mode and prompt."""
    prefill_s: list[float] = field(default_factory=list)
    passes_s: dict[str, dict[int, list[float]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    """By model and count."""
    floors_s: dict[str, dict[int, list[float]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    """The floors of these."""
    memory: list[dict[str, float]] = field(default_factory=list)

    @property
    def modes(self) -> tuple[str, ...]:
        return tuple(mode for mode in MODES.get(self.engine, ("plain",)) if mode != "draft" or "draft" in self.models)


class Machine:
    """What memory and processors give at the moment: the best of several tries of what torch does best."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self._buffer = torch.ones(1 << 15, 1 << 12)  # 512 MB, far more than any cache
        self._vector = torch.ones(1 << 12)
        self._square = torch.rand(512, 512)
        self.read_bytes_s: list[float] = []
        self.flop_s: list[float] = []

    def measure(self) -> tuple[float, float]:
        """Bytes read and float32 operations a second."""
        read = (self._buffer.sum, lambda: torch.mv(self._buffer, self._vector))
        self.read_bytes_s.append(4 * self._buffer.numel() / min(_seconds(way) for way in read for _ in range(4)))
        product = min(_seconds(lambda: torch.mm(self._square, self._square)) for _ in range(20))
        self.flop_s.append(2 * 512**3 / product)
        return self.read_bytes_s[-1], self.flop_s[-1]


def _seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main(
    folder: Annotated[Path, typer.Argument(help="What weights.py wrote.")],
    only: Annotated[
        list[str] | None, typer.Option(help='Sides alone, as "q8_0", "llama.cpp" or "paceline f32".')
    ] = None,
    part: Annotated[list[str] | None, typer.Option(help=f"Measure these alone: {', '.join(PARTS)}.")] = None,
    mode: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(MODES['paceline'])}.")] = None,
    draft: Annotated[Path | None, typer.Option(help="Paceline's draft, instead of four layers of the target.")] = None,
    repeats: int = 3,
    max_tokens: int = 64,
    threads: int = os.cpu_count() or 1,
    openvino: Annotated[str, typer.Option(help="The Python that has openvino-genai.")] = sys.executable,
    plot: Annotated[Path | None, typer.Option(help="Draw time against M into this file.")] = None,
) -> None:
    if plot:
        importlib.import_module("matplotlib.figure")  # rather now than after the measuring
    parts, modes = part or PARTS, mode or MODES["paceline"]
    if unknown := {*parts, *modes} - {*PARTS, *MODES["paceline"]}:
        raise typer.BadParameter(f"{', '.join(unknown)}: parts are {PARTS}, modes {MODES['paceline']}")
    machine = Machine(threads)
    contestants: list[Contestant] = []
    interrupted = False
    try:
        for engine, formats in FORMATS.items():
            for kind in formats:
                if not only or any(set(words.split()) <= {engine, kind} for words in only):
                    python = openvino if engine == "openvino" else sys.executable
                    contestants += start(folder, engine, kind, draft, python, threads)
        work = [job for _ in range(repeats) for job in jobs(contestants, machine, parts, modes, max_tokens, threads)]
        failed: set[str] = set()
        for name, job in track(work, console=console, description="measuring"):
            if name not in failed:
                time.sleep(SETTLE_S)
                try:
                    job()
                except ValueError as error:
                    failed.add(name)
                    console.print(f"{name} stopped: {error}", markup=False)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        for contestant in contestants:
            contestant.side.close()
    results = report(contestants, machine)
    if plot:
        draw(plot, contestants)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    setting = {
        "command": " ".join(sys.argv),
        "commit": commit,
        "machine": f"{platform.machine()}, {os.cpu_count()} processors, {threads} threads",
        "versions": {one.engine: one.side.versions for one in contestants},
        "python": platform.python_version(),
        "interrupted": interrupted,
    }
    print(json.dumps({"benchmark": "speed", **setting, "results": results}))


def start(folder: Path, engine: str, kind: str, draft: Path | None, python: str, threads: int) -> Iterator[Contestant]:
    """The contestant, unless it cannot be had here."""
    name = f"{engine} {kind}"
    suffix = "" if kind in FOLDERS else ".gguf"
    models = {"target": folder / f"target-{kind}{suffix}"}
    if "draft" in MODES.get(engine, ()):
        models["draft"] = draft if draft and engine in OURS else folder / f"draft-{kind}{suffix}"
    try:
        if missing := [str(path) for path in models.values() if not path.exists()]:
            raise ValueError(f"{missing[0]} is not there; benchmarks/weights.py writes it")
        side = Side(engine, python=python, target=models["target"], draft=models.get("draft"), threads=threads)
    except ValueError as error:
        console.print(f"{name} left out: {error}", markup=False)
        return
    facts = {model: inspect(str(path)) for model, path in models.items()} if engine in OURS else {}
    yield Contestant(name=name, engine=engine, format=kind, models=models, side=side, facts=facts)


# Measuring


def jobs(
    contestants: Sequence[Contestant],
    machine: Machine,
    parts: Sequence[str],
    modes: Sequence[str],
    count: int,
    threads: int,
) -> Iterator[Job]:
    """One repeat."""
    tokenizer = inspect("smollm2-135m").tokenizer
    prompts = {kind: tokenizer.encode_chat([{"role": "user", "content": text}]) for kind, text in PROMPTS.items()}

    def decode(one: Contestant, mode: str, kind: str) -> None:
        if mode not in one.runs:
            one.side.generate(mode, prompts[kind], 8)  # warm up
        run = one.side.generate(mode, prompts[kind], count)
        one.runs[mode][kind].append(run)

    def prefill(one: Contestant) -> None:
        if not one.prefill_s:
            one.side.generate("plain", some_tokens(PREFILL), 1)
        # Other tokens each time: OpenVINO GenAI keeps the prompts it has read.
        one.prefill_s.append(one.side.generate("plain", some_tokens(PREFILL), 1).first_s)

    def passes(one: Contestant, model: str) -> None:
        for _ in range(PASSES):
            bandwidth, rate = machine.measure()
            time.sleep(SETTLE_S)
            for _ in range(3):  # what was in the caches returns to them
                one.side.score(model, 1)
            for m in COUNTS:
                seconds = one.side.score(model, m)
                one.passes_s[model][m].append(seconds)
                if facts := one.facts.get(model):
                    floor = max(weight_bytes(facts) / bandwidth, 2 * facts.parameters * m / rate)
                    one.floors_s[model][m].append(floor)

    def memory(one: Contestant) -> None:
        fresh = Side(one.engine, python=sys.executable, target=one.models["target"], draft=None, threads=threads)
        try:
            fresh.generate("plain", some_tokens(PREFILL), 16)
            facts = one.facts["target"]
            cache = (facts.cache_memory or 0) * (PREFILL + 16)
            sizes = {"weights_mb": weight_bytes(facts) / 1e6, "cache_mb": cache / 1e6}
            one.memory.append({**fresh.memory(), **sizes})
        finally:
            fresh.close()

    if "decode" in parts:
        for kind in prompts:
            for one in contestants:
                yield from ((one.name, partial(decode, one, mode, kind)) for mode in one.modes if mode in modes)
    if "prefill" in parts:
        yield from ((one.name, partial(prefill, one)) for one in contestants)
    if "passes" in parts:
        yield from ((one.name, partial(passes, one, model)) for one in contestants for model in one.models)
    if "memory" in parts:
        yield from ((one.name, partial(memory, one)) for one in contestants if one.engine in OURS)


def weight_bytes(facts: Inspection) -> float:
    """Bytes that a pass reads: all of them, as these models' head is their embedding."""
    return sum(facts.stored.values())


# Telling


def report(contestants: Sequence[Contestant], machine: Machine) -> dict[str, Any]:
    """Prints what was measured and returns it."""
    results: dict[str, Any] = {}
    if machine.read_bytes_s:
        read, rate = statistics.median(machine.read_bytes_s) / 1e9, statistics.median(machine.flop_s) / 1e9
        lowest, highest = min(machine.read_bytes_s) / 1e9, max(machine.read_bytes_s) / 1e9
        console.print(f"memory {read:.1f} GB/s ({lowest:.1f} to {highest:.1f}), float32 products {rate:.0f} GFLOP/s")
        results["machine"] = {"read_gb_s": read, "read_gb_s_range": [lowest, highest], "gflop_s": rate}
    for name, tell in {
        "decode": tell_decode,
        "rounds": tell_rounds,
        "ratios": tell_ratios,
        "passes": tell_passes,
        "memory": tell_memory,
    }.items():
        table, found = tell(contestants)
        if found:
            console.print(table)
            results[name] = found
    return results


Told = tuple[Table, dict[str, Any]]


def tell_decode(contestants: Sequence[Contestant]) -> Told:
    table = Table("side", "mode", "tokens/s", "times plain", "accepted/drafted", "texts as plain's", title="Decoding")
    found: dict[str, Any] = {}
    for one in contestants:
        plain = one.runs.get("plain", {})
        for mode, runs in one.runs.items():
            ms = 1000 * statistics.fmean(statistics.median(map(per_token, each)) for each in runs.values())
            pairs = [
                (mine.tokens, theirs.tokens)
                for kind in runs
                for mine, theirs in zip(runs[kind], plain.get(kind, []), strict=False)
            ]
            same = sum(mine == theirs for mine, theirs in pairs)
            parts = total_parts(runs)
            times = times_faster(runs, plain)
            found.setdefault(one.name, {})[mode] = {
                "ms_per_token": ms,
                "times_plain": times,
                "same_texts": [same, len(pairs)],
                "accepted": parts.get("accepted"),
                "drafted": parts.get("drafted"),
            }
            drafted = f"{parts['accepted']:.0f}/{parts['drafted']:.0f}" if parts.get("drafted") else ""
            table.add_row(one.name, mode, f"{1000 / ms:.1f}", shown(times), drafted, f"{same}/{len(pairs)}")
    return table, found


def tell_rounds(contestants: Sequence[Contestant]) -> Told:
    names = ("draft passes", "score", "rest of draft", "verify", "other")
    table = Table(
        "side", "mode", *names, "outside the passes", title=f"Milliseconds of a round, K = {DRAFT_TOKENS}, or auto"
    )
    found: dict[str, Any] = {}
    for one in contestants:
        for mode, runs in one.runs.items():
            parts = total_parts(runs)
            if not parts.get("rounds"):
                continue
            inside = (parts["draft_pass_s"], parts["score_s"])
            outside = (parts["draft_s"] - parts["draft_pass_s"], parts["verify_s"], parts["other_s"])
            share = sum(outside) / sum(inside + outside)
            ms = [1000 * seconds / parts["rounds"] for seconds in inside + outside]
            told = {name.replace(" ", "_"): value for name, value in zip(names, ms, strict=True)}
            found.setdefault(one.name, {})[mode] = {**told, "share_outside": share}
            table.add_row(one.name, mode, *(f"{value:.2f}" for value in ms), f"{share:.1%}")
    return table, found


def tell_ratios(contestants: Sequence[Contestant]) -> Told:
    """How many times faster our plain decoding and prefill are than each peer's."""
    peers = [one for one in contestants if one.engine not in OURS]
    title = f"Times faster than a peer: plain decoding, prefill of {PREFILL}"
    table = Table("side", "prefill, ms", *(one.name for one in peers), title=title)
    found: dict[str, Any] = {}
    for one in contestants:
        prefill = 1000 * statistics.median(one.prefill_s) if one.prefill_s else None
        row: dict[str, Any] = {"prefill_ms": prefill}
        if one.engine in OURS:
            for peer in peers:
                pairs = zip(one.prefill_s, peer.prefill_s, strict=False)
                ratios = [theirs / mine for mine, theirs in pairs]
                row[peer.name] = {
                    "decode": times_faster(one.runs.get("plain", {}), peer.runs.get("plain", {})),
                    "prefill": statistics.median(ratios) if ratios else None,
                }
        cells = [f"{shown(row[p.name]['decode'])}, {shown(row[p.name]['prefill'])}" for p in peers if p.name in row]
        if one.prefill_s or "plain" in one.runs:
            found[one.name] = row
            table.add_row(one.name, "" if prefill is None else f"{prefill:.0f}", *cells)
    return table, found


def tell_passes(contestants: Sequence[Contestant]) -> Told:
    title = "One pass over M tokens: ms, times that of M = 1, times its floor"
    table = Table("side", "model", *(f"M = {m}" for m in COUNTS), title=title, show_lines=True)
    found: dict[str, Any] = {}
    for one in contestants:
        for model, times in one.passes_s.items():
            ms = {m: 1000 * statistics.median(seconds) for m, seconds in times.items()}
            floors = {
                m: statistics.median(s / floor for s, floor in zip(times[m], seconds, strict=False))
                for m, seconds in one.floors_s[model].items()
            }
            found.setdefault(one.name, {})[model] = {"ms": ms, "times_floor": floors}
            lines = [
                {m: f"{value:.1f}" for m, value in ms.items()},
                {m: shown(value / ms[1]) for m, value in ms.items()},
            ]
            lines += [{m: shown(value) for m, value in floors.items()}]
            table.add_row(one.name, model, *("\n".join(line[m] for line in lines if m in line) for m in COUNTS))
    return table, found


def tell_memory(contestants: Sequence[Contestant]) -> Told:
    title = "Memory beyond importing torch, MB, and seconds to load"
    table = Table("side", "weights", "cache", "peak", "peak - 1.25 weights - cache", "load, s", title=title)
    found: dict[str, Any] = {}
    for one in contestants:
        if one.memory:
            found[one.name] = row = {key: statistics.median(m[key] for m in one.memory) for key in one.memory[0]}
            rest = row["peak_mb"] - 1.25 * row["weights_mb"] - row["cache_mb"]
            sizes = (row["weights_mb"], row["cache_mb"], row["peak_mb"], rest)
            table.add_row(one.name, *(f"{value:.0f}" for value in sizes), f"{row['load_s']:.2f}")
    return table, found


def per_token(run: Run) -> float:
    return run.decode_s / run.decoded


def times_faster(mine: dict[str, list[Run]], theirs: dict[str, list[Run]]) -> float | None:
    """The median over repeats of the ratio within a repeat, the mean of that over prompts."""
    ratios = [
        statistics.median(per_token(b) / per_token(a) for a, b in zip(mine[kind], theirs[kind], strict=False))
        for kind in mine
        if theirs.get(kind)
    ]
    return statistics.fmean(ratios) if ratios else None


def total_parts(runs: dict[str, list[Run]]) -> dict[str, float]:
    total: dict[str, float] = defaultdict(float)
    for run in (run for each in runs.values() for run in each):
        for key, value in run.parts.items():
            total[key] += value
    return total


def shown(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


COLOURS = {
    "paceline": "#1f5fbf",
    "paceline-int8": "#0b2f66",
    "llama.cpp": "#d9730d",
    "transformers": "#8e3fb5",
    "openvino": "#2a8c55",
}
PANELS = {"float32 and 16 bits": ("f32", "bf16", "f16"), "8 bits": ("q8_0", "int8"), "4 bits": ("q4_1", "q4_0")}
DASHES = ("-", "--", ":")


def medians_ms(seconds: dict[int, list[float]]) -> tuple[list[int], list[float]]:
    return list(seconds), [1000 * statistics.median(each) for each in seconds.values()]


def draw(path: Path, contestants: Sequence[Contestant]) -> None:
    """Time against M, a panel for each width of weights. Grey: what memory and processors allow."""
    passed = [one for one in contestants if one.passes_s["target"]]
    panels = {title: [o for o in passed if o.format in formats] for title, formats in PANELS.items()}
    panels = {title: those for title, those in panels.items() if those}
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(4.5 * len(panels), 4.6), layout="constrained")
    for number, (title, those) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(1, len(panels), number)
        floors: set[str] = set()  # two sides of one format have the same
        for one in those:
            dashes = DASHES[PANELS[title].index(one.format)]
            times = medians_ms(one.passes_s["target"])
            axes.plot(*times, dashes, marker="o", markersize=4, color=COLOURS[one.engine], label=one.name)
            if one.facts and one.format not in floors:
                floors.add(one.format)
                least = medians_ms(one.floors_s["target"])
                axes.plot(*least, dashes, color="#999999", linewidth=1, label=f"floor of {one.format}")
        axes.set(title=title, xlabel="M, tokens in one pass", ylabel="milliseconds", xticks=COUNTS, ylim=(0, None))
        axes.grid(color="#e5e5e5")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9)
    figure.suptitle("One pass of SmolLM2-135M over M tokens behind 128 others")
    figure.savefig(path)


if __name__ == "__main__":
    typer.run(main)
