"""Files of a model's entry: its newest version, its weights, its tokenizer and special tokens."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from app.inference.tokenizer_files import (
    default_parameters,
    end_ids,
    leading_token,
    newest_version,
    read_json,
    repository_with,
    revision,
    special_ids,
    special_tokens,
    tokenizer_file,
    weights_directory,
)

WORDS = {"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4}


def make_tokenizer(*, adds_begin: bool = False) -> Tokenizer:
    made = Tokenizer(WordLevel(WORDS, unk_token="<unk>"))
    made.pre_tokenizer = Whitespace()
    made.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    made.add_tokens([AddedToken("plain")])
    if adds_begin:
        made.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return made


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def test_the_newest_version_is_the_largest_number(tmp_path: Path) -> None:
    assert newest_version(tmp_path, "m") is None
    for version in ("9", "10", "2", "old"):
        write(tmp_path / "m" / version / "model.json", {})
    write(tmp_path / "m" / "11" / "other.json", {})
    write(tmp_path / "n" / "12" / "model.json", {})
    assert newest_version(tmp_path, "m") == tmp_path / "m" / "10" / "model.json"


def test_weights_are_where_config_json_is(tmp_path: Path) -> None:
    version, elsewhere = tmp_path / "models" / "m" / "1", tmp_path / "elsewhere"
    repository = tmp_path / "models"
    assert weights_directory(repository, version, str(elsewhere)) is None
    write(version / "config.json", {})
    assert weights_directory(repository, version, "") is None
    assert weights_directory(repository, version, "owner/name") == version
    write(elsewhere / "config.json", {})
    assert weights_directory(repository, version, str(elsewhere)) == elsewhere
    inside = repository / "m" / "1" / "weights"
    assert weights_directory(repository, version, "models/m/1/weights") == version
    write(inside / "config.json", {})
    assert weights_directory(repository, version, "models/m/1/weights") == inside
    assert weights_directory(repository, version, "m/1/weights") == version


def test_the_tokenizer_of_a_model_is_beside_its_weights(tmp_path: Path) -> None:
    assert tokenizer_file(tmp_path, "m") is None
    write(tmp_path / "m" / "1" / "model.json", {"model": "models/m/1/weights"})
    assert tokenizer_file(tmp_path, "m") is None
    weights = tmp_path / "m" / "1" / "weights"
    write(weights / "config.json", {})
    assert tokenizer_file(tmp_path, "m") is None
    write(weights / "tokenizer.json", {})
    assert tokenizer_file(tmp_path, "m") == weights / "tokenizer.json"


def test_a_missing_file_is_empty_and_a_list_is_refused(tmp_path: Path) -> None:
    assert read_json(tmp_path / "missing.json") == {}
    write(tmp_path / "list.json", [1])
    with pytest.raises(TypeError, match=r"list\.json is not a JSON object"):
        read_json(tmp_path / "list.json")


def test_special_tokens_have_a_text_or_an_object() -> None:
    given = {
        "bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": None, "pad_token": 7,
        "sep_token": {}, "other_token": "x",
    }  # fmt: skip
    assert special_tokens(given) == {"bos_token": "<s>", "eos_token": "</s>"}


def test_special_ids_are_of_tokens_that_are_not_text() -> None:
    assert special_ids(None) == frozenset()
    assert special_ids(make_tokenizer()) == {1, 2}


@pytest.mark.parametrize(
    ("config", "generation", "name", "ids"),
    [
        ({}, {}, None, set()), ({}, {}, "</s>", {2}), ({}, {}, "missing", set()),
        ({"eos_token_id": 7}, {"eos_token_id": [8, 9]}, "</s>", {2, 7, 8, 9}),
        ({"eos_token_id": None}, {"eos_token_id": [None, "x", 5]}, None, {5}),
    ],
)  # fmt: skip
def test_end_ids_are_those_of_all_files(
    tmp_path: Path, config: Any, generation: Any, name: str | None, ids: set[int]
) -> None:
    write(tmp_path / "config.json", config)
    write(tmp_path / "generation_config.json", generation)
    assert end_ids(make_tokenizer(), name, tmp_path) == ids
    assert end_ids(None, name, tmp_path) == ids - {2}


SAMPLING = {"temperature": 0.6, "top_k": 20, "min_p": None, "max_new_tokens": 9, "do_sample": True}


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ({}, {"temperature": 0.6, "top_k": 20}),
        ({"generation_config": "auto"}, {"temperature": 0.6, "top_k": 20}),
        ({"generation_config": "vllm"}, {}),
        (
            {"generation_config": "vllm", "override_generation_config": {"top_p": 0.5, "x": 1}},
            {"top_p": 0.5},
        ),
        ({"override_generation_config": {"top_k": 1}}, {"temperature": 0.6, "top_k": 1}),
        ({"generation_config": "models/m/other"}, {"presence_penalty": 1}),
        ({"generation_config": "models/m/missing"}, {}),
    ],
)
def test_default_parameters_are_those_of_the_engine(
    tmp_path: Path, engine: Any, expected: Any
) -> None:
    write(tmp_path / "weights" / "generation_config.json", SAMPLING)
    write(tmp_path / "m" / "other" / "generation_config.json", {"presence_penalty": 1})
    assert default_parameters(tmp_path, engine, tmp_path / "weights") == expected


def test_default_parameters_are_unknown_without_the_weights(tmp_path: Path) -> None:
    assert default_parameters(tmp_path, {}, None) is None
    assert default_parameters(tmp_path, {"generation_config": "vllm"}, None) == {}


def test_a_revision_changes_with_the_files_of_a_model(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    write(tmp_path / "1" / "model.json", {})
    write(weights / "config.json", {})
    write(weights / "a.safetensors", "x")
    file = tmp_path / "1" / "model.json"
    found = [revision(file, weights), revision(file, None)]
    assert revision(file, weights) == found[0]
    write(weights / "README.md", "no part of the model")
    assert revision(file, weights) == found[0]
    write(weights / "a.safetensors", "xx")
    found.append(revision(file, weights))
    os.utime(weights / "a.safetensors", ns=(0, 0))
    found.append(revision(file, weights))
    write(tmp_path / "1" / "multi_lora.json", {"a": "b"})
    found.append(revision(file, weights))
    write(file, {"max_model_len": 5})
    found.append(revision(file, weights))
    assert len(set(found)) == len(found)


def test_the_leading_token_is_what_the_tokenizer_adds_itself() -> None:
    assert leading_token(make_tokenizer(adds_begin=True), "<s>") == "<s>"
    assert leading_token(make_tokenizer(adds_begin=True), "</s>") == ""
    assert leading_token(make_tokenizer(adds_begin=True), None) == ""
    assert leading_token(make_tokenizer(), "<s>") == ""
    assert leading_token(None, "<s>") == ""


def test_the_first_repository_with_the_model_is_read(tmp_path: Path) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    for repository, model in ((second, "m"), (third, "m"), (first, "n")):
        (repository / model / "1").mkdir(parents=True)
        (repository / model / "1" / "model.json").write_text("{}")
    repositories = [first, second, third]
    assert repository_with(repositories, "m") == second
    assert repository_with(repositories, "n") == first
    assert repository_with(repositories, "unknown") == first
