"""One decoder for every architecture a `ModelConfig` can describe.

A pass takes the new tokens of all its chunks packed one after the other: everything but attention works on [N, ...],
and attention takes the chunks in turn, each over its own slot of the cache. So nothing is padded, and what a sequence
computes does not depend on how long its neighbours are.

Knows no architecture by name, no file format, no tokenizer, and nothing of speculation.

Shapes: N tokens of a pass, T tokens of one chunk, L positions a chunk sees, H hidden size, D head size, Q query heads,
K key/value heads, G = Q / K, O outputs, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from paceline.models.cache import KVCache
from paceline.models.config import ModelConfig, Rope
from paceline.models.interface import Cache, Chunk, Scores

Rotation = tuple[torch.Tensor, torch.Tensor]
"""cos and sin of every token's angles, [N, 1, D] each; the first half of sin is negated (see `rotate`)."""

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}

FEW_ROWS = 16
"""As many as a draft may bring along. Up to here a chunk's query heads that share keys are scored as rows of one
product; beyond, that would only multiply the mask by G."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """One chunk in the layers of one window: how many rows it has, where it writes, and what it sees."""

    tokens: int
    slot: int
    start: int
    """Position of its first token."""
    begin: int
    """First position that any of its tokens sees."""
    mask: torch.Tensor | None
    """Added to the scores: [T, L] or, for few rows, [G T, L]. None: every token sees every position."""


class Norm(nn.Module):
    """RMS norm, computed in float32 whatever the dtype of the model."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=torch.float32))
        self.size = (size,)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self.size, self.weight, self.eps).to(x.dtype)


class Linear(nn.Linear):
    def forward(self, x_NI: torch.Tensor) -> torch.Tensor:
        return product(x_NI, self.weight, self.bias)


def product(x_NI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + b. A few rows on a CPU are multiplied from the other side, W x^T, which MKL does better for 2 to 4."""
    if 1 < x_NI.shape[0] <= FEW_ROWS and x_NI.dtype == torch.float32 and x_NI.device.type == "cpu":
        y_NO = torch.mm(weight_OI, x_NI.t()).t()
        return y_NO if bias_O is None else y_NO + bias_O
    return F.linear(x_NI, weight_OI, bias_O)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q = Linear(config.hidden_size, q_size, bias=config.qkv_bias)
        self.k = Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.v = Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.output = Linear(q_size, config.hidden_size, bias=config.output_bias)
        self.q_norm = Norm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = Norm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5 if config.query_scale is None else config.query_scale
        self.softcap = config.attention_softcap

    def forward(
        self, x_NH: torch.Tensor, rotation: Rotation | None, reaches: Sequence[Reach], cache: KVCache, layer: int
    ) -> torch.Tensor:
        n = x_NH.shape[0]
        # The number of heads is what the projections give, so that a device may hold only some of them.
        q_NQD = self.q(x_NH).view(n, -1, self.head_dim)
        k_NKD = self.k(x_NH).view(n, -1, self.head_dim)
        v_NKD = self.v(x_NH).view(n, -1, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q_NQD, k_NKD = self.q_norm(q_NQD), self.k_norm(k_NKD)
        if rotation is not None:
            heads = (q_NQD.shape[1], k_NKD.shape[1])
            q_NQD, k_NKD = rotate(torch.cat((q_NQD, k_NKD), dim=1), rotation).split(heads, dim=1)
        if len(reaches) == 1:
            return self.output(self._attend(reaches[0], q_NQD, k_NKD, v_NKD, cache, layer))
        sizes = [reach.tokens for reach in reaches]
        chunks = zip(reaches, q_NQD.split(sizes), k_NKD.split(sizes), v_NKD.split(sizes), strict=True)
        return self.output(torch.cat([self._attend(*chunk, cache, layer) for chunk in chunks]))

    def _attend(
        self,
        reach: Reach,
        q_TQD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        cache: KVCache,
        layer: int,
    ) -> torch.Tensor:
        """One chunk over its own slot: [T, Q D]."""
        k_1KLD, v_1KLD = cache.extend(layer, reach.slot, reach.start, reach.begin, k_TKD, v_TKD)
        tokens, heads, size = q_TQD.shape
        kv_heads, length = k_1KLD.shape[1:3]
        group = heads // kv_heads
        if tokens == 1:
            q_1KRD = q_TQD.view(1, kv_heads, group, size)
        else:
            q_1KRD = q_TQD.view(tokens, kv_heads, group, size).permute(1, 2, 0, 3).reshape(1, kv_heads, -1, size)
        if self.softcap is not None:
            scores = q_1KRD @ k_1KLD.transpose(2, 3)
            scores = self.softcap * torch.tanh(scores * (self.scale / self.softcap))
            if reach.mask is not None:
                by_mask = (kv_heads, -1, reach.mask.shape[0], length)
                scores = (scores.view(by_mask) + reach.mask).view(1, kv_heads, -1, length)
            out = torch.softmax(scores, dim=-1) @ v_1KLD
        elif tokens <= FEW_ROWS:
            out = F.scaled_dot_product_attention(q_1KRD, k_1KLD, v_1KLD, reach.mask, scale=self.scale)
        else:
            shape = (kv_heads, group, length, size)
            q_KGTD = q_1KRD.view(kv_heads, group, tokens, size)
            k_KGLD, v_KGLD = k_1KLD.transpose(0, 1).expand(shape), v_1KLD.transpose(0, 1).expand(shape)
            out = F.scaled_dot_product_attention(q_KGTD, k_KGLD, v_KGLD, reach.mask, scale=self.scale)
        if tokens == 1:
            return out.reshape(1, heads * size)
        return out.reshape(heads, tokens, size).transpose(0, 1).reshape(tokens, heads * size)


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up = Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x_NH: torch.Tensor) -> torch.Tensor:
        return self.down(self.activation(self.gate(x_NH)) * self.up(x_NH))


class Block(nn.Module):
    """One layer. It does not know its own index: a cut of a decoder runs the same blocks at other indices."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()

        def norm() -> Norm:
            return Norm(config.hidden_size, config.norm_eps)

        self.attention_norm = norm()
        self.attention = Attention(config)
        self.attention_post_norm = norm() if config.post_norms else None
        self.mlp_norm = norm()
        self.mlp = MLP(config)
        self.mlp_post_norm = norm() if config.post_norms else None

    def forward(
        self, x_NH: torch.Tensor, rotation: Rotation | None, reaches: Sequence[Reach], cache: KVCache, layer: int
    ) -> torch.Tensor:
        y_NH = self.attention(self.attention_norm(x_NH), rotation, reaches, cache, layer)
        x_NH = x_NH + (y_NH if self.attention_post_norm is None else self.attention_post_norm(y_NH))
        y_NH = self.mlp(self.mlp_norm(x_NH))
        return x_NH + (y_NH if self.mlp_post_norm is None else self.mlp_post_norm(y_NH))


class Decoder(nn.Module):
    """A `LanguageModel` (see interface.py). Tensors are named as the state dict says; a tied model has no `head`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.num_heads % config.num_kv_heads or config.head_dim % 2 or not config.layers:
            raise ValueError(
                f"{config.num_heads} query heads over {config.num_kv_heads} key/value heads of size {config.head_dim} "
                f"in {config.num_layers} layers: the first must be a multiple of the second, the size even, and there "
                "must be a layer; is the checkpoint's configuration damaged?"
            )
        self.config = config
        # Given its tensor, because torch's own initialisation costs seconds of imports on the meta device.
        embedding_VH = torch.empty(config.vocab_size, config.hidden_size)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size, _weight=embedding_VH)
        self.layers = nn.ModuleList(Block(config) for _ in config.layers)
        self.norm = Norm(config.hidden_size, config.norm_eps)
        self.head = None if config.tied else Linear(config.hidden_size, config.vocab_size, bias=False)
        # Angles and masks are computed once in a pass for each distinct rope and window, not for each layer.
        self._ropes = list(dict.fromkeys(layer.rope for layer in config.layers))
        self._windows = list(dict.fromkeys(layer.window for layer in config.layers))
        self._kinds = [(self._ropes.index(layer.rope), self._windows.index(layer.window)) for layer in config.layers]

    @classmethod
    def from_tensors(
        cls,
        config: ModelConfig,
        tensors: Iterable[tuple[str, torch.Tensor]],
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> Decoder:
        """A decoder for inference, holding the tensors as `dtype` (norms as float32) on `device`.

        Tensors are taken one at a time, so at most one exists twice, and taken over where nothing has to change.
        Every name and shape must be the config's.
        """
        with torch.device("meta"):
            decoder = cls(config)
        missing = {name: tuple(parameter.shape) for name, parameter in decoder.named_parameters()}
        for name, tensor in tensors:
            shape = missing.pop(name, None)
            if shape is None:
                raise ValueError(f"tensor {name} is given twice or has no place in this {config.architecture} model")
            if tuple(tensor.shape) != shape:
                raise ValueError(f"tensor {name} has shape {list(tensor.shape)}, the configuration needs {list(shape)}")
            owner_name, _, leaf = name.rpartition(".")
            owner = decoder.get_submodule(owner_name)
            stored = tensor.to(device, torch.float32 if isinstance(owner, Norm) else dtype)
            setattr(owner, leaf, nn.Parameter(stored, requires_grad=False))
        if missing:
            raise ValueError(
                f"{len(missing)} tensors of this {config.architecture} model are missing, {next(iter(missing))} first: "
                "the checkpoint is incomplete"
            )
        return decoder.eval()

    def cut(self, layers: Sequence[int]) -> Decoder:
        """A decoder made of these layers of this one, in this order. It shares the modules: nothing is copied."""
        if not layers or not all(0 <= layer < self.config.num_layers for layer in layers):
            raise ValueError(
                f"cannot cut out layers {list(layers)}: name at least one, from 0 to {self.config.num_layers - 1}"
            )
        with torch.device("meta"):
            cut = Decoder(replace(self.config, layers=tuple(self.config.layers[layer] for layer in layers)))
        cut.embedding, cut.norm, cut.head = self.embedding, self.norm, self.head
        cut.layers = nn.ModuleList(self.layers[layer] for layer in layers)
        return cut.train(self.training)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def context(self) -> int:
        return self.config.context

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of activations and cache."""
        return self.embedding.weight.dtype

    def new_cache(self, slots: int, capacity: int) -> KVCache:
        if capacity > self.context:
            raise ValueError(
                f"a cache of {capacity} tokens exceeds the model's context: ask for at most {self.context} tokens"
            )
        return KVCache(
            layers=self.config.num_layers,
            slots=slots,
            kv_heads=self.config.num_kv_heads,
            capacity=capacity,
            head_dim=self.config.head_dim,
            dtype=self.dtype,
            device=self.device,
        )

    def forward(self, chunks: Sequence[Chunk], cache: Cache, features: Sequence[int] = ()) -> Scores:
        assert isinstance(cache, KVCache)
        assert len(cache.keys) == len(self.layers)
        if not all(0 <= index <= len(self.layers) for index in features):
            raise ValueError(f"features {list(features)} do not exist: this model has 0 to {len(self.layers)}")
        if not chunks:
            return Scores(logits=[])

        # 1. Where the chunks go, and what each layer needs to know of that.
        starts, ends = cache.place(chunks, self.vocab_size)
        tokens = [token for chunk in chunks for token in chunk.tokens]
        positions_N = torch.cat(
            [
                torch.arange(start, start + len(chunk.tokens), dtype=torch.float32, device=self.device)
                for chunk, start in zip(chunks, starts, strict=True)
            ]
        )
        rotations = [rotation(rope, self.config.head_dim, positions_N, self.dtype) for rope in self._ropes]
        reaches = [self._reaches(window, chunks, starts) for window in self._windows]

        # 2. Through the layers.
        x_NH = self.embedding(torch.tensor(tokens, device=self.device))
        if self.config.embedding_scale != 1.0:
            # Gemma was trained with the scale rounded to the model's dtype, and transformers keeps that.
            x_NH = x_NH * torch.tensor(self.config.embedding_scale, dtype=x_NH.dtype).item()
        captured: dict[int, torch.Tensor] = {}
        for index, (block, (rope, window)) in enumerate(zip(self.layers, self._kinds, strict=True)):
            if index in features:
                captured[index] = x_NH
            x_NH = block(x_NH, rotations[rope], reaches[window], cache, index)
        x_NH = self.norm(x_NH)
        captured[len(self.layers)] = x_NH

        # 3. Only the rows somebody asked for go through the head.
        sizes = [len(chunk.tokens) for chunk in chunks]
        outputs = [chunk.outputs for chunk in chunks]
        features_NFH = torch.stack([captured[index] for index in features], dim=1) if features else None
        if outputs != sizes:
            stops = [sum(sizes[: i + 1]) for i in range(len(sizes))]
            rows = [row for stop, count in zip(stops, outputs, strict=True) for row in range(stop - count, stop)]
            x_NH = x_NH[torch.tensor(rows, dtype=torch.long, device=self.device)]
        logits_OV = (product(x_NH, self.embedding.weight) if self.head is None else self.head(x_NH)).float()
        if self.config.logit_softcap is not None:
            logits_OV = self.config.logit_softcap * torch.tanh(logits_OV / self.config.logit_softcap)
        cache.commit(ends)
        return Scores(
            logits=list(logits_OV.split(outputs)),
            features=[] if features_NFH is None else list(features_NFH.split(sizes)),
        )

    def _reaches(self, window: int | None, chunks: Sequence[Chunk], starts: Sequence[int]) -> list[Reach]:
        group = self.config.num_heads // self.config.num_kv_heads
        reaches = []
        for chunk, start in zip(chunks, starts, strict=True):
            tokens = len(chunk.tokens)
            begin = 0 if window is None else max(0, start + 1 - window)
            mask = None
            if tokens > 1:
                asking_T1 = torch.arange(start, start + tokens, device=self.device)[:, None]
                asked_L = torch.arange(begin, start + tokens, device=self.device)
                hidden_TL = asked_L > asking_T1
                if window is not None:
                    hidden_TL |= asked_L <= asking_T1 - window
                mask = torch.zeros(hidden_TL.shape, dtype=self.dtype, device=self.device)
                mask.masked_fill_(hidden_TL, -math.inf)
                if tokens <= FEW_ROWS:
                    mask = mask.repeat(group, 1)
            reaches.append(Reach(tokens=tokens, slot=chunk.slot, start=start, begin=begin, mask=mask))
        return reaches


def rotate(x_NQD: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Turn each pair (x[d], x[d + D/2]) by its angle: the second term swaps the halves, its sign is in sin."""
    cos_N1D, sin_N1D = rotation
    return torch.addcmul(x_NQD * cos_N1D, x_NQD.roll(x_NQD.shape[-1] // 2, dims=-1), sin_N1D)


def rotation(rope: Rope | None, head_dim: int, positions_N: torch.Tensor, dtype: torch.dtype) -> Rotation | None:
    if rope is None:
        return None
    if rope.kind == "dynamic" and rope.factors is None:
        angles_ND, scale = positions_N[:, None] * _dynamic_frequencies(rope, head_dim, positions_N), 1.0
    else:
        frequencies_D, scale = _frequencies(rope, head_dim, positions_N.device)
        angles_ND = positions_N[:, None] * frequencies_D
    cos, sin = angles_ND.cos(), angles_ND.sin()
    cos_N1D, sin_N1D = torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None]
    if scale != 1.0:
        cos_N1D, sin_N1D = cos_N1D * scale, sin_N1D * scale
    return cos_N1D.to(dtype), sin_N1D.to(dtype)


def _dynamic_frequencies(rope: Rope, head_dim: int, positions_N: torch.Tensor) -> torch.Tensor:
    """NTK scaling whose base grows once a sequence is longer than the original context: [N, D/2].

    transformers takes the base from the longest position of the pass, so beyond the original context its numbers
    depend on how a text was cut into passes. Here each token takes the base of a sequence that ends with it. That is
    transformers' result within the original context and for text decoded one token at a time, and it depends on the
    position alone: scoring a draft, truncating and prefilling in chunks all give the same keys.
    """
    assert rope.original_context is not None
    lengths_N = (positions_N + 1).clamp(min=rope.original_context)
    stretch_N = rope.factor * lengths_N / rope.original_context - (rope.factor - 1)
    bases_N = rope.theta * stretch_N ** (head_dim / (head_dim - 2))
    exponents_D = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions_N.device) / head_dim
    return 1.0 / bases_N[:, None] ** exponents_D


@functools.lru_cache(maxsize=64)
def _frequencies(rope: Rope, head_dim: int, device: torch.device) -> tuple[torch.Tensor, float]:
    """Radians per position of each pair, [D/2], and what cos and sin are multiplied by."""
    # Kept for later passes, some of which may want gradients: so never an inference tensor, wherever it is first asked.
    with torch.inference_mode(False), torch.device("cpu"):
        powers_D = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        plain_D = 1.0 / powers_D
        scale = 1.0
        if rope.factors is not None:
            if len(rope.factors) != head_dim // 2:
                raise ValueError(
                    f"{len(rope.factors)} rope factors for heads of size {head_dim}, which need {head_dim // 2}: "
                    "is the checkpoint damaged?"
                )
            frequencies_D = plain_D / torch.tensor(rope.factors, dtype=torch.float32)
        elif rope.kind == "default":
            frequencies_D = plain_D
        elif rope.kind == "linear":
            frequencies_D = plain_D / rope.factor
        elif rope.kind == "llama3":
            frequencies_D = _llama3(rope, plain_D)
        else:
            assert rope.kind == "yarn"
            frequencies_D = _yarn(rope, powers_D, head_dim)
            scale = _yarn_scale(rope)
        return frequencies_D.to(device), scale


def _llama3(rope: Rope, plain_D: torch.Tensor) -> torch.Tensor:
    """Waves that fit the original context often stay, those that hardly do are stretched, with a ramp between."""
    assert rope.original_context is not None
    turns_D = rope.original_context * plain_D / (2 * math.pi)
    kept_D = (turns_D - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept_D = kept_D.clamp(0.0, 1.0)
    return plain_D * (kept_D + (1 - kept_D) / rope.factor)


def _yarn(rope: Rope, powers_D: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Pairs turning more than `beta_fast` times in the original context stay, fewer than `beta_slow` are stretched."""
    context = rope.original_context
    assert context is not None

    def pair_turning(times: float) -> float:
        return head_dim * math.log(context / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    pairs_D = torch.arange(head_dim // 2, dtype=torch.float32)
    stretched_D = ((pairs_D - low) / ((high - low) or 0.001)).clamp(0.0, 1.0)
    return stretched_D / (rope.factor * powers_D) + (1 - stretched_D) / powers_D


def _yarn_scale(rope: Rope) -> float:
    def gain(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return gain(rope.mscale) / gain(rope.mscale_all_dim)
    return gain(1.0)
