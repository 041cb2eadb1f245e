"""What a draft learns from: texts as token ids, most of them the target's own answers, and the target's hidden states.

A folder holds `answers.jsonl`, one line for each finished text, and, where hidden states are kept, `features.bin`. Both
only grow, features first: whatever interrupts the work, the lines that are whole are finished texts, and going on
gives what an uninterrupted run would have given, since every answer has random numbers of its own.

Shapes: N positions of a batch, T tokens of a text, F features, H hidden size, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.engine.llm import LLM
from paceline.models.cache import KVCache
from paceline.models.decoder import Decoder
from paceline.models.interface import Chunk
from paceline.proposers.base import NoProposer
from paceline.sampling.params import SamplingParams

READ_CHUNK = 512
"""Tokens of a text that one pass reads for its hidden states."""
HELD_OUT = 19
"""Every so many-th text is never trained on: an odd number, so that answers of all temperatures are among them."""


@dataclass(frozen=True)
class Example:
    """A text; `mask[t]`: token t belongs to an answer, so predicting it is trained."""

    tokens: tuple[int, ...]
    mask: tuple[bool, ...]

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.mask):
            raise ValueError(
                f"{len(self.tokens)} tokens have a mask of {len(self.mask)}: give one value for each token"
            )
        if not any(self.mask[1:]):
            raise ValueError(
                f"a text of {len(self.tokens)} tokens has an all-zero mask: nothing of it would be trained. Mark the "
                "tokens of its answer (the first token of a text has nothing before it and cannot be predicted)"
            )


@dataclass(frozen=True)
class Batch:
    """Several texts packed one behind the other, without the last token of each, which nothing follows."""

    lengths: list[int]
    tokens_N: torch.Tensor
    next_N: torch.Tensor
    """The token behind each."""
    trained_N: torch.Tensor
    """Whether the prediction made here, of `next_N`, is trained."""
    features_NFH: torch.Tensor
    """float32: the hidden states that the draft asked for."""
    hidden_NH: torch.Tensor
    """float32: the target's last hidden state, behind its last norm."""
    lse_N: torch.Tensor
    """float32: log sum exp of the target's logits over the whole vocabulary, where `trained_N`; 0 elsewhere."""

    def to(self, device: torch.device) -> Batch:
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return Batch(lengths=self.lengths, **moved)


# Prompts


@dataclass(frozen=True)
class Prompt:
    """One line of a prompts file: a question to be answered, or a text that is given whole (`mask` is then set)."""

    tokens: tuple[int, ...]
    mask: tuple[bool, ...] | None = None


def read_prompts(file: Path, llm: LLM) -> list[Prompt]:
    """The lines of a JSONL file, by their keys:

    `prompt` (a string: through the chat template where the model has one, as it is with `"chat": false`) or `messages`
    (a conversation) are answered by the target; `text` is trained on as it stands; so are `tokens`, with `mask`.
    Raises ValueError naming the line for anything else, and for a file without lines.
    """
    prompts = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            prompts.append(_prompt(json.loads(line), llm))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{file}, line {number}: {error}") from error
    if not prompts:
        raise ValueError(
            f'{file} holds no prompts: give one JSON object a line, such as {{"prompt": "Why is the sky blue?"}}'
        )
    return prompts


def _prompt(line: Mapping[str, Any], llm: LLM) -> Prompt:
    tokenizer, context = llm.tokenizer, llm.target.context
    if not isinstance(line, dict) or len(kinds := line.keys() & {"prompt", "messages", "text", "tokens"}) != 1:
        raise ValueError("a line is an object with one of prompt, messages, text and tokens")
    kind = kinds.pop()
    if kind == "tokens":
        given = [*line["tokens"]]
        if not all(isinstance(t, int) and 0 <= t < llm.target.vocab_size for t in given):
            raise ValueError(f"tokens are ids from 0 to {llm.target.vocab_size - 1}")
        example = Example(tuple(given), tuple(map(bool, line.get("mask", [1] * len(given)))))
        return Prompt(example.tokens[:context], example.mask[:context])
    if kind == "text":
        tokens = tuple(tokenizer.encode(line["text"])[:context])
        return Prompt(tokens, (True,) * len(tokens))
    if kind == "messages":
        tokens = tuple(tokenizer.encode_chat(line["messages"]))
    elif line.get("chat", True) and tokenizer.chat_template is not None:
        tokens = tuple(tokenizer.encode_chat([{"role": "user", "content": line["prompt"]}]))
    else:
        tokens = tuple(tokenizer.encode(line["prompt"]))
    if not 0 < len(tokens) < context:
        raise ValueError(f"the prompt has {len(tokens)} tokens, it must have 1 to {context - 1}")
    return Prompt(tokens)


# Answers


@dataclass(frozen=True, kw_only=True)
class Answering:
    """How the target answers. The temperatures take turns: prompt i has the (i mod their number)-th."""

    temperatures: tuple[float, ...] = (0.0, 0.8)
    max_tokens: int = 256
    seed: int = 0

    def params(self, index: int) -> SamplingParams:
        temperature = self.temperatures[index % len(self.temperatures)]
        digest = hashlib.sha256(f"{self.seed} {index}".encode()).digest()
        return SamplingParams(
            temperature=temperature,
            max_tokens=self.max_tokens,
            seed=int.from_bytes(digest[:7], "big"),
        )


class Recorder(NoProposer):
    """A proposer that proposes nothing and keeps the target's hidden states of every running sequence."""

    def __init__(self, features: tuple[int, ...]) -> None:
        self.features = features
        self._tokens: dict[int, Sequence[int]] = {}
        self._parts: dict[int, list[torch.Tensor]] = {}

    def begin(self, slot: int) -> None:
        self._parts[slot] = []

    def observe(self, slot: int, tokens: Sequence[int], features_TFH: torch.Tensor | None = None) -> None:
        self._tokens[slot] = tokens
        if features_TFH is not None:
            # A narrow copy: the tensor itself may be a view of the whole pass.
            self._parts[slot].append(features_TFH.to(torch.bfloat16, copy=True))

    def take(self, tokens: Sequence[int]) -> torch.Tensor:
        """[T - 1, F, H] of a sequence that has just ended."""
        slot = next(slot for slot, held in self._tokens.items() if len(held) == len(tokens) and held == tokens)
        return torch.cat(self._parts.pop(slot))


class Texts:
    """The texts of a folder, and what is kept of the target's hidden states behind them.

    `features` are the indices a draft asks for; the last hidden state is always captured beside them. At most `budget`
    bytes of hidden states are kept in the folder (bfloat16); those of the other texts are computed whenever they are
    needed. Raises ValueError where the folder was begun with other settings.
    """

    def __init__(
        self, folder: Path, llm: LLM, prompts: Sequence[Prompt], how: Answering, *, features: Sequence[int], budget: int
    ) -> None:
        if not isinstance(llm.target, Decoder):
            raise ValueError(
                "a draft can be trained for targets that Paceline's own decoder runs; this one is run by "
                "transformers: `paceline info` lists what ours can run"
            )
        self.target: Decoder = llm.target
        self._llm, self._prompts, self._how = llm, prompts, how
        self._last = self.target.config.num_layers
        self.features = tuple(features)
        self._captured = tuple(sorted({*features, self._last}))
        self._row_bytes = 2 * len(self._captured) * self.target.config.hidden_size
        self._budget = budget
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._settle(folder / "settings.json")
        self._lines = folder / "answers.jsonl"
        self._features = folder / "features.bin"
        self._scratch: KVCache | None = None
        self._examples: dict[int, Example] = {}
        self._places: dict[int, tuple[int, list[float]]] = {}
        self._read()

    def _settle(self, file: Path) -> None:
        digest = hashlib.sha256(repr(self._prompts).encode()).hexdigest()
        settings = {
            "prompts": digest,
            "temperatures": list(self._how.temperatures),
            "max_tokens": self._how.max_tokens,
            "seed": self._how.seed,
            "captured": list(self._captured),
            "sizes": [self.target.config.hidden_size, self.target.config.num_layers, self.target.vocab_size],
        }
        if file.exists():
            found = json.loads(file.read_text())
            differing = [name for name in settings if settings[name] != found.get(name)]
            if differing:
                name = differing[0]
                raise ValueError(
                    f"{file.parent} was begun with {name} {found.get(name)} and is now to go on with "
                    f"{settings[name]}: use another folder, or the same settings"
                )
        else:
            write_atomically(file, json.dumps(settings).encode())

    def _read(self) -> None:
        """What is finished. A line that was cut off, and features without a line, are removed."""
        whole = 0
        if self._lines.exists():
            data = self._lines.read_bytes()
            whole = data.rfind(b"\n") + 1
            for text in data[:whole].splitlines():
                line = json.loads(text)
                self._enter(line)
            os.truncate(self._lines, whole)
        kept = max((start + self._bytes(i) for i, (start, _) in self._places.items()), default=0)
        with self._features.open("ab") as file:
            file.truncate(kept)

    def _bytes(self, index: int) -> int:
        return (len(self._examples[index].tokens) - 1) * self._row_bytes

    def _enter(self, line: Mapping[str, Any]) -> None:
        answer = line["answer"]
        mask = (
            tuple(t >= answer for t in range(len(line["tokens"])))
            if isinstance(answer, int)
            else tuple(map(bool, answer))
        )
        self._examples[line["id"]] = Example(tuple(line["tokens"]), mask)
        if "features" in line:
            self._places[line["id"]] = (line["features"], line["lse"])

    # Making them

    @property
    def missing(self) -> list[int]:
        return [index for index in range(len(self._prompts)) if index not in self._examples]

    def make(self, *, batch: int = 32, advance: Callable[[int, int], None] = lambda texts, tokens: None) -> None:
        """Answer what is not answered yet. `advance` hears of every finished text and its new tokens."""
        given = [index for index in self.missing if self._prompts[index].mask is not None]
        asked = [index for index in self.missing if self._prompts[index].mask is None]
        with self._lines.open("ab") as lines, self._features.open("ab") as features:
            for index in given:
                prompt = self._prompts[index]
                assert prompt.mask is not None
                example = Example(prompt.tokens, prompt.mask)
                states = self.states(example) if self._fits(features.tell(), example) else None
                self._append(index, example, states, [int(m) for m in example.mask], lines, features)
                advance(1, 0)
            for index, example, states in self._answers(
                asked, batch, lambda size: self._budget >= features.tell() + size
            ):
                answer = len(self._prompts[index].tokens)
                keep = states if self._fits(features.tell(), example) else None
                self._append(index, example, keep, answer, lines, features)
                advance(1, len(example.tokens) - answer)

    def _fits(self, used: int, example: Example) -> bool:
        return used + (len(example.tokens) - 1) * self._row_bytes <= self._budget

    def _answers(
        self, asked: Sequence[int], batch: int, room: Callable[[int], bool]
    ) -> Iterator[tuple[int, Example, torch.Tensor | None]]:
        """The target's answers as they are finished. Hidden states come from the passes that wrote the answer."""
        most = max((len(self._prompts[index].tokens) for index in asked), default=0) + self._how.max_tokens
        recorder = Recorder(self._captured if room(most * self._row_bytes) else ())
        llm = self._llm.with_draft(lambda slots, capacity: recorder, max_num_seqs=batch)
        prompts = [list(self._prompts[index].tokens) for index in asked]
        for place, completion in llm.as_completed(prompts, [self._how.params(index) for index in asked]):
            index, tokens = asked[place], [*completion.prompt_token_ids, *completion.outputs[0].token_ids]
            start = len(completion.prompt_token_ids)
            states = recorder.take(tokens) if recorder.features else None
            yield index, Example(tuple(tokens), tuple(t >= start for t in range(len(tokens)))), states

    def _append(
        self,
        index: int,
        example: Example,
        states: torch.Tensor | None,
        answer: int | list[int],
        lines: Any,
        features: Any,
    ) -> None:
        line: dict[str, Any] = {"id": index, "tokens": list(example.tokens), "answer": answer}
        if states is not None:
            trained = torch.tensor(example.mask[1:])
            lse_T = self._lse(states[:, -1].float(), trained)
            line |= {"features": features.tell(), "lse": lse_T[trained].tolist()}
            features.write(states.contiguous().view(torch.int16).numpy().tobytes())
            features.flush()
        lines.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        lines.flush()
        self._enter(line)

    @torch.inference_mode()
    def _lse(self, hidden_TH: torch.Tensor, trained_T: torch.Tensor) -> torch.Tensor:
        """[T] where trained, 0 elsewhere; some rows at a time, since a row of logits is large."""
        lse_T = torch.zeros(len(hidden_TH))
        rows = trained_T.nonzero()[:, 0]
        for part in rows.split(128):
            lse_T[part] = self.target.logits(hidden_TH[part].to(self.target.device)).logsumexp(-1).cpu()
        return lse_T

    # Hidden states

    @torch.inference_mode()
    def states(self, example: Example) -> torch.Tensor:
        """[T - 1, F', H] in bfloat16: what was captured, the last hidden state last."""
        tokens = example.tokens[:-1]
        cache = self._cache(len(tokens))
        cache.truncate(0, 0)
        parts = []
        for start in range(0, len(tokens), READ_CHUNK):
            chunk = Chunk(0, tokens[start : start + READ_CHUNK], outputs=0)
            (found,) = self.target([chunk], cache, self._captured).features
            parts.append(found.to("cpu", torch.bfloat16))
        return torch.cat(parts)

    def _cache(self, length: int) -> KVCache:
        if self._scratch is None or self._scratch.capacity < length:
            self._scratch = self.target.new_cache(1, min(self.target.context, max(length, 1024)))
        return self._scratch

    def kept(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """States and lse [T - 1] of a text, read where they are kept and computed where not."""
        example = self._examples[index]
        trained = torch.tensor(example.mask[1:])
        if index not in self._places:
            states = self.states(example)
            return states, self._lse(states[:, -1].float(), trained)
        start, lse = self._places[index]
        shape = (len(example.tokens) - 1, len(self._captured), self.target.config.hidden_size)
        raw = np.memmap(self._features, np.int16, "r", start, shape)
        states, lse_T = torch.from_numpy(np.array(raw)).view(torch.bfloat16), torch.zeros(len(trained))
        lse_T[trained] = torch.tensor(lse)
        return states, lse_T

    # Batches

    @property
    def indices(self) -> list[int]:
        return sorted(self._examples)

    def train(self) -> list[int]:
        """The texts that are trained on; where there are too few to set any aside, all."""
        return [index for index in self.indices if index % HELD_OUT] or self.indices

    def held_out(self) -> list[int]:
        return [index for index in self.indices if index % HELD_OUT == 0]

    def example(self, index: int) -> Example:
        return self._examples[index]

    def batch(self, indices: Sequence[int]) -> Batch:
        examples = [self._examples[index] for index in indices]
        found = [self.kept(index) for index in indices]
        states = torch.cat([states for states, _ in found]).float()
        where = [self._captured.index(feature) for feature in self.features]
        return Batch(
            lengths=[len(example.tokens) - 1 for example in examples],
            tokens_N=torch.tensor([token for example in examples for token in example.tokens[:-1]]),
            next_N=torch.tensor([token for example in examples for token in example.tokens[1:]]),
            trained_N=torch.tensor([trained for example in examples for trained in example.mask[1:]]),
            features_NFH=states[:, where],
            hidden_NH=states[:, self._captured.index(self._last)],
            lse_N=torch.cat([lse for _, lse in found]),
        )

    def plan(self, seed: int, epoch: int, tokens_per_batch: int) -> list[list[int]]:
        """The texts of each batch of an epoch, the same for the same arguments. A batch has one text at least."""
        order = np.random.default_rng([seed, epoch]).permutation(self.train()).tolist()
        batches: list[list[int]] = []
        size = 0
        for index in order:
            length = len(self._examples[index].tokens) - 1
            if not batches or size + length > tokens_per_batch:
                batches.append([])
                size = 0
            batches[-1].append(index)
            size += length
        return batches

    def frequent(self, count: int) -> list[int]:
        """The `count` tokens that answers hold most often, those that end a text among them; ascending."""
        counts = np.zeros(self.target.vocab_size, np.int64)
        for index in self.train():
            example = self._examples[index]
            np.add.at(
                counts, [token for token, trained in zip(example.tokens, example.mask, strict=True) if trained], 1
            )
        counts[list(self._llm.eos_ids)] = counts.max() + 1
        chosen = np.argsort(-counts, kind="stable")[:count]
        return sorted(chosen.tolist())

    def coverage(self, ids: Sequence[int]) -> float:
        """The part of the held-out answers' tokens that are among `ids`."""
        known = set(ids)
        examples = [self._examples[index] for index in self.held_out() or self.train()]
        answers = [t for e in examples for t, trained in zip(e.tokens, e.mask, strict=True) if trained]
        return sum(token in known for token in answers) / len(answers)

    def cost(self) -> tuple[float, int]:
        """(tokens a second that the target reads for hidden states, bytes that keeping them takes for a token)."""
        tokens = (self._prompts[0].tokens * READ_CHUNK)[: min(READ_CHUNK, self.target.context - 1)]
        example = Example(tokens, (True,) * len(tokens))
        self.states(example)
        began = time.perf_counter()
        self.states(example)
        return len(tokens) / (time.perf_counter() - began), self._row_bytes


def write_atomically(file: Path, data: bytes) -> None:
    """Readers see the old file or the new one, whole."""
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    beside.write_bytes(data)
    os.replace(beside, file)
