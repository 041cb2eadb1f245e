"""A certificate as one HTML page that needs nothing else. All text is escaped: names and notes may be hostile."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

from paceline.evaluation.audit.certificate import Certificate, Control, Level, jsonable
from paceline.evaluation.audit.statistics import CONTRASTS

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --quiet: #59636e; --line: #d5dae0; --paper: #ffffff; --soft: #f4f6f8;
  --good: #14713d; --bad: #b3261e; --doubt: #8a5a00; --bar: #4a7fc1; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ec; --quiet: #9aa4af; --line: #353c44; --paper: #14171b;
  --soft: #1d2126; --good: #5cc98a; --bad: #ff8a80; --doubt: #e5b455; --bar: #7fb0ee; } }
body { margin: 2rem auto; max-width: 62rem; padding: 0 1rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.verdict { border: 2px solid; border-radius: 6px; padding: .7rem 1rem; margin: 1rem 0; }
.verdict b { font-size: 1.25rem; }
.good { color: var(--good); } .bad { color: var(--bad); } .doubt { color: var(--doubt); }
.quiet { color: var(--quiet); }
.verdict ul, .verdict p { color: var(--ink); margin: .3rem 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; margin: .6rem 0; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .6rem; text-align: left; vertical-align: top; }
th { color: var(--quiet); font-weight: 600; }
td.n, th.n { text-align: right; white-space: nowrap; }
pre { background: var(--soft); padding: .8rem; border-radius: 6px; white-space: pre-wrap; }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
"""
_LOOK = {"exact": "good", "not exact": "bad", "proves nothing": "doubt"}
_MEANING = {
    "exact": "Every level passed, and every fault that can exist here was caught.",
    "not exact": "At least one level found the distribution changed.",
    "proves nothing": "No level found a fault, but the audit could not have found some that it should.",
}


def page(certificate: Certificate) -> str:
    """The whole document."""
    look = _LOOK[certificate.verdict]
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in certificate.reasons)
    notes = "".join(f"<p class='quiet'>{escape(note)}</p>" for note in certificate.notes)
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>Certificate: {escape(certificate.verdict)}</title><style>{_STYLE}</style></head><body>",
        "<h1>Is the target's distribution kept?</h1>",
        f"<div class='verdict {look}'><b>{escape(certificate.verdict)}</b>",
        f"<p>{_MEANING[certificate.verdict]}</p>{f'<ul>{reasons}</ul>' if reasons else ''}</div>",
        notes,
        "<h2>What was audited</h2>",
        _pairs(certificate.subject),
        *(_level(level) for level in certificate.levels),
        _controls(certificate),
        "<h2>To repeat it</h2>",
        _pairs(certificate.setting),
        "</body></html>\n",
    ]
    return "\n".join(parts)


def _level(level: Level) -> str:
    mark = "<span class='good'>passed</span>" if level.exact else "<span class='bad'>failed</span>"
    figures = dict(level.figures)
    findings, fit = figures.pop("findings", None), figures.pop("fit", None)
    flips = figures.pop("flips", None)
    return "\n".join(
        [
            f"<h2>Level {level.number}, {escape(level.title.lower())}: {mark}</h2>",
            f"<p>{escape(level.summary)}</p><p class='quiet'>{escape(level.covers)}</p>",
            _plot(findings) + _findings(findings) if findings else "",
            _fit(fit) if fit else "",
            _flips(flips) if flips else "",
            _pairs(figures),
        ]
    )


def _findings(findings: list[dict[str, Any]]) -> str:
    head = ("token", "count of", "trials", "expected", "observed", "difference", "limit", "detectable", "p-value")
    rows = (
        (
            str(f["position"]),
            f["contrast"],
            f"{f['trials']:,}",
            f"{f['expected']:.4f}",
            f"{f['observed']:.4f}",
            f"{f['observed'] - f['expected']:+.4f}",
            f"{f['limit']:.4f}",
            f"{f['detectable']:.4f}",
            f"{f['p_value']:.2g}",
        )
        for f in findings
    )
    named = "; ".join(f"<b>{escape(name)}</b>: {escape(what)}" for name, what in CONTRASTS.items())
    return _table(head, rows, numbers=range(2, 9)) + f"<p class='quiet'>{named}.</p>"


def _plot(findings: list[dict[str, Any]]) -> str:
    """Difference of observed and expected, in units of its limit; the dashed lines are the limit."""
    row, left, width = 20, 190, 700
    height = row * len(findings) + 34
    reach = max(1.25, *(abs(_in_limits(f)) for f in findings)) if findings else 1.25
    reach = min(reach, 20.0) * 1.05

    def x(value: float) -> float:
        return left + (width - left - 10) * (max(-reach, min(reach, value)) + reach) / (2 * reach)

    marks = []
    for n, f in enumerate(findings):
        value, y = _in_limits(f), row * n + 20
        colour = "var(--bad)" if abs(value) > 1 else "var(--bar)"
        marks.append(
            f"<text x='{left - 8}' y='{y + 4}' text-anchor='end'>token {f['position']}, {escape(f['contrast'])}</text>"
            f"<line x1='{x(0):.1f}' x2='{x(value):.1f}' y1='{y}' y2='{y}' stroke='{colour}' stroke-width='3'/>"
            f"<circle cx='{x(value):.1f}' cy='{y}' r='4' fill='{colour}'/>"
        )
    foot = row * len(findings) + 12
    dashes = "stroke-dasharray='4 3'"
    lines = "".join(
        f"<line x1='{x(v):.1f}' x2='{x(v):.1f}' y1='8' y2='{foot}' stroke='var(--quiet)' {dashes if v else ''}/>"
        f"<text x='{x(v):.1f}' y='{foot + 14}' text-anchor='middle'>{t}</text>"
        for v, t in ((-1.0, "-limit"), (0.0, "0"), (1.0, "limit"))
    )
    label = "Observed less expected share of each count, in units of the limit"
    return (
        f"<figure style='margin:0'><svg viewBox='0 0 {width} {height}' role='img' aria-label='{label}'>"
        f"{lines}{''.join(marks)}</svg><figcaption class='quiet'>{label} (beyond it, an exact engine falls by the"
        " stated probability of a false alarm alone).</figcaption></figure>"
    )


def _in_limits(finding: dict[str, Any]) -> float:
    return float((finding["observed"] - finding["expected"]) / finding["limit"]) if finding["limit"] else 0.0


def _fit(fit: dict[str, Any]) -> str:
    return (
        f"<p>Fit of the first token, over {fit['contexts']:,} contexts: Pearson's statistic {fit['statistic']:,.1f}, "
        f"{fit['mean']:,.1f} under p, p-value {fit['p_value']:.2g} by {fit['simulations']:,} simulations. "
        f"Total variation of observed and expected shares {fit['distance']:.4f} on average, at most "
        f"{fit['distance_limit']:.4f} under p at this confidence (few samples a context: most of it is chance).</p>"
    )


def _flips(flips: list[dict[str, Any]]) -> str:
    head = ("prompt", "batch", "at token", "plain", "speculative", "margin", "")
    rows = (
        (
            str(f["prompt"]),
            str(f["slots"]),
            str(f["position"]),
            str(f["plain"]),
            str(f["speculative"]),
            f"{f['margin']:.2g}",
            "near-tie" if f["near_tie"] else "error",
        )
        for f in flips
    )
    return _table(head, rows, numbers=range(6))


def _controls(certificate: Certificate) -> str:
    if not certificate.controls:
        return ""
    words = {True: ("good", "caught"), False: ("bad", "missed"), None: ("quiet", "cannot exist")}

    def row(control: Control) -> str:
        look, word = words[control.caught]
        cells = (str(control.level), control.fault, control.what)
        return (
            "<tr>"
            + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
            + f"<td class='{look}'>{word}</td><td>{escape(control.detail)}</td></tr>"
        )

    head = "".join(f"<th>{name}</th>" for name in ("level", "fault", "what is wrong in it", "", "found"))
    body = "".join(map(row, certificate.controls))
    return (
        "<h2>Controls: deliberately wrong variants</h2><p class='quiet'>Each was run in place of the engine, and the "
        "level must fail it. A level that lets one pass could not have found this fault.</p>"
        f"<div class='wide'><table><tr>{head}</tr>{body}</table></div>"
    )


def _pairs(values: dict[str, Any]) -> str:
    rows = ((str(key), _shown(value)) for key, value in jsonable(values).items())
    return _table(("", ""), rows, head=False)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_shown(each)}" for key, each in value.items()) or "-"
    if isinstance(value, list):
        return ", ".join(map(_shown, value)) or "-"
    return "-" if value is None else str(value)


def _table(
    names: Iterable[str], rows: Iterable[Iterable[str]], *, numbers: Iterable[int] = (), head: bool = True
) -> str:
    right = set(numbers)

    def cells(tag: str, row: Iterable[str]) -> str:
        return "".join(f"<{tag}{' class=n' if i in right else ''}>{escape(cell)}</{tag}>" for i, cell in enumerate(row))

    top = f"<tr>{cells('th', names)}</tr>" if head else ""
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<div class='wide'><table>{top}{body}</table></div>"
