"""Level 3 on any OpenAI-compatible server that returns log-probabilities, through `/completions`.

What it can prove: that tokens are sampled as the server's own log-probabilities say, at temperature 1 and without
filters, where these are the probabilities themselves. A draft whose proposals are accepted too often, or a recovered
token from the wrong distribution, shows. What it cannot: that the log-probabilities are the target's (a server may
report its draft's), and anything at other temperatures. Only the most probable tokens are reported, so the rest is one
token for the tests. Answers are hostile input: their size is limited, and their form is checked.
"""

from __future__ import annotations

import json
import math
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from paceline.evaluation.audit import statistics
from paceline.evaluation.audit.certificate import Certificate, Control, Journal, Level
from paceline.evaluation.audit.run import Say, Size
from paceline.evaluation.audit.statistics import Cells, Sample
from paceline.evaluation.prompts import PROMPTS
from paceline.evaluation.record import circumstances
from paceline.sampling.params import SamplingParams

TOP = 5
"""Most probable tokens that are asked for; some servers give no more."""
LARGEST_ANSWER = 1 << 24
"""Bytes."""
TIMEOUT_S = 120
KEY = "OPENAI_API_KEY"
"""The environment's variable for the server's key, as clients of this interface have it: options would be recorded."""
TOO_OFTEN = 0.1
"""What the control adds to the most probable token."""

Row = dict[str, float]
"""Probabilities of the most probable tokens, and of the one that was sampled."""


def complete(server: str, body: dict[str, Any]) -> list[list[tuple[str, Row]]]:
    """(token, the row it was drawn from) of each token of each choice. Raises ValueError for an answer without them."""
    url = f"{server.rstrip('/')}/completions"
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{server!r} is no address of a server: write http://HOST:PORT/v1")
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(KEY):
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            data = answer.read(LARGEST_ANSWER + 1)
    except urllib.error.HTTPError as error:
        raise ValueError(f"{url} answered {error.code}: {error.read(500).decode(errors='replace')}") from error
    if len(data) > LARGEST_ANSWER:
        raise ValueError(f"{url} answered with more than {LARGEST_ANSWER} bytes: ask for fewer --trials at a time")
    try:
        return [_choice(choice["logprobs"]) for choice in json.loads(data)["choices"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{url} gave no log-probabilities in the form of completions: does it support them?"
        ) from error


def _choice(logprobs: dict[str, Any]) -> list[tuple[str, Row]]:
    found = []
    for token, own, top in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        row = {str(name): math.exp(min(0.0, float(value))) for name, value in top.items()}
        row.setdefault(str(token), math.exp(min(0.0, float(own))))
        found.append((str(token), row))
    return found


def rows_of(choices: Sequence[Sequence[tuple[str, Row]]], size: Size) -> Sample:
    """Each token against the row it came with; rows of one prefix are taken from the first choice that has it."""
    sample = Sample(size.ahead)
    groups: dict[tuple[str, ...], tuple[Row, list[str]]] = {}
    for choice in choices:
        tokens = tuple(token for token, _ in choice)
        for t, (token, row) in enumerate(choice[: size.ahead]):
            top = dict(sorted(row.items(), key=lambda item: -item[1])[:TOP])
            groups.setdefault(tokens[:t], (top, []))[1].append(token)
    for prefix, (row, given) in groups.items():
        p_V = np.array([*row.values(), max(0.0, 1 - sum(row.values()))])
        p_V /= p_V.sum()
        places = {name: place for place, name in enumerate(row)}
        drawn = [places.get(token, len(row)) for token in given]
        # Rounded log-probabilities may leave nothing for the rest.
        p_V = np.maximum(p_V, 1e-6) / np.maximum(p_V, 1e-6).sum()
        sample.add(p_V, None, (), drawn, position=len(prefix) + 1)
        if not prefix:
            sample.cells.append(Cells.of(p_V, drawn))
    sample.trials = len(choices)
    return sample


def audit_server(
    server: str,
    model: str,
    params: SamplingParams,
    prompts: Sequence[str] | None,
    size: Size,
    *,
    seed: int,
    out: Path | None,
    say: Say,
) -> Certificate:
    """`size.trials` completions of `size.ahead` tokens for each of up to `size.contexts` prompts, continued
    as they are.

    Raises ValueError where the parameters are other than temperature 1 without filters, or the server has no
    log-probabilities; OSError where it cannot be reached.
    """
    if params.temperature != 1 or params.top_p != 1 or params.top_k > 0 or params.min_p or params.penalises:
        raise ValueError(
            "log-probabilities are those of temperature 1 without filters and penalties: audit a server with these"
        )
    texts = list(prompts or PROMPTS)[: size.contexts]
    told = {"server": server, "model": model, "top": TOP}
    asked = {**told, "prompts": texts, "size": asdict(size), "seed": seed}
    journal = Journal(None if out is None else out / "steps.jsonl", asked)
    body = {"model": model, "max_tokens": size.ahead, "temperature": 1, "top_p": 1, "logprobs": TOP}

    def ask(index: int) -> Any:
        return [
            complete(server, {**body, "prompt": texts[index], "n": 1, "seed": seed + 100_000 * index + number})[0]
            for number in range(size.trials)
        ]

    def collect(change: Callable[[int, Any], Any] = lambda index, choices: choices) -> statistics.Statistics:
        whole = Sample(size.ahead)
        for index in range(len(texts)):
            choices = journal.once(f"prompt {index}", partial(ask, index))
            whole.extend(rows_of(change(index, choices), size))
            say(f"{index + 1} of {len(texts)} prompts")
        return statistics.examine(whole, alarm=size.alarm, seed=seed)

    def favourite(index: int, choices: Any) -> Any:
        """The same answers with some first tokens replaced by the most probable one."""
        rng = np.random.default_rng([seed, index])
        return [
            [(max(choice[0][1], key=choice[0][1].__getitem__), choice[0][1])] if rng.random() < TOO_OFTEN else choice
            for choice in choices
            if choice
        ]

    found, wrong = collect(), collect(favourite)
    control = Control(
        fault="favourite too often",
        what=f"{TOO_OFTEN:.0%} of the first tokens are the most probable one instead",
        level=3,
        caught=not wrong.exact,
        detail=f"p = {wrong.worst_p_value:.1e} after {wrong.trials} completions",
    )
    seen = min((f.detectable for f in found.findings if f.position == 1), default=1.0)
    level = Level(
        number=3,
        title="Statistics",
        covers="Sampled tokens against the server's own log-probabilities, at temperature 1: not that these are the "
        "target's, nor anything at another temperature. A share of the most probable token that is off by "
        f"{seen:.2%} would have been seen with a probability of {statistics.POWER:.0%}.",
        exact=found.exact,
        summary=f"{found.trials} completions of {len(texts)} prompts: p = {found.worst_p_value:.2g} "
        f"(fails below {found.alarm:g})",
        figures={
            "findings": [asdict(finding) for finding in found.findings],
            "fit": None if found.fit is None else asdict(found.fit),
        },
    )
    certificate = Certificate(
        subject=told,
        levels=[level],
        controls=[control],
        doubts=[],
        setting=circumstances() | {"seed": seed, "size": asdict(size), "prompts": len(texts)},
        notes=["The server's own word is what it is held against: there is no identity and no replay."],
    )
    if out is not None:
        certificate.save(out)
    return certificate
