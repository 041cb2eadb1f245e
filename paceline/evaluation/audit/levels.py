"""What the three levels found, in words and figures. Tests nothing."""

from __future__ import annotations

from dataclasses import asdict

from paceline.evaluation.audit.certificate import Level
from paceline.evaluation.audit.identity import CUT, ROUNDING, Identity
from paceline.evaluation.audit.replay import Noise, Replay
from paceline.evaluation.audit.statistics import POWER, Statistics
from paceline.evaluation.audit.subject import Subject
from paceline.evaluation.audit.trials import Found


def identity_summary(found: Identity) -> str:
    parts = [f"rows differ by {max(found.rows, default=0.0):.1e} at most"]
    if found.proposals:
        parts.append(f"q by {max(found.proposals):.1e}")
    if found.recombined:
        parts.append(f"what recombines by {max(found.recombined):.1e}")
    return ", ".join(parts) + f", {found.reused} random numbers used twice"


def identity(found: Identity, noise: Noise, subject: Subject) -> Level:
    covers = (
        "One real round at each context. The rows that verification used are those of plain decoding; q is what tokens "
        "were drawn from; no random number decides twice. Accept, residual and bonus recombine to p over every block "
        f"of two drafted tokens, with real p and q cut to their {CUT} most probable tokens each: whole blocks "
        "over the whole vocabulary cannot be enumerated."
        if subject.decide
        else "One real round at each context. The rows that verification used are those of plain decoding, and "
        "proposals are what the draft's distribution gave. The coupled rule has no residual to recombine: that its "
        "text is plain decoding's is level 2."
    )
    return Level(
        number=1,
        title="Identity",
        covers=covers,
        exact=found.exact(noise.variation),
        summary=f"{len(found.rows)} contexts: {identity_summary(found)}",
        figures={
            "total variation (worst, mean)": {
                name: [max(each, default=0.0), sum(each) / max(len(each), 1)]
                for name, each in (
                    ("rows", found.rows),
                    ("proposals", found.proposals),
                    ("recombined", found.recombined),
                )
            },
            "limits": {
                "rows": ROUNDING + 4 * noise.variation,
                "proposals": 0.0,
                "recombined": ROUNDING,
            },
            "random numbers used twice": found.reused,
            "drafted tokens": found.drafted,
            "of these by chance": found.by_chance,
            "overlap of p and q, sum min(p, q)": sum(found.overlap) / max(len(found.overlap), 1),
        },
    )


def replay(found: Replay, noise: Noise, subject: Subject) -> Level:
    how = "the parameters asked for" if subject.verify == "coupled" else "temperature 0"
    near = len(found.flips) - found.errors
    return Level(
        number=2,
        title="Replay",
        covers=f"The same text as plain decoding, with {how}, for every prompt and batch size. "
        "A flip is a near-tie only where its margin is within twice the measured noise of scores.",
        exact=found.exact,
        summary=f"{found.texts} texts, {found.tokens} tokens: {found.errors} differ, {near} near-ties",
        figures={
            "batch sizes": found.batch_sizes,
            "noise of scores": noise.scores,
            "noise of p, total variation": noise.variation,
            "positions the noise was measured at": noise.positions,
            "flips": [asdict(flip) for flip in found.flips[:100]],
        },
    )


def statistics(found: Statistics, first: Identity, contexts: Found, rounds: int) -> Level:
    overlap = sum(first.overlap) / max(len(first.overlap), 1)
    return Level(
        number=3,
        title="Statistics",
        covers="Tokens that the engine's own rounds sampled, against the exact p of plain decoding: the first, second "
        "and third behind each context. A bias of the first token towards what the draft favours, of a total variation "
        f"of {found.detectable:.2%} or more on average over these contexts, would have been seen with a probability of "
        f"{POWER:.0%}. Biases that cancel out over contexts are seen only where they are large.",
        exact=found.exact,
        summary=f"{found.trials} trials ({rounds} sampled rounds) from {len(first.rows)} contexts: "
        f"p = {found.worst_p_value:.2g} "
        f"corrected for {len(found.findings) + (found.fit is not None)} tests (fails below {found.alarm:g}), "
        f"{found.impossible} impossible tokens",
        figures={
            "findings": [asdict(finding) for finding in found.findings],
            "fit": None if found.fit is None else asdict(found.fit),
            "contexts": len(first.rows),
            "trials": found.trials,
            "rounds": rounds,
            "p-value": found.worst_p_value,
            "detectable": found.detectable,
            "overlap of p and q": overlap,
            "places looked at": contexts.looked,
            "places with a draft": contexts.drafted,
        },
    )
