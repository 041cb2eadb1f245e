"""The command line, end to end on a tiny random model; the interactive parts through a real pseudo-terminal."""

from __future__ import annotations

import fcntl
import inspect
import json
import os
import pty
import re
import resource
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import load_file
from typer.testing import CliRunner

from paceline import LLM, Completion, SamplingParams, __version__
from paceline.cli import app
from paceline.conversation import Conversation
from paceline.decoding.sequence import OutputToken, Provenance
from paceline.engine.outputs import StreamChunk
from paceline.options import AnswerOptions, CompletionOptions, ModelOptions
from paceline.terminal import Screen, pieces

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
CORPUS = ["riders take turns in each other's draft to go faster than any of them could alone\n"] * 4
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def save_model(folder: Path, *, seed: int, layers: int = 1, template: str | None = TEMPLATE, merges: int = 40) -> str:
    import tokenizers
    import transformers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=258 + merges,
        special_tokens=["<|start|>", "<|end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=template)
    fast.save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        eos_token_id=1,
        bos_token_id=None,
        initializer_range=0.3,
    )
    torch.manual_seed(seed)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"), seed=0, layers=2)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("draft"), seed=1)


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Without a chat template, with another tokenizer."""
    return save_model(tmp_path_factory.mktemp("plain"), seed=2, template=None, merges=0)


@pytest.fixture(scope="module")
def llm(model: str) -> LLM:
    return LLM(model)


GREEDY = SamplingParams(temperature=0, max_tokens=24)
ASKED = ["--temperature", "0", "--max-tokens", "24"]


def run(*arguments: str, code: int = 0, **options: Any) -> Any:
    result = CliRunner().invoke(app, arguments, **options)
    assert result.exit_code == code, (result.output, result.exception)
    return result


def records(*arguments: str, **options: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run("generate", *arguments, "--json", **options).stdout.splitlines()]


def asked_of(llm: LLM, text: str, params: SamplingParams = GREEDY) -> Completion:
    return llm.chat([{"role": "user", "content": text}], params)[0]


# ---- the interface ----

TARGET = "--model --dtype --quantize --activations --kv-cache-dtype --compile --device --threads"
MODEL = f"{TARGET} --draft --draft-tokens -k --draft-p-min --verify"
SAMPLING = (
    "--temperature --top-p --top-k --min-p --repetition-penalty --presence-penalty --frequency-penalty --seed --stop"
    " --max-tokens --min-tokens --ignore-eos"
)
FROZEN = {
    "generate": f"prompts --file --chat --raw --system {MODEL} {SAMPLING} --n --logprobs --show-draft --json --compare",
    "chat": f"--system {MODEL} {SAMPLING} --show-draft",
    "tune": f"prompts {TARGET} --draft --batch {SAMPLING} --json",
    "train": "target --prompts --out --kind --draft-vocab --layers --heads --answer-temperature --max-tokens"
    " --cache-features --steps --tokens --epochs --loss --lr --unroll --tokens-per-batch --batches-per-step"
    " --gradient-checkpointing --seed --start --temperature --top-p --device --threads",
    "export": "draft --format --out --target",
    "audit": "target --prompts --chat --raw --out --contexts --trials --alarm --batch --engine --server"
    f" {MODEL} {SAMPLING}",
    "pull": "name",
    "info": "model --draft --json",
    **dict.fromkeys(
        ("bench xsum", "bench humaneval", "bench gsm8k", "bench spec-bench"),
        f"--data --out --limit -n --seed --batch {MODEL}",
    ),
    "bench sweep": f"data --out --most --tokens --limit --seed {MODEL}",
    "bench report": "folders --out",
}


def flags(group: Any, prefix: str = "") -> dict[str, list[str]]:
    """By command, those of groups among them."""
    found: dict[str, list[str]] = {}
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            found |= flags(command, f"{prefix}{name} ")
        else:
            found[prefix + name] = [flag for p in command.params for flag in (*p.opts, *p.secondary_opts)]
    return found


def test_commands_and_flags_are_frozen() -> None:
    assert flags(typer.main.get_command(app)) == {name: asked.split() for name, asked in FROZEN.items()}


def test_defaults_are_those_of_the_package() -> None:
    params = SamplingParams()
    for options in (CompletionOptions(), AnswerOptions(max_tokens=256)):
        assert options.params() == params
    assert {field.name for field in fields(CompletionOptions)} < {field.name for field in fields(SamplingParams)}
    signature = inspect.signature(LLM.__init__).parameters
    for field in fields(ModelOptions):
        assert field.name == "model" or field.default == signature[field.name].default, field.name


@pytest.mark.parametrize(
    "arguments",
    ["--help", "generate --help", "chat -h", "train -h", "export -h", "bench xsum -h", "audit -h", "--version"],
)
def test_help_imports_nothing_heavy(arguments: str) -> None:
    code = (
        "import sys, atexit; from paceline.cli import main; sys.argv[0] = 'paceline';"
        "atexit.register(lambda: print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])); main()"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments.split()], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "Usage: paceline" in done.stdout or done.stdout.startswith(f"paceline {__version__}\n")


def test_help_is_quick() -> None:
    def seconds() -> float:
        # Processor time: what the clock says depends on what else the machine does.
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before = seconds()
    subprocess.run([sys.executable, "-m", "paceline", "--help"], capture_output=True, check=True)
    assert seconds() - before < 0.5


def test_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "paceline", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"paceline {__version__}\n"


# ---- generate ----


def test_one_prompt_is_streamed_through_the_chat_template(model: str, llm: LLM) -> None:
    result = run("generate", "go faster", "--model", model, *ASKED)
    assert result.stdout == asked_of(llm, "go faster").text + "\n"
    assert "24 tokens, " in result.stderr
    assert "ms a round: draft " in result.stderr
    assert "\x1b" not in result.stderr


def test_raw_continues_the_text_and_system_goes_first(model: str, llm: LLM) -> None:
    (raw,) = records("go faster", "--raw", "--model", model, *ASKED)
    assert raw["token_ids"] == llm.generate("go faster", GREEDY)[0].token_ids
    (told,) = records("go faster", "--system", "be brief", "--model", model, *ASKED)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "go faster"}]
    assert told["token_ids"] == llm.chat(messages, GREEDY)[0].token_ids
    assert len({tuple(r["token_ids"]) for r in (raw, told)} | {tuple(asked_of(llm, "go faster").token_ids)}) == 3


def test_a_model_without_a_template_continues(plain_model: str) -> None:
    (record,) = records("go", "--model", plain_model, *ASKED)
    assert record["token_ids"] == LLM(plain_model).generate("go", GREEDY)[0].token_ids


def test_prompts_from_files_and_stdin(model: str, tmp_path: Path) -> None:
    whole, lines = tmp_path / "whole.txt", tmp_path / "lines.jsonl"
    whole.write_text("two\nlines\n\n")
    lines.write_text('{"prompt": "first", "id": 1}\n\n{"prompt": "second\\u2028"}')
    assert _prompts(model, "--file", str(whole)) == ["two\nlines\n"]
    assert _prompts(model, "zeroth", "--file", str(lines)) == ["zeroth", "first", "second\u2028"]
    assert _prompts(model, input="piped é\n") == ["piped é"]
    assert _prompts(model, "given", "-", input="piped") == ["given", "piped"]
    assert _prompts(model, "given", input="ignored") == ["given"]


def _prompts(model: str, *arguments: str, **options: Any) -> list[str]:
    found = records(*arguments, "--model", model, "--max-tokens", "1", **options)
    return [record["prompt"] for record in sorted(found, key=lambda record: record["index"])]


def test_json_tells_everything_and_its_seed_repeats_it(model: str, draft: str) -> None:
    arguments = ["one", "two", "--model", model, "--draft", draft, "-k", "3", "--n", "2", "--logprobs", "2"]
    found = records(*arguments, "--max-tokens", "9")
    assert sorted((r["index"], r["completion"]) for r in found) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for record in found:
        assert record["prompt"] == ["one", "two"][record["index"]]
        assert len(record["token_ids"]) == len(record["provenance"]) == len(record["logprobs"]) <= 9
        assert set(record["provenance"]) <= {"accepted", "recovered", "bonus", "plain"}
        assert record["finish_reason"] in ("length", "stop")
        assert record["stats"]["drafted"] > 0
        assert record["stats"]["tokens_per_second"] > 0
    seed = next(r["seed"] for r in found if r["index"] == 1)
    again = records("two", *arguments[2:], "--max-tokens", "9", "--seed", str(seed))
    assert [r["token_ids"] for r in again] == [r["token_ids"] for r in found if r["index"] == 1]


def test_every_sampling_flag_arrives(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    seen: list[SamplingParams] = []
    real = LLM.as_completed

    def spy(self: LLM, prompts: Any, params: Any, **options: Any) -> Any:
        seen.append(params)
        return real(self, prompts, params, **options)

    monkeypatch.setattr(LLM, "as_completed", spy)
    flags = (
        "--temperature 0.7 --top-p 0.9 --top-k 20 --min-p 0.01 --repetition-penalty 1.1 --presence-penalty 0.1"
        " --frequency-penalty 0.2 --seed 5 --stop xyzzy --stop plugh --max-tokens 3 --min-tokens 2 --ignore-eos --n 2"
        " --logprobs 1"
    )
    records("go", "--model", model, *flags.split())
    assert seen == [
        SamplingParams(
            temperature=0.7,
            top_p=0.9,
            top_k=20,
            min_p=0.01,
            repetition_penalty=1.1,
            presence_penalty=0.1,
            frequency_penalty=0.2,
            seed=5,
            stop=["xyzzy", "plugh"],
            max_tokens=3,
            min_tokens=2,
            ignore_eos=True,
            n=2,
            logprobs=1,
        )
    ]


def test_every_model_flag_arrives(monkeypatch: pytest.MonkeyPatch, model: str, draft: str) -> None:
    seen: list[Any] = []
    real = LLM.__init__

    def spy(self: LLM, *arguments: Any, **options: Any) -> None:
        seen.append((arguments, options))
        real(self, *arguments, **options)

    monkeypatch.setattr(LLM, "__init__", spy)
    flags = f"--model {model} --draft {draft} -k 2 --draft-p-min 0.25 --verify block --dtype bfloat16"
    flags += " --device cpu --threads 1"
    run("generate", "go", *flags.split(), "--max-tokens", "2")
    options: dict[str, Any] = {
        "draft_tokens": 2,
        "draft_p_min": 0.25,
        "verify": "block",
        "dtype": "bfloat16",
        "device": "cpu",
        "threads": 1,
    }
    others = {"quantize": None, "activations": "auto", "kv_cache_dtype": "auto", "compile": False, "max_num_seqs": 8}
    assert seen == [((model, draft), options | others)]
    run("generate", "go", "--model", model, "--draft", "none", "--quantize", "q8_0", "--max-tokens", "2")
    assert (seen[1][0], seen[1][1]["quantize"]) == ((model, None), "q8_0")
    rounded = run(
        "generate", "go", "--model", model, "--quantize", "q8_0", "--activations", "int8", "--max-tokens", "2"
    )
    assert seen[2][1]["activations"] == "int8"
    assert "multiply is rounded to int8; 'lossless' means: against this" in " ".join(rounded.stderr.split())


def test_several_prompts_are_written_under_their_headings(model: str, llm: LLM) -> None:
    result = run("generate", "one", "two\nlines", "--model", model, *ASKED)
    blocks = {f"[{i + 1}] {head}\n{asked_of(llm, text).text}\n" for i, (head, text) in enumerate(HEADS.items())}
    assert all(block in result.stdout for block in blocks)
    assert len(result.stdout) == sum(map(len, blocks))


HEADS = {"one": "one", "two...": "two\nlines"}


def test_compare_measures_both_and_checks_the_text(model: str, draft: str) -> None:
    result = run("generate", "go", "--model", model, "--draft", draft, "--compare", "-k", "4", *ASKED)
    assert re.search(r"plain +│ +24 │ +[\d.]+ │ +1.00 │", result.stdout)
    assert re.search(r"speculative +│ +24 │", result.stdout)
    assert "times the speed of plain decoding; the two texts are equal" in result.stdout
    sampled = ["go", "on", "--model", model, "--draft", draft, "-k4", "--compare", "--max-tokens", "12", "--n", "2"]
    *_, last = records(*sampled)
    assert last["comparison"]["same_text"] is None
    assert last["comparison"]["plain"]["drafted"] == 0 < last["comparison"]["speculative"]["drafted"]
    *_, last = records(*sampled, "--verify", "coupled")
    assert last["comparison"]["same_text"] is True


# ---- provenance ----


def test_marks_stand_where_there_are_no_colours(capsys: pytest.CaptureFixture[str]) -> None:
    said = [("plain", "a"), ("accepted", "b"), ("accepted", "c"), ("bonus", ""), ("recovered", "d\n"), ("bonus", "e")]
    screen = Screen(show_draft=True)
    screen.write(said)
    screen.end_line()
    screen.end_line()
    screen.legend()
    out, err = capsys.readouterr()
    assert out == "a[bc]{d\n}<e>\n"
    assert err == "tokens: [accepted] {recovered} <bonus> plain\n"


def test_colours_on_a_terminal_and_marks_with_no_color(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = [("accepted", "one\ntwo"), ("plain", "\x1b]0;title\x07\tthree")]
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    Screen(show_draft=True).write(said)
    coloured = capsys.readouterr().out
    # No background crosses the end of a line, and the model's own escape sequences do not reach the terminal.
    assert coloured == "\x1b[30;42mone\x1b[0m\n\x1b[30;42mtwo\x1b[0m\ufffd]0;title\ufffd\tthree"
    monkeypatch.setenv("NO_COLOR", "1")
    Screen(show_draft=True).write(said)
    assert capsys.readouterr().out == "[one\ntwo]\ufffd]0;title\ufffd\tthree"
    Screen(show_draft=False).write(said)
    assert capsys.readouterr().out == "one\ntwo\ufffd]0;title\ufffd\tthree"


def test_piped_text_is_the_models_own(capsys: pytest.CaptureFixture[str]) -> None:
    Screen(show_draft=False).write([("plain", "\x1b[1m\ttext \r\n")])
    assert capsys.readouterr().out == "\x1b[1m\ttext \r\n"


@pytest.mark.parametrize("several", [False, True])
def test_show_draft_changes_nothing_but_the_colours(model: str, llm: LLM, several: bool) -> None:
    prompts = ["go", "faster"] if several else ["go"]
    environment = {"FORCE_COLOR": "1", "TERM": "xterm", "NO_COLOR": None}
    drafting = ["--draft", model, "-k", "4", "--show-draft"]
    result = run("generate", *prompts, "--model", model, *drafting, *ASKED, env=environment)
    text = asked_of(llm, "go").text
    assert "\x1b[30;42m" in result.stdout
    assert text.translate({27: 0xFFFD}) in ANSI.sub("", result.stdout)


def test_pieces_of_a_cut_output_are_its_text(llm: LLM) -> None:
    whole = asked_of(llm, "go").outputs[0]
    stop = whole.text[7:9]
    completion = asked_of(llm, "go", SamplingParams(temperature=0, max_tokens=24, stop=stop))
    (output,) = completion.outputs
    assert output.stop_reason == stop
    assert len(output.token_ids) < 24
    found = list(pieces(llm.tokenizer, completion, output))
    assert "".join(text for _, text in found) == output.text == whole.text[: whole.text.index(stop)]


# ---- errors ----


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("go --model smollm2", "Did you mean 'smollm2-135m'"),
        ("go --model ./nowhere", "no model at './nowhere'"),
        ("go --temperature -1", "temperature is -1.0"),
        ("go --n 0", "n is 0"),
        ("go --logprobs 2", "add --json"),
        ("go --compare --draft none", "--compare needs a draft"),
        ("go --compare -k 0", "--compare needs a draft"),
        ("go --model MODEL -k -1", "draft_tokens is -1"),
        ("go --model MODEL --threads 0", "threads is 0"),
        ("go --model MODEL --quantize q8_0 --dtype float32", "ask for two formats"),
        ("go --model MODEL --draft ./nowhere", "no model at './nowhere'"),
        ("go --model MODEL --raw --system x", "drop --system"),
        ("go --model PLAIN --chat", "no chat template"),
        ("go --model MODEL --logprobs 9999 --json", "logprobs is 9999"),
        ("--file FOLDER/absent.txt", "absent.txt: No such file"),
        ("--file FOLDER", "Is a directory"),
        ("--file FOLDER/bad.jsonl", 'bad.jsonl, line 2: not of the form {"prompt": "text"}'),
        ("--file FOLDER/empty.jsonl", "holds no prompt"),
        ("--file FOLDER/latin.txt", "latin.txt is not UTF-8 text: byte 3 is 0xe9"),
    ],
)
def test_errors_are_one_line(arguments: str, says: str, model: str, plain_model: str, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "good"}\n["prompt"]\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    for name, value in (("MODEL", model), ("PLAIN", plain_model), ("FOLDER", str(tmp_path))):
        arguments = arguments.replace(name, value)
    result = run("generate", *arguments.split(), code=2)
    assert result.stdout == ""
    *_, last = result.stderr.splitlines()
    assert result.stderr.count("error: ") == 1
    assert last.startswith("error: ")
    assert says in last


@pytest.mark.parametrize("arguments", [["info", "./nowhere"], ["pull", "no-such-model"], ["chat", "--model", "./no"]])
def test_other_commands_fail_the_same_way(arguments: list[str]) -> None:
    result = run(*arguments, code=2)
    assert result.stderr.splitlines()[-1].startswith("error: ")


def test_what_nobody_foresaw_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    def broken(self: LLM, *arguments: Any) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(LLM, "stream", broken)
    result = CliRunner().invoke(app, ["generate", "go", "--model", model])
    assert isinstance(result.exception, RuntimeError)


# ---- interruption ----


def test_ctrl_c_keeps_the_finished_lines(model: str, tmp_path: Path) -> None:
    prompts = tmp_path / "many.jsonl"
    prompts.write_text('{"prompt": "go"}\n' * 200)
    flags = ["--json", "--model", model, "--max-tokens", "40", "--threads", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", "generate", "--file", str(prompts), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,  # what readline read ahead would be lost to communicate
    )
    assert process.stdout
    first = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    lines = (first + out).splitlines()
    assert 0 < len(lines) < 200
    assert all(len(json.loads(line)["token_ids"]) > 0 for line in lines)
    told = re.search(r"interrupted: (\d+) of 200 prompts are finished", err.decode())
    assert told
    assert len(lines) - 1 <= int(told[1]) <= len(lines)  # the interruption may come right behind a line
    assert b"Traceback" not in err


def test_ctrl_c_ends_a_stream_cleanly(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: LLM, prompt: Any, params: Any) -> Iterator[StreamChunk]:
        yield StreamChunk(text="so far", tokens=[OutputToken(5, "so far", Provenance.PLAIN)], completion=None)
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", interrupted)
    result = run("generate", "go", "--model", model, code=130)
    assert result.stdout == "so far\n"
    assert "tokens/s" not in result.stderr


# ---- pull and info ----


def test_pull_prints_where_and_how_large(model: str) -> None:
    result = run("pull", model)
    size = sum(file.stat().st_size for file in Path(model).iterdir())
    assert re.fullmatch(rf"{re.escape(model)} \({size / 1000:.1f} kB\)\n", result.stdout)


def test_info_describes_without_torch(model: str) -> None:
    code = (
        "import sys; from paceline.cli import app;"
        "app(sys.argv[1:], standalone_mode=False); print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, "info", model, "--json"]
    described, torch_is_there = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert torch_is_there == "False"
    found = json.loads(described)
    parameters = sum(tensor.numel() for tensor in load_file(Path(model) / "model.safetensors").values())
    assert found["parameters"] == parameters
    assert found["stored"] == {"F32": 4 * parameters}
    assert found["weight_memory"] == 4 * parameters
    assert found["cache_memory_per_token"] == 2 * 2 * 16 * 4
    assert found["config"]["context"] == 1024
    assert found["tokens"] == found["config"]["vocab_size"]
    assert found["eos_ids"] == [1]
    assert found["chat_template"] is True


def test_info_is_readable(model: str, plain_model: str) -> None:
    lines = dict(re.split(r"  +", line, maxsplit=1) for line in run("info", model).stdout.splitlines())
    assert lines["architecture"] == "llama"
    assert lines["layers"] == "2"
    assert lines["context"] == "1,024 tokens"
    assert lines["ends with"] == "<|end|> (1)"
    assert lines["chat template"] == "yes"
    assert lines["KV cache"] == "256 bytes a token, 262.1 kB for the whole context"
    assert re.search(r"chat template +no", run("info", plain_model).stdout)


def test_info_knows_the_draft_that_comes_with_a_model(model: str) -> None:
    fits = json.loads(run("info", model, "--draft", "smollm2-135m-eagle3", "--json").stdout)["draft"]
    assert (fits["name"], fits["fits"]) == ("smollm2-135m-eagle3", False)
    assert re.search("made for a target whose hidden_size is 576", fits["reason"])


def test_info_says_whether_a_draft_fits(model: str, draft: str, plain_model: str) -> None:
    fits = json.loads(run("info", model, "--draft", draft, "--json").stdout)["draft"]
    assert fits["fits"]
    assert fits["same_tokens"]
    assert 0 < fits["parameter_ratio"] < 1
    assert f"{draft} fits: the same tokens" in run("info", model, "--draft", draft).stdout
    other = json.loads(run("info", model, "--draft", plain_model, "--json").stdout)["draft"]
    assert other["fits"]
    assert not other["same_tokens"]
    assert other["share"] == pytest.approx(258 / 298)
    assert "86.6% of the target's tokens can be proposed" in run("info", model, "--draft", plain_model).stdout


def test_info_refuses_a_draft_of_another_tongue(model: str, monkeypatch: pytest.MonkeyPatch, plain_model: str) -> None:
    monkeypatch.setattr("paceline.proposers.vocabulary.SMALLEST_SHARE", 0.9)
    result = run("info", model, "--draft", plain_model)
    assert "does not fit: target and draft share 258 of the target's 298 tokens" in result.stdout


# ---- chat ----


def test_chat_from_a_pipe_answers_every_line(model: str, llm: LLM) -> None:
    lines = "go\n\n/stats\nfaster\n/nonsense\n/clear\ngo\n/exit\nfaster\n"
    result = run("chat", "--model", model, "--system", "be brief", *ASKED, input=lines)
    history = [{"role": "system", "content": "be brief"}]
    said = []
    for text in ("go", "faster"):
        history.append({"role": "user", "content": text})
        said.append(llm.chat(history, GREEDY)[0].text)
        history.append({"role": "assistant", "content": said[-1]})
    assert result.stdout == "".join(f"{text}\n" for text in (*said, said[0]))
    assert "there is no /nonsense" in result.stderr
    assert "forgotten" in result.stderr
    assert result.stderr.count("24 tokens, ") == 4


def test_chat_needs_a_template(plain_model: str) -> None:
    assert "no chat template" in run("chat", "--model", plain_model, input="hi\n", code=2).stderr


def conversation(llm: LLM, **params: Any) -> Conversation:
    opening = [{"role": "system", "content": "be brief"}]
    return Conversation(llm, SamplingParams(temperature=0, **params), Screen(show_draft=False), opening)


def test_a_stopped_answer_stays_as_far_as_it_came(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = conversation(llm, max_tokens=200)
    real, seen = LLM.stream, []

    def interrupted(self: LLM, prompt: Any, params: Any) -> Iterator[StreamChunk]:
        for chunk in real(self, prompt, params):
            seen.append(chunk.text)
            yield chunk
            if len("".join(seen)) > 20:
                raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", interrupted)
    talk._answer("go")
    partial = "".join(seen)
    assert talk.turns == [{"role": "user", "content": "go"}, {"role": "assistant", "content": partial}]
    out, err = capsys.readouterr()
    assert out == partial + "\n"
    assert err == "stopped\n"

    def nothing_yet(self: LLM, prompt: Any, params: Any) -> Iterator[StreamChunk]:
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(LLM, "stream", nothing_yet)
    talk._answer("again")
    assert [turn["content"] for turn in talk.turns] == ["go", partial]
    monkeypatch.setattr(LLM, "stream", real)
    talk._answer("again")
    assert len(talk.turns) == 4


def test_a_full_context_forgets_the_oldest_turns(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    talk = conversation(llm, max_tokens=8)
    question = "riders " * 60
    for i in range(8):
        talk._answer(f"{i} {question}")
    err = capsys.readouterr().err
    assert "the context of 1024 tokens is full: forgot the oldest 1 of " in err
    asked = [turn["content"][0] for turn in talk.turns[::2]]
    assert asked == [str(i) for i in range(8 - len(asked), 8)]
    assert 2 <= len(asked) < 8
    ids = llm.tokenizer.encode_chat([*talk.opening, *talk.turns])
    assert b"be brief" in b"".join(map(llm.tokenizer.token_bytes, ids))
    assert [turn["role"] for turn in talk.turns[:2]] == ["user", "assistant"]

    before = list(talk.turns)
    with pytest.raises(ValueError, match="the prompt has"):
        talk._answer("riders " * 2000)
    assert talk.turns == before


@dataclass
class Terminal:
    """A program on a pseudo-terminal of its own, whose keys are typed through it."""

    process: subprocess.Popen[bytes]
    keys: int
    seen: str = ""

    def type(self, text: str) -> None:
        os.write(self.keys, text.encode())

    def wait_for(self, pattern: str, timeout: float = 60) -> str:
        """What came up to the first match of `pattern`; what follows it is kept for the next call."""
        end = time.monotonic() + timeout
        while not (match := re.search(pattern, self.seen)):
            ready, _, _ = select.select([self.keys], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"no {pattern!r} in {self.seen!r}"
            try:
                data = os.read(self.keys, 4096)
            except OSError:  # how Linux says that the other end is closed
                data = b""
            assert data, f"ended without {pattern!r}: {self.seen!r}"
            self.seen += data.decode(errors="replace")
        before, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return before


@pytest.fixture
def terminal() -> Iterator[Any]:
    started: list[Terminal] = []

    def open_terminal(*arguments: str) -> Terminal:
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "paceline", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "dumb", "COLUMNS": "200"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C reaches it
        )
        os.close(theirs)
        started.append(Terminal(process, ours))
        return started[-1]

    yield open_terminal
    for found in started:
        if found.process.poll() is None:
            found.process.kill()
        found.process.wait()
        os.close(found.keys)


def test_chat_on_a_terminal(terminal: Any, model: str) -> None:
    flags = ["--temperature", "0", "--max-tokens", "700", "--ignore-eos", "--threads", "1"]
    talk = terminal("chat", "--model", model, *flags)
    talk.wait_for(r"Ctrl-C stops an answer\r\n> ")
    talk.type("go\n")
    talk.wait_for(r"go\r\n[^>]{5}")
    talk.type("\x03")
    assert "700 tokens" not in talk.wait_for(r"stopped\r\n> ")
    talk.type("half a line")
    talk.wait_for("half a line")
    time.sleep(0.5)  # Python's readline misses a Ctrl-C between echoing a key and waiting for the next one
    talk.type("\x03")
    talk.wait_for(r"/exit or Ctrl-D leaves\r\n> ")
    talk.type("faster\n")
    talk.wait_for(r"700 tokens, [^\n]* after \d+ prompt tokens[^\n]*\n> ")
    talk.type("/stats\n")
    talk.wait_for(r"700 tokens, [^\n]*\n> ")
    talk.type("\x04")
    assert talk.process.wait(20) == 0


def test_a_batch_on_a_terminal_shows_texts_above_the_bar(terminal: Any, model: str) -> None:
    shown = terminal("generate", "one", "two", "--model", model, "--max-tokens", "8", "--threads", "1")
    text = shown.wait_for(r"ms a round")
    for i, prompt in enumerate(("one", "two"), start=1):
        assert f"[{i}] {prompt}\r\n" in text
    assert shown.process.wait(20) == 0


@pytest.mark.model
def test_the_built_in_model_answers() -> None:
    record, compared = records(
        "What is the capital of France?", "--temperature", "0", "--max-tokens", "12", "--compare", "-k", "2"
    )
    assert "Paris" in record["text"]
    assert compared["comparison"]["same_text"] is True


@pytest.mark.parametrize(("given", "found"), [(None, "4000"), ("7", "7")])
def test_threads_wait_briefly_unless_told_otherwise(given: str | None, found: str) -> None:
    code = (
        "import os, atexit; from paceline.cli import main;"
        "atexit.register(lambda: print(os.environ['GOMP_SPINCOUNT'])); main()"
    )
    environment = {key: value for key, value in os.environ.items() if key != "GOMP_SPINCOUNT"}
    environment |= {} if given is None else {"GOMP_SPINCOUNT": given}
    done = subprocess.run(
        [sys.executable, "-c", code, "--version"], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.splitlines()[-1] == found
