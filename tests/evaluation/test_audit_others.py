"""The same statistics on engines that are not ours: what is exact passes, what is biased is caught."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline import SamplingParams
from paceline.evaluation.audit import Size
from paceline.evaluation.audit.others import audit_engine, audit_other
from paceline.evaluation.audit.server import audit_server, complete
from tests.evaluation.test_audit import PROMPTS, folders  # noqa: F401
from tests.fakes import Table

SIZE = Size(contexts=24, trials=60, ahead=2)


class Fake:
    """An engine over tables; `law` says what its first assisted token is drawn from, `plain` what any token is."""

    name = "fake"
    vocab_size = 8

    def __init__(self, fault: str) -> None:
        self.fault, self.tables = fault, (Table(8, 2, 1), Table(8, 2, 2))

    def encode(self, text: str) -> list[int]:
        return [ord(c) % 8 for c in text[:6]]

    def logits(self, context: Sequence[int], more: Sequence[int], *, draft: bool) -> torch.Tensor:
        rows = [self.tables[draft].row([*context, *more[:t]]) for t in range(len(more) + 1)]
        return torch.from_numpy(np.log(np.array(rows)))

    def _law(self, tokens: Sequence[int], draft: bool) -> Any:
        p, q = (table.row(tokens) for table in self.tables)
        if draft and self.fault == "accepts too much":
            return 0.7 * p + 0.3 * q
        return p**2 / (p**2).sum() if self.fault == "another temperature" else p

    def sample(self, context: Sequence[int], count: int, length: int, *, draft: bool, seed: int) -> list[list[int]]:
        rng, found = np.random.default_rng(seed), []
        for _ in range(count):
            tokens: list[int] = []
            while len(tokens) < length:
                tokens.append(int(rng.choice(8, p=self._law([*context, *tokens], draft))))
            found.append(tokens)
        return found


@pytest.mark.parametrize(
    ("fault", "verdict"),
    [("", "exact"), ("accepts too much", "not exact"), ("another temperature", "proves nothing")],
)
def test_an_engine_is_held_against_its_own_target(fault: str, verdict: str) -> None:
    certificate = audit_engine(
        Fake(fault), SamplingParams(), ["abcdef", "fedcba"], SIZE, seed=0, out=None, say=lambda text: None, subject={}
    )
    assert certificate.verdict == verdict
    assert all(control.caught for control in certificate.controls)


def test_other_prompts_are_another_audit(tmp_path: Path) -> None:
    def run(prompt: str) -> None:
        audit_engine(
            Fake(""), SamplingParams(), [prompt], SIZE, seed=0, out=tmp_path, say=lambda text: None, subject={}
        )

    run("abcdef")
    run("abcdef")
    with pytest.raises(ValueError, match="holds an audit with another setting"):
        run("fedcba")


def test_the_assisted_generation_of_transformers(folders: tuple[str, str], tmp_path: Path) -> None:  # noqa: F811
    size = Size(contexts=8, trials=25, ahead=2)
    certificate = audit_other(
        "transformers",
        *folders,
        3,
        SamplingParams(temperature=0.8),
        PROMPTS,
        size,
        seed=0,
        out=tmp_path,
        say=lambda text: None,
    )
    assert certificate.subject["params"]["top_k"] == 50
    assert certificate.doubts == []
    assert certificate.verdict != "not exact"
    assert {c.fault: c.caught for c in certificate.controls}["accept everything"]


def test_other_engines_are_asked_for_temperature_and_filters_alone(tmp_path: Path) -> None:
    for params, match in (
        (SamplingParams(presence_penalty=1.0), "presence_penalty is 1.0"),
        (SamplingParams(temperature=0), "need chance"),
    ):
        with pytest.raises(ValueError, match=match):
            audit_other("transformers", "t", "d", 3, params, None, SIZE, seed=0, out=tmp_path, say=lambda text: None)


@pytest.mark.skipif(find_spec("openvino_genai") is not None, reason="it is installed")
def test_an_engine_that_is_not_installed_is_named_with_the_cure(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pip install openvino-genai"):
        audit_other("openvino", "t", "d", 3, SamplingParams(), None, SIZE, seed=0, out=tmp_path, say=lambda text: None)


class Server(BaseHTTPRequestHandler):
    """Completions over a table of eight letters; `bias` of the tokens are the most probable one."""

    bias = 0.0
    table = Table(8, 2, 3)

    def do_POST(self) -> None:
        if self.headers["Authorization"] == "Bearer wrong":
            self._answer("no such key", 401)
            return
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        rng = np.random.default_rng(asked["seed"])
        tokens = [ord(c) % 8 for c in asked["prompt"]]
        names, own, top = [], [], []
        for _ in range(asked["max_tokens"]):
            p = self.table.row(tokens)
            token = int(p.argmax()) if rng.random() < self.bias else int(rng.choice(8, p=p))
            best = np.argsort(-p)[: asked["logprobs"]]
            names.append(f"t{token}")
            own.append(float(np.log(p[token])))
            top.append({f"t{i}": float(np.log(p[i])) for i in best})
            tokens.append(token)
        choice = {"text": "", "logprobs": {"tokens": names, "token_logprobs": own, "top_logprobs": top}}
        self._answer({"choices": [choice if asked["model"] != "silent" else {"text": "", "logprobs": None}]})

    def _answer(self, body: Any, code: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Biased(Server):
    bias = 0.15


@pytest.fixture(params=[Server, Biased])
def address(request: pytest.FixtureRequest) -> Iterator[tuple[str, float]]:
    server = HTTPServer(("127.0.0.1", 0), request.param)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1", request.param.bias
    server.shutdown()
    server.server_close()


def test_a_server_is_held_against_its_own_word(address: tuple[str, float]) -> None:
    url, bias = address
    texts = [f"prompt {chr(97 + n)}{chr(100 + 3 * n % 8)}" for n in range(12)]
    certificate = audit_server(
        url, "m", SamplingParams(), texts, replace(SIZE, trials=60), seed=0, out=None, say=lambda text: None
    )
    assert certificate.verdict == ("not exact" if bias else "exact")
    assert certificate.controls[0].caught
    assert "not that these are the target's" in certificate.levels[0].covers


def test_the_key_of_a_server_comes_from_the_environment(
    address: tuple[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "wrong")
    body = {"model": "m", "prompt": "a", "max_tokens": 1, "n": 1, "logprobs": 5, "seed": 0}
    with pytest.raises(ValueError, match=r"answered 401: \"no such key\""):
        complete(address[0], body)
    monkeypatch.setenv("OPENAI_API_KEY", "right")
    assert complete(address[0], body)


def test_a_server_without_log_probabilities_is_told_of(address: tuple[str, float]) -> None:
    body = {"prompt": "a", "max_tokens": 1, "logprobs": 5, "seed": 0}
    with pytest.raises(ValueError, match="gave no log-probabilities"):
        complete(address[0], {**body, "model": "silent"})
    with pytest.raises(ValueError, match="no address"):
        complete("file:///etc/passwd", body)
    with pytest.raises(ValueError, match="temperature 1"):
        audit_server(address[0], "m", SamplingParams(top_p=0.9), None, SIZE, seed=0, out=None, say=lambda text: None)
