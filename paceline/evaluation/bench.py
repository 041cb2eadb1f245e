"""A task's items with plain and with speculative decoding side by side, every completion on disk once it is there.

Two phases. Timed: one completion of each item at batch 1, plain and speculative by turns within this process, the order
changing from item to item, so that the machine's drift falls on both. Rest: the other n - 1 samples in batches, for the
quality alone; their seconds are not kept. Scores are computed afterwards, from the stored texts.

A line of `results.jsonl` is one unit of work, kept or lost as a whole: the timed completions of an item with both
methods, or one further sample with one of them. `scores.jsonl` has one line for each setting, item and method.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from random import Random
from typing import Any

from paceline.decoding.sequence import Provenance
from paceline.decoding.stats import Stats
from paceline.engine.llm import LLM
from paceline.engine.outputs import Completion
from paceline.evaluation.record import RunFolder
from paceline.evaluation.tasks import Item, Setting, Task, prompt_tokens
from paceline.proposers.base import NoProposer
from paceline.sampling.params import SamplingParams

METHODS = ("plain", "speculative")
RESULTS, SCORES = "results.jsonl", "scores.jsonl"
LETTERS = {provenance.value[0]: provenance for provenance in Provenance}
"""Provenance as results hold it: one letter a token, a, r, b or p."""

Track = Callable[[Sequence[Any], str], Iterable[Any]]
"""(work, what it is) -> the same work, with progress shown."""


def unshown(work: Sequence[Any], description: str) -> Iterable[Any]:
    return work


def chosen(task: Task, limit: int | None, seed: int) -> Task:
    """The task with `limit` of its items, drawn at random: items are often sorted by what they are about."""
    if limit is None or limit >= len(task.items):
        return task
    if limit < 1:
        raise ValueError(f"limit is {limit}, it must be at least 1")
    items = tuple(Random(seed).sample(task.items, limit))
    return replace(task, items=items, title=f"{limit} of {task.title}")


def with_samples(task: Task, n: int | None) -> Task:
    """n completions of each item, in the settings that sample: a greedy one has only one. None leaves the task's."""
    if n is None:
        return task
    settings = [replace(s, params=replace(s.params, n=n)) if s.params.temperature else s for s in task.settings]
    return replace(task, settings=tuple(settings))


def fitting(task: Task, llm: LLM) -> tuple[Task, int]:
    """The task without the items whose prompts leave no room in the model's context, and how many those are."""
    room = llm.target.context - max((s.params.max_tokens or 1) for s in task.settings)
    items = tuple(item for item in task.items if len(prompt_tokens(item, llm.tokenizer)) <= room)
    if not items:
        raise ValueError(f"all {len(task.items)} prompts are longer than {room} tokens: use a model with more context")
    return replace(task, items=items), len(task.items) - len(items)


def digest(task: Task, llm: LLM) -> str:
    """Of what the model is asked: a run goes on only with the same prompts and parameters."""
    asked = [[item.id, prompt_tokens(item, llm.tokenizer), list(turns(item))] for item in task.items]
    settings = [[setting.name, repr(setting.params)] for setting in task.settings]
    return hashlib.sha256(json.dumps([asked, settings]).encode()).hexdigest()[:16]


def turns(item: Item) -> tuple[str, ...]:
    """What the user says behind the model's first answer, if anything."""
    return tuple(item.reference.get("turns", ()))[1:]


def seed_of(seed: int, setting: str, item: str, method: str, sample: int) -> int:
    """Of one completion. Plain and speculative ones differ, so that they are independent samples of the same law."""
    address = json.dumps([seed, setting, item, method, sample]).encode()
    return int.from_bytes(hashlib.sha256(address).digest()[:8], "big") >> 1


def plainly(llm: LLM) -> LLM:
    """The same target in memory, without a draft."""
    plain = llm.with_draft(lambda slots, capacity: NoProposer())
    plain.draft_tokens = 0
    return plain


def measure(llm: LLM, task: Task, folder: RunFolder, *, seed: int, track: Track = unshown) -> None:
    """Whatever is not in the folder yet."""
    lines = folder.read(RESULTS)
    timed = {(line["setting"], line["item"]) for line in lines if line["timed"]}
    sampled = {
        (line["setting"], line["item"], found["method"], found["sample"])
        for line in lines
        if not line["timed"]
        for found in line["completions"]
    }
    engines = dict(zip(METHODS, (plainly(llm), llm), strict=True))
    by_turns = [
        (setting, item, METHODS if number % 2 == 0 else METHODS[::-1])
        for number, item in enumerate(task.items)
        for setting in task.settings
        if (setting.name, item.id) not in timed
    ]
    if by_turns:
        for engine in engines.values():  # the first pass is slower than others
            engine.generate([prompt_tokens(task.items[0], llm.tokenizer)], SamplingParams(max_tokens=8, seed=0))
    for setting, item, order in track(by_turns, f"{task.name}, timed"):
        completions = _timed(engines, setting, item, order, seed)
        line = {"setting": setting.name, "item": item.id, "timed": True, "asked": [_asked(item), *turns(item)]}
        folder.append(RESULTS, line | {"completions": completions})
    for setting in task.settings:
        for method, engine in engines.items():
            work = [
                (item, sample)
                for item in task.items
                for sample in range(1, setting.params.n)
                if (setting.name, item.id, method, sample) not in sampled
            ]
            _rest(engine, setting, method, work, folder, seed, track)


def score(task: Task, folder: RunFolder, *, track: Track = unshown) -> None:
    """Whatever is complete and not scored yet. Texts of further turns are not scored."""
    if not task.metric:
        return
    texts: dict[tuple[str, str, str], dict[int, str]] = {}
    for line in folder.read(RESULTS):
        for found in line["completions"]:
            if found["turn"] == 0:
                texts.setdefault((line["setting"], line["item"], found["method"]), {})[found["sample"]] = found["text"]
    done = {(line["setting"], line["item"], line["method"]) for line in folder.read(SCORES)}
    work = [
        (setting, item, method)
        for setting in task.settings
        for item in task.items
        for method in METHODS
        if (setting.name, item.id, method) not in done
        and len(texts.get((setting.name, item.id, method), ())) == setting.params.n
    ]
    for setting, item, method in track(work, f"{task.name}, scoring"):
        of_sample = texts[setting.name, item.id, method]
        scores = task.score(item, [of_sample[sample] for sample in sorted(of_sample)])
        folder.append(SCORES, {"setting": setting.name, "item": item.id, "method": method, "scores": scores})


def _timed(
    engines: dict[str, LLM], setting: Setting, item: Item, order: Sequence[str], seed: int
) -> list[dict[str, Any]]:
    """One completion of each turn with each method, in this order; every method goes on from its own answer."""
    found = []
    asked = dict.fromkeys(order, item)
    for turn, follows in enumerate([*turns(item), None]):
        for method in order:
            llm = engines[method]
            prompt = prompt_tokens(asked[method], llm.tokenizer)
            if len(prompt) >= llm.target.context:
                continue  # a conversation ends where the context does
            params = replace(setting.params, n=1, seed=seed_of(seed, setting.name, item.id, method, 0))
            (completion,) = llm.generate([prompt], params)
            kept = _completion(llm, completion, method, 0, turn)
            found.append(kept | {"stats": asdict(completion.stats)})
            if follows is not None:
                asked[method] = _next_turn(asked[method], completion.text, follows)
    return found


def _next_turn(item: Item, answer: str, follows: str) -> Item:
    said = [{"role": "assistant", "content": answer}, {"role": "user", "content": follows}]
    assert not isinstance(item.prompt, str)
    return replace(item, prompt=(*item.prompt, *said))


def _rest(
    llm: LLM,
    setting: Setting,
    method: str,
    work: Sequence[tuple[Item, int]],
    folder: RunFolder,
    seed: int,
    track: Track,
) -> None:
    """One sequence for each (item, sample), as many at once as the engine runs."""
    if not work:
        return
    prompts = [prompt_tokens(item, llm.tokenizer) for item, _ in work]
    params = [
        replace(setting.params, n=1, seed=seed_of(seed, setting.name, item.id, method, sample)) for item, sample in work
    ]
    results: Iterator[tuple[int, Completion]] = llm.as_completed(prompts, params)
    for _ in track(work, f"{setting.name}, {method}, further samples"):
        index, completion = next(results)
        item, sample = work[index]
        found = _completion(llm, completion, method, sample, 0)
        found["stats"] = {name: value for name, value in asdict(completion.stats).items() if not name.endswith("_s")}
        folder.append(RESULTS, {"setting": setting.name, "item": item.id, "timed": False, "completions": [found]})


def _asked(item: Item) -> str:
    """What stands last in the prompt: the question, for people."""
    return item.prompt if isinstance(item.prompt, str) else item.prompt[-1]["content"]


def _completion(llm: LLM, completion: Completion, method: str, sample: int, turn: int) -> dict[str, Any]:
    (output,) = completion.outputs
    return {
        "method": method,
        "sample": sample,
        "turn": turn,
        "text": output.text,
        "tokens": output.token_ids,
        "widths": _widths(llm, completion),
        "provenance": "".join(provenance.value[0] for provenance in output.provenance),
        "finish": output.finish_reason,
        "seed": output.seed,
    }


def _widths(llm: LLM, completion: Completion) -> list[int]:
    """Characters of the text that became certain with each token; what a stop string cut off counts for none."""
    (output,) = completion.outputs
    detokenizer = llm.tokenizer.detokenizer(completion.prompt_token_ids)
    widths, left = [], len(output.text)
    for token in output.token_ids:
        widths.append(min(len(detokenizer.push(token)), left))
        left -= widths[-1]
    widths[-1] += left
    return widths


def stats_of(record: dict[str, Any]) -> Stats:
    """Of a completion in the results; those of a batch have no seconds."""
    return Stats(**record["stats"])


def round_lengths(provenance: str) -> list[int]:
    """Tokens that each round gave, the one that read the prompt first: a round ends with the target's own token, and
    the output may end within one."""
    lengths, length = [], 0
    for letter in provenance:
        length += 1
        if LETTERS[letter] is not Provenance.ACCEPTED:
            lengths.append(length)
            length = 0
    return [*lengths, length] if length else lengths
