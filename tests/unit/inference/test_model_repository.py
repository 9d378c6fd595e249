"""Sources of models, checks of their files, and the entries that serve them."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from app.inference.model_repository import (
    DEFAULT_MAX_MODEL_LEN,
    ModelRepositoryError,
    ModelSource,
    check_quantization,
    entry_name,
    model_length,
    parse_source,
    read_config,
    write_entry,
)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A model's directory with files of each kind, some of which an entry leaves out."""
    made = tmp_path / "weights"
    write(made / "config.json", json.dumps({"max_position_embeddings": 64}))
    write(made / "model.safetensors", "numbers")
    write(made / "additional_chat_templates" / "tool_use.jinja", "{{ tools }}")
    write(made / "additional_chat_templates" / "rag.jinja", "{{ documents }}")
    write(made / "a" / "b" / "vocab.txt", "words")
    write(made / "pytorch_model.bin", "a pickle")
    write(made / ".cache" / "download.json", "{}")
    (made / "directory.json").mkdir()
    return made


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def arguments(entry: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((entry / "1" / "model.json").read_text())
    return found


def files(directory: Path) -> set[str]:
    found = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)) for path in found}


# --- sources --------------------------------------------------------------------------------------


def test_a_source_is_a_directory_or_an_id(weights: Path) -> None:
    assert parse_source(str(weights)) == ModelSource("weights", weights.resolve())
    found = parse_source("Qwen/Qwen2.5-0.5B")
    assert found == ModelSource("Qwen2.5-0.5B", None, "Qwen/Qwen2.5-0.5B", "main")
    found = parse_source("Qwen/Qwen2.5-0.5B@v1/x")
    assert found == ModelSource("Qwen2.5-0.5B", None, "Qwen/Qwen2.5-0.5B", "v1/x")


@pytest.mark.parametrize("text", ["name", "a/b/c", "/a/b", "/a", "a/b@", "a b/c", "a/b c"])
def test_no_other_source_is_a_model(text: str) -> None:
    with pytest.raises(ModelRepositoryError, match="neither a directory nor"):
        parse_source(text)


def test_names_of_entries_have_the_characters_of_a_model_name() -> None:
    assert entry_name("My model (2)") == "My-model-2"
    assert entry_name("..a_b.c-") == "a_b.c"
    with pytest.raises(ModelRepositoryError, match="makes no model name"):
        entry_name("...")


# --- checks ---------------------------------------------------------------------------------------


def test_a_configuration_is_read(weights: Path) -> None:
    assert read_config(weights) == {"max_position_embeddings": 64}
    quantized = {"quantization_config": {"quant_method": "awq"}}
    write(weights / "config.json", json.dumps(quantized))
    assert read_config(weights) == quantized
    write(weights / "config.json", json.dumps({"quantization_config": "bitsandbytes"}))
    assert read_config(weights)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", "not valid JSON"),
        ("[]", "not a JSON object"),
        (json.dumps({"quantization_config": {"quant_method": "bitsandbytes"}}), "bitsandbytes"),
        (json.dumps({"quantization_config": {"load_in_8bit": True}}), "bitsandbytes"),
        (json.dumps({"quantization_config": {"load_in_4bit": True}}), "bitsandbytes"),
    ],
)
def test_a_wrong_configuration_is_refused(weights: Path, config: str, words: str) -> None:
    write(weights / "config.json", config)
    with pytest.raises(ModelRepositoryError, match=words):
        read_config(weights)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"architectures": ["T5ForConditionalGeneration"]}, "T5ForConditionalGeneration"),
        ({"model_type": "mt5"}, "mt5"),
        ({"is_encoder_decoder": True, "architectures": ["NovelModel"]}, "NovelModel"),
        ({"is_encoder_decoder": True}, "by its configuration"),
        ({"text_config": {"is_encoder_decoder": True}, "model_type": "blip-2"}, "blip-2"),
    ],
)
def test_an_encoder_decoder_is_refused_with_the_reason(
    weights: Path, config: dict[str, object], kind: str
) -> None:
    write(weights / "config.json", json.dumps(config))
    with pytest.raises(ModelRepositoryError) as refused:
        read_config(weights)
    assert str(refused.value) == (
        f"{weights} is an encoder-decoder model ({kind}): vLLM has no encoder that reads a text, "
        "so it cannot generate from a prompt. Choose a decoder-only model."
    )


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {}},
        {"is_encoder_decoder": False, "architectures": None, "model_type": "llama"},
        {"quantization_config": {"quant_method": "gptq", "load_in_4bit": True}},
        {"quantization_config": {"load_in_8bit": False}},
    ],
)
def test_other_models_are_not_taken_for_such(weights: Path, config: dict[str, object]) -> None:
    write(weights / "config.json", json.dumps(config))
    assert read_config(weights) == config


def test_missing_files_are_refused_by_name(weights: Path) -> None:
    (weights / "model.safetensors").unlink()
    with pytest.raises(ModelRepositoryError, match=r"no \*\.safetensors"):
        read_config(weights)
    (weights / "config.json").unlink()
    with pytest.raises(ModelRepositoryError, match=r"no config\.json"):
        read_config(weights)


def test_a_quantization_is_one_of_vllms() -> None:
    for on_cpu in (False, True):
        check_quantization(None, on_cpu=on_cpu)
        check_quantization("awq", on_cpu=on_cpu)
        with pytest.raises(ModelRepositoryError, match="QUANTIZATION=nf4"):
            check_quantization("nf4", on_cpu=on_cpu)
    check_quantization("fp8", on_cpu=False)
    with pytest.raises(ModelRepositoryError) as raised:
        check_quantization("fp8", on_cpu=True)
    text = str(raised.value)
    assert "on a CPU" in text
    assert " awq," in text
    assert " fp8," not in text
    with pytest.raises(ModelRepositoryError, match=r"of vLLM here: .* fp8,"):
        check_quantization("nf4", on_cpu=False)


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 64}, 64),
        ({"n_positions": 32, "seq_length": 16}, 32),
        ({"max_position_embeddings": None, "max_seq_len": 8}, 8),
        ({"text_config": {"max_position_embeddings": 128}, "max_position_embeddings": 1}, 128),
        ({}, None),
    ],
)
def test_the_length_of_a_model_is_under_its_familys_key(
    config: dict[str, Any], length: int | None
) -> None:
    assert model_length(config) == length


# --- entries --------------------------------------------------------------------------------------


def test_an_entry_links_its_weights(weights: Path, tmp_path: Path) -> None:
    entry = tmp_path / "repository" / "m"
    write_entry(entry, weights)
    assert (entry / "1" / "weights").readlink() == weights.resolve()
    assert arguments(entry) == {
        "model": "models/m/1/weights",
        "max_model_len": 64,
        "gpu_memory_utilization": 0.9,
    }
    assert 'backend: "vllm"' in (entry / "config.pbtxt").read_text()
    assert [path.name for path in entry.parent.iterdir()] == ["m"]


def test_an_entry_takes_the_files_of_a_model_alone(weights: Path, tmp_path: Path) -> None:
    entry = tmp_path / "m"
    write_entry(entry, weights, with_files=True)
    taken = entry / "1" / "weights"
    assert not taken.is_symlink()
    assert files(taken) == {
        "config.json",
        "model.safetensors",
        "a/b/vocab.txt",
        "additional_chat_templates/tool_use.jinja",
        "additional_chat_templates/rag.jinja",
    }
    assert (taken / "model.safetensors").read_text() == "numbers"
    assert (taken / "model.safetensors").samefile(weights / "model.safetensors")


def test_files_are_copied_where_links_are_impossible(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Path) -> None:
        raise OSError("another file system")

    monkeypatch.setattr("app.inference.model_repository.os.link", refuse)
    write_entry(tmp_path / "m", weights, with_files=True)
    copied = tmp_path / "m" / "1" / "weights" / "model.safetensors"
    assert copied.read_text() == "numbers"
    assert not copied.samefile(weights / "model.safetensors")


def test_a_full_disk_is_named_and_leaves_no_entry(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "model.safetensors")

    monkeypatch.setattr("app.inference.model_repository.os.link", refuse)
    monkeypatch.setattr("app.inference.model_repository.shutil.copyfile", refuse)
    with pytest.raises(ModelRepositoryError, match=r"safetensors: No space .* cannot be put into"):
        write_entry(tmp_path / "m", weights, with_files=True)
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("positions", "given", "length"),
    [
        (64, None, 64), (64, 32, 32), (64, 128, 128), (1_000_000, None, DEFAULT_MAX_MODEL_LEN),
        (1_000_000, 50_000, 50_000), (None, None, 2048),
    ],
)  # fmt: skip
def test_the_length_of_an_entry_is_bounded(
    weights: Path, tmp_path: Path, positions: int | None, given: int | None, length: int
) -> None:
    write(weights / "config.json", json.dumps({"max_position_embeddings": positions}))
    write_entry(tmp_path / "m", weights, max_model_len=given)
    assert arguments(tmp_path / "m")["max_model_len"] == length


def test_arguments_of_the_engine_come_last(weights: Path, tmp_path: Path) -> None:
    engine = {"gpu_memory_utilization": 0.5, "enforce_eager": True}
    write_entry(tmp_path / "m", weights, quantization="awq", engine=engine)
    found = arguments(tmp_path / "m")
    assert found["quantization"] == "awq"
    assert found["gpu_memory_utilization"] == 0.5
    assert found["enforce_eager"]


def test_an_entry_replaces_an_earlier_and_an_interrupted_one(weights: Path, tmp_path: Path) -> None:
    entry = tmp_path / "m"
    write(entry / "1" / "old.json", "{}")
    write(tmp_path / ".m.unfinished" / "1" / "half.json", "{}")
    write_entry(entry, weights)
    assert not (entry / "1" / "old.json").exists()
    assert not (entry / "1" / "half.json").exists()
    assert not (tmp_path / ".m.unfinished").exists()
    write_entry(entry, weights)
    assert (entry / "1" / "weights").is_symlink()
