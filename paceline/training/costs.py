"""What a round costs here, in seconds, by the number of drafted tokens: measured by the decoding loop itself."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from paceline.decoding.stats import Stats
from paceline.engine.llm import LLM
from paceline.sampling.params import SamplingParams
from paceline.training.evaluation import MAX_DRAFT, Costs

PROMPT = "Explain how a bicycle keeps its balance, and write down the steps to learn riding one."
TOKENS = 40
"""Of each measured run."""
REPEATS = 3
"""Runs of each K, one of every K in turn: the machine's speed drifts, and all of them shall see the same of it."""


def measure(llm: LLM, draft: Path) -> Costs:
    """Medians over the runs, greedy, one sequence, the draft of this folder."""
    drafting = llm.with_draft(llm.new_proposer(draft))
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    prompt = llm.tokenizer.encode(PROMPT)
    found: dict[int, list[Stats]] = {k: [] for k in range(MAX_DRAFT + 1)}
    for repeat in range(REPEATS + 1):
        for k, runs in found.items():
            drafting.draft_tokens = k
            (completion,) = drafting.generate([prompt], params)
            if repeat:  # the first one is for caches and clocks
                runs.append(completion.stats)
    drafts = range(1, MAX_DRAFT + 1)
    return Costs(
        plain_s=median(s.decode_s / s.rounds for s in found[0]),
        score_s=[median(s.score_s / s.rounds for s in found[k]) for k in drafts],
        draft_s=[median(s.draft_s / s.rounds for s in found[k]) for k in drafts],
        other_s=median((s.verify_s + s.other_s) / s.rounds for k in drafts for s in found[k]),
    )
