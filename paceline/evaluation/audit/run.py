"""An audit from beginning to end: contexts, three levels, their controls, and the certificate they add up to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from paceline.engine.llm import LLM
from paceline.evaluation.audit import identity, levels, replay, statistics
from paceline.evaluation.audit.certificate import Certificate, Control, Journal, Level
from paceline.evaluation.audit.faults import FAULTS, PENALTIES, Fault, Pair, penalising, why_not
from paceline.evaluation.audit.statistics import Cells, Sample, share
from paceline.evaluation.audit.subject import DECIDES, Subject
from paceline.evaluation.audit.trials import Bench, Context, Exact, Found, Outcome, find_contexts
from paceline.evaluation.prompts import PROMPTS
from paceline.evaluation.record import circumstances
from paceline.sampling.distribution import Distribution
from paceline.sampling.params import SamplingParams

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much an audit looks at."""

    contexts: int = 100
    trials: int = 40
    """From each context, each of as many sampled rounds as it takes to give `ahead` tokens."""
    ahead: int = 3
    alarm: float = 1e-3
    """Probability that level 3 fails an engine that is exact."""
    slots: int = 16
    replay_tokens: int = 48
    batch_sizes: tuple[int, ...] = (1, 4, 16)

    def __post_init__(self) -> None:
        for name, least in (("contexts", 1), ("trials", 2), ("ahead", 1), ("slots", 1), ("replay_tokens", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be at least {least}")
        if not 0 < self.alarm < 0.5:
            raise ValueError(f"alarm is {self.alarm}, it must lie between 0 and 0.5: 0.001 is usual")


def audit(
    llm: LLM,
    params: SamplingParams | None = None,
    prompts: Sequence[str | Sequence[int]] | None = None,
    *,
    size: Size | None = None,
    seed: int = 0,
    out: Path | str | None = None,
    subject: dict[str, Any] | None = None,
    say: Say = lambda text: None,
) -> Certificate:
    """Is the target's distribution kept by this `llm`, with its draft, rule and number of drafted tokens?

    prompts: texts as the model is to continue them, or token ids; a small set of our own if None, as chats where the
        model has a template.
    size: how many contexts and trials; the default takes some minutes with a small model.
    seed: of everything that is drawn; the same seed gives the same certificate.
    out: a folder for certificate.html, certificate.json and the steps done so far, from which the same call goes on.
    subject: what to say of the pair beside what is known here, such as names.

    Raises ValueError for prompts that cannot be used, and for a folder that holds another audit.
    """
    params, size = params or SamplingParams(temperature=0.8, top_p=0.95), size or Size()
    folder = None if out is None else Path(out)
    run = _Run(_subject(llm, params), _encoded(llm, prompts), size, seed, folder, say, subject or {})
    certificate = run.certificate(_about(llm, run.subject, subject or {}))
    if folder is not None:
        certificate.save(folder)
    return certificate


def _subject(llm: LLM, params: SamplingParams) -> Subject:
    ends = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else llm.eos_ids)
    params.check_vocabulary(llm.target.vocab_size)
    if not isinstance(llm.draft_tokens, int) or llm.draft_tokens < 1:
        raise ValueError(f"draft_tokens is {llm.draft_tokens}, an audit needs a fixed number of 1 at least: give -k")
    verify = next(name for name, rule in _rules().items() if rule is llm.rule)
    return Subject(
        target=llm.target,
        new_proposer=llm.proposers,
        verify=verify,
        rule=llm.rule,
        decide=DECIDES.get(verify),
        params=replace(params, n=1, seed=None, stop=None, logprobs=None, prompt_logprobs=None),
        draft_tokens=llm.draft_tokens,
        end_ids=ends,
    )


def _rules() -> dict[str, Any]:
    from paceline.sampling.sampler import RULES

    return dict(RULES)


def _encoded(llm: LLM, prompts: Sequence[str | Sequence[int]] | None) -> list[list[int]]:
    if prompts is None:
        if llm.tokenizer.chat_template is None:
            prompts = PROMPTS
        else:
            prompts = [llm.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in PROMPTS]
    if not prompts:
        raise ValueError("an audit needs 1 prompt at least: give some, or leave them out for a small set of our own")
    found = [llm.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
    room = llm.target.context // 2
    fitting = [ids for ids in found if 0 < len(ids) <= room]
    if not fitting:
        raise ValueError(f"no prompt has 1 to {room} tokens, half of the model's context: give shorter ones")
    return fitting


def _about(llm: LLM, subject: Subject, told: dict[str, Any]) -> dict[str, Any]:
    return {
        "target": type(llm.target).__name__,
        "device": str(llm.target.device),
        "verify": subject.verify,
        "draft_tokens": subject.draft_tokens,
        "params": {
            name: value
            for name, value in asdict(subject.params).items()
            if not name.startswith("_") and value != getattr(SamplingParams(), name)
        },
        "notes": list(llm.notes),
    } | told


class _Run:
    """The steps of one audit. Each is kept in the journal once it is done."""

    def __init__(
        self,
        subject: Subject,
        prompts: list[list[int]],
        size: Size,
        seed: int,
        folder: Path | None,
        say: Say,
        told: dict[str, Any],
    ) -> None:
        self.subject, self.prompts, self.size, self.seed, self.say = subject, prompts, size, seed, say
        asked = {
            "paceline": version("paceline"),
            "told": told,
            "verify": subject.verify,
            "draft_tokens": subject.draft_tokens,
            "params": asdict(subject.params),
            "prompts": prompts,
            "size": asdict(size),
            "seed": seed,
            "vocabulary": subject.target.vocab_size,
        }
        self.journal = Journal(None if folder is None else folder / "steps.jsonl", asked)
        self._texts: tuple[Subject, list[list[int]]] | None = None
        self._bench: Bench | None = None
        self._exact: Exact | None = None

    def certificate(self, about: dict[str, Any]) -> Certificate:
        size = self.size
        found = self._contexts()
        noise = replay.Noise(**self.journal.once("noise", lambda: replay.measure_noise(self.subject, found.contexts)))
        self.say(f"rows of one position differ by {noise.variation:.1e} between passes")
        found_levels, controls, doubts = list[Level](), list[Control](), list[str]()
        if found.contexts:
            first, sample = self._rounds(found.contexts)
            pair = Pair(self.subject, chance=first.by_chance > 0)
            found_levels.append(levels.identity(first, noise, self.subject))
        replayed = self._replay(noise)
        found_levels.append(levels.replay(replayed, noise, self.subject))
        if found.contexts:
            slack = 10 * noise.variation
            tested = statistics.examine(sample, alarm=size.alarm, seed=self.seed, slack=slack)
            found_levels.append(levels.statistics(tested, first, found, sample.rounds))
            for fault in FAULTS:
                controls += self._controls(fault, pair, found.contexts, noise)
        else:
            doubts.append(
                f"the draft proposed nothing at any of {found.looked} places: use prompts that suit it, or another "
                "draft"
            )
        return Certificate(
            subject=about,
            levels=found_levels,
            controls=sorted(controls, key=lambda c: c.level),
            doubts=doubts,
            setting=circumstances() | {"seed": self.seed, "size": asdict(size), "prompts": len(self.prompts)},
        )

    def _contexts(self) -> Found:
        def find() -> Any:
            found = find_contexts(
                self.subject,
                self.prompts,
                self.size.contexts,
                seed=self.seed,
                slots=self.size.slots,
                say=self.say,
            )
            return {"contexts": [[c.prompt, c.output] for c in found.contexts]} | {
                "looked": found.looked,
                "drafted": found.drafted,
            }

        done = self.journal.once("contexts", find)
        contexts = [Context(tuple(prompt), tuple(output)) for prompt, output in done["contexts"]]
        return Found(contexts, done["looked"], done["drafted"])

    def _groups(self, contexts: Sequence[Context]) -> list[list[Context]]:
        """Contexts that are looked at together. They are in order, and each slot goes through a stretch of them."""
        stretch = -(-len(contexts) // self.size.slots)
        runs = [contexts[start : start + stretch] for start in range(0, len(contexts), stretch)]
        return [[run[n] for run in runs if n < len(run)] for n in range(stretch)]

    def _rounds(self, contexts: Sequence[Context]) -> tuple[identity.Identity, Sample]:
        """Levels 1 and 3 share the reading of the contexts."""
        whole, sample, looked = identity.Identity(), Sample(self.size.ahead), 0
        for number, group in enumerate(self._groups(contexts)):

            def examine(number: int = number, group: Sequence[Context] = group) -> Any:
                bench, exact = self._at(self.subject, self.subject, group, contexts)
                first = identity.examine(bench, exact, self.subject.decide, seed=self._seed(number))
                return {"identity": first, "sample": self._sampled(bench, exact, number)}

            done = self.journal.once(f"contexts {number}", examine)
            whole.extend(identity.Identity(**done["identity"]))
            sample.extend(Sample.load(done["sample"]))
            looked += len(group)
            self.say(f"{looked} of {len(contexts)} contexts, {sample.rounds} rounds sampled")
        return whole, sample

    def _at(
        self, subject: Subject, right: Subject, group: Sequence[Context], contexts: Sequence[Context]
    ) -> tuple[Bench, Exact]:
        """`subject` before these contexts, and what plain decoding of `right` says there. The last ones are kept."""
        slots, longest = self._groups(contexts)[0], max(len(context.tokens) for context in contexts)
        if self._bench is None or self._bench.subject is not subject:
            self._bench = None  # its memory first
            self._bench = Bench(subject, slots, ahead=self.size.ahead, longest=longest)
        if self._exact is None or self._exact.subject != right:
            self._exact = None
            ahead = max(self.size.ahead, subject.draft_tokens) + 1
            self._exact = Exact(right, slots, ahead=ahead, longest=longest)
        self._bench.move(group)
        self._exact.move(group)
        return self._bench, self._exact

    def _seed(self, group: int) -> int:
        """Of the first context in a group; the others' follow it."""
        return (self.seed + 1) * 1_000_003 + group * self.size.slots

    def _sampled(self, bench: Bench, exact: Exact, number: int) -> Sample:
        """Trials of every context of the bench, each with numbers of its own, held against plain decoding."""
        outcomes, rounds = [], bench.rounds
        for sample in range(1, self.size.trials + 1):
            samplers = [
                bench.subject.new_sampler(len(context.prompt), self._seed(number) + i, sample)
                for i, context in enumerate(bench.contexts)
            ]
            outcomes.append(bench.run(samplers))
        sorted_out = [_sorted_out([trial[i] for trial in outcomes]) for i in range(len(bench.contexts))]
        exact.learn([[prefix for prefix, _ in groups] for groups, _ in sorted_out])
        sampled = Sample(self.size.ahead, rounds=bench.rounds - rounds)
        for i, (groups, q_of) in enumerate(sorted_out):
            for (prefix, seen), tokens in groups.items():
                sampled.add(share(exact.p(i, prefix)), share(q_of[prefix]) if seen else None, prefix, tokens)
            sampled.cells.append(Cells.of(share(exact.p(i)), [trial[i].tokens[0] for trial in outcomes]))
            sampled.trials += len(outcomes)
        return sampled

    def _replay(self, noise: replay.Noise) -> replay.Replay:
        right = replay.determined(self.subject)

        def run() -> Any:
            self.say(f"replaying {len(self.prompts)} prompts")
            return replay.examine(
                right,
                self._plain(right),
                right,
                self.prompts,
                seed=self.seed,
                tokens=self.size.replay_tokens,
                batch_sizes=self.size.batch_sizes,
                noise=noise,
            )

        done = self.journal.once("replay", run)
        return replay.Replay(**{**done, "flips": [replay.Flip(**flip) for flip in done["flips"]]})

    def _plain(self, right: Subject) -> list[list[int]]:
        """The texts of plain decoding. The last ones are kept: most controls are held against the same."""
        if self._texts is None or self._texts[0] != right:
            alone = replace(right, draft_tokens=0)
            slots = max(self.size.batch_sizes)
            self._texts = (
                right,
                alone.decode(self.prompts, seed=self.seed, slots=slots, tokens=self.size.replay_tokens),
            )
        return self._texts[1]

    def _controls(
        self, fault: Fault, pair: Pair, contexts: Sequence[Context], noise: replay.Noise
    ) -> Iterator[Control]:
        missing = why_not(fault, pair)
        right = self.subject
        added = ""
        if fault is PENALTIES:
            right = replace(right, params=penalising(right.params))
            # All but the last token as prompt, whose tokens do not count: what is drafted then counts for most.
            contexts = [Context(tuple(c.tokens[:-1]), (c.tokens[-1],)) for c in contexts]
            added = "; with presence_penalty and frequency_penalty of -2 for this control"
        faulty = fault.make(right) if missing is None else right
        tests = {1: self._before_identity, 2: self._before_replay, 3: self._before_statistics}
        for level in sorted(fault.levels):
            if missing is None and not (level == 1 and self.subject.decide is None and fault.needs_decide):

                def test(level: int = level) -> Any:
                    self.say(f"control: {fault.name}, level {level}")
                    return tests[level](faulty, right, contexts, noise)

                caught, detail = self.journal.once(f"control {fault.name} {level}", test)
            else:
                caught, detail = None, missing or "seen by levels 2 and 3: this rule has no function to recombine"
            yield Control(
                fault=fault.name, what=fault.what, level=level, caught=caught, detail=detail + (added if caught else "")
            )

    def _before_identity(
        self, faulty: Subject, right: Subject, contexts: Sequence[Context], noise: replay.Noise
    ) -> tuple[bool, str]:
        bench, exact = self._at(faulty, right, self._groups(contexts)[0], contexts)
        found = identity.examine(bench, exact, faulty.decide if right.decide else None, seed=self._seed(0))
        return not found.exact(noise.variation), levels.identity_summary(found)

    def _before_replay(
        self, faulty: Subject, right: Subject, contexts: Sequence[Context], noise: replay.Noise
    ) -> tuple[bool, str]:
        faulty, right = (replay.determined(each) for each in (faulty, right))
        found = replay.examine(
            faulty,
            self._plain(right),
            right,
            self.prompts,
            seed=self.seed,
            tokens=self.size.replay_tokens,
            batch_sizes=self.size.batch_sizes[-1:],
            noise=noise,
        )
        return not found.exact, f"{found.errors} of {found.texts} texts differ"

    def _before_statistics(
        self, faulty: Subject, right: Subject, contexts: Sequence[Context], noise: replay.Noise
    ) -> tuple[bool, str]:
        """As many contexts as it takes, up to all that the audit itself looked at."""
        sample, look = Sample(self.size.ahead), 1
        tested = None
        groups = self._groups(contexts)
        for number, group in enumerate(groups):
            bench, exact = self._at(faulty, right, group, contexts)
            sample.extend(self._sampled(bench, exact, number))
            if number + 1 < look and number + 1 < len(groups):
                continue
            look *= 2
            tested = statistics.examine(sample, alarm=self.size.alarm, seed=self.seed, slack=10 * noise.variation)
            if not tested.exact:
                break
        assert tested is not None
        return not tested.exact, f"p = {tested.worst_p_value:.1e} after {tested.trials} trials"


def _sorted_out(
    outcomes: Sequence[Outcome],
) -> tuple[dict[tuple[tuple[int, ...], bool], list[int]], dict[tuple[int, ...], Distribution]]:
    """The tokens of one context's trials by (what stood before them, whether the q there was known), and these q.

    The q of a prefix is used from the trial behind the one that showed it: a test must not choose its sets of tokens
    by the draft that it judges.
    """
    groups: dict[tuple[tuple[int, ...], bool], list[int]] = {}
    q_of: dict[tuple[int, ...], Distribution] = {}
    for outcome in outcomes:
        tokens = tuple(outcome.tokens)
        for t, token in enumerate(tokens):
            groups.setdefault((tokens[:t], tokens[:t] in q_of), []).append(token)
        q_of = outcome.q_of | q_of
    return groups, q_of
