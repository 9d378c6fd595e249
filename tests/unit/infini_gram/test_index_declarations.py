"""The TOML file that declares indexes: its members, and the positions of errors."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from fastapi.routing import iter_route_contexts

from app.api.app import create_app
from app.core.settings import Settings
from app.infini_gram.declarations import (
    BYTES,
    RESERVED_NAMES,
    Declaration,
    DeclarationError,
    add_declaration,
    check_name,
    declare_removed,
    parse_declarations,
    read_declarations,
    to_toml,
)

FILE = Path("/etc/llm/indexes.toml")

WHOLE = """
[indexes.pile]
path = "pile"
tokenizer = "pile/tokenizer.json"
description = "The Pile"
delimiters = { "." = 29889 }

[indexes."v4.bytes"]
path = "/data/bytes"
tokenizer = "bytes"
"""


def test_whole_declarations_are_read() -> None:
    pile, raw = parse_declarations(WHOLE, FILE)
    assert pile == Declaration(
        "pile",
        Path("/etc/llm/pile"),
        "/etc/llm/pile/tokenizer.json",
        "The Pile",
        {".": 29889},
    )
    assert raw == Declaration("v4.bytes", Path("/data/bytes"), BYTES)
    assert raw.paths == (Path("/data/bytes"),)


def test_nothing_declares_nothing(tmp_path: Path) -> None:
    assert read_declarations(None) == []
    assert parse_declarations("", FILE) == []
    with pytest.raises(DeclarationError, match=r"gone\.toml cannot be read: No such file"):
        read_declarations(tmp_path / "gone.toml")
    (tmp_path / "latin.toml").write_bytes(b'[indexes."\xe9"]')
    with pytest.raises(DeclarationError, match="is not UTF-8"):
        read_declarations(tmp_path / "latin.toml")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[indexes.a", "at end of document"),
        ('[indexes.a]\npath="a"\n[indexes.a]\npath="b"', "at line 3"),
        ("[index.a]", "'index' is unknown"),
        ("indexes = 3", "must be tables"),
        ("[[indexes]]", "must be tables"),
        ("[indexes]\na = 3", "indexes.a: must be a table"),
        ("[indexes.a]", "indexes.a.path: missing"),
        ("[indexes.a]\npath = 3", "indexes.a.path: must be a text"),
        ("[indexes.a]\npath = []", "indexes.a.path: missing"),
        ('[indexes.a]\npath = ["a", 3]', "indexes.a.path: must be a text"),
        ('[indexes.a]\npath = ["a", ""]', "indexes.a.path: missing"),
        ('[indexes.a]\npath = ["a", "./a"]', "indexes.a.path: has a directory twice"),
        (f"[indexes.a]\npath = {[str(n) for n in range(65)]}", "has more than 64 directories"),
        ('[indexes.a]\npath = "a\\u0000"', "indexes.a.path: must be a text"),
        ('[indexes.a]\npath = "a"\nremoved = 3', "indexes.a.removed: must be a text"),
        ('[indexes.a]\npath = "a"\nremoved = []', "indexes.a.removed: missing"),
        ('[indexes.a]\npath = "a"\nremoved = ["b", "b"]', "indexes.a.removed: has a directory"),
        ('[indexes.a]\npath = ["a", "b"]\nremoved = "./b"', "indexes.a.removed: /etc/llm/b is the"),
        ('[indexes.a]\npath = "a"\ntokeniser = "bytes"', "indexes.a.tokeniser: unknown"),
        ('[indexes.a.b]\npath = "a"', "indexes.a.b: unknown"),
        ('[indexes.a]\npath = "a"\ndelimiters = {"." = 16777216}', "indexes.a.delimiters: must"),
        ('[indexes.a]\npath = "a"\ndelimiters = {"." = true}', "indexes.a.delimiters: must"),
        ('[indexes.v1]\npath = "a"', "the beginning of other routes"),
        ('[indexes.Results]\npath = "a"', "the beginning of other routes"),
        ('[indexes."../a"]\npath = "a"', "not a plain name"),
        ('[indexes.a]\npath = "a"\n[indexes.A]\npath = "b"', "in its case only"),
    ],
)
def test_what_is_wrong_is_reported_with_its_place(text: str, problem: str) -> None:
    with pytest.raises(DeclarationError) as raised:
        parse_declarations(text, FILE)
    assert str(raised.value).startswith(f"{FILE}: ")
    assert problem in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "a b", "-a", "_a", "é", "a\n", "a%2f", "x" * 129, "docs", "V1"]
)
def test_names_that_cannot_be(name: str) -> None:
    with pytest.raises(DeclarationError):
        check_name(name)


@pytest.mark.parametrize("name", ["a", "olmo-2-0325-32b", "v4_pileval.llama", "0"])
def test_names_that_can(name: str) -> None:
    assert check_name(name) == name


def test_no_index_can_hide_a_route_of_ours() -> None:
    values = {"host": "db", "user": "u", "password": "p", "name": "n"}
    settings = Settings.model_validate({f"database_{key}": text for key, text in values.items()})
    routes = list(iter_route_contexts(create_app(settings).routes))
    assert len(routes) > 90
    segments = {route.path.split("/")[1] for route in routes if route.path}
    assert {one for one in segments if one and not one.startswith("{")} <= RESERVED_NAMES


# --- Writing ------------------------------------------------------------------------------------


def test_what_is_there_stays(tmp_path: Path) -> None:
    file = tmp_path / "indexes.toml"
    there = '# mine\n[indexes.a]\npath = "a"  # here'
    file.write_text(there)
    file.chmod(0o640)
    added = Declaration("b", tmp_path / 'odd "dir\\', str(tmp_path / "t.json"), 'An "é\x7f"\n')
    add_declaration(file, added)
    assert file.read_text().startswith(f"{there}\n\n")
    assert file.stat().st_mode & 0o777 == 0o640
    first, second = read_declarations(file)
    assert (first.name, second) == ("a", added)
    # A path below the file's directory is written relative to it.
    assert str(tmp_path) not in file.read_text()
    with pytest.raises(DeclarationError, match="twice"):
        add_declaration(file, added)
    assert len(read_declarations(file)) == 2
    assert [one.name for one in tmp_path.iterdir()] == ["indexes.toml"]


def test_several_directories(tmp_path: Path) -> None:
    text = '[indexes.a]\npath = ["x/a", "/data/b"]\ntokenizer = "t.json"'
    (found,) = parse_declarations(text, tmp_path / "indexes.toml")
    assert found.paths == (tmp_path / "x/a", Path("/data/b"))
    assert parse_declarations(to_toml(found, tmp_path), tmp_path / "indexes.toml") == [found]


def test_removed_documents(tmp_path: Path) -> None:
    file = tmp_path / "indexes.toml"
    text = '[indexes.a]\npath = "a"\nremoved = ["x/r", "/data/r"]\ntokenizer = "bytes"'
    (found,) = parse_declarations(text, file)
    assert found.removed_paths == (tmp_path / "x/r", Path("/data/r"))
    assert found.all_paths == (tmp_path / "a", tmp_path / "x/r", Path("/data/r"))
    assert parse_declarations(to_toml(found, tmp_path), file) == [found]


def test_the_line_of_removed_documents_is_added_to_its_table(tmp_path: Path) -> None:
    file = tmp_path / "indexes.toml"
    there = '# [indexes.b]\n[indexes.a]\npath = "a"\n\n[indexes."b"]  # mine\npath = ["b",\n"c"]\n'
    file.write_text(there)
    before, second = read_declarations(file)
    wanted = replace(second, removed_paths=(tmp_path / "r",))
    declare_removed(file, wanted)
    assert file.read_text() == there.replace("# mine\n", '# mine\nremoved = "r"\n')
    assert read_declarations(file) == [before, wanted]
    dotted = 'indexes.a.path = "a"\n'
    file.write_text(dotted)
    with pytest.raises(DeclarationError, match="has no table of 'a' that can be extended"):
        declare_removed(file, replace(before, removed_paths=(tmp_path / "r",)))
    assert file.read_text() == dotted


def test_a_new_file(tmp_path: Path) -> None:
    added = Declaration("b", Path("/data/b"), BYTES)
    add_declaration(tmp_path / "indexes.toml", added)
    assert read_declarations(tmp_path / "indexes.toml") == [added]
    assert tomllib.loads(to_toml(added)) == {
        "indexes": {"b": {"path": "/data/b", "tokenizer": "bytes"}}
    }


def test_a_tokenizer_inside_the_index_needs_no_words(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "tokenizer.json").write_text("{}")
    text = '[indexes.a]\npath = "a"\n[indexes.b]\npath = "b"'
    a, b = parse_declarations(text, tmp_path / "indexes.toml")
    assert a.tokenizer == str(tmp_path / "a" / "tokenizer.json")
    assert b.tokenizer == BYTES
