"""A completion's text and its end: what is cut, what is held back, and what is released when."""

from __future__ import annotations

import codecs
import random
from collections.abc import Sequence as Items
from typing import Any

import pytest

from paceline.decoding.sequence import Detokenizer, OutputToken, Provenance, Sequence, TokenLogprobs
from paceline.sampling.params import SamplingParams
from paceline.sampling.sampler import RULES, Sampler
from paceline.sampling.streams import Stream

END = 99


class Pieces:
    """A detokenizer of given bytes: text is certain at the end of a character, as real ones have it."""

    def __init__(self, pieces: Items[bytes]) -> None:
        self.pieces = pieces
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self.decoder.decode(b"<end>" if token == END else self.pieces[token])

    def flush(self) -> str:
        return self.decoder.decode(b"", final=True)


class Runs:
    """A detokenizer that knows the text of a run of `~` pieces only once another token ends it, as SentencePiece's
    byte tokens have it."""

    def __init__(self, pieces: Items[str]) -> None:
        self.pieces, self.run = pieces, ""

    def push(self, token: int) -> str:
        if token != END and self.pieces[token].startswith("~"):
            self.run += self.pieces[token][1:]
            return ""
        return self.flush() + ("" if token == END else self.pieces[token])

    def flush(self) -> str:
        run, self.run = self.run, ""
        return run


def growing(detokenizer: Detokenizer, *, room: int = 100, **params: Any) -> Sequence:
    sampler = Sampler(
        params=SamplingParams(max_tokens=None, **params),
        rule=RULES["token"],
        stream=Stream(0),
        prompt_length=2,
        end_ids=frozenset({END}),
    )
    return Sequence([7, 7], sampler, limit=2 + room, detokenizer=detokenizer)


def text(tokens: Items[OutputToken]) -> str:
    return "".join(token.text for token in tokens)


class Result:
    """Commits the pieces in order until the completion ends, taking after each of them."""

    def __init__(self, pieces: Items[str | bytes], *, end: bool = False, **options: Any) -> None:
        encoded = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
        self.sequence = growing(Pieces(encoded), **options)
        self.takes: list[str] = []
        self.taken: list[OutputToken] = []
        for token in [*range(len(pieces)), *([END] if end else [])]:
            ended = self.sequence.commit(token, Provenance.PLAIN, None)
            batch = self.sequence.take()
            self.taken += batch
            self.takes.append(text(batch))
            if ended:
                break
        self.text = text(self.sequence.output)
        self.count = len(self.sequence.output)
        self.ended = self.sequence.finish_reason, self.sequence.stop_reason


# ---- stop strings ----


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "count"),
    [
        (["ab", "cd", "ef"], "cd", "ab", 2),
        (["ab", "cd", "ef"], "d", "abc", 2),
        (["ab", "cd", "ef"], "bc", "a", 2),
        (["ab", "cd", "ef"], "bcde", "a", 3),
        (["ab", "cd", "ef"], "abcdef", "", 3),
        (["a", "b", "c", "d"], "abcd", "", 4),
        (["xxxabyyy", "z"], "ab", "xxx", 1),
        (["a", "a", "a", "b"], "aab", "a", 4),
        (["ababa", "bac"], "abac", "abab", 2),
        (["a", "", "b", "c"], "ab", "", 3),
        (["x", "", "a", "", "", "b"], "ab", "x", 6),
    ],
)
def test_a_stop_string_is_cut_wherever_the_borders_of_the_tokens_are(
    pieces: list[str], stop: str, text: str, count: int
) -> None:
    result = Result(pieces, stop=stop)
    assert (result.text, result.count, result.ended) == (text, count, ("stop", stop))
    kept = Result(pieces, stop=stop, include_stop_str_in_output=True)
    assert (kept.text, kept.count, kept.ended) == (text + stop, count, ("stop", stop))


def test_of_two_stop_strings_in_one_token_the_earlier_in_the_text_is_cut() -> None:
    for stop in (("c", "b"), ("b", "c")):
        result = Result(["a b c d"], stop=stop)
        assert (result.text, result.ended) == ("a ", ("stop", "b"))
    # bcd begins first, although c ends first
    assert Result(["abcd"], stop=("c", "bcd")).text == "a"
    assert Result(["abcd"], stop=("c", "bcd"), include_stop_str_in_output=True).text == "abcd"


def test_the_stop_string_that_is_whole_first_ends_the_output() -> None:
    result = Result(["a", "b", "c", "d"], stop=("bcd", "c"))
    assert (result.text, result.count, result.ended) == ("ab", 3, ("stop", "c"))


def test_a_stop_string_in_the_prompt_alone_is_not_looked_for() -> None:
    assert Result(["b", "c"], stop="ab").ended == (None, None)


def test_min_tokens_passes_over_stop_strings_until_then() -> None:
    for include in (False, True):
        result = Result(["a", "b", "x", "b"], stop="b", min_tokens=2, include_stop_str_in_output=include)
        assert (result.text, result.count) == ("abxb" if include else "abx", 4)
    assert Result(["a", "b", "b"], stop="b", min_tokens=1).count == 2
    assert Result(["a", "b", "b"], stop="b", min_tokens=2).count == 3
    straddling = Result(["a", "b", "c"], stop="bc", min_tokens=2)
    assert (straddling.text, straddling.ended) == ("a", ("stop", "bc")), "it ends behind the border"


# ---- what streaming may show ----


def test_text_that_could_become_a_stop_string_waits() -> None:
    result = Result(["x", "s", "t", "y", "s", "to", "p"], stop="stop")
    assert result.takes == ["x", "", "", "sty", "", "", ""]
    assert result.text == "xsty"
    assert Result(["x", "s", "t"], stop="stop", room=3).takes == ["x", "", "st"], "the end releases all"
    assert Result(["xs", "y"], stop="stop").takes == ["", "xsy"], "a token is shown whole or not at all"


def test_without_stop_strings_nothing_waits() -> None:
    assert Result(["a", "", "b"]).takes == ["a", "", "b"]


def test_take_gives_each_token_once() -> None:
    sequence = growing(Pieces([b"a", b"b", b"s", b"c"]), stop="st")
    assert sequence.take() == []
    for token in (0, 1, 2):
        sequence.commit(token, Provenance.PLAIN, None)
    assert [token.id for token in sequence.take()] == [0, 1]
    assert sequence.take() == []
    sequence.commit(3, Provenance.PLAIN, None)
    assert [token.id for token in sequence.take()] == [2, 3]
    assert sequence.take() == []


def test_an_included_stop_string_need_not_wait() -> None:
    """It stays in the text whether it is completed or not."""
    result = Result(["x", "s", "t", "op!", "z"], stop="stop", include_stop_str_in_output=True)
    assert result.takes == ["x", "s", "t", "op"]


def test_a_stop_string_passed_over_by_min_tokens_does_not_wait() -> None:
    """A whole stop string that was not looked for cannot become one any more."""
    assert Result(["a", "b", "x"], stop=("ab", "wxyz"), min_tokens=3).takes == ["", "ab", "x"]


def plain_end(pieces: Items[str], stops: Items[str], least: int, include: bool) -> tuple[str, int]:
    """The definition: the first token with which a stop string becomes whole ends the text there."""
    whole = ""
    for count, piece in enumerate(pieces, start=1):
        before, whole = len(whole), whole + piece
        if count <= least:
            continue
        ends = [
            (start, stop)
            for stop in stops
            for start in range(len(whole))
            if whole.startswith(stop, start) and start + len(stop) > before
        ]
        if ends:
            start, stop = min(ends)
            return whole[: start + len(stop) * include], count
    return whole, len(pieces)


def certain_tokens(pieces: Items[str], stops: Items[str]) -> int:
    """How many of the tokens so far may be shown: those of which no character could begin a stop string yet to come."""
    whole = "".join(pieces)
    certain = next(
        (i for i in range(len(whole)) if any(len(s) > len(whole) - i and s.startswith(whole[i:]) for s in stops)),
        len(whole),
    )
    count = len(pieces)
    while len("".join(pieces[:count])) > certain:
        count -= 1
    return count


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("least", [0, 3])
def test_random_texts_end_and_stream_as_the_definition_says(include: bool, least: int) -> None:
    rng, stopped, waited = random.Random(least), 0, 0
    for _ in range(1500):
        pieces = ["".join(rng.choices("ab", k=rng.choice((0, 1, 1, 2, 3)))) for _ in range(rng.randint(1, 9))]
        # All of one length: a shorter one that min_tokens passed over has a test of its own.
        size = rng.randint(1, 5)
        stops = ["".join(rng.choices("ab", k=size)) for _ in range(rng.randint(1, 3))]
        result = Result(pieces, stop=stops, min_tokens=least, include_stop_str_in_output=include)
        assert (result.text, result.count) == plain_end(pieces, stops, least, include), (pieces, stops)
        stopped += result.ended[0] == "stop"
        if result.ended[0] == "stop":
            assert "".join(result.takes) == result.text
            assert result.taken == result.sequence.output
        shown = 0
        for i, take in enumerate(result.takes[: result.count - (result.ended[0] == "stop")], start=1):
            certain = certain_tokens(pieces[:i], stops)
            if not include:  # an included stop string need not wait, which has a test of its own
                assert take == "".join(pieces[shown:certain]), (pieces, stops, i)
            shown = certain
            waited += certain < i
    assert stopped > 300
    assert waited > 300


@pytest.mark.parametrize("include", [False, True])
def test_random_texts_with_stop_strings_of_any_length_show_nothing_that_is_cut_later(include: bool) -> None:
    rng, stopped = random.Random(5), 0
    for _ in range(1500):
        pieces = ["".join(rng.choices("ab", k=rng.choice((0, 1, 1, 2)))) for _ in range(rng.randint(1, 12))]
        stops = ["".join(rng.choices("ab", k=rng.randint(2, 7))) for _ in range(rng.randint(1, 3))]
        result = Result(
            pieces, stop=stops, min_tokens=rng.choice((0, 2)), include_stop_str_in_output=include, room=len(pieces)
        )
        assert "".join(result.takes) == result.text
        assert result.taken == result.sequence.output
        assert result.text == plain_end(pieces, stops, result.sequence.sampler.params.min_tokens, include)[0]
        stopped += result.ended[0] == "stop"
    assert stopped > 300


# ---- end tokens ----


def test_an_end_token_is_kept_and_its_text_left_out() -> None:
    result = Result(["a", "b"], end=True)
    assert (result.text, result.ended) == ("ab", ("stop", END))
    assert [token.id for token in result.sequence.output] == [0, 1, END]
    assert result.sequence.tokens == [7, 7, 0, 1, END]
    assert Result(["a"], end=True, include_stop_str_in_output=True).text == "a<end>"


def test_an_end_token_releases_what_waited() -> None:
    assert Result(["a", "s", "t"], end=True, stop="stop").takes == ["a", "", "", "st"]


def test_an_end_token_is_no_part_of_a_stop_string() -> None:
    result = Result(["a"], end=True, stop="<end>")
    assert (result.text, result.ended) == ("a", ("stop", END))
    across = Result(["a<"], end=True, stop="<<end")
    assert (across.text, across.ended) == ("a<", ("stop", END))


# ---- characters of several tokens ----

EURO = "\u20ac".encode()


def test_a_character_of_several_tokens_comes_with_the_last_of_them() -> None:
    result = Result([b"a", EURO[:1], EURO[1:2], EURO[2:], b"b"])
    assert result.takes == ["a", "", "", "\u20ac", "b"]
    assert [token.text for token in result.sequence.output] == ["a", "", "", "\u20ac", "b"]


def test_an_unfinished_character_comes_out_at_the_end() -> None:
    assert Result([b"a", EURO[:2]], room=2).takes == ["a", "\ufffd"]
    ended = Result([b"a", EURO[:2]], end=True)
    assert (ended.text, ended.takes[-1]) == ("a\ufffd", "\ufffd"), "of the text, all but the end token's"


def test_stop_strings_are_found_around_and_across_such_characters() -> None:
    pieces = [b"a", EURO[:1], EURO[1:], b"b", b"c"]
    assert Result(pieces, stop="\u20ac").text == "a"
    assert Result(pieces, stop="\u20ac").count == 3
    assert Result(pieces, stop="a\u20acb").takes == ["", "", "", ""]
    assert Result(pieces, stop="\u20acb", include_stop_str_in_output=True).text == "a\u20acb"
    assert Result(pieces, stop="ab").text == "a\u20acbc"


def test_what_was_begun_behind_a_stop_string_is_dropped() -> None:
    for include in (False, True):
        result = Result([b"a", b"stop" + EURO[:2]], stop="stop", include_stop_str_in_output=include)
        assert result.text == ("astop" if include else "a")


def test_text_that_becomes_certain_late_is_searched_like_any_other() -> None:
    """A line break that is a byte token is certain only when the next token comes, or when none does."""
    pieces = ["a", "~\n", "b"]

    def finished(tokens: list[int], **options: Any) -> Sequence:
        sequence = growing(Runs(pieces), stop="\n", **options)
        for token in tokens:
            if sequence.commit(token, Provenance.PLAIN, None):
                break
        return sequence

    for tokens, options in (([0, 1, 2], {}), ([0, 1, END], {}), ([0, 1], {"room": 2})):
        for include in (False, True):
            done = finished(tokens, include_stop_str_in_output=include, **options)
            assert text(done.output) == ("a\n" if include else "a"), (tokens, options)
            assert (done.finish_reason, done.stop_reason) == ("stop", "\n")
    passed_over = finished([0, 1], room=2, min_tokens=2)
    assert (text(passed_over.output), passed_over.finish_reason) == ("a\n", "length")


# ---- how it ends, and what is kept ----


def test_the_limit_ends_with_length_and_hides_no_earlier_end() -> None:
    assert Result(["a", "b", "c"], room=2).ended == ("length", None)
    assert Result(["a", "b", "c"], room=2).count == 2
    assert Result(["a", "b", "c"], room=4).ended == (None, None)
    assert Result(["a", "b"], room=2, stop="b").ended == ("stop", "b")
    assert Result(["a"], end=True, room=2).ended == ("stop", END)


def test_nothing_is_committed_behind_the_end() -> None:
    result = Result(["a", "b"], room=1)
    with pytest.raises(AssertionError):
        result.sequence.commit(0, Provenance.PLAIN, None)


def test_tokens_keep_their_provenance_logprobs_and_count() -> None:
    sequence = growing(Pieces([b"a", b"b", b"stop"]), stop="stop")
    logprobs = TokenLogprobs(-0.5, 1, ((0, -0.5),))
    assert not sequence.commit(0, Provenance.ACCEPTED, logprobs)
    assert not sequence.commit(1, Provenance.BONUS, None)
    assert sequence.commit(2, Provenance.PLAIN, None)
    assert sequence.output == [
        OutputToken(0, "a", Provenance.ACCEPTED, logprobs),
        OutputToken(1, "b", Provenance.BONUS, None),
        OutputToken(2, "", Provenance.PLAIN, None),
    ]
    assert (sequence.stats.prompt_tokens, sequence.stats.output_tokens) == (2, 3)
    assert sequence.tokens == [7, 7, 0, 1, 2]


@pytest.mark.parametrize(("prompt", "limit"), [([], 5), ([7], 5), ([7, 7], 2), ([7, 7], 1)])
def test_a_sequence_begins_with_its_whole_prompt_and_has_room(prompt: list[int], limit: int) -> None:
    sampler = growing(Pieces([])).sampler
    with pytest.raises(AssertionError):
        Sequence(prompt, sampler, limit=limit, detokenizer=Pieces([]))
