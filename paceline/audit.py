"""`paceline audit`: from options to a certificate on disk and a summary on the terminal. Tests nothing itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline import terminal
from paceline.evaluation.audit.certificate import Certificate
from paceline.evaluation.audit.run import Say, Size
from paceline.evaluation.audit.run import audit as examine
from paceline.options import AuditOptions, ModelOptions, SamplingOptions

DRAFT_TOKENS = 4
"""K where nobody asks for one: every K is exact or none, and a fixed one is what can be tested."""
COLOURS = {"exact": "green", "not exact": "red", "proves nothing": "yellow"}


def audit(
    target: str | None,
    texts: Sequence[str] | None,
    chat: bool | None,
    out: Path,
    *,
    size: AuditOptions,
    model: ModelOptions,
    sampling: SamplingOptions,
) -> int:
    """The exit code. Raises ValueError for what cannot be audited."""
    if target is not None:
        model = replace(model, model=target)
    if model.draft == "none" and size.server is None:
        raise ValueError("there is no draft to audit: leave out --draft none")
    if model.k == "auto":
        model = replace(model, draft_tokens=str(DRAFT_TOKENS))
    seed = sampling.seed or 0
    extent = Size(contexts=size.contexts, trials=size.trials, alarm=size.alarm, slots=size.batch)
    say = terminal.note
    try:
        certificate = _audit(texts, chat, out, extent, seed, say, size=size, model=model, sampling=sampling)
    except KeyboardInterrupt:
        say(f"interrupted: {out} keeps the steps that are done, and the same command goes on")
        raise
    summary(certificate)
    terminal.note(f"{out / 'certificate.html'} and {out / 'certificate.json'}")
    return certificate.exit_code


def _audit(
    texts: Sequence[str] | None,
    chat: bool | None,
    out: Path,
    extent: Size,
    seed: int,
    say: Say,
    *,
    size: AuditOptions,
    model: ModelOptions,
    sampling: SamplingOptions,
) -> Certificate:
    params = sampling.params()
    if size.server is not None:
        from paceline.evaluation.audit.server import audit_server

        return audit_server(size.server, model.model, params, texts, extent, seed=seed, out=out, say=say)
    if size.engine != "paceline":
        from paceline.evaluation.audit.others import audit_other

        k = model.k
        assert k != "auto"
        engine = size.engine
        return audit_other(engine, model.model, model.draft, k, params, texts, extent, seed=seed, out=out, say=say)
    llm = model.load()
    prompts: Sequence[str | Sequence[int]] | None = texts
    if texts is not None and (llm.tokenizer.chat_template is not None if chat is None else chat):
        prompts = [llm.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in texts]
    return examine(llm, params, prompts, size=extent, seed=seed, out=out, subject=_told(model), say=say)


def _told(model: ModelOptions) -> dict[str, object]:
    """What the options say of the pair, format and device; K and the rule are known anyway."""
    told = {name: value for name, value in asdict(model).items() if name not in ("draft_tokens", "verify", "device")}
    return {"target": told.pop("model"), **told}


def summary(certificate: Certificate) -> None:
    """On stdout: the verdict, what it stands on, and which faults were caught."""
    console = Console(highlight=False)
    for level in certificate.levels:
        mark = Text("passed", "green") if level.exact else Text("FAILED", "red")
        console.print(Text(f"level {level.number}, {level.title.lower()}: ").append(mark), soft_wrap=True)
        console.print(Text(f"  {level.summary}"), soft_wrap=True)
    table = Table("fault", *(f"level {level.number}" for level in certificate.levels))
    found = {(c.fault, c.level): c.caught for c in certificate.controls}
    words = {True: Text("caught", "green"), False: Text("MISSED", "red"), None: Text("cannot exist", "dim")}
    for fault in dict.fromkeys(c.fault for c in certificate.controls):
        cells = [
            words[found[fault, level.number]] if (fault, level.number) in found else Text("-", "dim")
            for level in certificate.levels
        ]
        table.add_row(fault, *cells)
    if certificate.controls:
        console.print(table)
    colour = COLOURS[certificate.verdict]
    console.print(Text("verdict: ").append(certificate.verdict, f"bold {colour}"), soft_wrap=True)
    for reason in certificate.reasons:
        console.print(Text(f"  {reason}"), soft_wrap=True)
