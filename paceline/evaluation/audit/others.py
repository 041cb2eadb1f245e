"""Level 3 on other engines: what they sample, with a draft, against the exact p of their own target.

An engine is asked for the first tokens behind a context, many times, and for its own exact rows there; nothing is known
of its rounds. Its plain sampling goes through the same test first: where that fails, p is not what the engine samples
from (another format, a parameter it treats differently), and nothing can be said of its speculation.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from paceline.evaluation.audit import statistics
from paceline.evaluation.audit.certificate import Certificate, Control, Journal, Level
from paceline.evaluation.audit.run import Say, Size
from paceline.evaluation.audit.statistics import Cells, Sample, share
from paceline.evaluation.prompts import PROMPTS
from paceline.evaluation.record import circumstances
from paceline.sampling.distribution import Distribution, distribution, on_host
from paceline.sampling.params import SamplingParams


class Engine(Protocol):
    """Someone's assisted generation. Contexts and results are tokens of the target."""

    name: str
    vocab_size: int

    def encode(self, text: str) -> list[int]:
        """As the user's message of a chat, where the model has a template."""
        ...

    def sample(self, context: Sequence[int], count: int, length: int, *, draft: bool, seed: int) -> list[list[int]]:
        """`count` continuations of up to `length` tokens, each ended by the end of the text at most."""
        ...

    def logits(self, context: Sequence[int], more: Sequence[int], *, draft: bool) -> torch.Tensor:
        """[T + 1, V] behind a context and each of T tokens more, of target or draft."""
        ...


class Transformers:
    """`generate(assistant_model=...)`, from two folders. Its default top_k of 50 holds where no top_k is asked for."""

    name = "transformers"

    def __init__(self, target: str, draft: str, params: SamplingParams, draft_tokens: int) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer, logging

        logging.set_verbosity_error()
        # Hostile input is not executed: no code out of a folder, no pickles.
        how: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": False, "use_safetensors": True}
        self.tokenizer = AutoTokenizer.from_pretrained(target, trust_remote_code=False)
        self.models = [AutoModelForCausalLM.from_pretrained(name, **how).eval() for name in (target, draft)]
        assistant = self.models[1].generation_config
        assistant.num_assistant_tokens, assistant.num_assistant_tokens_schedule = draft_tokens, "constant"
        assistant.assistant_confidence_threshold = 0.0
        self.vocab_size = self.models[0].get_output_embeddings().weight.shape[0]
        ends = self.models[0].generation_config.eos_token_id
        self._end_ids = [] if ends is None else ends if isinstance(ends, list) else [ends]
        self._kinds: dict[str, Any] = {
            "do_sample": True,
            "pad_token_id": self._end_ids[0] if self._end_ids else 0,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or self.vocab_size,
        }

    def encode(self, text: str) -> list[int]:
        return _encode(self.tokenizer, text)

    def sample(self, context: Sequence[int], count: int, length: int, *, draft: bool, seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        # Assisted generation takes one sequence at a time; plain sampling all at once.
        more, calls, rows = ({"assistant_model": self.models[1]}, count, 1) if draft else ({}, 1, count)
        found = []
        for _ in range(calls):
            whole = self.models[0].generate(
                torch.tensor([list(context)] * rows),
                attention_mask=torch.ones(rows, len(context), dtype=torch.int64),
                max_new_tokens=length,
                **self._kinds,
                **more,
            )
            found += [self._until_end(row) for row in whole[:, len(context) :].tolist()]
        return found

    def _until_end(self, tokens: list[int]) -> list[int]:
        """Without the padding behind an end."""
        ends = [i + 1 for i, token in enumerate(tokens) if token in self._end_ids]
        return tokens[: min(ends, default=len(tokens))]

    @torch.inference_mode()
    def logits(self, context: Sequence[int], more: Sequence[int], *, draft: bool) -> torch.Tensor:
        rows_TV = self.models[draft](torch.tensor([[*context, *more]])).logits[0, len(context) - 1 :]
        return rows_TV.float()


class OpenVINO:
    """OpenVINO GenAI's `draft_model`, from two exported folders on a CPU; p from the same files by OpenVINO itself."""

    name = "openvino"

    def __init__(self, target: str, draft: str, params: SamplingParams, draft_tokens: int) -> None:
        try:
            import openvino
            import openvino_genai as genai
        except ImportError as error:
            raise ValueError(f"auditing OpenVINO needs its packages: pip install openvino-genai ({error})") from error

        self._genai, core = genai, openvino.Core()
        self._exact = [
            core.compile_model(Path(folder) / "openvino_model.xml", "CPU").create_infer_request()
            for folder in (target, draft)
        ]
        schedulers = [genai.SchedulerConfig(), genai.SchedulerConfig()]
        for scheduler in schedulers:
            scheduler.cache_size = 1
        # With a draft as well, 2026.4 ends in a failed check of its own.
        schedulers[0].enable_prefix_caching = True
        plain = genai.LLMPipeline(target, "CPU", scheduler_config=schedulers[0])
        assisted = genai.LLMPipeline(
            target, "CPU", scheduler_config=schedulers[1], draft_model=genai.draft_model(draft, "CPU")
        )
        self._pipelines = [plain, assisted]
        self._tokenizer = plain.get_tokenizer()
        self._params, self._draft_tokens = params, draft_tokens
        self.vocab_size = int(self._row(0, [1]).shape[-1])

    def encode(self, text: str) -> list[int]:
        chat = self._tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
        encoded = self._tokenizer.encode(chat, add_special_tokens=False)
        return [int(token) for token in encoded.input_ids.data[0]]

    def sample(self, context: Sequence[int], count: int, length: int, *, draft: bool, seed: int) -> list[list[int]]:
        import openvino

        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.apply_chat_template = length, True, False
        config.temperature, config.top_p = self._params.temperature, self._params.top_p
        config.top_k = self._params.top_k or self.vocab_size
        if draft:
            config.num_assistant_tokens = self._draft_tokens
        ids = openvino.Tensor(np.array([list(context)], dtype=np.int64))
        mask = openvino.Tensor(np.ones((1, len(context)), dtype=np.int64))
        inputs = self._genai.TokenizedInputs(ids, mask)
        found = []
        for number in range(count):
            config.rng_seed = seed + number
            found.append([int(token) for token in self._pipelines[draft].generate(inputs, config).tokens[0]])
        return found

    def logits(self, context: Sequence[int], more: Sequence[int], *, draft: bool) -> torch.Tensor:
        rows_TV = self._row(int(draft), [*context, *more])[len(context) - 1 :]
        return torch.from_numpy(rows_TV.copy()).float()

    def _row(self, which: int, tokens: Sequence[int]) -> Any:
        request = self._exact[which]
        request.reset_state()
        length = len(tokens)
        named = {
            "input_ids": np.array([list(tokens)], dtype=np.int64),
            "attention_mask": np.ones((1, length), dtype=np.int64),
            "position_ids": np.arange(length, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, dtype=np.int32),
        }
        wanted = {name for tensor in request.model_inputs for name in tensor.get_names()}
        request.infer({name: value for name, value in named.items() if name in wanted})
        return request.get_output_tensor(0).data[0]


def _encode(tokenizer: Any, text: str) -> list[int]:
    if not tokenizer.chat_template:
        return list(tokenizer.encode(text))
    found = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
    )
    return list(tokenizer.encode(found, add_special_tokens=False))


ENGINES: dict[str, Callable[[str, str, SamplingParams, int], Engine]] = {
    "transformers": Transformers,
    "openvino": OpenVINO,
}


class Sampled:
    """What one way of sampling gives at each context, ready for the tests."""

    def __init__(self, engine: Engine, params: SamplingParams, contexts: Sequence[list[int]], size: Size) -> None:
        self.engine, self.params, self.contexts, self.size = engine, params, contexts, size

    def _chosen(self, row_V: torch.Tensor) -> Distribution:
        return distribution(on_host(row_V), self.params)

    def of(self, index: int, samples: Sequence[Sequence[int]]) -> Sample:
        """Hold samples of one context against its exact rows."""
        context, sample = self.contexts[index], Sample(self.size.ahead)
        groups: dict[tuple[int, ...], list[int]] = {}
        for tokens in samples:
            for t, token in enumerate(tokens[: self.size.ahead]):
                groups.setdefault(tuple(tokens[:t]), []).append(token)
        p_of: dict[tuple[int, ...], Distribution] = {}
        for prefix in sorted(groups, key=len, reverse=True):
            if prefix not in p_of:
                for t, row_V in enumerate(self.engine.logits(context, prefix, draft=False)):
                    p_of[prefix[:t]] = self._chosen(row_V)
        q = self.q(index)
        for prefix, tokens in groups.items():
            sample.add(share(p_of[prefix]), q if not prefix else None, prefix, tokens)
        sample.cells.append(Cells.of(share(p_of[()]), [tokens[0] for tokens in samples if tokens]))
        sample.trials = len(samples)
        return sample

    def q(self, index: int) -> statistics.Vector:
        return share(self._chosen(self.engine.logits(self.contexts[index], (), draft=True)[-1]))

    def run(self, index: int, *, draft: bool, seed: int) -> Sample:
        samples = self.engine.sample(
            self.contexts[index], self.size.trials, self.size.ahead, draft=draft, seed=seed + 1000 * index
        )
        return self.of(index, samples)

    def wrong(self, index: int, *, fault: str, seed: int) -> Sample:
        """First tokens of an engine that accepts everything, or that recovers from p; drawn here from p and q."""
        p = share(self._chosen(self.engine.logits(self.contexts[index], (), draft=False)[-1]))
        q = self.q(index)
        law = q
        if fault == "residual = p":
            kept = np.minimum(p, q)
            law = kept + (1 - kept.sum()) * p
        rng = np.random.default_rng([seed, index])
        return self.of(index, [[int(t)] for t in rng.choice(len(law), self.size.trials, p=law / law.sum())])


def _contexts(engine: Engine, prompts: Sequence[str], count: int, seed: int) -> list[list[int]]:
    """Places in the engine's own plain answers."""
    found: list[list[int]] = []
    rng = random.Random(seed)
    each = -(-count // len(prompts))
    for number, text in enumerate(prompts):
        prompt = engine.encode(text)
        (answer,) = engine.sample(prompt, 1, max(2 * each, 24), draft=False, seed=seed + number)
        places = rng.sample(range(1, len(answer) + 1), min(each, len(answer)))
        found += [[*prompt, *answer[:place]] for place in places]
    rng.shuffle(found)
    return found[:count]


def audit_engine(
    engine: Engine,
    params: SamplingParams,
    prompts: Sequence[str] | None,
    size: Size,
    *,
    seed: int,
    out: Path | None,
    say: Say,
    subject: dict[str, Any],
) -> Certificate:
    """Plain sampling, sampling with the draft, and the controls, on the same contexts.

    `size.trials` samples of `size.ahead` tokens each from `size.contexts` contexts.
    """
    told = {"engine": engine.name, **subject, "params": asdict(params)}
    asked = {**told, "prompts": list(prompts or PROMPTS), "size": asdict(size), "seed": seed}
    journal = Journal(None if out is None else out / "steps.jsonl", asked)
    contexts = journal.once("contexts", lambda: _contexts(engine, prompts or PROMPTS, size.contexts, seed))
    sampled = Sampled(engine, params, contexts, size)

    def collect(name: str, one: Callable[[int], Sample]) -> statistics.Statistics:
        whole = Sample(size.ahead)
        for index in range(len(contexts)):
            whole.extend(Sample.load(journal.once(f"{name} {index}", partial(one, index))))
            say(f"{name}: {index + 1} of {len(contexts)} contexts")
        return statistics.examine(whole, alarm=size.alarm, seed=seed, slack=0.001)

    plain = collect("plain", partial(sampled.run, draft=False, seed=seed + 1))
    assisted = collect("with the draft", partial(sampled.run, draft=True, seed=seed + 2))
    controls = []
    for fault, what in (
        ("accept everything", "every drafted token stands"),
        ("residual = p", "a rejected token is replaced by one from p"),
    ):
        found = collect(fault, partial(sampled.wrong, fault=fault, seed=seed))
        controls.append(
            Control(
                fault=fault,
                what=f"{what}; drawn from the engine's own p and q",
                level=3,
                caught=not found.exact,
                detail=f"p = {found.worst_p_value:.1e} after {found.trials} samples",
            )
        )
    overlap = float(
        np.mean(
            [
                np.minimum(share(sampled._chosen(engine.logits(context, (), draft=False)[-1])), sampled.q(index)).sum()
                for index, context in enumerate(contexts)
            ]
        )
    )
    doubts = []
    if not plain.exact:
        doubts.append(
            f"plain sampling fails the same test (p = {plain.worst_p_value:.1e}): p is not what this engine samples "
            "from, so nothing can be said of its draft"
        )
    certificate = Certificate(
        subject=told | {"overlap of p and q": overlap},
        levels=[_level(assisted, plain)] if plain.exact else [],
        controls=controls,
        doubts=doubts,
        setting=circumstances() | {"seed": seed, "size": asdict(size), "contexts": len(contexts)},
        notes=[
            "Another engine: only what it samples can be seen, so there is no identity and no replay. Faults that need "
            "a look inside (raw q, shared noise) are seen where they move enough probability."
        ],
    )
    if out is not None:
        certificate.save(out)
    return certificate


def _level(found: statistics.Statistics, plain: statistics.Statistics) -> Level:
    return Level(
        number=3,
        title="Statistics",
        covers="Tokens sampled with the draft, against p of the engine's own target behind the same context. A bias of "
        f"the first token towards what the draft favours of a total variation of {found.detectable:.2%} or more would "
        f"have been seen with a probability of {statistics.POWER:.0%}.",
        exact=found.exact,
        summary=f"{found.trials} samples with the draft: p = {found.worst_p_value:.2g} (fails below {found.alarm:g}), "
        f"{found.impossible} impossible tokens; without it p = {plain.worst_p_value:.2g}",
        figures={
            "findings": [asdict(finding) for finding in found.findings],
            "fit": None if found.fit is None else asdict(found.fit),
            "plain": {"p-value": plain.worst_p_value, "impossible": plain.impossible},
        },
    )


def audit_other(
    name: str,
    target: str,
    draft: str,
    draft_tokens: int,
    params: SamplingParams,
    prompts: Sequence[str] | None,
    size: Size,
    *,
    seed: int,
    out: Path,
    say: Say,
) -> Certificate:
    """Raises ValueError for parameters that the other engine would not be asked for."""
    asked = SamplingParams(temperature=params.temperature, top_p=params.top_p, top_k=params.top_k)
    for field in ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens"):
        if getattr(params, field) != getattr(asked, field):
            raise ValueError(
                f"{field} is {getattr(params, field)}: other engines are asked for temperature and filters"
            )
    if params.temperature == 0:
        raise ValueError("temperature is 0, and statistics need chance: give 0.8, say")
    if name == "transformers" and params.top_k == 0:
        asked = replace(asked, top_k=50)  # what a call there has if it says nothing
    engine = ENGINES[name](target, draft, asked, draft_tokens)
    subject = {"target": target, "draft": draft, "draft_tokens": draft_tokens}
    return audit_engine(engine, asked, prompts, size, seed=seed, out=out, say=say, subject=subject)
