"""Every verification rule keeps the target's distribution exactly: enumeration, not statistics.

For a ratio rule the emitted sequence of a round is followed by the target itself up to K + 1 tokens, and the joint
distribution over all V^(K+1) sequences is compared with the target's. The uniforms enter `decide` only through
comparisons with a threshold h that depends on the block alone, so two values of each uniform, just below h and just
above it, with the weights h and 1 - h, enumerate them all. For coupled verification the outcomes are who wins each
race on either side; their probabilities have a closed form, and noise inside each outcome's region stands for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from paceline.sampling import block, coupled, rejection
from paceline.sampling.distribution import Distribution, Floats
from paceline.sampling.draft import Draft
from paceline.sampling.draw import inverse_cdf, race
from paceline.sampling.streams import Purpose, Stream
from tests.fakes import Table, Vector

Decide = Callable[[Sequence[Distribution], Draft, Vector], tuple[int, Distribution]]
Thresholds = Callable[[Sequence[Distribution], Draft], Vector]
Row = Callable[[Sequence[int]], Vector]


def distribution(row: Floats, *, few: bool = False) -> Distribution:
    """A row as all its tokens, or as those `few` that have any probability."""
    if not few:
        return Distribution(len(row), row)
    ids = np.flatnonzero(row)
    return Distribution(len(row), row[ids], ids)


def behind(row: Row, tokens: Sequence[int], count: int, *, few: bool = False) -> list[Distribution]:
    """The distributions behind tokens[:0], tokens[:1], ..., `count` of them."""
    return [distribution(row(tokens[:i]), few=few) for i in range(count)]


def cases(count: int) -> list[tuple[int, int, Row, Row]]:
    """(V, K, p, q) with zeros, disjoint supports, p = q and one-hot drafts among them."""
    found: list[tuple[int, int, Row, Row]] = []
    for seed in range(count):
        rng = np.random.default_rng([7, seed])
        size, k = int(rng.integers(2, 6)), int(rng.integers(1, 5))
        zeros = float(rng.choice([0.0, 0.4]))
        p = Table(size, k + 1, 1000 + seed, zeros)
        q = Table(size, k + 1, 2000 + seed, zeros, one_hot=float(rng.choice([0.0, 0.3])))
        kind = seed % 8
        if kind == 0:
            q = p
        elif kind == 1:
            q.one_hot = 1.0
        elif kind == 2:  # disjoint supports: p on the even tokens, q on the odd ones
            even = np.arange(size) % 2 == 0
            p.row, q.row = _masked(p.row, even), _masked(q.row, ~even)  # type: ignore[method-assign, assignment]
        found.append((size, k, p.row, q.row))
    return found


def _masked(row: Row, keep: npt.NDArray[np.bool_]) -> Row:
    def masked(tokens: Sequence[int]) -> Vector:
        kept = np.where(keep, row(tokens) + 1e-3, 0)
        return kept / kept.sum()

    return masked


def enumerate_round(
    decide: Decide,
    thresholds: Thresholds,
    size: int,
    k: int,
    p: Row,
    q: Row,
    *,
    few: tuple[bool, bool] = (False, False),
    ends: Callable[[Sequence[int]], bool] = lambda drafted: False,
) -> tuple[Vector, float]:
    """The joint distribution of K + 1 tokens [V, ..., V], and the expected number of tokens of the round.

    `few` tells which of p and q come as the tokens that have any probability; `ends`, by what has been drafted, whether
    the draft ends there.
    """
    joint, expected, most = np.zeros((size,) * (k + 1)), 0.0, k
    blocks = set()
    for tokens in itertools.product(range(size), repeat=most):
        blocks.add(tokens[: next((i for i in range(most) if ends(tokens[:i])), most)])
    for tokens in sorted(blocks):
        k = len(tokens)
        drawn = float(np.prod([q(tokens[:i])[token] for i, token in enumerate(tokens)]))
        if drawn == 0:
            continue
        p_S = behind(p, tokens, k + 1, few=few[0])
        draft = Draft(tokens, tuple(behind(q, tokens, k, few=few[1])))
        h = thresholds(p_S, draft)
        for pattern in itertools.product((True, False), repeat=k):
            weight = float(np.prod(np.where(pattern, h, 1 - h)))
            if weight == 0:
                continue
            accepted, left = decide(p_S, draft, np.where(pattern, h * (1 - 1e-13), h + 1e-13))
            rest = left.dense() / left.probs.sum()
            expected += drawn * weight * (accepted + 1)
            for token in range(size):
                _continue_with(joint, p, (*tokens[:accepted], token), drawn * weight * rest[token])
    return joint, expected


def _continue_with(joint: Vector, p: Row, tokens: tuple[int, ...], weight: float) -> None:
    if weight == 0:
        return
    if len(tokens) == joint.ndim:
        joint[tokens] += weight
        return
    row = p(tokens)
    for token in range(len(row)):
        _continue_with(joint, p, (*tokens, token), weight * row[token])


def target_joint(size: int, length: int, p: Row) -> Vector:
    joint = np.zeros((size,) * length)
    _continue_with(joint, p, (), 1.0)
    return joint


def test_token_and_block_verification_keep_the_target_exactly_and_block_never_expects_fewer_tokens() -> None:
    gained = 0
    for case, (size, k, p, q) in enumerate(cases(200)):
        few = (case // 8 % 2 == 1, case // 16 % 2 == 1)  # eight kinds of case in turn, in each form
        expected_joint = target_joint(size, k + 1, p)
        tokens_a_round = {}
        for name, decide, thresholds in (
            ("token", rejection.decide, rejection.thresholds),
            ("block", block.decide, lambda p_S, draft: block.thresholds(p_S, draft)[0]),
        ):
            joint, tokens_a_round[name] = enumerate_round(decide, thresholds, size, k, p, q, few=few)
            assert np.abs(joint - expected_joint).max() < 1e-12, (name, size, k)
        assert tokens_a_round["block"] >= tokens_a_round["token"] - 1e-12
        gained += tokens_a_round["block"] > tokens_a_round["token"] + 1e-6
    assert gained > 50, "block verification gains where K > 1 and p differs from q"


def test_a_draft_may_end_wherever_what_it_holds_so_far_says() -> None:
    """Its length then depends on chance, but never on the token that is not drawn any more."""
    lengths = set()
    for case, (size, k, p, q) in enumerate(cases(60)):
        rng = np.random.default_rng([11, case])
        chosen = {n: bool(rng.random() < 0.4) for n in range(size**k * 2)}

        def ends(drafted: Sequence[int], size: int = size, chosen: dict[int, bool] = chosen) -> bool:
            number = sum(token * size**i for i, token in enumerate(drafted)) + len(drafted)
            lengths.add(len(drafted))
            return chosen[number]

        for decide, thresholds in (
            (rejection.decide, rejection.thresholds),
            (block.decide, lambda p_S, draft: block.thresholds(p_S, draft)[0]),
        ):
            joint, _ = enumerate_round(decide, thresholds, size, k, p, q, ends=ends)
            assert np.abs(joint - target_joint(size, k + 1, p)).max() < 1e-12, (size, k)
    assert lengths == {0, 1, 2, 3}


def test_the_enumeration_catches_a_draft_cut_by_the_token_it_drops() -> None:
    """Dropping a drawn token for being improbable is not the same as not drawing it."""
    p, q = Table(3, 3, 1).row, Table(3, 3, 2).row

    def joint_of(cut: bool) -> Vector:
        joint = np.zeros((3, 3))
        for token in range(3):
            drawn = q(())[token]
            p_S, draft = behind(p, (token,), 2), Draft((token,), tuple(behind(q, (token,), 1)))
            if cut and token == int(q(()).argmin()):
                p_S, draft = p_S[:1], Draft()
            h = rejection.thresholds(p_S, draft)
            for stands in itertools.product((True, False), repeat=len(draft)):
                weight = float(np.prod(np.where(stands, h, 1 - h)))
                accepted, left = rejection.decide(p_S, draft, np.where(stands, h * (1 - 1e-13), h + 1e-13))
                rest = left.dense() / left.probs.sum()
                for last in range(3):
                    _continue_with(joint, p, (*draft.tokens[:accepted], last), drawn * weight * rest[last])
        return joint

    assert np.abs(joint_of(cut=False) - target_joint(3, 2, p)).max() < 1e-12
    assert np.abs(joint_of(cut=True) - target_joint(3, 2, p)).max() > 1e-3


@pytest.mark.fault(3)
@pytest.mark.parametrize("fault", ["accept everything", "recover from p", "ratio upside down"])
def test_the_enumeration_catches_a_faulty_rule(fault: str) -> None:
    def decide(p_S: Sequence[Distribution], draft: Draft, uniforms: Vector) -> tuple[int, Distribution]:
        if fault == "accept everything":
            return len(draft), p_S[len(draft)]
        if fault == "recover from p":
            accepted, _ = rejection.decide(p_S, draft, uniforms)
            return accepted, p_S[accepted]
        ratios = [rejection.likelihood_ratio(p_S, draft, t) for t in range(len(draft))]
        stands = uniforms < 1 / np.maximum(ratios, 1e-300)
        accepted = int(stands.cumprod().sum())
        return accepted, rejection.residual(p_S[accepted], draft, accepted)

    p, q = Table(3, 3, 1).row, Table(3, 3, 2).row
    joint, _ = enumerate_round(decide, rejection.thresholds, 3, 2, p, q)
    assert np.abs(joint - target_joint(3, 3, p)).max() > 1e-3


class Noise(Stream):
    """Exponential noise by position, as the uniforms it comes from."""

    def __init__(self, noise: Sequence[Vector]) -> None:
        object.__setattr__(self, "noise", noise)

    def uniforms(self, purpose: Purpose, position: int, anchor: int, count: int) -> Vector:
        return -np.expm1(-self.noise[position])  # type: ignore[attr-defined]


def races(p: Vector, q: Vector) -> dict[tuple[int, int], tuple[float, Vector]]:
    """(the target's winner i, the draft's winner j) -> its probability under shared noise, and noise that gives it.

    i wins for p and j for q iff every E_k >= max(E_i p_k / p_i, E_j q_k / q_j). With t = E_j / E_i that integrates to
    the integral of (1 + t + sum over the others of max(p_k / p_i, t q_k / q_j))^-2 over p_j / p_i <= t <= q_j / q_i.
    """
    found: dict[tuple[int, int], tuple[float, Vector]] = {}
    for i, j in itertools.product(np.flatnonzero(p).tolist(), np.flatnonzero(q).tolist()):
        if i == j:
            least = np.maximum(p / p[i], q / q[i])
            found[i, i] = (1 / least.sum(), _noise(least, {i: 1.0}))
            continue
        low, high = p[j] / p[i], q[j] / q[i] if q[i] else np.inf
        others = [k for k in range(len(p)) if k not in (i, j)]
        kinks = [p[k] / p[i] * q[j] / q[k] for k in others if q[k]]
        edges = [low, *sorted(t for t in kinks if low < t < high), high]
        probability = 0.0
        for start, stop in itertools.pairwise(edges):
            if stop <= start:
                continue
            middle = start + 1 if stop == np.inf else (start + stop) / 2
            late = [k for k in others if middle * q[k] / q[j] > p[k] / p[i]]
            at = 1 + sum(p[k] / p[i] for k in others if k not in late)
            slope = 1 + sum(q[k] / q[j] for k in late)
            there = 0.0 if stop == np.inf else 1 / (at + slope * stop)
            probability += (1 / (at + slope * start) - there) / slope
        if probability > 0:
            t = low + 1 if high == np.inf else (low + high) / 2
            found[i, j] = (probability, _noise(np.maximum(p / p[i], t * q / q[j]), {i: 1.0, j: t}))
    return found


def _noise(least: Vector, winners: dict[int, float]) -> Vector:
    noise = least * 1.01 + 1e-9
    for k, value in winners.items():
        noise[k] = value
    return noise * (0.01 / noise.max())


def enumerate_coupled(size: int, k: int, p: Row, q: Row, few: tuple[bool, bool]) -> Vector:
    """As `enumerate_round`: every outcome of the shared races, with its probability, through propose and verify."""
    joint = np.zeros((size,) * (k + 1))

    def play(noise: list[Vector], winners: list[tuple[int, int]], weight: float) -> None:
        stream, tokens = Noise([*noise, *[np.ones(size)] * (k + 1 - len(noise))]), list[int]()
        for i in range(k):
            tokens.append(coupled.propose(distribution(q(tokens), few=few[1]), stream, i, 0))
        assert tokens[: len(winners)] == [j for _, j in winners][:k]
        draft = Draft(tuple(tokens), tuple(behind(q, tokens, k, few=few[1])))
        verdict = coupled.verify(behind(p, tokens, k + 1, few=few[0]), draft, stream, 0)
        emitted = (*tokens[: verdict.accepted], verdict.token)
        assert emitted == tuple(i for i, _ in winners)
        _continue_with(joint, p, emitted, weight)

    def extend(noise: list[Vector], winners: list[tuple[int, int]], weight: float) -> None:
        """The round goes on where both chose the same."""
        prefix = [i for i, _ in winners]
        if len(winners) == k:
            row = p(prefix)
            for i in np.flatnonzero(row).tolist():
                play([*noise, _noise(row / row[i], {i: 1.0})], [*winners, (i, -1)], weight * row[i])
            return
        for (i, j), (probability, example) in races(p(prefix), q(prefix)).items():
            go_on = extend if i == j else play
            go_on([*noise, example], [*winners, (i, j)], weight * probability)

    extend([], [], 1.0)
    return joint


def test_coupled_verification_keeps_the_target_exactly() -> None:
    for case, (size, k, p, q) in enumerate(cases(200)):
        joint = enumerate_coupled(size, k, p, q, (case // 8 % 2 == 1, case // 16 % 2 == 1))
        assert np.abs(joint - target_joint(size, k + 1, p)).max() < 1e-12, (size, k)


def test_coupled_verification_emits_the_targets_own_choices_whatever_the_draft() -> None:
    """With the noise fixed, every emitted token is the target's choice; and that choice is i with probability p_i."""
    for case, (_, k, p, q) in enumerate(cases(200)):
        for seed in range(5):
            stream, anchor = Stream(1000 * case + seed), 3
            tokens: list[int] = []
            for i in range(k):
                tokens.append(coupled.propose(distribution(q(tokens)), stream, anchor + i, anchor))
            draft = Draft(tuple(tokens), tuple(behind(q, tokens, k)))
            verdict = coupled.verify(behind(p, tokens, k + 1), draft, stream, anchor)
            emitted = [*tokens[: verdict.accepted], verdict.token]
            alone: list[int] = []
            for i in range(len(emitted)):
                row = distribution(p(alone), few=True)
                alone.append(coupled.verify([row], Draft(), stream, anchor + i).token)
            assert emitted == alone


def test_an_exponential_race_is_won_by_token_i_with_probability_p_i() -> None:
    """Whatever the rivals' noise, i wins iff E_i < p_i M with M = min(E_j / p_j) over the rivals. M is exponential with
    rate 1 - p_i and E_i / p_i with rate p_i, so i wins with probability p_i / (p_i + 1 - p_i)."""
    rng = np.random.default_rng(0)
    for seed in range(200):
        p = Table(4, 0, seed).row([])
        for i in range(4):
            noise = rng.exponential(size=4) * 1e-3  # a race depends on ratios alone; small numbers keep their digits
            edge = p[i] * min(noise[j] / p[j] for j in range(4) if j != i)
            for factor, wins in ((1 - 1e-6, True), (1 + 1e-6, False)):
                noise[i] = edge * factor
                assert (race(distribution(p), -np.expm1(-noise)) == i) is wins


def test_coupled_acceptance_probability_is_the_published_formula() -> None:
    p, q = Table(4, 0, 5).row([]), Table(4, 0, 6).row([])
    expected = sum(1 / np.maximum(p / p[i], q / q[i]).sum() for i in range(4))
    rng, agreed, trials = np.random.default_rng(0), 0, 20_000
    for _ in range(trials):
        uniforms = rng.random(4)
        agreed += race(distribution(p), uniforms) == race(distribution(q), uniforms)
    # Hoeffding: a true rate differs by more than this with probability below 1e-9
    assert abs(agreed / trials - expected) < np.sqrt(np.log(2 / 1e-9) / (2 * trials))


@pytest.mark.parametrize("few", [False, True])
def test_a_race_is_run_among_all_though_few_logarithms_are_taken(few: bool) -> None:
    """The definition, argmax of p / E over every token, on long rows and at the edges of the uniforms."""
    rng = np.random.default_rng(1)
    for case in range(200):
        size = int(rng.integers(1, 3000))
        p = rng.dirichlet(np.full(size, rng.choice([0.01, 0.1, 1.0]))) * (rng.random(size) < 0.8)
        p[rng.integers(size)] += 1e-3
        uniforms = rng.random(size)
        if case % 4 == 0:
            uniforms[rng.integers(size, size=3)] = rng.choice([0.0, 2.0**-53, 1 - 2.0**-53], 3)
        for probs in (p, p.astype(np.float32)):
            with np.errstate(over="ignore"):
                expected = int((probs / np.maximum(-np.log1p(-uniforms), 1e-300)).argmax())
            assert race(distribution(probs, few=few), uniforms) == expected


def test_inverse_cdf_gives_each_token_its_share_of_the_unit_interval() -> None:
    probs = np.array([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    edges = [(0.0, 1), (0.25 - 1e-12, 1), (0.25, 3), (0.75 - 1e-12, 3), (0.75, 4), (1 - 2.0**-53, 4)]
    for few in (False, True):
        assert [inverse_cdf(distribution(probs, few=few), u) for u, _ in edges] == [token for _, token in edges]
        assert [inverse_cdf(distribution(probs * 7, few=few), u) for u, _ in edges] == [token for _, token in edges]


@pytest.mark.parametrize("size", [1, 255, 256, 257, 1000, 70_000])
@pytest.mark.parametrize("zeros", [0.0, 0.7, 0.999])
def test_inverse_cdf_sums_in_blocks_what_a_plain_sum_gives(size: int, zeros: float) -> None:
    rng = np.random.default_rng(size)
    for dtype in (np.float32, np.float64):
        probs = (rng.random(size) * (rng.random(size) >= zeros)).astype(dtype)
        probs[rng.integers(size)] = 1
        mass = probs.cumsum(dtype=np.float64)
        tokens = np.flatnonzero(probs)
        for few in (False, True):
            whole = distribution(probs, few=few)
            for token in rng.choice(tokens, 20):
                for share in (0.01, 0.99):
                    before = mass[token] - probs[token]
                    assert inverse_cdf(whole, (before + share * probs[token]) / mass[-1]) == token
            assert inverse_cdf(whole, 0.0) == tokens[0]
            for last in (1 - 2.0**-53, 1.0):  # inside of a block, rounding can make it 1
                assert inverse_cdf(whole, last) == tokens[-1]


def test_the_last_uniform_never_chooses_a_token_without_probability() -> None:
    probs = np.random.default_rng(0).random(50_000).astype(np.float32)
    probs[-1000:] = 0
    assert inverse_cdf(distribution(probs), 1 - 2.0**-53) == 48_999


@pytest.mark.fault(13)
def test_random_numbers_are_a_function_of_their_address() -> None:
    stream = Stream(1)
    first = stream.uniforms(Purpose.ACCEPT, 5, 3, 8)
    np.random.default_rng().random(10)
    np.random.seed(0)  # noqa: NPY002 - other randomness in the process must not matter
    assert (first == Stream(1).uniforms(Purpose.ACCEPT, 5, 3, 8)).all()
    assert first[0] == stream.uniform(Purpose.ACCEPT, 5, 3)
    assert (first == stream.uniforms(Purpose.ACCEPT, 5, 3, 8)).all(), "asking uses nothing up"
    raw = np.random.Philox(key=[1, 0], counter=[0, Purpose.ACCEPT, 5, 3]).random_raw(8)
    assert (first == (raw >> np.uint64(11)) / 2**53).all()
    others = [
        Stream(2).uniforms(Purpose.ACCEPT, 5, 3, 8),
        Stream(1, 1).uniforms(Purpose.ACCEPT, 5, 3, 8),
        stream.uniforms(Purpose.NEXT, 5, 3, 8),
        stream.uniforms(Purpose.ACCEPT, 6, 3, 8),
        stream.uniforms(Purpose.ACCEPT, 5, 4, 8),
    ]
    assert all(len(np.intersect1d(first, other)) == 0 for other in others)


@pytest.mark.fault(3)
def test_random_numbers_are_uniform_on_a_fine_grid() -> None:
    numbers = np.concatenate([Stream(9).uniforms(Purpose.PROPOSE, i, i, 16) for i in range(4000)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    # Kolmogorov-Smirnov by the Dvoretzky-Kiefer-Wolfowitz bound at 1e-9
    gap = np.abs(np.sort(numbers) - (np.arange(len(numbers)) + 0.5) / len(numbers)).max()
    assert gap < np.sqrt(np.log(2 / 1e-9) / (2 * len(numbers)))
    assert (numbers * 2.0**24 % 1 != 0).mean() > 0.99, "finer than a float32 grid"


class Anchorless(Stream):
    """Numbers keyed by the position alone, which a later round meets again."""

    def seek(self, purpose: Purpose, position: int, anchor: int) -> np.random.Philox:
        return super().seek(purpose, position, 0)


def gap_of_two_tokens(new_stream: Callable[[int], Stream], runs: int = 6000) -> float:
    """L1 distance from the target, of the first two tokens out of rounds of two drafted tokens each."""
    p, q = np.array([0.5, 0.5]), np.array([0.9, 0.1])
    p_S, q_K = [distribution(p)] * 3, (distribution(q),) * 2
    counts = np.zeros((2, 2))
    for seed in range(runs):
        stream, tokens = new_stream(seed), list[int]()
        while len(tokens) < 2:
            anchor = len(tokens)
            drafted = tuple(block.propose(q_K[0], stream, anchor + i, anchor) for i in range(2))
            verdict = block.verify(p_S, Draft(drafted, q_K), stream, anchor)
            tokens += [*drafted[: verdict.accepted], verdict.token]
        counts[tuple(tokens[:2])] += 1
    return float(np.abs(counts / runs - np.multiply.outer(p, p)).sum())


def test_block_verification_needs_new_numbers_every_round() -> None:
    """Why streams have an anchor: the first round looked at the second position's numbers before it gave that up."""
    # Weissman et al. 2003 at 1e-9, for four outcomes
    bound = np.sqrt(2 * (4 * np.log(2) + np.log(1e9)) / 6000)
    assert gap_of_two_tokens(Stream) < bound < gap_of_two_tokens(Anchorless)
