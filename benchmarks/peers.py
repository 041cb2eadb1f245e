"""The sides that `speed.py` compares: Paceline and what a user would pick instead, each in a process of its own.

A process each, because engines keep thread pools that spin, and need packages that do not install side by side: so a
package is imported only by the side that needs it, and a side may run under another Python. Every side answers the
calls of `Engine`, a line of JSON each. Knows no prompts, no repetitions and no tables.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import random
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

DRAFT_TOKENS = 4
TRAINED = "smollm2-135m-eagle3"
CONTEXT = 128
"""Tokens in the cache before a pass that is timed."""
ROOM = 1024
"""Longest sequence, in tokens, that a side has to hold."""
PACKAGES = ("torch", "transformers", "llama-cpp-python", "openvino", "openvino-genai")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One greedy generation. A token that would end the text is a token like others."""

    tokens: list[int]
    first_s: float
    """Until the first tokens were there: reading the prompt."""
    decode_s: float
    """From then on."""
    decoded: int
    """Tokens that came in `decode_s`."""
    parts: dict[str, float] = field(default_factory=dict)
    """Rounds, tokens and what `decode_s` was spent on, where the engine tells."""


class Engine(Protocol):
    """A target and perhaps a draft, loaded."""

    def generate(self, mode: str, ids: Sequence[int], count: int) -> Run:
        """Mode "plain", "ngram" (prompt lookup) or "draft"; `count` tokens."""
        ...

    def score(self, model: str, count: int) -> float:
        """Seconds of one pass of "target" or "draft" over `count` tokens behind CONTEXT others, with all logits."""
        ...


def some_tokens(count: int) -> list[int]:
    return random.choices(range(100, 40_000), k=count)


class Paceline:
    activations = "auto"

    def __init__(self, target: str, draft: str | None, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self.before_mb, began = _peak_mb(), time.perf_counter()
        from paceline import LLM, load
        from paceline.models.interface import Chunk

        plain = LLM(target, None, device="cpu", activations=self.activations)
        self.load_s = time.perf_counter() - began
        self.models: dict[str, Any] = {"target": plain.target}
        drafts: dict[str, Any] = {"plain": None, "ngram": "ngram"}
        self.draft_pass_s = 0.0
        if draft:
            self.models["draft"] = drafts["draft"] = model = load(
                draft, device="cpu", activations=self.activations
            ).model
            self._watch(model)
        self.llms = {
            mode: LLM(plain.target, draft, tokenizer=plain.tokenizer, draft_tokens=DRAFT_TOKENS)
            for mode, draft in drafts.items()
        }
        # What auto is for the built-in name.
        self.llms["trained"] = LLM(plain.target, f"ngram+{TRAINED}", tokenizer=plain.tokenizer, draft_p_min=0.3)
        proposer: Any = self.llms["trained"].proposers(1, CONTEXT)
        self._watch(proposer.proposers[-1].model)
        self.chunk, self.inference = Chunk, torch.inference_mode
        self.caches: dict[str, Any] = {}

    def _watch(self, draft: Any) -> None:
        draft.register_forward_pre_hook(lambda *_: self._clock(-1))
        draft.register_forward_hook(lambda *_: self._clock(1))

    def _clock(self, sign: int) -> None:
        self.draft_pass_s += sign * time.perf_counter()

    def generate(self, mode: str, ids: Sequence[int], count: int) -> Run:
        from paceline import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        self.draft_pass_s, began = 0.0, time.perf_counter()
        (completion,) = self.llms[mode].generate(ids, params)
        whole, stats = time.perf_counter() - began, completion.stats
        told = ("rounds", "drafted", "accepted", "draft_s", "score_s", "verify_s", "other_s")
        return Run(
            tokens=completion.token_ids,
            first_s=whole - stats.decode_s,
            decode_s=stats.decode_s,
            decoded=count - 1,
            parts={"draft_pass_s": self.draft_pass_s, **{key: getattr(stats, key) for key in told}},
        )

    def score(self, model: str, count: int) -> float:
        with self.inference():
            if model not in self.caches:
                self.caches[model] = self.models[model].new_cache(1, ROOM)
                self.models[model]([self.chunk(0, some_tokens(CONTEXT))], self.caches[model])
            chunk, began = self.chunk(0, some_tokens(count), outputs=count), time.perf_counter()
            self.models[model]([chunk], self.caches[model])
            seconds = time.perf_counter() - began
            self.caches[model].truncate(0, CONTEXT)
        return seconds

    def memory(self) -> dict[str, float]:
        """Of loading and everything since, beyond what importing torch takes."""
        return {"load_s": self.load_s, "peak_mb": _peak_mb() - self.before_mb}


class PacelineInt8(Paceline):
    """What matrices in blocks multiply is rounded to int8, as llama.cpp does it."""

    activations = "int8"


def _peak_mb() -> float:
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return int(found[1]) * 1024 / 1e6 if found else float("nan")


class Transformers:
    def __init__(self, target: str, draft: str | None, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.cache_utils import DynamicCache
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        torch.set_num_threads(threads)
        self.torch, self.new_cache = torch, DynamicCache
        self.models: dict[str, Any] = {"target": AutoModelForCausalLM.from_pretrained(target, dtype="auto").eval()}
        self.models["target"].generation_config.eos_token_id = None
        if draft:
            self.models["draft"] = assistant = AutoModelForCausalLM.from_pretrained(draft, dtype="auto").eval()
            assistant.generation_config.update(
                num_assistant_tokens=DRAFT_TOKENS,
                num_assistant_tokens_schedule="constant",
                assistant_confidence_threshold=0.0,
                eos_token_id=None,
            )
        self.caches: dict[str, Any] = {}

    def generate(self, mode: str, ids: Sequence[int], count: int) -> Run:
        prompt, came = self.torch.tensor([ids]), _Arrivals()
        assisted = {"assistant_model": self.models["draft"]} if mode == "draft" else {}
        with self.torch.inference_mode():
            began = time.perf_counter()
            output = self.models["target"].generate(
                prompt,
                attention_mask=self.torch.ones_like(prompt),
                max_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
                streamer=came,
                **assisted,
            )
            ended = time.perf_counter()
        (first, number), *_ = came.found[1:]  # the first arrival is the prompt itself
        generated = output[0, len(ids) :].tolist()
        return Run(tokens=generated, first_s=first - began, decode_s=ended - first, decoded=len(generated) - number)

    def score(self, model: str, count: int) -> float:
        run = self.models[model]
        with self.torch.inference_mode():
            if model not in self.caches:
                self.caches[model] = self.new_cache(config=run.config)
                run(input_ids=self.torch.tensor([some_tokens(CONTEXT)]), past_key_values=self.caches[model])
            ids, began = self.torch.tensor([some_tokens(count)]), time.perf_counter()
            run(input_ids=ids, past_key_values=self.caches[model])
            seconds = time.perf_counter() - began
            self.caches[model].crop(-count)
        return seconds


class _Arrivals:
    """A streamer of transformers that notes when how many tokens came."""

    def __init__(self) -> None:
        self.found: list[tuple[float, int]] = []

    def put(self, value: Any) -> None:
        self.found.append((time.perf_counter(), value.numel()))

    def end(self) -> None:
        pass


class LlamaCpp:
    """llama.cpp's own calls: the loop of `llama_cpp.Llama` would add its Python to every token."""

    def __init__(self, target: str, draft: str | None, threads: int) -> None:
        self.api = api = importlib.import_module("llama_cpp")
        self.quiet = api.llama_log_callback(lambda *_: None)  # lives as long as it may be called
        api.llama_log_set(self.quiet, ctypes.c_void_p(0))
        self.model = api.llama_model_load_from_file(target.encode(), api.llama_model_default_params())
        if not self.model:
            raise ValueError(f"llama.cpp cannot load {target}.")
        params = api.llama_context_default_params()
        params.n_ctx = ROOM
        params.n_batch = params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = threads
        self.context = api.llama_init_from_model(self.model, params)
        self.memory_of = api.llama_get_memory(self.context)
        self.batch = api.llama_batch_init(512, 0, 1)
        self.greedy = api.llama_sampler_init_greedy()

    def _decode(self, ids: Sequence[int], start: int, outputs: int) -> None:
        batch = self.batch
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, start + i, 1, 0
            batch.logits[i] = i >= len(ids) - outputs
        if self.api.llama_decode(self.context, batch):
            raise ValueError(f"llama.cpp could not decode {len(ids)} tokens behind {start}.")

    def generate(self, mode: str, ids: Sequence[int], count: int) -> Run:
        self.api.llama_memory_seq_rm(self.memory_of, 0, 0, -1)
        began = time.perf_counter()
        self._decode(ids, 0, 1)
        generated = [self.api.llama_sampler_sample(self.greedy, self.context, -1)]
        first = time.perf_counter()
        while len(generated) < count:
            self._decode(generated[-1:], len(ids) + len(generated) - 1, 1)
            generated.append(self.api.llama_sampler_sample(self.greedy, self.context, -1))
        ended = time.perf_counter()
        return Run(tokens=generated, first_s=first - began, decode_s=ended - first, decoded=count - 1)

    def score(self, model: str, count: int) -> float:
        if self.api.llama_memory_seq_pos_max(self.memory_of, 0) != CONTEXT - 1:
            self.api.llama_memory_seq_rm(self.memory_of, 0, 0, -1)
            self._decode(some_tokens(CONTEXT), 0, 1)
        ids, began = some_tokens(count), time.perf_counter()
        self._decode(ids, CONTEXT, count)
        self.api.llama_get_logits_ith(self.context, 0)  # waits until they are there
        seconds = time.perf_counter() - began
        self.api.llama_memory_seq_rm(self.memory_of, 0, CONTEXT, -1)
        return seconds


class OpenVino:
    def __init__(self, target: str, draft: str | None, threads: int) -> None:
        self.ov, self.api = importlib.import_module("openvino"), importlib.import_module("openvino_genai")
        self.pipeline = self.api.LLMPipeline(target, "CPU", INFERENCE_NUM_THREADS=threads)
        compiled = self.ov.Core().compile_model(
            str(Path(target, "openvino_model.xml")), "CPU", {"INFERENCE_NUM_THREADS": threads}
        )
        self.request = compiled.create_infer_request()

    def generate(self, mode: str, ids: Sequence[int], count: int) -> Run:
        config = self.api.GenerationConfig(max_new_tokens=count, ignore_eos=True, do_sample=False)
        prompt = self.ov.Tensor(self._array([list(ids)]))
        began = time.perf_counter()
        output = self.pipeline.generate(prompt, config)
        whole, first_s = time.perf_counter() - began, output.perf_metrics.get_ttft().mean / 1000
        return Run(tokens=list(output.tokens[0]), first_s=first_s, decode_s=whole - first_s, decoded=count - 1)

    def score(self, model: str, count: int) -> float:
        self.request.reset_state()  # it cannot be cut back to CONTEXT tokens
        self._pass(CONTEXT, 0)
        self._pass(count, CONTEXT)  # slower than its like, as the one before it was of another size
        return self._pass(count, CONTEXT + count)

    def _pass(self, count: int, start: int) -> float:
        inputs = {
            "input_ids": self._array([some_tokens(count)]),
            "attention_mask": self._array([[1] * (start + count)]),
            "position_ids": self._array([range(start, start + count)]),
            "beam_idx": self._array([0]).astype("int32"),
        }
        began = time.perf_counter()
        self.request.infer(inputs)
        return time.perf_counter() - began

    def _array(self, values: Sequence[Any]) -> Any:
        return importlib.import_module("numpy").array(values, dtype="int64")


ENGINES: dict[str, type[Any]] = {
    "paceline": Paceline,
    "paceline-int8": PacelineInt8,
    "transformers": Transformers,
    "llama.cpp": LlamaCpp,
    "openvino": OpenVino,
}


class Side:
    """An engine in a process of its own, seen from outside. ValueError where it cannot be had here."""

    def __init__(self, engine: str, *, python: str, target: Path, draft: Path | None, threads: int) -> None:
        options = json.dumps({"target": str(target), "draft": str(draft) if draft else None, "threads": threads})
        self._process = subprocess.Popen(
            [python, __file__, engine, options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"},
            start_new_session=True,  # Ctrl-C is for the measuring process, which then closes its sides
        )
        try:
            self.versions: dict[str, str] = self._answer()
        except BaseException:
            self.close()
            raise

    def generate(self, mode: str, ids: Sequence[int], count: int) -> Run:
        return Run(**self._call("generate", mode, list(ids), count))

    def score(self, model: str, count: int) -> float:
        return float(self._call("score", model, count))

    def memory(self) -> dict[str, float]:
        return dict(self._call("memory"))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _call(self, name: str, *arguments: Any) -> Any:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer then says that it has ended
            self._process.stdin.write(json.dumps([name, *arguments]) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ValueError(f"its process ended with exit code {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["result"]


def serve(name: str, options: dict[str, Any]) -> None:
    """Load an engine, say which versions it runs, then answer calls until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an engine prints is no answer

    def answer(**content: Any) -> None:
        print(json.dumps(content), file=answers, flush=True)

    try:
        engine = ENGINES[name](**options)
        answer(result={package: found for package in PACKAGES if (found := _version(package))})
        for line in sys.stdin:
            call, *arguments = json.loads(line)
            result = getattr(engine, call)(*arguments)
            answer(result=asdict(result) if isinstance(result, Run) else result)
    except ImportError as error:
        answer(error=f"{error} ({sys.executable})")
    except Exception as error:
        traceback.print_exc()
        answer(error=f"{type(error).__name__}: {error}")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    serve(sys.argv[1], json.loads(sys.argv[2]))
