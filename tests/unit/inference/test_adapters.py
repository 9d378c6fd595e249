"""Adapters of a model repository: names, teams, and files that are wrong or change."""

import os
from pathlib import Path
from typing import Any

import orjson
import pytest

from app.inference.adapters import AdapterFiles, Adapters, full_name, read_adapters


def write(version: Path, **files: Any) -> Path:
    """The files of an entry's version, by name without `.json`; returns its model.json."""
    version.mkdir(parents=True, exist_ok=True)
    for name, content in {"model": {"model": "m", "enable_lora": True}, **files}.items():
        (version / f"{name}.json").write_bytes(orjson.dumps(content))
    return version / "model.json"


def test_names_are_in_order(tmp_path: Path) -> None:
    file = write(tmp_path, multi_lora={"sheep": "/s", "dog": "models/m/1/dog"})
    assert read_adapters(file) == Adapters(("dog", "sheep"))


def test_a_model_that_enables_none_has_none(tmp_path: Path) -> None:
    file = write(tmp_path, model={"model": "m"}, multi_lora={"sheep": "/s"})
    assert read_adapters(file) == Adapters()


def test_enabling_may_be_text_as_in_nvidias_examples(tmp_path: Path) -> None:
    file = write(tmp_path, model={"enable_lora": "true"}, multi_lora={"sheep": "/s"})
    assert read_adapters(file).names == ("sheep",)


@pytest.mark.parametrize(
    ("team", "names"), [("red", ["dog", "sheep"]), ("blue", ["dog"]), (None, [])]
)
def test_an_adapter_may_belong_to_teams(tmp_path: Path, team: str | None, names: list[str]) -> None:
    lora, teams = {"sheep": "/s", "dog": "/d"}, {"sheep": ["red", "green"]}
    adapters = read_adapters(write(tmp_path, multi_lora=lora, adapter_teams=teams))
    assert adapters.of_team(team) == names
    assert [one for one in ("dog", "sheep", "cat") if adapters.allows(one, team)] == names


@pytest.mark.parametrize(
    "files",
    [
        {"multi_lora": []},
        {"multi_lora": {"a:b": "/x"}},
        {"multi_lora": {"": "/x"}},
        {"multi_lora": {"line\n": "/x"}},
        {"multi_lora": {str(number): "/x" for number in range(1001)}},
        {"multi_lora": {"sheep": "/s"}, "adapter_teams": {"dog": ["red"]}},
        {"multi_lora": {"sheep": "/s"}, "adapter_teams": {"sheep": "red"}},
        {"multi_lora": {"sheep": "/s"}, "adapter_teams": {"sheep": [1]}},
        {"multi_lora": {"sheep": "/s"}, "adapter_teams": [["sheep"]]},
    ],
)
async def test_wrong_files_open_no_adapter(tmp_path: Path, files: dict[str, Any]) -> None:
    write(tmp_path / "m" / "1", **files)
    assert await AdapterFiles(tmp_path).read(["m"]) == {"m": Adapters()}


async def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    files = AdapterFiles(tmp_path)
    assert await files.read(["m"]) == {"m": Adapters()}  # there is no model yet
    version = tmp_path / "m" / "1"
    write(version)
    assert await files.read(["m"]) == {"m": Adapters()}
    write(version, multi_lora={"sheep": "/s"})
    assert (await files.read(["m"]))["m"].names == ("sheep",)
    write(version, multi_lora={"sheep": "/s"}, adapter_teams={"sheep": ["red"]})
    assert (await files.read(["m"]))["m"].of_team("blue") == []
    (version / "multi_lora.json").write_text("{")
    os.utime(version / "multi_lora.json", (1, 1))
    assert await files.read(["m"]) == {"m": Adapters()}


def test_full_names() -> None:
    assert [full_name("demo", None), full_name("demo", "sheep")] == ["demo", "demo:sheep"]
