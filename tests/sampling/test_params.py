"""Parameters are refused with the value, the limit and a cure, and accepted up to their very limits."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from typing import Any

import pytest

from paceline.sampling.params import SamplingParams

REFUSED: list[tuple[str, object, str, str]] = [
    ("n", 0, ">= 1", "at least one"),
    ("n", -1, ">= 1", "at least one"),
    ("n", 1.0, "integer", "at least one"),
    ("n", True, "integer", "at least one"),
    ("temperature", -0.1, "a finite number >= 0", "0 for greedy"),
    ("temperature", math.nan, "a finite number >= 0", "0 for greedy"),
    ("temperature", math.inf, "a finite number >= 0", "0 for greedy"),
    ("temperature", "1", "a finite number >= 0", "0 for greedy"),
    ("temperature", None, "a finite number >= 0", "0 for greedy"),
    ("temperature", True, "a finite number >= 0", "0 for greedy"),
    ("top_p", 0, "(0, 1]", "1 to keep every token"),
    ("top_p", 0.0, "(0, 1]", "1 to keep every token"),
    ("top_p", 1.0001, "(0, 1]", "1 to keep every token"),
    ("top_p", math.nan, "(0, 1]", "1 to keep every token"),
    ("top_k", -2, ">= -1", "0 to keep every token"),
    ("top_k", 2.5, "integer", "0 to keep every token"),
    ("min_p", -1e-9, "0..1", "0 to keep every token"),
    ("min_p", 1.1, "0..1", "0 to keep every token"),
    ("repetition_penalty", 0, "greater than 0", "1 for none"),
    ("repetition_penalty", -1.0, "greater than 0", "1 for none"),
    ("repetition_penalty", math.inf, "greater than 0", "1 for none"),
    ("presence_penalty", -2.1, "-2..2", "0 for none"),
    ("presence_penalty", 2.1, "-2..2", "0 for none"),
    ("frequency_penalty", -2.1, "-2..2", "0 for none"),
    ("frequency_penalty", math.nan, "-2..2", "0 for none"),
    ("seed", 2**64, "64 bits", "smaller"),
    ("seed", -(2**63) - 1, "64 bits", "smaller"),
    ("seed", 1.0, "integer", "smaller"),
    ("max_tokens", 0, ">= 1", "at least"),
    ("max_tokens", 2.0, "integer", "at least"),
    ("min_tokens", -1, "0..256", "lower it"),
    ("min_tokens", 257, "0..256 (max_tokens)", "raise max_tokens"),
    ("logprobs", -1, ">= 0", "None for none"),
    ("logprobs", True, "integer", "None for none"),
    ("prompt_logprobs", -1, ">= 0", "None for none"),
    ("prompt_logprobs", "5", "integer", "None for none"),
]


@pytest.mark.parametrize(("name", "value", "limit", "cure"), REFUSED)
def test_a_refusal_names_value_limit_and_cure(name: str, value: object, limit: str, cure: str) -> None:
    arguments: dict[str, Any] = {name: value}
    with pytest.raises(ValueError) as refused:
        SamplingParams(**arguments)
    stated, _, advice = str(refused.value).partition(": ")
    assert stated.startswith(f"{name} is {value!r}, it must be ")
    assert limit in stated
    assert cure in advice


@pytest.mark.parametrize(
    ("arguments", "named", "limit"),
    [
        ({"logit_bias": {-1: 0.0}}, "logit_bias key is -1", "a token id >= 0"),
        ({"logit_bias": {"7": 1.0}}, "logit_bias key is '7'", "a token id >= 0"),
        ({"logit_bias": {7: 100.5}}, "logit_bias[7] is 100.5", "in -100..100"),
        ({"logit_bias": {1: 0.0, 8: -math.inf}}, "logit_bias[8] is -inf", "in -100..100"),
        ({"stop_token_ids": (1, -2)}, "a stop token is -2", "a token id >= 0"),
        ({"stop_token_ids": (1.0,)}, "a stop token is 1.0", "a token id >= 0"),
        ({"stop": ""}, "a stop string is ''", "a non-empty string"),
        ({"stop": ("a", "")}, "a stop string is ''", "a non-empty string"),
        ({"stop": ("a", 5)}, "a stop string is 5", "a non-empty string"),
        ({"stop": b"ab"}, "a stop string is 97", "a non-empty string"),
        ({"max_tokens": None, "min_tokens": -3}, "min_tokens is -3", "in 0..inf (max_tokens)"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens is 5", "in 0..4 (max_tokens)"),
    ],
)
def test_a_refusal_names_the_member_at_fault(arguments: dict[str, Any], named: str, limit: str) -> None:
    with pytest.raises(ValueError) as refused:
        SamplingParams(**arguments)
    stated, _, advice = str(refused.value).partition(": ")
    assert named in stated
    assert limit in stated
    assert advice


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"n": 1},
        {"temperature": 0},
        {"temperature": 0.0},
        {"temperature": 5e-324},
        {"temperature": 100},
        {"top_p": 1},
        {"top_p": 5e-324},
        {"top_k": -1},
        {"top_k": 0},
        {"top_k": 10**9},
        {"min_p": 0},
        {"min_p": 1},
        {"repetition_penalty": 5e-324},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"presence_penalty": 2.0, "frequency_penalty": -2.0},
        {"logit_bias": {}},
        {"logit_bias": {0: -100, 1: 100}},
        {"seed": 0},
        {"seed": -(2**63)},
        {"seed": 2**64 - 1},
        {"stop": None},
        {"stop": "\n"},
        {"max_tokens": 1, "min_tokens": 1},
        {"max_tokens": None, "min_tokens": 10**6},
        {"logprobs": 0, "prompt_logprobs": 0},
    ],
    ids=str,
)
def test_values_at_their_limits_are_accepted(arguments: dict[str, Any]) -> None:
    params = SamplingParams(**arguments)
    for name, value in arguments.items():
        assert getattr(params, name) == value


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"])
def test_an_integer_beyond_every_float_is_refused_like_any_other_value(name: str) -> None:
    arguments: dict[str, Any] = {name: 10**400}
    with pytest.raises(ValueError, match=name):
        SamplingParams(**arguments)


def test_stop_strings_are_one_tuple_whatever_form_they_came_in() -> None:
    assert SamplingParams().stop_strings == ()
    assert SamplingParams(stop="ab").stop_strings == ("ab",), "a string is one stop string, not its letters"
    wanted = ["ab", "c"]
    params = SamplingParams(stop=wanted)
    wanted.append("d")
    assert params.stop_strings == ("ab", "c"), "changing the list later changes nothing"


def test_parameters_are_frozen() -> None:
    params = SamplingParams(temperature=0.5)
    for item in dataclasses.fields(SamplingParams):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(params, item.name, 1)
    with pytest.raises(TypeError):
        SamplingParams(1)  # type: ignore[call-arg]


def test_a_changed_copy_is_validated_again_and_knows_its_own_stop_strings() -> None:
    params = SamplingParams(stop="a")
    assert dataclasses.replace(params, stop=("b", "c")).stop_strings == ("b", "c")
    with pytest.raises(ValueError, match="temperature"):
        dataclasses.replace(params, temperature=-1)


def test_token_ids_and_counts_are_checked_against_a_vocabulary() -> None:
    fits = SamplingParams(logit_bias={9: 1.0}, stop_token_ids=(9,), logprobs=10, prompt_logprobs=10)
    fits.check_vocabulary(10)
    for params, named in (
        (SamplingParams(logit_bias={0: 1.0, 10: 1.0}), "a token id is 10, it must be below 10"),
        (SamplingParams(stop_token_ids=(0, 12)), "a token id is 12, it must be below 10"),
        (SamplingParams(logprobs=11), "logprobs is 11, it must be at most 10"),
        (SamplingParams(prompt_logprobs=11), "prompt_logprobs is 11, it must be at most 10"),
    ):
        with pytest.raises(ValueError, match=named):
            params.check_vocabulary(10)


@pytest.mark.parametrize("statement", ["import paceline.sampling.params", "import paceline; paceline.SamplingParams()"])
def test_asking_for_parameters_does_not_import_torch(statement: str) -> None:
    heavy = "{'torch', 'numpy', 'transformers'}"
    code = f"import sys; {statement}; print(*{heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")
