"""`paceline train`: from a target and prompts to a draft. Whatever interrupts it, the same command goes on.

A folder holds the draft itself (`config.json`, `model.safetensors`), `texts/`, `checkpoints/`, `log.jsonl` and, where
matplotlib is installed, the curves.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from rich.filesize import decimal
from rich.progress import Progress

from paceline.checkpoints.drafts import find_draft, is_draft, read_draft
from paceline.checkpoints.folder import read_json
from paceline.decoding.control import MAX_DRAFT, Costs
from paceline.engine.llm import LLM
from paceline.models.decoder import Decoder
from paceline.sampling.params import SamplingParams
from paceline.training.data import Answering, Batch, Prompt, Texts, read_prompts
from paceline.training.evaluation import Evaluation, evaluate
from paceline.training.learners import Learner, begin, subsets
from paceline.training.recipes import LEARNING_RATES, Recipe
from paceline.training.reporting import Report
from paceline.training.trainer import Trainer
from paceline.training.world import World

HELD_OUT_TOKENS = 8192
"""Of held-out texts, at most, that an evaluation reads; a batch of it holds EVALUATION_BATCH."""
EVALUATION_BATCH = 1024

TRIED = {"shallow": subsets}
"""Kinds that are made of the target's layers: (depth, count) -> the layers that are tried, by what they are called."""

Say = Callable[[str], None]


def train(
    target: str,
    prompts: Path,
    out: Path,
    *,
    kind: str,
    draft_vocab: int,
    layers: int,
    heads: int,
    loss: str,
    steps: int | None,
    tokens: int | None,
    epochs: float | None,
    lr: float | None,
    unroll: int,
    tokens_per_batch: int,
    batches_per_step: int,
    gradient_checkpointing: bool,
    temperature: float,
    top_p: float,
    answer_temperature: Sequence[float] | None,
    max_tokens: int,
    cache_features: int,
    seed: int,
    start: Path | None = None,
    device: str,
    threads: int | None,
    say: Say = lambda text: None,
    measure: Callable[[LLM, Path], Costs] | None = None,
) -> None:
    """`epochs` counts where neither `steps` nor `tokens` is given. `cache_features` in bytes. `measure` tells what
    serving with the draft in a folder costs. Raises ValueError for what cannot be trained, KeyboardInterrupt after
    Ctrl-C, when everything is kept."""
    if sum(length is not None for length in (steps, tokens, epochs)) > 1:
        raise ValueError(f"steps is {steps}, tokens is {tokens} and epochs is {epochs}: give one of them")
    if draft_vocab < 0:
        raise ValueError(f"draft_vocab is {draft_vocab}, it must be a number of tokens, or 0 for all of them")
    if epochs is not None and not 0 < epochs < math.inf:
        raise ValueError(f"epochs is {epochs}, it must be a finite number above 0")
    # Made before the target answers, which may take hours: what cannot be trained by is said at once.
    recipe = Recipe(
        steps=steps,
        tokens=1 if steps is None and tokens is None else tokens,
        loss=loss,
        lr=LEARNING_RATES[kind] if lr is None else lr,
        unroll=unroll,
        tokens_per_batch=tokens_per_batch,
        batches_per_step=batches_per_step,
        gradient_checkpointing=gradient_checkpointing,
        seed=seed,
    )
    params = SamplingParams(temperature=temperature, top_p=top_p)
    how = Answering(max_tokens=max_tokens, seed=seed)
    if answer_temperature:
        how = replace(how, temperatures=tuple(answer_temperature))
    world = World.from_environment(device)
    say = say if world.first else lambda text: None
    try:
        llm = LLM(target, None, device=world.device, threads=threads)
        # A draft of one token, to learn which hidden states its kind reads.
        features = begin(kind, _decoder(llm), target, [0], layers=[0], heads=heads).features
        texts = _texts(out / "texts", llm, read_prompts(prompts, llm), how, features, cache_features, world, say)
        held_out = _held_out(texts, world)
        ids = texts.frequent(draft_vocab) if 0 < draft_vocab < llm.target.vocab_size else None
        if start is not None:
            start = find_draft(start) or start
            _, of_start, _ = read_draft(start, _decoder(llm), kind)
            ids = None if of_start is None else of_start.tolist()
        if ids is not None:
            say(f"the draft has {len(ids):,} tokens, {texts.coverage(ids):.1%} of those in held-out answers")
        chosen = _layers(start or out, kind, llm, target, ids, held_out, layers, world, say)
        learner = begin(kind, _decoder(llm), target, ids, layers=chosen, heads=heads, seed=seed)
        if steps is None and tokens is None:
            epoch = sum(len(texts.example(index).tokens) - 1 for index in texts.train())
            recipe = replace(recipe, tokens=max(1, round(epoch * (3.0 if epochs is None else epochs))))
        if learner.steps is not None:
            recipe = replace(recipe, unroll=learner.steps)
        if start is not None:
            learner.start(start)
        costs = _costs(learner, llm, measure, say) if measure is not None and world.first else None
        report = Report(out, costs=costs, reach=learner.reach)
        trainer = Trainer(
            learner,
            texts,
            recipe,
            out / "checkpoints",
            evaluate=lambda asked: _evaluate(learner, held_out(asked), llm, params),
            saved=lambda: learner.save(out),
            observer=report if world.first else None,
            world=world,
            softcap=_decoder(llm).config.logit_softcap,
            origin={
                "kind": kind,
                "draft_vocab": ids and len(ids),
                "layers": chosen,
                "heads": heads,
                "start": start and str(start),
            },
        )
        _run(trainer, report, out, say)
    finally:
        world.leave()


def measured(llm: LLM, draft: Path) -> Costs:
    """What serving with the draft in this folder costs here."""
    return llm.with_draft(draft, max_num_seqs=1).measure()


def _costs(learner: Learner, llm: LLM, measure: Callable[[LLM, Path], Costs], say: Say) -> Costs:
    say("measuring what a round costs here")
    with TemporaryDirectory() as folder:  # a draft that is trained further than this one may be where it will be
        learner.save(Path(folder))
        return measure(llm, Path(folder))


def _run(trainer: Trainer, report: Report, out: Path, say: Say) -> None:
    try:
        trainer.run()
    except KeyboardInterrupt:
        say(f"interrupted after step {trainer.counters.step}: the same command goes on from there")
        raise
    finally:
        report.close()
    if not trainer.world.first:
        return
    trainer.learner.save(out)
    for text in filter(None, (report.plot(), report.verdict(), f"the draft is in {out}: use it with --draft {out}")):
        say(text)


def _decoder(llm: LLM) -> Decoder:
    if not isinstance(llm.target, Decoder):
        raise ValueError(
            "a draft can be trained for targets that Paceline's own decoder runs; this one is run by transformers"
        )
    return llm.target


def _texts(
    folder: Path,
    llm: LLM,
    prompts: Sequence[Prompt],
    how: Answering,
    features: tuple[int, ...],
    budget: int,
    world: World,
    say: Say,
) -> Texts:
    """All of them, made by rank 0 where they are missing; then everybody reads them."""
    if world.first:
        texts = Texts(folder, llm, prompts, how, features=features, budget=budget)
        if texts.missing:
            _make(texts, prompts, how, budget, say)
    world.wait()
    return texts if world.first else Texts(folder, llm, prompts, how, features=features, budget=budget)


def _make(texts: Texts, prompts: Sequence[Prompt], how: Answering, budget: int, say: Say) -> None:
    asked = sum(prompts[index].mask is None for index in texts.missing)
    most = sum(len(prompts[index].tokens) + how.max_tokens * (prompts[index].mask is None) for index in texts.missing)
    speed, size = texts.cost()
    say(
        f"{len(texts.missing):,} texts to make, {asked:,} of them answers; at most {most:,} tokens. Their hidden states"
        f" take {size:,} bytes a token on disk, {decimal(most * size)} in all; {decimal(budget)} may be kept, and the"
        f" others are computed in every epoch, at about {speed:,.0f} tokens a second ({most / speed / 60:.0f} min)"
    )
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, redirect_stdout=sys.stdout.isatty()) as bar:
        task = bar.add_task("answering", total=len(texts.missing))
        try:
            texts.make(advance=lambda made, _: bar.advance(task, made))
        except KeyboardInterrupt:
            say(f"interrupted: {len(texts.indices)} of {len(prompts)} texts are made; the same command goes on")
            raise


def _held_out(texts: Texts, world: World) -> Callable[[Callable[[], bool]], Iterator[Batch]]:
    """(when to stop) -> this rank's batches of the texts that are set aside. They are read once and stay in memory."""
    groups: list[list[int]] = []
    left, room = HELD_OUT_TOKENS, 0
    for index in texts.held_out():
        length = len(texts.example(index).tokens) - 1
        if left <= 0:
            break
        if not groups or length > room:
            groups.append([])
            room = EVALUATION_BATCH
        groups[-1].append(index)
        left, room = left - length, room - length
    read: list[Batch] = []
    own = groups[world.rank :: world.size]

    def batches(asked: Callable[[], bool]) -> Iterator[Batch]:
        for number, indices in enumerate(own):
            if asked():
                return
            if number == len(read):
                read.append(texts.batch(indices).to(texts.target.device))
            yield read[number]

    return batches


def _evaluate(learner: Learner, batches: Iterator[Batch], llm: LLM, params: SamplingParams) -> torch.Tensor:
    return evaluate(learner, batches, _decoder(llm).logits, params, learner.steps or MAX_DRAFT)


def _layers(
    out: Path,
    kind: str,
    llm: LLM,
    name: str,
    ids: Sequence[int] | None,
    held_out: Callable[[Callable[[], bool]], Iterator[Batch]],
    count: int,
    world: World,
    say: Say,
) -> list[int]:
    """Which of the target's layers a draft begins as: those whose tokens would be accepted most often without
    training. None for a kind that is not made of them."""
    if kind not in TRIED:
        return []
    if is_draft(out) and isinstance(found := read_json(out / "config.json").get("layers"), list):
        return found
    tried = {}
    for how, layers in TRIED[kind](_decoder(llm).config.num_layers, count).items():
        learner = begin(kind, _decoder(llm), name, ids, layers=layers)
        sums_J3 = world.sum(_evaluate(learner, held_out(lambda: False), llm, SamplingParams()))
        tried[how] = (Evaluation.of(sums_J3).alpha[0], layers)
    say("without training: " + "; ".join(f"{how} {layers} alpha {alpha:.3f}" for how, (alpha, layers) in tried.items()))
    return max(tried.values(), key=lambda found: found[0])[1]
