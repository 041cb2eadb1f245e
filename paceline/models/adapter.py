"""Any causal transformers model, already in memory, behind our interface.

Each slot has a transformers cache of its own and chunks run one after the other, so a pass over a batch costs its
sequences added up; what that buys is every architecture transformers has. The model is used as it is: its dtype, its
device, its way of computing attention. Knows no architecture; importing this does not import transformers.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from paceline.models.cache import Slots
from paceline.models.interface import Cache, Chunk, Scores


class TransformersCache(Slots):
    """One transformers cache for each slot. All layers keep every position (windows are masks): cutting is exact."""

    def __init__(self, config: Any, slots: int, capacity: int) -> None:
        super().__init__(slots, capacity)
        self._config = config
        self.caches = [_new_cache(config) for _ in range(slots)]

    def truncate(self, slot: int, length: int) -> None:
        super().truncate(slot, length)
        self.rewind(slot)

    def rewind(self, slot: int) -> None:
        """Bring every layer back to the slot's length, wherever a pass has left it."""
        length = self.length(slot)
        if length == 0:
            self.caches[slot] = _new_cache(self._config)
            return
        for layer in self.caches[slot].layers:
            surplus = _filled(layer) - length
            if surplus > 0:
                layer.crop(-surplus)


class TransformersModel:
    """A `LanguageModel` (see interface.py) that runs `model`, a causal language model of transformers.

    Features are the model's own hidden states, whose last transformers gives after the last norm. `context` is for
    models whose configuration does not name one.
    """

    def __init__(self, model: Any, *, context: int | None = None) -> None:
        name = type(model).__name__
        head = model.get_output_embeddings()
        if head is None or model.config.is_encoder_decoder:
            raise ValueError(f"{name} is not a decoder with a language model head: load it as AutoModelForCausalLM")
        self._config = model.config.get_text_config(decoder=True)
        if getattr(self._config, "use_bidirectional_attention", False) or not getattr(self._config, "is_causal", True):
            raise ValueError(f"{name} lets tokens see later ones: choose a causal model")
        parameters = inspect.signature(model.forward).parameters
        # Newer versions call it `cache`, and would warn about the older name at every pass.
        self._cache_argument = next((key for key in ("cache", "past_key_values") if key in parameters), None)
        if self._cache_argument is None or getattr(model, "_is_stateful", False):
            raise _not_rewindable(name)
        if any(not _croppable(layer) for layer in _new_cache(self._config).layers):
            raise _not_rewindable(name)
        self._model = model
        self._keeps_logits = "logits_to_keep" in parameters
        self._vocab_size = int(head.weight.shape[0])
        self._known_tokens = int(model.get_input_embeddings().weight.shape[0])
        self._context = _context(self._config) if context is None else context

    @property
    def vocab_size(self) -> int:
        """Rows of the output head."""
        return self._vocab_size

    @property
    def context(self) -> int:
        return self._context

    @property
    def device(self) -> torch.device:
        return self._model.device

    def new_cache(self, slots: int, capacity: int) -> TransformersCache:
        if capacity > self.context:
            raise ValueError(
                f"a cache of {capacity} tokens exceeds the model's context: ask for at most {self.context} tokens"
            )
        return TransformersCache(self._config, slots, capacity)

    @torch.no_grad()
    def __call__(self, chunks: Sequence[Chunk], cache: Cache, features: Sequence[int] = ()) -> Scores:
        assert isinstance(cache, TransformersCache)
        if self._model.training:
            raise ValueError("the model is in training mode, where dropout makes its answers random: call model.eval()")
        if not all(0 <= index <= self._config.num_hidden_layers for index in features):
            raise ValueError(
                f"features {list(features)} do not exist: this model has 0 to {self._config.num_hidden_layers}"
            )
        starts, ends = cache.place(chunks, self._known_tokens)
        scores = Scores(logits=[])
        try:
            for chunk, start in zip(chunks, starts, strict=True):
                self._run(chunk, start, cache.caches[chunk.slot], features, scores)
        except BaseException:
            # Also when interrupted: layers the pass has reached and layers it has not must agree again.
            for slot in ends:
                cache.rewind(slot)
            raise
        cache.commit(ends)
        return scores

    def _run(self, chunk: Chunk, start: int, held: Any, features: Sequence[int], scores: Scores) -> None:
        assert self._cache_argument is not None
        arguments = {self._cache_argument: held}
        if self._keeps_logits:
            arguments["logits_to_keep"] = max(chunk.outputs, 1)  # there, 0 means all
        output = self._model(
            input_ids=torch.tensor([list(chunk.tokens)], device=self.device),
            use_cache=True,
            output_hidden_states=bool(features),
            return_dict=True,
            **arguments,
        )
        if max(map(_filled, held.layers), default=0) != start + len(chunk.tokens):
            raise _not_rewindable(type(self._model).__name__)
        logits_TV = output.logits[0]
        scores.logits.append(logits_TV[logits_TV.shape[0] - chunk.outputs :].float())
        if features:
            scores.features.append(torch.stack([output.hidden_states[index][0] for index in features], dim=1))


def _new_cache(config: Any) -> Any:
    """A growing cache laid out as the model wants it, but without layers that drop what leaves their window."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    cache = DynamicCache(config=config)
    cache.layers = [DynamicLayer() if type(layer) is DynamicSlidingWindowLayer else layer for layer in cache.layers]
    return cache


def _croppable(layer: Any) -> bool:
    from transformers.cache_utils import DynamicLayer

    return type(layer) is DynamicLayer or getattr(layer, "is_croppable", False)


def _filled(layer: Any) -> int:
    """0 for layers that keep nothing, as those that use another layer's keys."""
    return int(layer.get_seq_length()) if hasattr(layer, "get_seq_length") else 0


def _not_rewindable(name: str) -> ValueError:
    return ValueError(
        f"{name} keeps more of the past than keys and values in a cache (a recurrent state, perhaps), so tokens it has "
        "read cannot be taken back, as rejected drafts must be: choose a model of attention layers only"
    )


def _context(config: Any) -> int:
    for key in ("max_position_embeddings", "max_seq_len", "seq_length"):
        context = getattr(config, key, None)
        if isinstance(context, int) and context > 0:
            break
    else:
        raise ValueError("the model's configuration names no longest sequence: pass context=, in tokens")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        # Past the original context transformers turns to other frequencies, chosen by the last position of a pass:
        # what a token scores would depend on how many were scored with it, and keys already cached would not match.
        context = min(context, rope.get("original_max_position_embeddings") or context)
    return context
