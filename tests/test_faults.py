"""Faults that other projects shipped, and the tests here that would catch each of them.

Tests carry the number as `@pytest.mark.fault(n)`; `pytest -m fault` runs them all.
"""

from __future__ import annotations

import ast
from pathlib import Path

FAULTS = {
    1: "the q in the ratio is not the distribution the token was drawn from",
    2: "a sampling parameter holds without speculation and is dropped with it",
    3: "the recovered token is drawn from p, the ratio is about the wrong token, or u comes from a coarse grid",
    4: "text goes on behind a stop inside an accepted block, or a stop is hidden, or counts disagree with the text",
    5: "the context limit of target or draft ends the process instead of the answer",
    6: "seeds are ignored, log-probabilities are the draft's, streaming drops tokens of a block",
    8: "ragged acceptance in a batch mixes up positions or caches",
    9: "vocabularies that differ, or are padded differently, are taken for the same",
    10: "nobody can tell draft, verification and overhead apart when it is slower",
    11: "acceptance counts rounds that drafted nothing, or mixes conditional and marginal rates",
    13: "random numbers are shared between proposal, acceptance and recovery, or can be moved from outside",
}
"""Two kinds cannot occur yet: there is no grammar mode (7) and no training (12)."""


def test_every_fault_kind_that_can_occur_has_a_test_of_its_own() -> None:
    marked: set[int] = set()
    for path in Path(__file__).parent.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                for decorator in node.decorator_list:
                    if ast.unparse(decorator).startswith("pytest.mark.fault(") and isinstance(decorator, ast.Call):
                        marked |= {ast.literal_eval(argument) for argument in decorator.args}
    assert marked == set(FAULTS)
