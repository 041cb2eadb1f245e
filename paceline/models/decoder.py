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
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

import paceline.kernels as kernels
from paceline.kernels import Matrix
from paceline.models.cache import Keeper, KVCache
from paceline.models.config import ModelConfig
from paceline.models.interface import Cache, Chunk, Scores
from paceline.models.quant import Quantized, quantize
from paceline.models.rope import Rotation, Table, rotate, table

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}

FEW_ROWS = 16
"""As many as a draft may bring along. Up to here a chunk's query heads that share keys are scored as rows of one
product; beyond, that would only multiply the mask by G."""

GATHERED = 32 << 20
"""Bytes of large pages that are asked for at once."""


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
    """RMS norm, computed in float32 whatever the dtype of the model; `packed`: by the CPU kernels."""

    packed = False

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=torch.float32))
        self.size = (size,)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed:
            return kernels.norm(x, self.weight, self.eps)
        return F.rms_norm(x.float(), self.size, self.weight, self.eps).to(x.dtype)


class Linear(nn.Linear):
    """With its weight as a parameter or, for inference on a CPU, packed for the kernels."""

    packed: Matrix | None = None

    def forward(self, x_NI: torch.Tensor) -> torch.Tensor:
        if self.packed is not None:
            return kernels.product(x_NI, self.packed, self.bias)
        return F.linear(x_NI, self.weight, self.bias)


class Embedding(nn.Embedding):
    """Rows by token and, in a tied model, the head."""

    packed: Matrix | None = None

    def forward(self, tokens_N: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens_N) if self.packed is None else kernels.rows(self.packed, tokens_N)

    def head(self, x_NH: torch.Tensor) -> torch.Tensor:
        return F.linear(x_NH, self.weight) if self.packed is None else kernels.product(x_NH, self.packed)


class Attention(nn.Module):
    """`inputs`: the width of what q, k and v multiply; None: the hidden size."""

    def __init__(self, config: ModelConfig, inputs: int | None = None) -> None:
        super().__init__()
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        inputs = inputs or config.hidden_size
        self.q = Linear(inputs, q_size, bias=config.qkv_bias)
        self.k = Linear(inputs, kv_size, bias=config.qkv_bias)
        self.v = Linear(inputs, kv_size, bias=config.qkv_bias)
        self.output = Linear(q_size, config.hidden_size, bias=config.output_bias)
        self.q_norm = Norm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = Norm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5 if config.query_scale is None else config.query_scale
        self.softcap = config.attention_softcap

    def forward(
        self, x_NI: torch.Tensor, rotation: Rotation | None, reaches: Sequence[Reach], cache: Keeper, layer: int
    ) -> torch.Tensor:
        n = x_NI.shape[0]
        # The number of heads is what the projections give, so that a device may hold only some of them.
        q_NQD = self.q(x_NI).view(n, -1, self.head_dim)
        k_NKD = self.k(x_NI).view(n, -1, self.head_dim)
        v_NKD = self.v(x_NI).view(n, -1, self.head_dim)
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

    def remember(
        self, x_NI: torch.Tensor, rotation: Rotation | None, reaches: Sequence[Reach], cache: Keeper, layer: int
    ) -> None:
        """Put keys and values into the cache and do no more: for rows of which nothing else is wanted."""
        k_NKD = self.k(x_NI).view(len(x_NI), -1, self.head_dim)
        v_NKD = self.v(x_NI).view(len(x_NI), -1, self.head_dim)
        if self.k_norm is not None:
            k_NKD = self.k_norm(k_NKD)
        if rotation is not None:
            k_NKD = rotate(k_NKD, rotation)
        sizes = [reach.tokens for reach in reaches]
        for reach, k_TKD, v_TKD in zip(reaches, k_NKD.split(sizes), v_NKD.split(sizes), strict=True):
            cache.extend(layer, reach.slot, reach.start, reach.begin, k_TKD, v_TKD)

    def _attend(
        self,
        reach: Reach,
        q_TQD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        cache: Keeper,
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
        self.activation_name = config.activation
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x_NH: torch.Tensor) -> torch.Tensor:
        return self.down(self.activation(self.gate(x_NH)) * self.up(x_NH))


class Block(nn.Module):
    """One layer. It does not know its own index: a cut of a decoder runs the same blocks at other indices.

    With `inputs` (a width), what its q, k and v multiply comes with each pass and is no norm of x.
    """

    def __init__(self, config: ModelConfig, inputs: int | None = None) -> None:
        super().__init__()

        def norm() -> Norm:
            return Norm(config.hidden_size, config.norm_eps)

        self.attention_norm = norm() if inputs is None else None
        self.attention = Attention(config, inputs)
        self.attention_post_norm = norm() if config.post_norms else None
        self.mlp_norm = norm()
        self.mlp = MLP(config)
        self.mlp_post_norm = norm() if config.post_norms else None

    def forward(
        self,
        x_NH: torch.Tensor,
        rotation: Rotation | None,
        reaches: Sequence[Reach],
        cache: Keeper,
        layer: int,
        inputs_NI: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if inputs_NI is None:
            assert self.attention_norm is not None
            inputs_NI = self.attention_norm(x_NH)
        y_NH = self.attention(inputs_NI, rotation, reaches, cache, layer)
        x_NH = x_NH + (y_NH if self.attention_post_norm is None else self.attention_post_norm(y_NH))
        y_NH = self.mlp(self.mlp_norm(x_NH))
        return x_NH + (y_NH if self.mlp_post_norm is None else self.mlp_post_norm(y_NH))

    def for_kernels(self) -> tuple[kernels.Attention, kernels.MLP] | None:
        """This layer as the kernels run it, or None where they cannot."""
        a, m = self.attention, self.mlp
        linears = (a.q, a.k, a.v, a.output, m.gate, m.up, m.down)
        parts = [kernels.Projection(matrix=x.packed, bias=x.bias) for x in linears if x.packed is not None]
        if len(parts) < len(linears) or not kernels.can_attend(a.head_dim):
            return None
        q, k, v, output, gate, up, down = parts
        attention = kernels.Attention(
            q=q,
            k=k,
            v=v,
            output=output,
            norm=_factors(self.attention_norm),
            post_norm=_factors(self.attention_post_norm),
            q_norm=_factors(a.q_norm),
            k_norm=_factors(a.k_norm),
            eps=self.mlp_norm.eps,
            scale=a.scale,
            softcap=a.softcap,
            head_dim=a.head_dim,
        )
        mlp = kernels.MLP(
            gate=gate,
            up=up,
            down=down,
            norm=self.mlp_norm.weight,
            post_norm=_factors(self.mlp_post_norm),
            eps=self.mlp_norm.eps,
            activation=m.activation_name,
        )
        return attention, mlp


def _factors(norm: Norm | None) -> torch.Tensor | None:
    return None if norm is None else norm.weight


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
        self.embedding = Embedding(config.vocab_size, config.hidden_size, _weight=embedding_VH)
        self.layers = nn.ModuleList(Block(config) for _ in config.layers)
        self.norm = Norm(config.hidden_size, config.norm_eps)
        self.head = None if config.tied else Linear(config.hidden_size, config.vocab_size, bias=False)
        self._cache_dtype: torch.dtype | None = None
        # Angles and masks are computed once in a pass for each distinct layer, not for each.
        self._distinct = list(dict.fromkeys(config.layers))
        self._kinds = [self._distinct.index(layer) for layer in config.layers]

    @classmethod
    def from_tensors(
        cls,
        config: ModelConfig,
        tensors: Iterable[tuple[str, torch.Tensor | Quantized]],
        *,
        dtype: torch.dtype | None,
        device: torch.device | str = "cpu",
        packed: bool = False,
    ) -> Decoder:
        """A decoder for inference on `device`, with every matrix stored as `dtype` (None: as it comes).

        `packed` stores them for the CPU kernels, where there are any (`kernels.notice` says why not); activations and
        cache are then float32, and so they are where matrices come in several types. Norms and biases of a packed
        model are float32 too. Tensors are taken one at a time, so only one exists more than once, and taken over where
        nothing has to change. Every name and shape must be the config's.
        """
        packed = packed and kernels.available()
        if dtype is None and not packed:
            dtype = torch.float32
        with torch.device("meta"):
            decoder = cls(config)
        missing = {name: tuple(parameter.shape) for name, parameter in decoder.named_parameters()}
        pages = _Pages()
        for name, tensor in tensors:
            shape = missing.pop(name, None)
            if shape is None:
                raise ValueError(f"tensor {name} is given twice or has no place in this {config.architecture} model")
            if tuple(tensor.shape) != shape:
                raise ValueError(f"tensor {name} has shape {list(tensor.shape)}, the configuration needs {list(shape)}")
            owner_name, _, leaf = name.rpartition(".")
            owner = decoder.get_submodule(owner_name)
            if packed and isinstance(owner, (Linear, Embedding)) and leaf == "weight":
                if Matrix.fits(shape[1]):
                    owner.packed = pages.hold(_packed(tensor, dtype))
                    owner.register_parameter(leaf, None)
                    continue
                if dtype is not None and isinstance(tensor, torch.Tensor):
                    tensor = tensor.to(dtype)  # rounded like the others, though held as float32
            if isinstance(tensor, Quantized):
                tensor = tensor.dequantize()
            wanted = torch.float32 if packed or isinstance(owner, Norm) else dtype
            setattr(owner, leaf, nn.Parameter(tensor.to(device, wanted), requires_grad=False))
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
        cut._cache_dtype = self._cache_dtype
        return cut.train(self.training)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def context(self) -> int:
        return self.config.context

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of activations."""
        return self.norm.weight.dtype if self.embedding.packed is not None else self.embedding.weight.dtype

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
            dtype=self._cache_dtype or self.dtype,
            device=self.device,
        )

    def set_cache_dtype(self, dtype: torch.dtype) -> None:
        """What new caches hold: the activations' own type, or float16 where the kernels run the layers."""
        if dtype != self.dtype and not (dtype == torch.float16 and self._native is not None and kernels.can_halve()):
            raise ValueError(
                f"a cache of {dtype} needs the CPU kernels, which do not run this model here: leave kv_cache_dtype at "
                f"auto, which is {self.dtype}"
            )
        self._cache_dtype = dtype

    def set_int8_activations(self) -> int:
        """From now on what matrices in blocks multiply is rounded to int8: faster, and another target. Returns how many
        matrices that are: none where the kernels do not run this model."""
        changed = 0
        for part in self.modules():
            if isinstance(part, (Linear, Embedding)) and part.packed is not None:
                part.packed = replace(part.packed, int8_inputs=True)
                changed += part.packed.rounds
        self.__dict__.pop("_native", None)
        return changed

    def compile_layers(self) -> None:
        """Let torch compile what has the same shape whenever as many tokens run: the MLPs, with CUDA graphs.

        Untested: written for CUDA, where launching small kernels one by one takes longer than running them. Attention
        stays as it is, since its shapes grow with the text.
        """
        for block in self.layers:
            assert isinstance(block, Block)
            block.mlp.compile(mode="reduce-overhead", dynamic=False)

    def forward(self, chunks: Sequence[Chunk], cache: Cache, features: Sequence[int] = ()) -> Scores:
        assert isinstance(cache, KVCache)
        depth = len(self._kinds)
        assert len(cache.keys) == depth
        if not all(0 <= index <= depth for index in features):
            raise ValueError(f"features {list(features)} do not exist: this model has 0 to {depth}")
        if not chunks:
            return Scores(logits=[])

        starts, ends = cache.place(chunks, self.vocab_size)
        sizes, outputs = [len(chunk.tokens) for chunk in chunks], [chunk.outputs for chunk in chunks]
        # Only the rows somebody asked for go through the head.
        stops = itertools.accumulate(sizes)
        wanted = [row for stop, count in zip(stops, outputs, strict=True) for row in range(stop - count, stop)]
        run = self._run if self._native is None else self._run_natively
        logits_OV, features_NFH = run(chunks, starts, cache, features, wanted)
        cache.commit(ends)
        return Scores(
            logits=_parts(self._capped(logits_OV), outputs),
            features=[] if features_NFH is None else _parts(features_NFH, sizes),
        )

    def _run(
        self,
        chunks: Sequence[Chunk],
        starts: Sequence[int],
        cache: KVCache,
        features: Sequence[int],
        wanted: Sequence[int],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(logits [O, V] of the rows `wanted`, hidden states [N, F, H] or None for none) in plain torch."""
        spans = [(start, start + len(chunk.tokens)) for chunk, start in zip(chunks, starts, strict=True)]
        rotations = [None if angles is None else angles.at(spans) for angles in self._angles]
        group = self.config.num_heads // self.config.num_kv_heads
        reaches = [reaches_of(chunks, starts, kind.window, group, self.dtype, self.device) for kind in self._distinct]
        x_NH = self.embedding(torch.tensor([token for chunk in chunks for token in chunk.tokens], device=self.device))
        if self.config.embedding_scale != 1.0:
            # Gemma was trained with the scale rounded to the model's dtype, and transformers keeps that.
            x_NH = x_NH * torch.tensor(self.config.embedding_scale, dtype=x_NH.dtype).item()
        captured = {}
        for index, (block, kind) in enumerate(zip(self.layers, self._kinds, strict=True)):
            if index in features:
                captured[index] = x_NH
            x_NH = block(x_NH, rotations[kind], reaches[kind], cache, index)
        captured[len(self.layers)] = x_NH = self.norm(x_NH)
        features_NFH = torch.stack([captured[index] for index in features], dim=1) if features else None
        if len(wanted) < len(x_NH):
            x_NH = x_NH[torch.tensor(wanted, dtype=torch.long, device=self.device)]
        return self._head_of(x_NH), features_NFH

    def _run_natively(
        self,
        chunks: Sequence[Chunk],
        starts: Sequence[int],
        cache: KVCache,
        features: Sequence[int],
        wanted: Sequence[int],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The same by the kernels."""
        assert self._native is not None
        tokens = [token for chunk in chunks for token in chunk.tokens]
        chunked = [(len(chunk.tokens), chunk.slot, start) for chunk, start in zip(chunks, starts, strict=True)]
        longest = max(start + size for size, _, start in chunked)
        places = [
            kernels.Places(chunked, kind.window, None if angles is None else angles.upto(longest))
            for kind, angles in zip(self._distinct, self._native_angles, strict=True)
        ]
        logits_OV, _, features_NFH = self._native(places, cache.native, tokens=tokens, captured=features, wanted=wanted)
        return logits_OV, features_NFH

    def head_rows(self, ids_D: torch.Tensor) -> torch.Tensor:
        """[D, H] float32: the rows of the head for these tokens."""
        matrix = self.embedding if self.head is None else self.head
        if matrix.packed is not None:
            return kernels.rows(matrix.packed, ids_D)
        return matrix.weight[ids_D].float()

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """[N, V] float32: the head alone, of hidden states behind the last norm."""
        return self._capped(self._head_of(hidden_NH))

    def _head_of(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        return (self.embedding.head(hidden_NH) if self.head is None else self.head(hidden_NH)).float()

    def _capped(self, logits_NV: torch.Tensor) -> torch.Tensor:
        cap = self.config.logit_softcap
        return logits_NV if cap is None else cap * torch.tanh(logits_NV / cap)

    @property
    def _angles(self) -> list[Table | None]:
        """Of each distinct kind of layer."""
        ropes, size = [kind.rope for kind in self._distinct], self.config.head_dim
        return [None if rope is None else table(rope, size, self.dtype, self.device) for rope in ropes]

    @functools.cached_property
    def _native_angles(self) -> list[Table | None]:
        """The same, looked up once: what runs in the kernels stays where it is."""
        return self._angles

    @functools.cached_property
    def _native(self) -> kernels.Model | None:
        """The whole model as the kernels run it, if they can run every part."""
        blocks = [block for block in self.layers if isinstance(block, Block)]
        layers = [layer for block in blocks if (layer := block.for_kernels()) is not None]
        head = (self.embedding if self.head is None else self.head).packed
        if len(layers) < len(self._kinds) or self.embedding.packed is None or head is None:
            return None
        return kernels.Model(
            layers,
            self._kinds,
            embedding=self.embedding.packed,
            head=head,
            last_norm=self.norm.weight,
            embedding_scale=self.config.embedding_scale,
        )


def _parts(rows: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    """A single one is not cut: behind a pass, which empties the caches, that takes as long as a step of bookkeeping."""
    return [rows] if len(sizes) == 1 else list(rows.split(sizes))


def reaches_of(
    chunks: Sequence[Chunk],
    starts: Sequence[int],
    window: int | None,
    group: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[Reach]:
    """Of each chunk, where each token sees what came before it, no further back than the window reaches."""
    reaches = []
    for chunk, start in zip(chunks, starts, strict=True):
        tokens = len(chunk.tokens)
        begin = 0 if window is None else max(0, start + 1 - window)
        mask = None
        if tokens > 1:
            asking_T1 = torch.arange(start, start + tokens, device=device)[:, None]
            asked_L = torch.arange(begin, start + tokens, device=device)
            hidden_TL = asked_L > asking_T1
            if window is not None:
                hidden_TL |= asked_L <= asking_T1 - window
            mask = torch.zeros(hidden_TL.shape, dtype=dtype, device=device)
            mask.masked_fill_(hidden_TL, -math.inf)
            if tokens <= FEW_ROWS:
                mask = mask.repeat(group, 1)
        reaches.append(Reach(tokens=tokens, slot=chunk.slot, start=start, begin=begin, mask=mask))
    return reaches


class _Pages:
    """Packed matrices one behind the other in large pages, each moved there as soon as it is packed: only one at a time
    exists more than once."""

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)

    def hold(self, matrix: Matrix) -> Matrix:
        old = matrix.data
        size = -(-old.numel() // 64) * 64
        if size > len(self._left):
            self._left = kernels.in_large_pages(max(size, GATHERED))
        new, self._left = self._left[: old.numel()].view(old.shape), self._left[size:]
        return replace(matrix, data=new.copy_(old))


def pack(module: nn.Module) -> None:
    """For inference by the CPU kernels: every matrix that fits is held in Q8_0 blocks, in place."""
    for part in module.modules():
        if isinstance(part, Linear) and part.packed is None and Matrix.fits(part.in_features):
            part.packed = _packed(quantize(part.weight.detach()), None)
            part.register_parameter("weight", None)
        elif isinstance(part, Norm) and Matrix.fits(part.size[0]):
            part.packed = True


def _packed(tensor: torch.Tensor | Quantized, dtype: torch.dtype | None) -> Matrix:
    if isinstance(tensor, Quantized):
        if dtype is None:
            return Matrix.pack_blocks(tensor.format, tensor.blocks)
        tensor = tensor.dequantize()
    return Matrix.pack(tensor if dtype is None else tensor.to(dtype))
