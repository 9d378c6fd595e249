"""`make download` and `make model`: what they fetch, what they write, what they refuse."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from app.inference.model_repository import QUANTIZATIONS
from app.inference.prompts import read_format
from tests.conftest import ROOT
from tests.model_hub import model_hub

TINY = {
    "config.json": b'{"max_position_embeddings": 256}',
    "model.safetensors": b"weights",
    "tokenizer_config.json": b'{"chat_template": "{{ messages }}"}',
}


def run(
    *arguments: str | Path, cwd: Path, hub: str = "http://127.0.0.1:9"
) -> subprocess.CompletedProcess[str]:
    """`python -m app model ...` with a data directory of the test's own."""
    environment: Mapping[str, str] = {
        **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
        "HF_ENDPOINT": hub,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(cwd / "home"),
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.run(
        [sys.executable, "-m", "app", "model", *arguments, "--data", cwd / "data"],
        cwd=cwd, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def write(cwd: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run("write", *arguments, "--models", cwd / "models", cwd=cwd)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A local model, with a file that is not to be served."""
    directory = tmp_path / "Tiny Model"
    directory.mkdir()
    for name, content in TINY.items():
        (directory / name).write_bytes(content)
    (directory / "pytorch_model.bin").write_bytes(b"a pickle")
    return directory


@pytest.mark.trial
def test_a_download_brings_the_files_once(tmp_path: Path) -> None:
    with model_hub("owner/tiny", {**TINY, "pytorch_model.bin": b"a pickle"}) as (url, fetched):
        first = run("download", "owner/tiny", cwd=tmp_path, hub=url)
        assert first.returncode == 0, first.stderr
        assert "owner/tiny is downloaded" in first.stdout
        assert sorted(fetched) == sorted(TINY)
        directory = tmp_path / "data" / "weights" / "owner--tiny"
        assert str(directory) in first.stdout
        assert {name: (directory / name).read_bytes() for name in TINY} == TINY
        assert run("download", "owner/tiny", cwd=tmp_path, hub=url).returncode == 0
        assert len(fetched) == len(TINY)
    # Downloaded models need no hub.
    written = write(tmp_path, "owner/tiny")
    assert written.returncode == 0, written.stderr
    assert (tmp_path / "models" / "tiny" / "1" / "weights" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("owner/tiny", "owner/tiny cannot be downloaded: "),
        (".", "MODEL=. is a local directory: there is nothing to download."),
        ("", "MODEL is missing: give a Hugging Face id or a directory"),
        ("/nowhere", "MODEL=/nowhere is neither a directory nor a Hugging Face id"),
    ],
)
def test_a_download_that_is_impossible_ends_in_one_line(
    model: str, words: str, tmp_path: Path
) -> None:
    ended = run("download", model, cwd=tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.startswith(words)
    assert ended.stderr.count("\n") == 1


def test_an_entry_holds_all_that_a_container_needs(weights: Path, tmp_path: Path) -> None:
    done = write(tmp_path, weights, "--quantization", "awq", "--max-model-len", "200")
    assert done.returncode == 0, done.stderr
    assert "docker-compose --profile gpu up" in done.stdout
    repository = tmp_path / "models"
    entry = repository / "Tiny-Model"
    assert [path.name for path in repository.iterdir()] == ["Tiny-Model"]
    assert json.loads((entry / "1" / "model.json").read_text()) == {
        "model": "models/Tiny-Model/1/weights",
        "max_model_len": 200,
        "gpu_memory_utilization": 0.9,
        "quantization": "awq",
    }
    config = (entry / "config.pbtxt").read_text()
    for parameter in ("ENABLE_VLLM_HEALTH_CHECK", "REPORT_CUSTOM_METRICS"):
        assert f'{{ key: "{parameter}" value: {{ string_value: "true" }} }}' in config
    files = {path.name: path for path in (entry / "1" / "weights").iterdir()}
    assert sorted(files) == sorted(TINY)
    assert not any(path.is_symlink() for path in files.values())
    assert files["model.safetensors"].samefile(weights / "model.safetensors")  # no second copy
    found = read_format(repository, "Tiny-Model")
    assert found is not None
    assert found.template is not None


@pytest.mark.trial  # starts the command twice
def test_an_entry_is_written_again_under_its_name(weights: Path, tmp_path: Path) -> None:
    for length in ("100", "200"):
        assert write(tmp_path, weights, "--name", "mine", "--max-model-len", length).returncode == 0
    model_json = tmp_path / "models" / "mine" / "1" / "model.json"
    assert json.loads(model_json.read_text())["max_model_len"] == 200


def test_an_entry_of_another_hand_is_kept(weights: Path, tmp_path: Path) -> None:
    (tmp_path / "models" / "demo" / "1").mkdir(parents=True)
    ended = write(tmp_path, weights, "--name", "demo")
    assert ended.returncode == 1
    assert "choose another name with NAME=" in ended.stderr
    assert list((tmp_path / "models").iterdir()) == [tmp_path / "models" / "demo"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--quantization", "bitsandbytes"], "QUANTIZATION=bitsandbytes is not a method of vLLM"),
        (["--max-model-len", "0"], "MAX_MODEL_LEN=0 must be at least 1"),
        (["--name", "a/b"], "NAME=a/b must be letters, digits"),
        (["--engine-option", "max_num_sqes=1"], "--engine-option: max_num_sqes: is not an option"),
        (["--engine-option", "model=/etc"], "--engine-option: model: cannot be set"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    arguments: list[str], words: str, weights: Path, tmp_path: Path
) -> None:
    ended = write(tmp_path, weights, *arguments)
    assert ended.returncode == 1
    assert ended.stderr.startswith(words)
    assert ended.stderr.count("\n") == 1
    assert not (tmp_path / "models").exists()


def test_options_of_the_engine_are_in_its_file(weights: Path, tmp_path: Path) -> None:
    """An operator's own entry may have what a launch needs a permission for."""
    given = {"tensor_parallel_size": 2, "hf_overrides": {"a": 1}, "load_format": "tensorizer"}
    words = ["--engine-option=hf-overrides={\"a\": 1}", "--engine-option=tensor_parallel_size=2",
             "--engine-option=load_format=tensorizer"]  # fmt: skip
    ended = write(tmp_path, weights, *words)
    assert ended.returncode == 0, ended.stderr
    (file,) = (tmp_path / "models").glob("*/1/model.json")
    arguments = json.loads(file.read_text())
    assert {name: arguments[name] for name in given} == given


def test_a_refused_quantization_comes_with_the_known_ones(weights: Path, tmp_path: Path) -> None:
    error = write(tmp_path, weights, "--quantization", "4bit").stderr
    assert all(name in error for name in QUANTIZATIONS)


def test_weights_of_bitsandbytes_are_refused(weights: Path, tmp_path: Path) -> None:
    (weights / "config.json").write_text(
        '{"quantization_config": {"quant_method": "bitsandbytes"}}'
    )
    ended = write(tmp_path, weights)
    assert ended.returncode == 1
    assert "is quantized with bitsandbytes" in ended.stderr


def test_make_passes_its_variables_on() -> None:
    planned = subprocess.run(
        ["make", "--dry-run", "model", "MODEL=owner/tiny@main", "QUANTIZATION=fp8",
         "MAX_MODEL_LEN=99", "NAME=mine", "DATA=here"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    words = planned.stdout.split()
    for option in (
        '--quantization "fp8"',
        '--max-model-len "99"',
        '--name "mine"',
        '--data "here"',
    ):
        name, value = option.split()
        assert words[words.index(name) + 1] == value
    assert '"owner/tiny@main"' in words
