"""Drafts that read the target's hidden states: one decoder layer between these and the target's own head.

A draft stands behind position t with what it is given there, g_t, and with the token t + 1, and tells the token t + 2.
For committed positions g comes from the target's hidden states; further on it is the draft's own hidden state, so that
it can go on drafting alone (EAGLE, Li et al. 2024, arXiv 2401.15077; EAGLE-3, Li et al. 2025, arXiv 2503.01840).

Embedding and head are the target's; they are not part of a draft's state dict. Knows no sampling, and not how a draft
is trained.

Shapes: N tokens of a pass, F features, H hidden size, I inputs of attention, C chunks, D draft vocabulary.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
from torch import nn

import paceline.kernels as kernels
from paceline.models.cache import Keeper, KVCache
from paceline.models.config import Layer, ModelConfig
from paceline.models.decoder import Block, Embedding, Linear, Norm, Reach, reaches_of
from paceline.models.interface import Chunk
from paceline.models.rope import Rotation, Table, table


def plain_layer(config: ModelConfig) -> ModelConfig:
    """One layer of the target's sizes in Llama's form, which is what other engines load drafts as."""
    return ModelConfig(
        architecture="llama",
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        layers=(Layer(rope=next((layer.rope for layer in reversed(config.layers) if layer.rope), None)),),
        context=config.context,
        norm_eps=config.norm_eps,
        embedding_scale=config.embedding_scale,
        logit_softcap=config.logit_softcap,
    )


class FeatureDraft(nn.Module):
    """What both layouts have in common; each says how features become g, and what its layer reads."""

    block: Block
    features: tuple[int, ...]
    """Which hidden states of the target it reads, by the indices of `LanguageModel`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self._of_target: tuple[Embedding, Linear | None] | None = None

    def attach(self, embedding: Embedding, head: Linear | None) -> None:
        """Take over the target's embedding, and a head over the draft vocabulary; None: that of a tied target."""
        self._of_target = (embedding, head)  # a tuple, so that they are no submodules

    def project(self, features_NFH: torch.Tensor) -> torch.Tensor:
        """[N, H] what the draft is given at positions that the target has read."""
        raise NotImplementedError

    def read(self, embedded_NH: torch.Tensor, given_NH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(x [N, H], inputs [N, I]): what the layer adds to, and what its q, k and v multiply."""
        raise NotImplementedError

    def last(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """[N, H] what the head multiplies."""
        raise NotImplementedError

    def embed(self, tokens_N: torch.Tensor) -> torch.Tensor:
        assert self._of_target is not None
        embedded_NH, scale = self._of_target[0](tokens_N), self.config.embedding_scale
        return embedded_NH if scale == 1 else embedded_NH * scale

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """[N, D]"""
        assert self._of_target is not None
        embedding, head = self._of_target
        last_NH = self.last(hidden_NH)
        return self._capped((embedding.head(last_NH) if head is None else head(last_NH)).float())

    def _capped(self, logits_ND: torch.Tensor) -> torch.Tensor:
        cap = self.config.logit_softcap
        return logits_ND if cap is None else cap * torch.tanh(logits_ND / cap)

    def layer(
        self,
        tokens_N: torch.Tensor,
        given_NH: torch.Tensor,
        rotation: Rotation | None,
        reaches: Sequence[Reach],
        cache: Keeper,
    ) -> torch.Tensor:
        """[N, H] hidden states, in plain torch: the readable twin of what the kernels do, and what training runs."""
        x_NH, inputs_NI = self.read(self.embed(tokens_N), given_NH)
        return self.block(x_NH, rotation, reaches, cache, 0, inputs_NI)

    def remember(
        self,
        tokens_N: torch.Tensor,
        given_NH: torch.Tensor,
        rotation: Rotation | None,
        reaches: Sequence[Reach],
        cache: Keeper,
    ) -> None:
        """As `layer`, for positions that later ones see and that say nothing themselves."""
        _, inputs_NI = self.read(self.embed(tokens_N), given_NH)
        self.block.attention.remember(inputs_NI, rotation, reaches, cache, 0)

    def new_cache(self, slots: int, capacity: int) -> KVCache:
        return KVCache(
            layers=1,
            slots=slots,
            kv_heads=self.config.num_kv_heads,
            capacity=capacity,
            head_dim=self.config.head_dim,
            dtype=self.dtype,
            device=self.device,
        )

    @property
    def device(self) -> torch.device:
        return self.block.mlp_norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of activations."""
        weight = self.block.mlp.gate.weight
        return torch.float32 if weight is None else weight.dtype

    def angles(self) -> Table | None:
        rope = self.config.layers[0].rope
        return None if rope is None else table(rope, self.config.head_dim, self.dtype, self.device)

    @functools.cached_property
    def _native_angles(self) -> Table | None:
        """The same, looked up once: what runs in the kernels stays where it is."""
        return self.angles()

    def rotation(self, spans: Sequence[tuple[int, int]]) -> Rotation | None:
        return None if (angles := self.angles()) is None else angles.at(spans)

    def forward(
        self, chunks: Sequence[Chunk], given: torch.Tensor, cache: KVCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits [C, D], hidden [C, H]) at the last token of each chunk; the chunks are appended to the cache.

        The tokens of a chunk are those behind the positions it takes: position t has token t + 1. `given` is what the
        draft goes on from there: the target's states [N, F, H], or its own [N, H].
        """
        starts, ends = cache.place(chunks, self.config.vocab_size)
        tokens = [token for chunk in chunks for token in chunk.tokens]
        stops = [stop - 1 for stop in itertools.accumulate(len(chunk.tokens) for chunk in chunks)]
        if (native := self._native) is not None:
            chunked = [(len(chunk.tokens), chunk.slot, start) for chunk, start in zip(chunks, starts, strict=True)]
            longest = max(start + size for size, _, start in chunked)
            rotation = None if (angles := self._native_angles) is None else angles.upto(longest)
            given, inputs_NI, read = self._handed(tokens, given)
            places = kernels.Places(chunked, None, rotation, inputs_NI)
            logits_CD, hidden_NH, _ = native([places], cache.native, tokens=read, given=given, wanted=stops)
            logits_CD = self._capped(logits_CD)
            hidden_CH = hidden_NH if len(stops) == len(tokens) else hidden_NH[stops]
        else:
            group = self.config.num_heads // self.config.num_kv_heads
            reaches = reaches_of(chunks, starts, None, group, self.dtype, self.device)
            spans = [(start, start + len(chunk.tokens)) for chunk, start in zip(chunks, starts, strict=True)]
            given_NH = self.project(given) if given.dim() == 3 else given
            tokens_N = torch.tensor(tokens, device=self.device)
            hidden_CH = self.layer(tokens_N, given_NH, self.rotation(spans), reaches, cache)[stops]
            logits_CD = self.logits(hidden_CH)
        cache.commit(ends)
        return logits_CD, hidden_CH

    def _handed(
        self, tokens: Sequence[int], given: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, Sequence[int] | None]:
        """What the kernels are handed (see `kernels.Model`): states, and what q, k and v multiply, or tokens."""
        given_NH = self.project(given) if given.dim() == 3 else given
        x_NH, inputs_NI = self.read(self.embed(torch.tensor(tokens)), given_NH)
        return x_NH.contiguous(), inputs_NI.contiguous(), None

    @functools.cached_property
    def _native(self) -> kernels.Model | None:
        """The draft as the kernels run it, if they can."""
        assert self._of_target is not None
        embedding, head = self._of_target
        layer, of_head = self.block.for_kernels(), (embedding if head is None else head).packed
        if layer is None or embedding.packed is None or of_head is None:
            return None
        return self._for_kernels(layer, embedding.packed, of_head)

    def _for_kernels(
        self, layer: tuple[kernels.Attention, kernels.MLP], embedding: kernels.Matrix, head: kernels.Matrix
    ) -> kernels.Model | None:
        return kernels.Model([layer], [0], embedding=embedding, head=head, last_norm=None)


class Eagle1(FeatureDraft):
    """g is the target's last hidden state, and the layer's output has to be like it: the target's head reads both."""

    def __init__(self, config: ModelConfig, features: Sequence[int]) -> None:
        super().__init__(config)
        assert len(features) == 1
        self.features = tuple(features)
        self.fc = Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.block = Block(config, inputs=config.hidden_size)

    def project(self, features_NFH: torch.Tensor) -> torch.Tensor:
        return features_NFH[:, 0]

    def read(self, embedded_NH: torch.Tensor, given_NH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x_NH = self.fc(torch.cat((embedded_NH, given_NH), dim=-1))
        return x_NH, x_NH

    def last(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        return hidden_NH


class Eagle3(FeatureDraft):
    """g is mixed from several hidden states; the layer adds to it and reads it beside the token, each normed."""

    def __init__(self, config: ModelConfig, features: Sequence[int]) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        self.features = tuple(features)
        self.fc = Linear(len(self.features) * hidden, hidden, bias=False)
        self.embedding_norm = Norm(hidden, config.norm_eps)
        self.given_norm = Norm(hidden, config.norm_eps)
        self.block = Block(config, inputs=2 * hidden)
        self.norm = Norm(hidden, config.norm_eps)

    def project(self, features_NFH: torch.Tensor) -> torch.Tensor:
        return self.fc(features_NFH.flatten(1))

    def read(self, embedded_NH: torch.Tensor, given_NH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return given_NH, torch.cat((self.embedding_norm(embedded_NH), self.given_norm(given_NH)), dim=-1)

    def last(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        return self.norm(hidden_NH)

    def _handed(
        self, tokens: Sequence[int], given: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, Sequence[int] | None]:
        return given.contiguous(), None, tokens

    def _for_kernels(
        self, layer: tuple[kernels.Attention, kernels.MLP], embedding: kernels.Matrix, head: kernels.Matrix
    ) -> kernels.Model | None:
        if self.fc.packed is None:
            return None
        return kernels.Model(
            [layer],
            [0],
            embedding=embedding,
            head=head,
            last_norm=self.norm.weight,
            embedding_scale=self.config.embedding_scale,
            mix=kernels.Projection(matrix=self.fc.packed),
            embedding_norm=self.embedding_norm.weight,
            given_norm=self.given_norm.weight,
        )
