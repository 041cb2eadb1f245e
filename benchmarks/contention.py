"""What a pass costs while other processes want the same processors, and what bounding OpenMP's busy waiting gives.

    python benchmarks/contention.py [--busy 0 --busy 1 --busy 2] [--spins 300000 --spins 4000]

One token of the built-in model behind a context of 100, beside processes that compute without end. `GOMP_SPINCOUNT`
is read when torch is imported, so each setting runs in a process of its own; the settings take turns. Ends in one JSON
line.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections import defaultdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

PASSES = """
import time
import torch
from paceline import load
from paceline.models.interface import Chunk
model = load("smollm2-135m", device="cpu").model
cache, seconds = model.new_cache(1, 128), []
with torch.inference_mode():
    model([Chunk(0, list(range(100)))], cache)
    end = time.perf_counter() + 3
    while time.perf_counter() < end or not seconds:
        began = time.perf_counter()
        model([Chunk(0, [5])], cache)
        seconds.append(time.perf_counter() - began)
        cache.truncate(0, 100)
print(1000 * sum(seconds) / len(seconds))
"""


def main(
    busy: Annotated[list[int], typer.Option(help="Processes beside it; may be repeated.")] = [0, 1, 2],  # noqa: B006
    spins: Annotated[list[int], typer.Option(help="GOMP_SPINCOUNT; may be repeated.")] = [300_000, 4000],  # noqa: B006
    repeats: int = 3,
) -> None:
    ms: dict[tuple[int, int], list[float]] = defaultdict(list)
    for _ in range(repeats):
        for beside in busy:
            others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(beside)]
            try:
                for count in spins:
                    environment = {**os.environ, "GOMP_SPINCOUNT": str(count)}
                    command = [sys.executable, "-c", PASSES]
                    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
                    ms[beside, count].append(float(done.stdout))
            finally:
                for other in others:
                    other.kill()
    table = Table("busy processes beside it", *(f"GOMP_SPINCOUNT={count}" for count in spins), title="ms a pass")
    for beside in busy:
        table.add_row(str(beside), *(f"{statistics.median(ms[beside, count]):.1f}" for count in spins))
    Console(stderr=True).print(table)
    results = [{"busy": beside, "spins": count, "ms": each} for (beside, count), each in ms.items()]
    setting = {"machine": f"{platform.machine()}, {os.cpu_count()} processors", "command": " ".join(sys.argv)}
    print(json.dumps({"benchmark": "contention", **setting, "results": results}))


if __name__ == "__main__":
    typer.run(main)
