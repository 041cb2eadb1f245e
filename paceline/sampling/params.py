"""What a request asks for: vLLM's names and meaning, validated when built. Knows no model and imports no torch."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


def _require(ok: bool, name: str, value: object, limit: str, cure: str) -> None:
    if not ok:
        raise ValueError(f"{name} is {value!r}, it must be {limit}: {cure}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. Every parameter holds under speculation exactly as without it.

    Raises ValueError, naming the value, the limit and the cure, for a parameter out of range.
    """

    n: int = 1
    """Completions per prompt, each with random streams of its own."""
    temperature: float = 1.0
    """0 is greedy: the most probable token, the lowest id among equals."""
    top_p: float = 1.0
    """Keep the most probable tokens that together reach this mass, and whatever ties with the last of them."""
    top_k: int = 0
    """Keep the k most probable tokens, ties with the k-th included; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less probable than this fraction of the most probable one."""
    repetition_penalty: float = 1.0
    """Divides the positive logits, multiplies the negative ones, of every token in prompt or output."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token in the output."""
    frequency_penalty: float = 0.0
    """Subtracted once for each time a token is in the output."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids; each in -100..100."""
    seed: int | None = None
    """None draws a seed from the operating system; the completion reports the one that was used."""
    stop: str | Sequence[str] | None = None
    """Strings that end the output; the first one found is cut off, with all after it."""
    stop_token_ids: Sequence[int] | None = None
    """Tokens that end the output; kept in `token_ids`, left out of `text`."""
    include_stop_str_in_output: bool = False
    max_tokens: int | None = 256
    """None generates up to the model's context."""
    min_tokens: int = 0
    """No end-of-sequence or stop token is sampled, and no stop string looked for, before this many tokens."""
    ignore_eos: bool = False
    logprobs: int | None = None
    """Report the target's log-probabilities (before temperature and filters) of each output token and of this many
    most probable ones."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens."""
    skip_special_tokens: bool = True

    _stop: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        n, k = self.n, self.top_k
        _require(_is_int(n) and n >= 1, "n", n, "an integer >= 1", "ask for at least one completion")
        for name, low, high, cure in (
            ("min_p", 0.0, 1.0, "use 0 to keep every token"),
            ("presence_penalty", -2.0, 2.0, "use 0 for none"),
            ("frequency_penalty", -2.0, 2.0, "use 0 for none"),
        ):
            value = getattr(self, name)
            _require(_is_number(value) and low <= value <= high, name, value, f"in {low:g}..{high:g}", cure)
        heat, top_p, penalty = self.temperature, self.top_p, self.repetition_penalty
        _require(
            _is_number(heat) and heat >= 0,
            "temperature",
            heat,
            "a finite number >= 0",
            "use 0 for greedy decoding, 1 for the model's own distribution",
        )
        _require(_is_number(top_p) and 0 < top_p <= 1, "top_p", top_p, "in (0, 1]", "use 1 to keep every token")
        _require(
            _is_number(penalty) and penalty > 0,
            "repetition_penalty",
            penalty,
            "greater than 0",
            "use 1 for none",
        )
        _require(_is_int(k) and k >= -1, "top_k", k, "an integer >= -1", "use 0 to keep every token")
        for name, cure in (
            ("logprobs", "use 0 for the output token alone, None for none"),
            ("prompt_logprobs", "use 0 for the prompt's tokens alone, None for none"),
        ):
            value = getattr(self, name)
            _require(value is None or (_is_int(value) and value >= 0), name, value, "None or an integer >= 0", cure)
        m, least = self.max_tokens, self.min_tokens
        _require(
            m is None or (_is_int(m) and m >= 1),
            "max_tokens",
            m,
            "None or an integer >= 1",
            "ask for one at least",
        )
        most = math.inf if m is None else m
        _require(
            _is_int(least) and 0 <= least <= most,
            "min_tokens",
            least,
            f"an integer in 0..{most} (max_tokens)",
            "lower it or raise max_tokens",
        )
        seed = self.seed
        _require(
            seed is None or (_is_int(seed) and -(2**63) <= seed < 2**64),
            "seed",
            seed,
            "None or an integer of 64 bits",
            "use a smaller one",
        )
        for token, bias in (self.logit_bias or {}).items():
            _require(
                _is_int(token) and token >= 0,
                "a logit_bias key",
                token,
                "a token id >= 0",
                "see the tokenizer",
            )
            _require(
                _is_number(bias) and -100 <= bias <= 100,
                f"logit_bias[{token}]",
                bias,
                "in -100..100",
                "clip it",
            )
        for token in self.stop_token_ids or ():
            _require(_is_int(token) and token >= 0, "a stop token", token, "a token id >= 0", "see the tokenizer")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        for text in stop:
            _require(isinstance(text, str) and text != "", "a stop string", text, "a non-empty string", "drop it")
        object.__setattr__(self, "_stop", stop)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return self._stop

    @property
    def penalises(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def check_vocabulary(self, size: int) -> None:
        """Refuse token ids beyond a vocabulary of `size`, and more log-probabilities than it has tokens."""
        for token in (*(self.logit_bias or {}), *(self.stop_token_ids or ())):
            _require(
                token < size,
                "a token id",
                token,
                f"below {size}, the target's vocabulary",
                "check the tokenizer",
            )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(value is None or value <= size, name, value, f"at most {size}, the vocabulary", "lower it")
