"""What int8 activations do to a model: `python benchmarks/rounding.py prompts.jsonl`, a {"prompt": ...} a line.

The same texts through the model as it is and with `activations="int8"`: perplexity of both, and how far their
next-token distributions are apart. Ends in one JSON line.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import track

from paceline.checkpoints.load import load
from paceline.evaluation.intervals import bootstrap
from paceline.evaluation.record import circumstances
from paceline.models.interface import Chunk, LanguageModel


def log_probabilities(model: LanguageModel, ids: list[int]) -> torch.Tensor:
    """[T, V] of the token behind each."""
    (logits_TV,) = model([Chunk(0, ids, outputs=len(ids))], model.new_cache(1, len(ids))).logits
    return logits_TV.log_softmax(-1)


@torch.inference_mode()
def main(
    texts: Annotated[Path, typer.Argument(help='A {"prompt": ...} a line.')],
    model: str = "smollm2-135m",
    quantize: str | None = None,
    limit: int = 40,
    tokens: int = 512,
) -> None:
    sides = [load(model, quantize=quantize, activations=activations) for activations in ("auto", "int8")]
    tokenizer = sides[0].tokenizer
    prompts = [str(json.loads(line)["prompt"]) for line in texts.read_text().splitlines()][:limit]
    columns: dict[str, list[float]] = {"tokens": [], "auto": [], "int8": [], "kl": [], "variation": [], "same": []}
    for text in track(prompts, console=Console(stderr=True)):
        ids = tokenizer.encode(text)[:tokens]
        if len(ids) < 2:
            continue
        own_TV, rounded_TV = (log_probabilities(side.model, ids[:-1]) for side in sides)
        next_T1 = torch.tensor(ids[1:])[:, None]
        columns["tokens"].append(len(ids) - 1)
        columns["auto"].append(-float(own_TV.gather(1, next_T1).sum()))
        columns["int8"].append(-float(rounded_TV.gather(1, next_T1).sum()))
        p_TV = own_TV.exp()
        columns["kl"].append(float((p_TV * (own_TV - rounded_TV)).sum()))
        columns["variation"].append(float((p_TV - rounded_TV.exp()).abs().sum()) / 2)
        columns["same"].append(float((own_TV.argmax(-1) == rounded_TV.argmax(-1)).sum()))
    found: dict[str, Any] = {"texts": len(columns["tokens"]), "tokens": sum(columns["tokens"])}
    for name in ("auto", "int8"):
        found[f"perplexity_{name}"] = math.exp(sum(columns[name]) / found["tokens"])
    count = columns["tokens"]
    estimates = {name: bootstrap(np.divide, columns[name], count) for name in ("kl", "variation", "same")}
    ratio = bootstrap(lambda own, other, n: np.exp((other - own) / n), columns["auto"], columns["int8"], count)
    found |= {name: vars(of) for name, of in {**estimates, "perplexity_ratio": ratio}.items() if of}
    print(json.dumps({"benchmark": "rounding", **circumstances(), "model": model, "quantize": quantize, **found}))


if __name__ == "__main__":
    typer.run(main)
