"""The flags that commands share, as dataclasses: each field is one option, with its name, type, default and help.

Says what can be asked for and turns it into the package's own objects; knows no command. Imports nothing heavy.
"""

from __future__ import annotations

import gc
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from paceline.sampling.params import SamplingParams

if TYPE_CHECKING:
    from paceline.engine.llm import LLM


def flattened(function: Callable[..., None]) -> Callable[..., None]:
    """`function` with the fields of its dataclass parameters for parameters, as typer reads signatures."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type] = {}
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        group = hints[name]
        if not is_dataclass(group):
            parameters.append(parameter.replace(annotation=group))
            continue
        assert isinstance(group, type)
        groups[name] = group
        types = get_type_hints(group, include_extras=True)
        parameters += [
            inspect.Parameter(field.name, parameter.KEYWORD_ONLY, default=field.default, annotation=types[field.name])
            for field in fields(group)
        ]

    @wraps(function)
    def flat(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        function(**given)

    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return flat


def _in(panel: str) -> Callable[..., Any]:
    return lambda help, *names, **more: typer.Option(*names, help=help, rich_help_panel=panel, **more)


_model, _drafting, _sampling, _output = _in("Model"), _in("Drafting"), _in("Sampling"), _in("Output")
_audit = _in("Audit")
_draft, _answers, _training, _measured = _in("Draft"), _in("Answers"), _in("Training"), _in("Evaluation")


def size(text: str) -> int:
    """Bytes. Raises ValueError for a text that is no size."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([kKMGT]?)B?", text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no size: write 4GB, 500MB or 0")
    return int(float(found[1]) * 1000 ** " kMGT".index(found[2].replace("K", "k") or " "))


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """What runs."""

    model: Annotated[str, _model("A built-in name, a folder, a .gguf file, or a hub id (org/name).")] = "smollm2-135m"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        _model("What the weights are held in; auto keeps the file's formats, where the device can multiply them."),
    ] = "auto"
    quantize: Annotated[
        Literal["q8_0"] | None,
        _model("On a CPU: hold model and draft in Q8_0 blocks, 8.5 bits a weight. An approximation of the checkpoint."),
    ] = None
    activations: Annotated[
        Literal["auto", "int8"],
        _model("int8: what matrices in blocks multiply is rounded to 8 bits. Faster on a CPU, and another target."),
    ] = "auto"
    kv_cache_dtype: Annotated[
        Literal["auto", "float32", "float16"],
        _model("What keys and values are held in; float16 takes half the memory, on a CPU."),
    ] = "auto"
    compile: Annotated[bool, _model("Let torch compile the model, with CUDA graphs (untested).", "--compile")] = False
    device: Annotated[str, _model("auto, cpu, cuda, cuda:1, ...")] = "auto"
    threads: Annotated[int | None, _model("CPU threads; torch's own choice if not given.")] = None

    def load(self, *, max_num_seqs: int = 8) -> LLM:
        return self._loaded(None, max_num_seqs=max_num_seqs)

    def _loaded(self, draft: str | None, **more: Any) -> LLM:
        from paceline import terminal
        from paceline.engine.llm import LLM

        if sys.stderr.isatty():
            terminal.note(f"loading {self.model}")
        names = [field.name for field in fields(TargetOptions) if field.name != "model"]
        llm = LLM(self.model, draft, **{name: getattr(self, name) for name in names}, **more)
        for text in llm.notes:
            terminal.note(text)
        gc.freeze()  # what was loaded stays: looking through it for garbage took 4% of decoding
        return llm


@dataclass(frozen=True, kw_only=True)
class ModelOptions(TargetOptions):
    """What runs, and how it is sped up."""

    draft: Annotated[
        str,
        _drafting(
            "Where drafted tokens come from: none, ngram (prompt lookup), a folder that train made, smollm2-135m-eagle3"
            " (comes with that model), or a model, named as --model. ngram+NAME asks prompt lookup first. auto:"
            " ngram+smollm2-135m-eagle3 for that model, ngram for others."
        ),
    ] = "auto"
    draft_tokens: Annotated[
        str,
        _drafting(
            "Tokens drafted a round; 0 is plain decoding. auto: what pays, chosen anew for every round.",
            "--draft-tokens",
            "-k",
            metavar="K|auto",
        ),
    ] = "auto"
    draft_p_min: Annotated[
        float | None,
        _drafting(
            "End a draft before a token that makes the chance of it all being kept lower than this; 0.3 for auto, 0 for"
            " others, if not given."
        ),
    ] = None
    verify: Annotated[
        Literal["token", "block", "coupled"],
        _drafting("Verification rule. coupled: the text depends on model and seed alone, whatever the draft."),
    ] = "token"

    @property
    def k(self) -> int | Literal["auto"]:
        if self.draft_tokens == "auto":
            return "auto"
        try:
            return int(self.draft_tokens)
        except ValueError:
            raise ValueError(f"--draft-tokens is {self.draft_tokens!r}, it must be a number, or auto") from None

    def load(self, *, max_num_seqs: int = 8) -> LLM:
        from paceline.terminal import note

        draft, k = None if self.draft == "none" else self.draft, self.k
        more = {"draft_tokens": k, "draft_p_min": self.draft_p_min, "verify": self.verify}
        llm = self._loaded(draft, max_num_seqs=max_num_seqs, **more)
        if k == "auto" and draft is not None:
            llm.profile(note)
        return llm


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """vLLM's names and meanings; each is checked by `SamplingParams`."""

    temperature: Annotated[float, _sampling("0 is greedy.")] = 1.0
    top_p: Annotated[float, _sampling("Keep the most probable tokens that together reach this mass.")] = 1.0
    top_k: Annotated[int, _sampling("Keep this many of the most probable tokens; 0 keeps all.")] = 0
    min_p: Annotated[float, _sampling("Drop tokens below this fraction of the most probable one.")] = 0.0
    repetition_penalty: Annotated[float, _sampling("Above 1 makes repeating prompt or output less probable.")] = 1.0
    presence_penalty: Annotated[float, _sampling("Subtracted from the logit of every token in the output.")] = 0.0
    frequency_penalty: Annotated[float, _sampling("The same, once for each time it is there.")] = 0.0
    seed: Annotated[int | None, _sampling("Makes a run repeatable; a new one each time if not given.")] = None
    stop: Annotated[list[str] | None, _sampling("Ends the output where this text appears; may be repeated.")] = None
    max_tokens: Annotated[int, _sampling("Longest output.")] = 256
    min_tokens: Annotated[int, _sampling("Nothing ends the output before this many tokens.")] = 0
    ignore_eos: Annotated[bool, _sampling("Go on past the end-of-sequence token.", "--ignore-eos")] = False

    def params(self) -> SamplingParams:
        return SamplingParams(**asdict(self))


@dataclass(frozen=True, kw_only=True)
class CompletionOptions(SamplingOptions):
    n: Annotated[int, _sampling("Completions of each prompt.")] = 1
    logprobs: Annotated[
        int | None, _sampling("Report each token's log-probability and those of this many others; needs --json.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class AnswerOptions(SamplingOptions):
    max_tokens: Annotated[int, _sampling("Longest answer.")] = 1024


@dataclass(frozen=True, kw_only=True)
class TunedOptions(SamplingOptions):
    max_tokens: Annotated[int, _sampling("Longest answer.")] = 96


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """What `training.command.train` is asked for."""

    kind: Annotated[
        Literal["eagle3", "eagle1", "heads", "shallow"],
        _draft("One layer that reads the target's hidden states; heads on the last; or a few of its layers."),
    ] = "eagle3"
    draft_vocab: Annotated[
        int, _draft("Tokens the draft can propose, the most frequent of the answers; 0 is all of them.")
    ] = 8192
    layers: Annotated[int, _draft("Of a shallow draft.")] = 4
    heads: Annotated[int, _draft("Of a heads draft.")] = 4
    answer_temperature: Annotated[
        list[float] | None,
        _answers("The target answers at this; several take turns, prompt by prompt.", show_default="0 and 0.8"),
    ] = None
    max_tokens: Annotated[int, _answers("Longest answer.")] = 256
    cache_features: Annotated[
        str, _answers("Keep up to this much of the target's hidden states on disk, such as 4GB.", metavar="SIZE")
    ] = "0"
    steps: Annotated[int | None, _training("Train for so many optimiser steps")] = None
    tokens: Annotated[int | None, _training("or for so many tokens")] = None
    epochs: Annotated[
        float | None, _training("or read the answers so many times.", show_default="3, without the others")
    ] = None
    loss: Annotated[
        Literal["forward-kl", "total-variation", "lk-alpha", "lk-lambda"], _training("What is made small.")
    ] = "forward-kl"
    lr: Annotated[float | None, _training("Highest learning rate.", show_default="by kind")] = None
    unroll: Annotated[int, _training("Steps of drafting that are trained together.")] = 3
    tokens_per_batch: Annotated[int, _training("Of one batch, about.")] = 2048
    batches_per_step: Annotated[int, _training("Batches of one optimiser step, over all processes.")] = 1
    gradient_checkpointing: Annotated[bool, _training("Less memory, more computing.", "--gradient-checkpointing")] = (
        False
    )
    seed: Annotated[int, _training("Of answers, beginning and order.")] = 0
    start: Annotated[
        Path | None, _training("Begin as this draft, of the same kind and vocabulary.", show_default="anew")
    ] = None
    temperature: Annotated[float, _measured("Measure acceptance as if serving at this.")] = 0.0
    top_p: Annotated[float, _measured("And at this.")] = 1.0
    device: Annotated[str, _model("auto, cpu, cuda, cuda:1, ...")] = "auto"
    threads: Annotated[int | None, _model("CPU threads; torch's own choice if not given.")] = None


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """How much an audit looks at, and whose engine."""

    contexts: Annotated[int, _audit("Places in the model's own answers from which tokens are sampled.")] = 100
    trials: Annotated[int, _audit("From each of them: the first three tokens, by as many rounds as they take.")] = 40
    alarm: Annotated[float, _audit("Probability that an exact engine fails the statistics.")] = 1e-3
    batch: Annotated[int, _audit("Contexts in a batch.")] = 16
    engine: Annotated[
        Literal["paceline", "transformers", "openvino"],
        _audit("Whose assisted generation is sampled; the others take folders of their own for target and --draft."),
    ] = "paceline"
    server: Annotated[
        str | None, _audit("Sample an OpenAI-compatible server instead, such as http://localhost:8000/v1.")
    ] = None


SystemOption = Annotated[str | None, typer.Option(help="The system message, ahead of the conversation.")]
ShowDraftOption = Annotated[
    bool,
    _output("Mark each token by where it came from, in colours or, where there are none, brackets.", "--show-draft"),
]
JsonLinesOption = Annotated[bool, _output("One JSON object a line for each completion, as it finishes.", "--json")]
JsonOption = Annotated[bool, _output("Write JSON, for scripts.", "--json")]
CompareOption = Annotated[
    bool, _output("Then run the same prompts without a draft, and show both speeds.", "--compare")
]
