"""Audits every format and rule: `python benchmarks/certificates.py OUT [--draft D]`. Resumable; ends in a JSON line.

Each certificate is a process of `paceline audit` with a folder of its own under OUT; one that is there already is only
read. With `--jobs N` so many run at once and share the processors: sampling is Python, which uses one. The table goes
to OUT/certificates.md. A format that a file has itself, such as Q8_0: `--target FILE --formats "as the file"`.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer

FORMATS = {
    "float32": ["--dtype", "float32"],
    "bfloat16": ["--dtype", "bfloat16"],
    "float16": ["--dtype", "float16"],
    "as the file": [],
    "int8": ["--activations", "int8"],
}
RULES = ("token", "block", "coupled")


def main(
    out: Path,
    target: str = "smollm2-135m",
    draft: Annotated[list[str] | None, typer.Option(help="One or several; ngram if none is given.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="As for `paceline audit`.")] = None,
    contexts: int = 1000,
    trials: int = 10,
    draft_tokens: int = 4,
    temperature: float = 0.8,
    top_p: float = 0.95,
    formats: Annotated[str, typer.Option(help="Some of them, with commas.")] = ",".join(FORMATS),
    rules: str = ",".join(RULES),
    jobs: int = 1,
) -> None:
    for given, known in ((formats, FORMATS), (rules, RULES)):
        if unknown := {*given.split(",")} - {*known}:
            raise typer.BadParameter(f"{', '.join(sorted(unknown))}: choose from {', '.join(known)}, with commas")
    wanted = list(itertools.product(draft or ["ngram"], formats.split(","), rules.split(",")))

    def certify(name: str, form: str, rule: str) -> dict[str, Any]:
        folder = out / f"{Path(name).name}-{form.replace(' ', '-')}-{rule}"
        command = [sys.executable, "-m", "paceline", "audit", target, "--draft", name, "--verify", rule]
        command += ["-k", str(draft_tokens), "--temperature", str(temperature), "--top-p", str(top_p)]
        command += ["--contexts", str(contexts), "--trials", str(trials), "--seed", "0"]
        command += ["--prompts", str(prompts)] if prompts else []
        command += ["--threads", str(max(1, (os.cpu_count() or 1) // jobs)), *FORMATS[form], "--out", str(folder)]
        if not (folder / "certificate.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            print(" ".join(command), file=sys.stderr, flush=True)
            with (folder / "log").open("a") as log:
                code = subprocess.run(command, stdout=log, stderr=log, check=False).returncode
            if code not in (0, 1, 3):  # nothing was certified: an error, or an interruption
                raise SystemExit(f"{folder / 'log'} says why there is no certificate (exit code {code})")
        return _row(name, form, rule, json.loads((folder / "certificate.json").read_text()))

    found: list[dict[str, Any]] = []
    with ThreadPoolExecutor(jobs) as pool:
        for row in pool.map(lambda of: certify(*of), wanted):
            found.append(row)
            (out / "certificates.md").write_text(_table(found), encoding="utf-8")
    print(_table(found), file=sys.stderr)
    print(json.dumps({"benchmark": "certificates", "rows": found}))


def _row(draft: str, form: str, rule: str, record: dict[str, Any]) -> dict[str, Any]:
    levels = {level["number"]: level for level in record["levels"]}
    identity = levels.get(1, {}).get("figures", {})
    statistics = levels.get(3, {}).get("figures", {})
    controls = record["controls"]
    return {
        "draft": Path(draft).name,
        "format": form,
        "rule": rule,
        "verdict": record["verdict"],
        "contexts": statistics.get("contexts", 0),
        "trials": statistics.get("trials", 0),
        "rounds": statistics.get("rounds", 0),
        "recombined": identity.get("total variation (worst, mean)", {}).get("recombined", [None])[0],
        "p": statistics.get("p-value"),
        "detectable": statistics.get("detectable"),
        "overlap": statistics.get("overlap of p and q"),
        "caught": sum(control["caught"] is True for control in controls),
        "missed": [f"{c['fault']} at level {c['level']}" for c in controls if c["caught"] is False],
        "setting": record["setting"],
    }


def _table(rows: list[dict[str, Any]]) -> str:
    head = (
        "draft",
        "format",
        "rule",
        "verdict",
        "contexts",
        "trials",
        "rounds",
        "recombined",
        "p",
        "detectable",
        "overlap",
    )
    lines = ["| " + " | ".join((*head, "controls caught", "missed")) + " |", "|---" * 13 + "|"]
    for row in rows:
        cells = [f"{row[key]:.3g}" if isinstance(row[key], float) else str(row[key] or "-") for key in head]
        cells += [str(row["caught"]), ", ".join(row["missed"]) or "-"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    typer.run(main)
