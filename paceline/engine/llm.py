"""`LLM`: a target, a draft and a tokenizer behind the calls people know from vLLM."""

from __future__ import annotations

import copy
import secrets
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch

from paceline.checkpoints.drafts import find_draft, load_draft, shipped_draft
from paceline.checkpoints.load import load
from paceline.checkpoints.tokenizer import Tokenizer, eos_ids
from paceline.decoding import sequence as decoding
from paceline.decoding.control import Adaptive, Control, Costs, NewControl, Pool, pool
from paceline.decoding.generate import generate
from paceline.decoding.round import Batch
from paceline.engine.outputs import Completion, CompletionOutput, Logprob, StreamChunk
from paceline.engine.profile import Profile, measure, profile_file
from paceline.models.adapter import TransformersModel
from paceline.models.decoder import Decoder
from paceline.models.feature import FeatureDraft
from paceline.models.heads import Heads
from paceline.models.interface import LanguageModel
from paceline.proposers.base import NoProposer, Proposer
from paceline.proposers.draft_model import DraftModelProposer
from paceline.proposers.feature import FeatureProposer
from paceline.proposers.first import FirstOf
from paceline.proposers.heads import HeadsProposer
from paceline.proposers.ngram import NgramProposer
from paceline.proposers.vocabulary import ReducedVocabulary, VocabularyMap
from paceline.sampling.distribution import Among
from paceline.sampling.params import SamplingParams
from paceline.sampling.sampler import RULES, Rule, Sampler
from paceline.sampling.streams import Stream

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NewProposer = Callable[[int, int], Proposer]
"""(slots, capacity in tokens) -> the proposer of one run."""

AHEAD = "ngram+"
"""Ahead of the name of a draft: prompt lookup drafts where it finds something, the draft where not."""

AUTO_P_MIN = 0.3
"""`draft_p_min` of `draft="auto"`: of 0.15, 0.3 and 0.45 the best on HumanEval's and GSM8K's prompts with weights in 4
bits, and as good as any in 16 (benchmarks/tasks.py, `@` behind the draft)."""

Message = Mapping[str, Any]
Prompt = str | Sequence[int]


class LLM:
    """Generates with exactly the target's distribution, faster where the draft is right often enough.

    model: a built-in name ("smollm2-135m"), a folder, a .gguf file, a hub id, or a model in memory: one of ours, or
        any causal model of transformers (then with `tokenizer`).
    draft: None (plain decoding), "ngram" (prompt lookup), a folder that `paceline train` made for this target,
        "smollm2-135m-eagle3" (the draft that comes with that model), or a model, given in any of the ways of `model`.
        "auto" is "ngram+" the draft that comes with a built-in model, "ngram" for others. "ngram+..." ahead of a name:
        prompt lookup where it finds something, that draft elsewhere. A draft with another tokenizer proposes the tokens
        that both know; a draft in memory without `draft_tokenizer` has the target's.
    draft_tokens: K, how many tokens a round drafts; 0 is plain decoding. "auto" chooses K for every sequence and round
        by what a round costs on this machine and what the sequence kept of its drafts so far, 0 included. The costs are
        those that `paceline tune` measured, or are measured before the first draft (a few seconds) and kept in the
        cache folder. Greedy and coupled texts are the same whatever K. Other texts with a seed repeat, whatever runs
        beside them, as long as the measured costs are the same; with a K of your choice also on another machine. A
        function that makes a `Control` for a proposer chooses in a way of one's own.
    draft_p_min: a draft model ends its draft before a token with which the chance that all of it is kept, as far as the
        draft can tell, would fall below this; 0 always drafts `draft_tokens`. None is 0.3 with `draft="auto"`, else 0.
    verify: "token" (the paper's rule), "block" (at least as many tokens a round), "coupled" (the text depends on target
        and seed alone, whatever the draft).
    dtype: "auto" (each matrix as the file has it, where the device can multiply it so; see `load`), "float32",
        "bfloat16" or "float16".
    quantize: None, or "q8_0" to hold model and draft in Q8_0 blocks on a CPU: less to read for each token, and an
        approximation of the file. Only of what is loaded by name; "lossless" is then against the model as loaded.
    activations: "auto" (float32 on a CPU), or "int8" to round what matrices in blocks (a GGUF file's, or by `quantize`)
        multiply to 8 bits: faster on a CPU, and another target, to which speculation is as exact.
    kv_cache_dtype: "auto" (that of the activations), or "float16" for keys and values in half the memory, where the CPU
        kernels run the model. Rounding them makes another target, to which speculation is as exact.
    compile: let torch compile what is the same in every pass, with CUDA graphs. For CUDA; not tested yet.
    device: "auto", "cpu", "cuda", ...
    threads: CPU threads of torch; None leaves its own choice.
    max_num_seqs: completions that run at once.

    Raises ValueError for a model, draft or option that cannot be used, and says what can.
    """

    def __init__(
        self,
        model: str | Path | LanguageModel | PreTrainedModel,
        draft: str | Path | LanguageModel | PreTrainedModel | None = "auto",
        *,
        draft_tokens: int | Literal["auto"] | NewControl = "auto",
        draft_p_min: float | None = None,
        verify: Literal["token", "block", "coupled"] = "token",
        dtype: str = "auto",
        quantize: str | None = None,
        activations: str = "auto",
        kv_cache_dtype: str = "auto",
        compile: bool = False,
        device: str = "auto",
        threads: int | None = None,
        max_num_seqs: int = 8,
        tokenizer: Tokenizer | PreTrainedTokenizerBase | None = None,
        draft_tokenizer: Tokenizer | PreTrainedTokenizerBase | None = None,
    ) -> None:
        if max_num_seqs < 1:
            raise ValueError(f"max_num_seqs is {max_num_seqs}, it must be at least 1")
        if draft_tokens != "auto" and (
            isinstance(draft_tokens, str) or (isinstance(draft_tokens, int) and draft_tokens < 0)
        ):
            raise ValueError(f"draft_tokens is {draft_tokens}, it must be at least 0, or auto")
        if verify not in RULES:
            raise ValueError(f"verify is {verify!r}, it must be one of {', '.join(RULES)}")
        if threads is not None:
            if threads < 1:
                raise ValueError(f"threads is {threads}, it must be at least 1, or None for torch's own choice")
            torch.set_num_threads(threads)
        self._rule = RULES[verify]
        self._max_num_seqs = max_num_seqs
        how = _How(
            dtype=dtype,
            quantize=quantize,
            activations=activations,
            kv_cache_dtype=kv_cache_dtype,
            compile=compile,
            device=device,
        )
        self.target, self.tokenizer, self.eos_ids, self.notes = _loaded(model, tokenizer, how)
        if draft_p_min is not None and not 0 <= draft_p_min < 1:
            raise ValueError(f"draft_p_min is {draft_p_min}, it must be at least 0 and below 1")
        self.draft_tokens: int | Literal["auto"] | NewControl = draft_tokens
        self._p_min = draft_p_min
        self._how, self._name = how, model if isinstance(model, (str, Path)) else None
        self._take(draft, draft_tokenizer)

    def with_draft(
        self, draft: str | Path | NewProposer | None, *, p_min: float | None = None, max_num_seqs: int | None = None
    ) -> LLM:
        """The same target in memory with another draft, by name, or what makes a proposer of one's own. `p_min` stands
        in for `draft_p_min`, where it is given."""
        other = copy.copy(self)
        other._p_min = self._p_min if p_min is None else p_min
        if draft is None or isinstance(draft, (str, Path)):
            other._take(draft, None)
        else:
            other._take(None, None)
            other._setting, other._new_proposer = None, draft
        other._max_num_seqs = max_num_seqs or self._max_num_seqs
        return other

    def _take(
        self,
        draft: str | Path | LanguageModel | PreTrainedModel | None,
        draft_tokenizer: Tokenizer | PreTrainedTokenizerBase | None,
    ) -> None:
        """Draft with this from now on."""
        self.draft_p_min = self._p_min or 0.0
        if draft == "auto":
            shipped = shipped_draft(self._name)
            draft = "ngram" if shipped is None else AHEAD + shipped
            if shipped is not None and self._p_min is None:
                self.draft_p_min = AUTO_P_MIN
        self._setting = self._settled(draft)
        self._new_proposer = self._proposers(draft, draft_tokenizer, self._how)
        self._profile: Profile | None = None
        self._pool: Pool = {}

    def _settled(self, draft: Any) -> dict[str, Any] | None:
        """All that costs depend on; None where a model has no name to find them by."""
        if self._name is None or not (draft is None or isinstance(draft, (str, Path))):
            return None

        def named(given: str | Path) -> str:
            ahead, name = (AHEAD, str(given)[len(AHEAD) :]) if str(given).startswith(AHEAD) else ("", str(given))
            return ahead + (str(Path(name).resolve()) if Path(name).exists() else name)

        return {
            "model": named(self._name),
            "draft": None if draft is None else named(draft),
            **asdict(self._how),
            "device": str(self.target.device),
            "threads": torch.get_num_threads(),
            "draft_p_min": self.draft_p_min,
        }

    @property
    def proposers(self) -> NewProposer:
        """What makes the proposer of each run."""
        return self._new_proposer

    @property
    def rule(self) -> Rule:
        return self._rule

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Completion]:
        """One result per prompt, in order. A prompt is a string or a list of token ids; `params` is one for all, or one
        for each. `progress` shows a bar on stderr."""
        found: dict[int, Completion] = {}
        for index, completion in self.as_completed(prompts, params, progress=progress):
            found[index] = completion
        return [found[index] for index in sorted(found)]

    def as_completed(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> Generator[tuple[int, Completion], None, None]:
        """(index of the prompt, its result), each as soon as it is there: what has come survives an interruption."""
        jobs = self._jobs(_as_list(prompts), params)
        return self._finish(jobs, progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Completion]:
        """`generate` behind the model's chat template. `messages` is a conversation (a list of {"role", "content"}) or
        a list of conversations."""
        conversations: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [self.tokenizer.encode_chat(conversation) for conversation in conversations]
        return self.generate(prompts, params, progress=progress)

    def stream(
        self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None
    ) -> Generator[StreamChunk, None, None]:
        """Text as soon as it is certain, for one prompt or one conversation (a list of messages). The last chunk
        carries the whole result. The iterator may be closed, or dropped, at any point."""
        params = params or SamplingParams()
        if params.n != 1:
            raise ValueError(f"n is {params.n}, a stream carries 1 completion: use generate for more")
        asked: Any = prompt
        if not isinstance(asked, str) and asked and isinstance(asked[0], Mapping):
            asked = self.tokenizer.encode_chat(asked)
        (job,) = self._jobs([asked], params)
        return self._stream(job)

    def _stream(self, job: _Job) -> Generator[StreamChunk, None, None]:
        for sequence in generate(self._batch([job]), job.sequences):
            tokens, ended = sequence.take(), sequence.finish_reason is not None
            if tokens or ended:
                text = "".join(token.text for token in tokens)
                yield StreamChunk(text=text, tokens=tokens, completion=job.completion() if ended else None)

    def _finish(self, jobs: list[_Job], progress: bool) -> Generator[tuple[int, Completion], None, None]:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        job_of = {id(sequence): index for index, job in enumerate(jobs) for sequence in job.sequences}
        unfinished = [len(job.sequences) for job in jobs]
        # The bar may take over stdout only where that is a terminal too: results that are piped stay there.
        console = Console(stderr=True)
        with Progress(*columns, console=console, disable=not progress, redirect_stdout=sys.stdout.isatty()) as bar:
            task = bar.add_task("generating", total=len(job_of))
            for sequence in generate(self._batch(jobs), [s for job in jobs for s in job.sequences]):
                if sequence.finish_reason is None:
                    continue
                bar.advance(task)
                index = job_of[id(sequence)]
                unfinished[index] -= 1
                if not unfinished[index]:
                    yield index, jobs[index].completion()

    def _batch(self, jobs: list[_Job]) -> Batch:
        sequences = [sequence for job in jobs for sequence in job.sequences]
        slots = max(1, min(self._max_num_seqs, len(sequences)))
        # The last token of a sequence is never processed.
        capacity = max((sequence.limit for sequence in sequences), default=2) - 1
        proposer = self._new_proposer(slots, capacity)
        control: int | Control = 0
        if not isinstance(proposer, NoProposer):
            k = self.draft_tokens
            if k == "auto":
                profile = self.profile()
                control = Adaptive(proposer, profile.costs, self._pool, profile.acceptance)
            else:
                control = k if isinstance(k, int) else k(proposer)
        return Batch(self.target, proposer, draft_tokens=control, slots=slots, capacity=capacity)

    @property
    def profile_file(self) -> Path | None:
        """Where the profile of this model, draft, format and machine is kept; None where they have no names."""
        return profile_file(self._setting) if self._setting else None

    def profile(self, say: Callable[[str], None] = lambda text: None) -> Profile:
        """What rounds cost here: as `paceline tune` found, or as measured now, which takes a moment, and kept."""
        if self._profile is None:
            file = self.profile_file
            found = Profile.load(file) if file else None
            if found is None or found.costs.batches[-1] < self._max_num_seqs:
                say(f"measuring what a round of up to {self._max_num_seqs} sequences costs on this machine, once")
                found = Profile(self.measure(), found.acceptance if found else {})
                if file:
                    found.save(file)
            self.use(found)
        assert self._profile is not None
        return self._profile

    def measure(self, batches: Sequence[int] = (), **how: Any) -> Costs:
        """What rounds cost here with one sequence, `max_num_seqs` and `batches` at once; `how` is of
        `engine.profile.measure`."""
        return measure(self.target, self._new_proposer, batches=(1, *batches, self._max_num_seqs), **how)

    def use(self, profile: Profile) -> None:
        """Choose K by this profile from now on."""
        self._profile, self._pool = profile, pool(profile.acceptance)

    def _jobs(self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None) -> list[_Job]:
        if params is None:
            params = SamplingParams()
        if isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"{len(params)} sampling params for {len(prompts)} prompts: give one, or one for each")
        return [self._job(prompt, each) for prompt, each in zip(prompts, params, strict=True)]

    def _job(self, prompt: Prompt, params: SamplingParams) -> _Job:
        params.check_vocabulary(self.target.vocab_size)
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        context = self.target.context
        if not ids:
            raise ValueError("the prompt has 0 tokens, it must have 1 at least: this tokenizer adds none by itself")
        if len(ids) >= context:
            raise ValueError(
                f"the prompt has {len(ids)} tokens, at most {context - 1} leave room for an answer in the model's "
                f"context of {context}: shorten it"
            )
        for token in ids:
            if not 0 <= token < self.target.vocab_size:
                raise ValueError(
                    f"the prompt holds token id {token}, ids end at {self.target.vocab_size - 1}: "
                    "was it made with another tokenizer?"
                )
        ends = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else self.eos_ids)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        limit = context if params.max_tokens is None else min(context, len(ids) + params.max_tokens)
        sequences = [
            decoding.Sequence(
                ids,
                Sampler(
                    params=params,
                    rule=self._rule,
                    stream=Stream(seed, sample),
                    prompt_length=len(ids),
                    end_ids=ends,
                ),
                limit=limit,
                detokenizer=self.tokenizer.detokenizer(ids, skip_special_tokens=params.skip_special_tokens),
            )
            for sample in range(params.n)
        ]
        return _Job(prompt if isinstance(prompt, str) else None, ids, sequences, self.tokenizer)

    def _proposers(
        self,
        draft: str | Path | LanguageModel | PreTrainedModel | None,
        draft_tokenizer: Tokenizer | PreTrainedTokenizerBase | None,
        how: _How,
    ) -> NewProposer:
        if draft is None:
            return lambda slots, capacity: NoProposer()
        if draft == "ngram":
            return lambda slots, capacity: NgramProposer(self.target.vocab_size)
        if not isinstance(draft, (str, Path)):
            how = _How()  # it is as it is
        if isinstance(draft, str) and draft.startswith(AHEAD):
            lookup, behind = self._proposers("ngram", None, how), draft.removeprefix(AHEAD)
            others = self._proposers(behind, draft_tokenizer, how)
            return lambda slots, capacity: FirstOf(lookup(slots, capacity), others(slots, capacity))
        if isinstance(draft, (str, Path)) and (folder := find_draft(draft)):
            return self.new_proposer(folder)
        device = str(self.target.device)
        drafting = _loaded(draft, draft_tokenizer or self.tokenizer, replace(how, device=device))
        vocabulary = VocabularyMap(
            self.tokenizer.tokens(),
            drafting.tokenizer.tokens(),
            partial(drafting.tokenizer.encode, add_special_tokens=False),
            target_size=self.target.vocab_size,
            draft_size=drafting.model.vocab_size,
        )
        if not vocabulary.identical:
            self.notes = (*self.notes, f"the draft can propose {vocabulary.share:.0%} of the target's tokens")
        return lambda slots, capacity: DraftModelProposer(
            drafting.model, vocabulary, slots=slots, capacity=capacity, p_min=self.draft_p_min
        )

    def new_proposer(self, folder: Path) -> NewProposer:
        """Of the draft in a folder that `paceline train` made for this target. ValueError for any other folder."""
        least = self.draft_p_min
        if not isinstance(self.target, Decoder):
            raise ValueError(
                f"{folder} holds a draft for a target that Paceline's own decoder runs, and this one is run by "
                "transformers: use draft='ngram', or a draft model"
            )
        trained = load_draft(folder, self.target)
        module, among = trained.module, None
        if trained.ids is not None:
            among = Among(self.target.vocab_size, trained.ids)
        if isinstance(module, Heads):
            return lambda slots, capacity: HeadsProposer(module, among, p_min=least)
        if isinstance(module, FeatureDraft):
            return lambda slots, capacity: FeatureProposer(module, among, slots=slots, capacity=capacity, p_min=least)
        vocabulary = ReducedVocabulary(among or Among(self.target.vocab_size, np.arange(self.target.vocab_size)))
        return lambda slots, capacity: DraftModelProposer(
            module, vocabulary, slots=slots, capacity=capacity, p_min=least
        )


class _Job:
    """One prompt and its n sequences."""

    def __init__(
        self, prompt: str | None, ids: list[int], sequences: list[decoding.Sequence], tokenizer: Tokenizer
    ) -> None:
        self.prompt, self.ids, self.sequences, self.tokenizer = prompt, ids, sequences, tokenizer

    def completion(self) -> Completion:
        of_prompt = self.sequences[0].prompt_logprobs
        wanted = self.sequences[0].sampler.params.prompt_logprobs is not None
        return Completion(
            prompt=self.prompt,
            prompt_token_ids=self.ids,
            prompt_logprobs=[
                self._logprobs(token, found) if found else None
                for token, found in zip(self.ids, of_prompt, strict=True)
            ]
            if wanted
            else None,
            outputs=[self._output(index, sequence) for index, sequence in enumerate(self.sequences)],
        )

    def _output(self, index: int, sequence: decoding.Sequence) -> CompletionOutput:
        assert sequence.finish_reason is not None
        logprobs = [self._logprobs(token.id, token.logprobs) for token in sequence.output if token.logprobs]
        wanted = sequence.sampler.params.logprobs is not None
        return CompletionOutput(
            index=index,
            text="".join(token.text for token in sequence.output),
            token_ids=[token.id for token in sequence.output],
            provenance=[token.provenance for token in sequence.output],
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            logprobs=logprobs if wanted else None,
            cumulative_logprob=sum(t.logprobs.logprob for t in sequence.output if t.logprobs) if wanted else None,
            seed=sequence.sampler.stream.seed,
            stats=sequence.stats,
        )

    def _logprobs(self, token: int, found: decoding.TokenLogprobs) -> dict[int, Logprob]:
        """vLLM's shape: the most probable tokens by id, with the token itself among them."""
        most_probable = [(i, value, rank) for rank, (i, value) in enumerate(found.top, start=1)]
        return {
            i: Logprob(value, rank, self.tokenizer.token_bytes(i).decode("utf-8", errors="replace"))
            for i, value, rank in [*most_probable, (token, found.logprob, found.rank)]
        }


def _as_list(prompts: Any) -> list[Prompt]:
    """One prompt, or several: a list of integers is one prompt."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]
    return list(prompts)


class _Loaded(NamedTuple):
    model: LanguageModel
    tokenizer: Tokenizer
    eos_ids: frozenset[int]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _How:
    """The options of `load`."""

    dtype: str = "auto"
    quantize: str | None = None
    activations: str = "auto"
    kv_cache_dtype: str = "auto"
    compile: bool = False
    device: str = "auto"


def _loaded(
    model: str | Path | LanguageModel | PreTrainedModel,
    tokenizer: Tokenizer | PreTrainedTokenizerBase | None,
    how: _How,
) -> _Loaded:
    """Load by name, or take what is in memory (then as it is: `dtype` and `device` are its own)."""
    if isinstance(model, (str, Path)):
        found = load(str(model), **asdict(how))
        return _Loaded(found.model, found.tokenizer, found.eos_ids, found.notes)
    for name, value, default in (
        ("quantize", how.quantize, None),
        ("activations", how.activations, "auto"),
        ("kv_cache_dtype", how.kv_cache_dtype, "auto"),
        ("compile", how.compile, False),
    ):
        if value != default:
            raise ValueError(f"{name} is {value!r} and the model is in memory already: give its name, or drop {name}")
    if tokenizer is None:
        raise ValueError("a model in memory needs its tokenizer: pass tokenizer=")
    if not isinstance(tokenizer, Tokenizer):
        tokenizer = Tokenizer.from_transformers(tokenizer)
    if isinstance(model, LanguageModel):
        return _Loaded(model, tokenizer, eos_ids(tokenizer, {}, {}), ())
    generation = model.generation_config
    ends = eos_ids(tokenizer, model.config.to_dict(), generation.to_dict() if generation else {})
    return _Loaded(TransformersModel(model), tokenizer, ends, ())
