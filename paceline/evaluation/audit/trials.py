"""Real contexts, held in the slots of a batch, from which the engine's own rounds can be run as often as wanted.

A context is gone back to by what the parts promise anyway: a cache forgets what lies behind a position, and a proposer
for which a slot begins anew reads the committed tokens again.

Shapes: N tokens of a context, V vocabulary, F captured features, H hidden size.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from paceline.decoding import sequence as decoding
from paceline.decoding.sequence import OutputToken, Provenance, TokenLogprobs
from paceline.evaluation.audit.subject import Silent, Subject
from paceline.models.interface import Cache, Chunk, InFront
from paceline.proposers.base import Proposer, Prospect, Request
from paceline.sampling.distribution import Distribution, on_host
from paceline.sampling.draft import Draft
from paceline.sampling.sampler import Sampler

READ_CHUNK = 512
"""Tokens of a context that one plain pass reads."""


@dataclass(frozen=True)
class Context:
    """A prompt and at least one token of output behind it."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.output]


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens the two have in common from the beginning on."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class _Remembering(InFront):
    """A target that remembers the cache it made."""

    def new_cache(self, slots: int, capacity: int) -> Cache:
        self.cache = super().new_cache(slots, capacity)
        return self.cache


class Watched:
    """A proposer whose last drafts, and the hidden states it was shown, can be looked at."""

    def __init__(self, inner: Proposer) -> None:
        self._inner = inner
        self.seen: dict[int, list[torch.Tensor]] = {}
        self.drafts: dict[int, tuple[int, Draft]] = {}
        """By slot: (committed tokens, what was drafted behind them)."""
        self.reading = False
        """What is observed is kept and not passed on: the proposer is told of it all at once afterwards."""

    @property
    def features(self) -> tuple[int, ...]:
        return self._inner.features

    def begin(self, slot: int) -> None:
        self.seen[slot] = []
        self._inner.begin(slot)

    def prospects(self, requests: Sequence[Request]) -> list[Prospect | None]:
        return self._inner.prospects(requests)

    def propose(self, requests: Sequence[Request]) -> list[Draft]:
        drafts = self._inner.propose(requests)
        for request, draft in zip(requests, drafts, strict=True):
            self.drafts[request.slot] = (len(request.tokens), draft)
        return drafts

    def observe(self, slot: int, tokens: Sequence[int], features_TFH: torch.Tensor | None = None) -> None:
        if features_TFH is not None:
            self.seen[slot].append(features_TFH)
        if not self.reading:
            self._inner.observe(slot, tokens, features_TFH)


class _Trial(decoding.Sequence):
    """A sequence that nothing ends: it is taken back to its context instead."""

    def commit(self, token: int, provenance: Provenance, logprobs: TokenLogprobs | None) -> bool:
        self.tokens.append(token)
        self.output.append(OutputToken(token, "", provenance, logprobs))
        return False


@dataclass
class Outcome:
    """What one trial gave: the first tokens, and the q of every prefix of them that was drafted behind."""

    tokens: list[int]
    q_of: dict[tuple[int, ...], Distribution] = field(default_factory=dict)


class Bench:
    """One context a slot. `ahead`: how many tokens a trial shall give; `longest`: the longest context there will be."""

    def __init__(
        self, subject: Subject, contexts: Sequence[Context], *, ahead: int, longest: int | None = None
    ) -> None:
        self.subject, self.ahead = subject, ahead
        self.contexts: Sequence[Context] = []
        self.rounds = 0
        """Rounds of a sequence, reading apart."""
        longest = longest or max(len(c.tokens) for c in contexts)
        self._capacity = min(subject.target.context - 1, longest + ahead + subject.draft_tokens + 1)
        target = _Remembering(subject.target)
        self.proposer = Watched(subject.new_proposer(len(contexts), self._capacity))
        watched = replace(subject, target=target, new_proposer=lambda slots, capacity: self.proposer)
        self._batch = watched.new_batch(len(contexts), self._capacity)
        self._cache = target.cache
        self._trials: list[_Trial] = []
        self._features: list[torch.Tensor | None] = []
        self.move(contexts)

    def move(self, contexts: Sequence[Context]) -> None:
        """To other contexts, not more than at first. What the slots have read of them already is not read again."""
        self.proposer.reading = True
        for i, context in enumerate(contexts):
            sampler = self.subject.new_sampler(len(context.prompt), 0)
            if i == len(self._trials):
                trial = _Trial(context.prompt, sampler, limit=self._capacity + 1, detokenizer=Silent())
                self._batch.admit(trial)
                self._trials.append(trial)
            else:
                trial, features = self._trials[i], self._features[i]
                same = common(self.contexts[i].tokens[:-1], context.tokens[:-1])
                self._cache.truncate(trial.slot, same)
                self.proposer.seen[trial.slot] = [] if features is None else [features[:same]]
            # No output yet, so all of it is read as a prompt is.
            trial.tokens, trial.output, trial.sampler = context.tokens, [], sampler
        # Where fewer contexts follow, the last slots keep what they hold.
        self.contexts, kept = list(contexts), self._features[len(contexts) :]
        while reading := [trial for trial in self._trials[: len(contexts)] if not trial.output]:
            self._batch.running = list(reading)
            self._batch.round()
        self.proposer.reading = False
        self._features = [self._known(t, c) for t, c in zip(self._trials, contexts, strict=False)] + kept

    def _known(self, trial: _Trial, context: Context) -> torch.Tensor | None:
        if not self.proposer.features:
            return None
        return torch.cat(self.proposer.seen[trial.slot])[: len(context.tokens) - 1]

    @torch.inference_mode()
    def rewind(self, samplers: Sequence[Sampler]) -> None:
        """Every slot back to its context, with all but the last token read."""
        for i, (context, sampler) in enumerate(zip(self.contexts, samplers, strict=True)):
            trial, features = self._trials[i], self._features[i]
            length = len(context.tokens)
            del trial.tokens[length:]
            trial.output = [OutputToken(token, "", Provenance.PLAIN) for token in context.output]
            trial.sampler = sampler
            self._cache.truncate(trial.slot, length - 1)
            self.proposer.begin(trial.slot)
            self.proposer.observe(trial.slot, trial.tokens, features)

    def round(self) -> None:
        """One round of every slot."""
        self._batch.running = list(self._trials[: len(self.contexts)])
        self._batch.round()

    def run(self, samplers: Sequence[Sampler]) -> list[Outcome]:
        """From the contexts, rounds until each has given `ahead` tokens."""
        self.rewind(samplers)
        outcomes = [Outcome([]) for _ in self.contexts]
        lengths = [len(context.tokens) for context in self.contexts]
        while going := [i for i, n in enumerate(lengths) if len(self._trials[i].tokens) < n + self.ahead]:
            self._batch.running = [self._trials[i] for i in going]
            self.proposer.drafts.clear()
            self._batch.round()
            self.rounds += len(going)
            for i in going:
                trial = self._trials[i]
                if trial.slot not in self.proposer.drafts:
                    continue
                anchor, draft = self.proposer.drafts[trial.slot]
                before = tuple(trial.tokens[lengths[i] : anchor])
                for t, q in enumerate(draft.probs):
                    prefix = (*before, *draft.tokens[:t])
                    if len(prefix) < self.ahead:
                        outcomes[i].q_of.setdefault(prefix, q)
        for i, outcome in enumerate(outcomes):
            outcome.tokens = self._trials[i].tokens[lengths[i] : lengths[i] + self.ahead]
        return outcomes


class Exact:
    """The target's own distribution behind a context and any continuation: plain passes, no draft, no rounds."""

    def __init__(
        self, subject: Subject, contexts: Sequence[Context], *, ahead: int, longest: int | None = None
    ) -> None:
        self.subject = subject
        self.contexts: Sequence[Context] = []
        most = (longest or max(len(c.tokens) for c in contexts)) + ahead
        self._cache = subject.target.new_cache(len(contexts), min(subject.target.context, most))
        self._known: dict[tuple[int, tuple[int, ...]], Distribution] = {}
        self.move(contexts)

    def move(self, contexts: Sequence[Context]) -> None:
        """As `Bench.move`."""
        unread = []
        for i, context in enumerate(contexts):
            held = self.contexts[i].tokens[:-1] if i < len(self.contexts) else []
            same = common(held, context.tokens[:-1])
            self._cache.truncate(i, same)
            unread.append(context.tokens[same:-1])
        self.contexts = [*contexts, *self.contexts[len(contexts) :]]
        self._samplers = [self.subject.new_sampler(len(context.prompt), 0) for context in self.contexts]
        self._known.clear()
        while any(unread):
            self._score([Chunk(slot, t[:READ_CHUNK], outputs=0) for slot, t in enumerate(unread) if t])
            unread = [tokens[READ_CHUNK:] for tokens in unread]

    @torch.inference_mode()
    def _score(self, chunks: Sequence[Chunk]) -> list[torch.Tensor]:
        return self.subject.target(chunks, self._cache).logits

    def logits(self, wanted: Sequence[tuple[int, Sequence[int]]]) -> list[torch.Tensor]:
        """[T + 1, V] for each (slot, T tokens behind its context), every slot once at most."""
        chunks = [Chunk(i, [self.contexts[i].tokens[-1], *more], outputs=len(more) + 1) for i, more in wanted]
        rows = self._score(chunks)
        for i, _ in wanted:
            self._cache.truncate(i, len(self.contexts[i].tokens) - 1)
        return rows

    def learn(self, continuations: Sequence[Sequence[tuple[int, ...]]]) -> None:
        """Score, for each slot, its continuations and all their prefixes: a token a pass, as plain decoding reads."""
        waiting = [
            sorted({tuple(c) for c in mine if (i, tuple(c)) not in self._known}, reverse=True)
            for i, mine in enumerate(continuations)
        ]
        ends = [len(context.tokens) - 1 for context in self.contexts]
        held: list[list[int]] = [[] for _ in waiting]
        """Behind all tokens of a context but the last, what its slot has read."""
        unread: list[list[int]] = [[] for _ in waiting]
        while True:
            for i, left in enumerate(waiting):
                while not unread[i] and left:
                    wanted = [self.contexts[i].tokens[-1], *left.pop()]
                    same = common(held[i], wanted)
                    self._cache.truncate(i, ends[i] + same)
                    held[i], unread[i] = wanted[:same], wanted[same:]
            going = [i for i, tokens in enumerate(unread) if tokens]
            if not going:
                break
            for i, rows_1V in zip(going, self._score([Chunk(i, unread[i][:1]) for i in going]), strict=True):
                held[i].append(unread[i].pop(0))
                self._known[i, tuple(held[i][1:])] = self.choose(i, held[i][1:], rows_1V[0])
        for i, end in enumerate(ends):
            self._cache.truncate(i, end)

    def choose(self, slot: int, more: Sequence[int], row_V: torch.Tensor) -> Distribution:
        """What the parameters make of the row behind a context and `more`."""
        return self._samplers[slot].distribution(on_host(row_V), [*self.contexts[slot].tokens, *more])

    def p(self, slot: int, more: Sequence[int] = ()) -> Distribution:
        """Learnt before."""
        return self._known[slot, tuple(more)]


@dataclass(frozen=True)
class Found:
    contexts: list[Context]
    looked: int
    """Positions of the engine's own outputs where a round began."""
    drafted: int
    """Those at which something was drafted."""


def find_contexts(
    subject: Subject,
    prompts: Sequence[Sequence[int]],
    count: int,
    *,
    seed: int,
    slots: int,
    tokens: int = 96,
    say: Callable[[str], None] = lambda text: None,
) -> Found:
    """Up to `count` places in outputs of the engine, greedy and sampled, where it drafted something.

    Which they are is settled before anything is tested, and by the contexts alone.
    """
    chosen: dict[tuple[int, ...], Context] = {}
    looked = 0
    # Where nothing can be drafted any more, tokens are worth nothing here; so many attempts, and what was found then.
    for attempt in range(-(-4 * count // (len(prompts) * tokens // 8 + 1)) + 2):
        params = replace(subject.params, temperature=0.0) if attempt == 0 else subject.params
        watched: list[_Anchors] = []

        def proposer(slots: int, capacity: int, watched: list[_Anchors] = watched) -> Proposer:
            watched.append(_Anchors(subject.new_proposer(slots, capacity)))
            return watched[-1]

        drawn = replace(subject, params=params, new_proposer=proposer)
        drawn.decode(prompts, seed=seed + attempt * len(prompts), slots=slots, tokens=tokens)
        (anchors,) = watched
        looked += anchors.asked
        for length, whole in anchors.found:
            if whole not in chosen and len(whole) + subject.draft_tokens + 8 < subject.target.context:
                chosen[whole] = Context(whole[:length], whole[length:])
        say(f"{len(chosen)} contexts with a draft after {looked} rounds")
        if len(chosen) >= count or subject.params.temperature == 0:  # then further answers are the same
            break
    found = list(chosen.values())
    random.Random(seed).shuffle(found)
    # Those of one text follow each other: each is then read from where the one before it ends.
    return Found(sorted(found[:count], key=lambda context: context.tokens), looked, len(chosen))


class _Anchors(Watched):
    """Notes every context at which something was drafted."""

    asked = 0

    def __init__(self, inner: Proposer) -> None:
        super().__init__(inner)
        self.found: list[tuple[int, tuple[int, ...]]] = []
        """(tokens of the prompt, all tokens)."""

    def propose(self, requests: Sequence[Request]) -> list[Draft]:
        drafts = super().propose(requests)
        self.asked += len(requests)
        self.found += [
            (request.sampler.prompt_length, tuple(request.tokens))
            for request, draft in zip(requests, drafts, strict=True)
            if draft.tokens
        ]
        return drafts
