"""The kinds of draft as they learn: how each is begun from the target, and how it is run for many positions at once.

A learner unrolls a batch: step j gives, for every position that is trained, what the draft says there when the j tokens
before were its own drafts' (they are the text's tokens, since only accepted drafts are gone on from).

Shapes: N positions of a batch, R rows of a step, T positions of a text, D draft vocabulary, H hidden size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from paceline.checkpoints.drafts import attach, build, read_draft, save_draft
from paceline.models.cache import Unrolled
from paceline.models.decoder import FEW_ROWS, Decoder, Linear, Reach, reaches_of
from paceline.models.feature import FeatureDraft
from paceline.models.heads import Heads
from paceline.models.interface import Chunk
from paceline.models.rope import table
from paceline.training.data import Batch


class Learner(Protocol):
    @property
    def kind(self) -> str: ...

    @property
    def features(self) -> tuple[int, ...]:
        """Hidden states that batches must carry."""
        ...

    @property
    def module(self) -> nn.Module:
        """What is trained requires gradients; embedding and head, which are the target's, do not."""
        ...

    @property
    def ids_D(self) -> torch.Tensor | None:
        """The draft vocabulary; None: all tokens."""
        ...

    @property
    def head_DH(self) -> torch.Tensor:
        """float32: the target's head over it."""
        ...

    @property
    def steps(self) -> int | None:
        """How many tokens ahead it can learn; None: any number."""
        ...

    def unroll(self, batch: Batch, steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(logits [R, D], positions [R]) of each step: row r is to match the target's distribution at its position.

        Every position is one that is trained. A kind that does the same at every step yields once.
        """
        ...

    @property
    def reach(self) -> int | None:
        """The most tokens it can draft; None: any number."""
        ...

    def start(self, folder: Path) -> None:
        """Go on from a draft of the same kind, shape and vocabulary; ValueError for another."""
        ...

    def save(self, folder: Path) -> None:
        """As `paceline.checkpoints.drafts` reads it."""
        ...


class _Learner:
    def __init__(
        self,
        kind: str,
        target: Decoder,
        target_name: str,
        ids: Sequence[int] | None,
        shape: dict[str, Any],
        module: FeatureDraft | Heads | Decoder,
    ) -> None:
        self.kind, self._target, self._target_name, self._shape = kind, target, target_name, shape
        self._ids = None if ids is None else sorted(ids)
        device = target.device
        self.ids_D = None if ids is None else torch.tensor(self._ids, device=device)
        every = torch.arange(target.vocab_size, device=device) if self.ids_D is None else self.ids_D
        self.head_DH = target.head_rows(every)
        self.module = module.to(device).float()
        # Never the target's own head, which may be packed: gradients have to pass through it.
        head = Linear(self.head_DH.shape[1], len(every), bias=False, device="meta")
        head.weight = nn.Parameter(self.head_DH, requires_grad=False)
        attach(module, target.embedding, head)
        self.features: tuple[int, ...] = module.features if isinstance(module, (FeatureDraft, Heads)) else ()
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name not in ("embedding.weight", "head.weight"))

    @property
    def reach(self) -> int | None:
        return None

    def start(self, folder: Path) -> None:
        tensors, ids, shape = read_draft(folder, self._target, self.kind)
        if shape != self._shape or (None if ids is None else ids.tolist()) != self._ids:
            raise ValueError(
                f"{folder} has {shape} and {'all' if ids is None else len(ids)} tokens, the draft to train has "
                f"{self._shape} and {len(self._ids) if self._ids else 'all'}: start from one of the same, or anew"
            )
        with torch.no_grad():
            for name, tensor in tensors.items():
                self.module.get_parameter(name).copy_(tensor)

    def save(self, folder: Path) -> None:
        save_draft(
            folder,
            self.module,
            kind=self.kind,
            shape=self._shape,
            target=self._target.config,
            target_name=self._target_name,
            ids=self._ids,
        )


class FeatureLearner(_Learner):
    """Step j > 0 reads the hidden state of the step before. It sees the first step's keys up to its row, which came
    from the target's states, and of all steps since those of its own row."""

    module: FeatureDraft
    steps: int | None = None

    def unroll(self, batch: Batch, steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        draft, cache = self.module, Unrolled()
        device, group = batch.tokens_N.device, draft.config.num_heads // draft.config.num_kv_heads
        starts = torch.tensor([0, *batch.lengths]).cumsum(0).tolist()
        # Of each text, the first row that says something: those before it, its prompt, are only seen.
        firsts = [_first(batch.trained_N[start:end]) for start, end in itertools.pairwise(starts)]
        rows = torch.arange(starts[-1], device=device).split(batch.lengths)
        before_B = torch.cat([of_text[:first] for of_text, first in zip(rows, firsts, strict=True)])
        rows_N = torch.cat([of_text[first:] for of_text, first in zip(rows, firsts, strict=True)])
        sizes = [length - first for length, first in zip(batch.lengths, firsts, strict=True)]
        ends = torch.tensor(starts[1:], device=device)
        ends_N = ends.repeat_interleave(torch.tensor(sizes, device=device))

        given_NH = draft.project(batch.features_NFH)
        if len(before_B):
            prompts = [
                Reach(tokens=first, slot=slot, start=0, begin=0, mask=None)
                for slot, first in enumerate(firsts)
                if first
            ]
            rotation = draft.rotation([(0, first) for first in firsts if first])
            draft.remember(batch.next_N[before_B], given_NH[before_B], rotation, prompts, cache)
        given_NH = given_NH[rows_N]
        for step in range(steps):
            # The row of position t reads the token behind it; past the end of its text it reads anything, unseen.
            tokens_N = batch.next_N[torch.minimum(rows_N + step, ends_N - 1)]
            spans = [(first + step, length + step) for first, length in zip(firsts, batch.lengths, strict=True)]
            reaches = [
                _reach(slot, first, size, step, group, device)
                for slot, (first, size) in enumerate(zip(firsts, sizes, strict=True))
            ]
            given_NH = draft.layer(tokens_N, given_NH, draft.rotation(spans), reaches, cache)
            # What it says is the target's distribution one position further on.
            target_N = rows_N + step + 1
            wanted_N = (target_N < ends_N) & batch.trained_N[torch.minimum(target_N, ends_N - 1)]
            yield draft.logits(given_NH[wanted_N]), target_N[wanted_N]


def _first(trained_T: torch.Tensor) -> int:
    """A row says what its position's successor shall say. One row of a text is always run."""
    return max(0, int(trained_T.to(torch.uint8).argmax()) - 1)


def _reach(slot: int, first: int, size: int, step: int, group: int, device: torch.device) -> Reach:
    """Each row sees the prompt, the first step's rows up to itself, and itself in the later ones."""
    prompt_RF = torch.ones(size, first, dtype=torch.bool, device=device)
    up_to_RR = torch.ones(size, size, dtype=torch.bool, device=device).tril()
    own_RR = torch.eye(size, dtype=torch.bool, device=device)
    seen_RL = torch.cat((prompt_RF, up_to_RR, *[own_RR] * step), dim=1)
    mask_RL = torch.zeros(seen_RL.shape, device=device).masked_fill_(~seen_RL, -math.inf)
    if size <= FEW_ROWS:
        mask_RL = mask_RL.repeat(group, 1)
    return Reach(tokens=size, slot=slot, start=0, begin=0, mask=mask_RL)


class HeadsLearner(_Learner):
    module: Heads

    @property
    def reach(self) -> int | None:
        return len(self.module.layers)

    @property
    def steps(self) -> int | None:
        return len(self.module.layers)

    def unroll(self, batch: Batch, steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        device = batch.tokens_N.device
        ends = torch.tensor(batch.lengths).cumsum(0)
        ends_N = ends.repeat_interleave(torch.tensor(batch.lengths)).to(device)
        rows_N = torch.arange(len(batch.tokens_N), device=device)
        logits_NKD = self.module(batch.hidden_NH, min(steps, len(self.module.layers)))
        for head in range(logits_NKD.shape[1]):
            target_N = rows_N + head + 1
            wanted_N = (target_N < ends_N) & batch.trained_N[torch.minimum(target_N, ends_N - 1)]
            yield logits_NKD[wanted_N, head], target_N[wanted_N]


class ShallowLearner(_Learner):
    """A language model: what it says of a token is the same at every step of a draft."""

    module: Decoder
    steps: int | None = 1

    def unroll(self, batch: Batch, steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        decoder, cache = self.module, Unrolled()
        config, device = decoder.config, batch.tokens_N.device
        starts = torch.tensor([0, *batch.lengths]).cumsum(0).tolist()
        chunks = [
            Chunk(slot, batch.tokens_N[start : start + length].tolist())
            for slot, (start, length) in enumerate(zip(starts, batch.lengths, strict=False))
        ]
        group = config.num_heads // config.num_kv_heads
        x_NH = decoder.embedding(batch.tokens_N) * config.embedding_scale
        for index, (block, kind) in enumerate(zip(decoder.layers, config.layers, strict=True)):
            spans = [(0, length) for length in batch.lengths]
            rotation = None if kind.rope is None else table(kind.rope, config.head_dim, x_NH.dtype, device).at(spans)
            reaches = reaches_of(chunks, [0] * len(chunks), kind.window, group, x_NH.dtype, device)
            x_NH = block(x_NH, rotation, reaches, cache, index)
        rows = batch.trained_N.nonzero()[:, 0]
        yield decoder.logits(decoder.norm(x_NH[rows])), rows


# Beginnings


def begin(
    kind: str,
    target: Decoder,
    target_name: str,
    ids: Sequence[int] | None,
    *,
    layers: Sequence[int] = (),
    heads: int = 4,
    seed: int = 0,
) -> Learner:
    """A draft as it is before training. `layers`: of a shallow draft, which of the target's it begins as."""
    torch.manual_seed(seed)
    return _BEGINNINGS[kind](target, target_name, ids, layers, heads)


def _eagle(kind: str) -> Callable[..., Learner]:
    def made(
        target: Decoder, name: str, ids: Sequence[int] | None, layers: Sequence[int], heads: int
    ) -> FeatureLearner:
        depth = target.config.num_layers
        # EAGLE-3's own choice: early, middle and late; as few as there are in a shallow target.
        late = sorted({min(2, depth), depth // 2, max(depth - 3, 0)})
        shape = {"features": [depth] if kind == "eagle1" else late}
        module = build(kind, target.config, shape)
        assert isinstance(module, FeatureDraft)
        _draw(module)
        return FeatureLearner(kind, target, name, ids, shape, module)

    return made


def _begin_heads(
    target: Decoder, name: str, ids: Sequence[int] | None, layers: Sequence[int], heads: int
) -> HeadsLearner:
    module = build("heads", target.config, {"heads": heads})
    assert isinstance(module, Heads)
    for layer in module.layers:  # so a head begins as the target's own
        assert isinstance(layer, Linear)
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    return HeadsLearner("heads", target, name, ids, {"heads": heads}, module)


def _begin_shallow(
    target: Decoder, name: str, ids: Sequence[int] | None, layers: Sequence[int], heads: int
) -> ShallowLearner:
    shape = {"layers": list(layers)}
    module = build("shallow", target.config, shape)
    assert isinstance(module, Decoder)
    module.embedding = target.embedding
    for mine, index in zip(module.layers, layers, strict=True):
        for part, theirs in target.layers[index].named_modules():
            own = mine.get_submodule(part)
            if isinstance(theirs, Linear) and theirs.packed is not None and isinstance(own, Linear):
                own.weight = nn.Parameter(theirs.packed.unpack().clone())  # it may be a view of the target's
                own.bias = None if theirs.bias is None else nn.Parameter(theirs.bias.clone())
            else:
                for leaf, value in theirs.named_parameters(recurse=False):
                    setattr(own, leaf, nn.Parameter(value.detach().float().clone()))
    module.norm.weight = nn.Parameter(target.norm.weight.detach().clone())
    module.config = replace(module.config, tied=False)
    return ShallowLearner("shallow", target, name, ids, shape, module)


def subsets(depth: int, count: int) -> dict[str, list[int]]:
    """A handful of ways to take `count` of a target's layers."""
    count = min(count, depth)
    even = [round(i * (depth - 1) / max(count - 1, 1)) for i in range(count)]
    ends = [*range((count + 1) // 2), *range(depth - count // 2, depth)]
    return {"first": list(range(count)), "last": list(range(depth - count, depth)), "even": even, "ends": ends}


_BEGINNINGS: dict[str, Callable[..., Learner]] = {
    "eagle3": _eagle("eagle3"),
    "eagle1": _eagle("eagle1"),
    "heads": _begin_heads,
    "shallow": _begin_shallow,
}
KINDS = tuple(_BEGINNINGS)


def _draw(module: nn.Module) -> None:
    """Small random matrices, with the deviation that transformers of this size usually begin with."""
    for linear in module.modules():
        if isinstance(linear, Linear):
            nn.init.normal_(linear.weight, std=0.02)
