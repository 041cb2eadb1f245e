"""Language models with known distributions, behind the interface that real ones implement.

Their logits are a function of what the *cache* holds, so a cache that was not rewound, or a token that was never fed,
shows in the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from paceline.decoding.control import Control
from paceline.decoding.generate import generate
from paceline.decoding.round import Batch
from paceline.decoding.sequence import Sequence as Generated
from paceline.models.interface import Cache, Chunk, Scores
from paceline.proposers.base import NoProposer, Proposer
from paceline.proposers.draft_model import DraftModelProposer
from paceline.proposers.ngram import NgramProposer
from paceline.proposers.vocabulary import VocabularyMap
from paceline.sampling.params import SamplingParams
from paceline.sampling.sampler import RULES, Rule, Sampler
from paceline.sampling.streams import Stream

Vector = npt.NDArray[np.float64]


class Table:
    """Conditional distributions over a small vocabulary, a function of the last `order` tokens.

    `zeros` is the chance that a token has no probability at all in a row, `one_hot` the chance that a row is certain.
    """

    def __init__(self, vocab_size: int, order: int, seed: int, zeros: float = 0.0, one_hot: float = 0.0) -> None:
        self.vocab_size, self.order, self.seed, self.zeros, self.one_hot = vocab_size, order, seed, zeros, one_hot
        self._rows: dict[tuple[int, ...], Vector] = {}

    def row(self, tokens: Sequence[int]) -> Vector:
        """[V] the distribution of the token after `tokens`."""
        key = tuple(tokens[-self.order :]) if self.order else ()
        if key not in self._rows:
            rng = np.random.default_rng([self.seed, len(key), *key])
            row = rng.dirichlet(np.full(self.vocab_size, 0.7))
            row[rng.random(self.vocab_size) < self.zeros] = 0
            if row.sum() == 0 or rng.random() < self.one_hot:
                row[:] = 0
                row[rng.integers(self.vocab_size)] = 1
            self._rows[key] = row / row.sum()
        return self._rows[key]


class TokenCache:
    """A cache that keeps the tokens themselves."""

    def __init__(self, slots: int, capacity: int) -> None:
        self.rows: list[list[int]] = [[] for _ in range(slots)]
        self.capacity = capacity

    @property
    def slots(self) -> int:
        return len(self.rows)

    def length(self, slot: int) -> int:
        return len(self.rows[slot])

    def truncate(self, slot: int, length: int) -> None:
        if not 0 <= length <= len(self.rows[slot]):
            raise ValueError(f"cannot truncate slot {slot} of {len(self.rows[slot])} positions to {length}")
        del self.rows[slot][length:]


class TableModel:
    """A `Table` as a LanguageModel, in float64. `passes` records the chunks it was given."""

    def __init__(self, table: Table, context: int = 64) -> None:
        self.table, self.context = table, context
        self.device = torch.device("cpu")
        self.passes: list[list[Chunk]] = []

    @property
    def vocab_size(self) -> int:
        return self.table.vocab_size

    def new_cache(self, slots: int, capacity: int) -> TokenCache:
        if capacity > self.context:
            raise ValueError(f"capacity {capacity} exceeds the context of {self.context}")
        return TokenCache(slots, capacity)

    def __call__(self, chunks: Sequence[Chunk], cache: Cache, features: Sequence[int] = ()) -> Scores:
        assert isinstance(cache, TokenCache)
        assert len({chunk.slot for chunk in chunks}) == len(chunks), "a slot runs once a pass"
        self.passes.append(list(chunks))
        logits = []
        for chunk in chunks:
            assert chunk.tokens, "an empty chunk"
            tokens, rows = cache.rows[chunk.slot], []
            for token in chunk.tokens:
                assert 0 <= token < self.vocab_size, f"token {token} is not in the vocabulary"
                tokens.append(token)
                rows.append(self.table.row(tokens))
            if len(tokens) > cache.capacity:
                raise ValueError(f"slot {chunk.slot} holds {cache.capacity} positions, {len(tokens)} were needed")
            picked = np.array(rows[len(rows) - chunk.outputs :]).reshape(chunk.outputs, self.vocab_size)
            with np.errstate(divide="ignore"):
                logits.append(torch.from_numpy(np.log(picked)))
        return Scores(logits)


class Letters:
    """A detokenizer: token i is the i-th letter, certain at once."""

    def push(self, token: int) -> str:
        return chr(ord("a") + token)

    def flush(self) -> str:
        return ""


@dataclass(frozen=True, kw_only=True)
class Job:
    prompt: tuple[int, ...] = (0,)
    params: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=12, seed=0))
    sample: int = 0


def decode(
    target: TableModel,
    jobs: Sequence[Job],
    *,
    draft: TableModel | Proposer | str | None = None,
    k: int | Control = 4,
    verify: str = "token",
    slots: int = 8,
    eos: frozenset[int] = frozenset(),
    rule: Rule | None = None,
) -> list[Generated]:
    """Run the jobs through the one decoding loop and return their sequences, finished, in order."""
    capacity = target.context - 1
    proposer: Proposer = NoProposer()
    if draft == "ngram":
        proposer = NgramProposer(target.vocab_size, shortest=1)
    elif draft is not None and not isinstance(draft, (TableModel, str)):
        proposer = draft
    elif isinstance(draft, TableModel):
        tokens = [(False, bytes([i])) for i in range(target.vocab_size)]
        vocabulary = VocabularyMap(
            tokens, tokens, lambda text: [], target_size=target.vocab_size, draft_size=draft.vocab_size
        )
        proposer = DraftModelProposer(draft, vocabulary, slots=slots, capacity=capacity)
    sequences = [
        Generated(
            job.prompt,
            Sampler(
                params=job.params,
                rule=rule or RULES[verify],
                stream=Stream(job.params.seed or 0, job.sample),
                prompt_length=len(job.prompt),
                end_ids=frozenset(job.params.stop_token_ids or ()) | (frozenset() if job.params.ignore_eos else eos),
            ),
            limit=min(target.context, len(job.prompt) + (job.params.max_tokens or target.context)),
            detokenizer=Letters(),
        )
        for job in jobs
    ]
    batch = Batch(target, proposer, draft_tokens=k, slots=slots, capacity=capacity)
    for _ in generate(batch, sequences):
        pass
    return sequences


def text(sequence: Generated) -> str:
    return "".join(token.text for token in sequence.output)


def ids(sequence: Generated) -> list[int]:
    return [token.id for token in sequence.output]
