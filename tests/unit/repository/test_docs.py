"""The documents keep up with the code: settings, error codes, links, commands."""

import re
from pathlib import Path

from pydantic import AliasChoices

from app.core.errors import FailureCode, ServiceError
from app.core.settings import Settings
from app.core.settings.observability import LogSettings
from app.ui.settings import UiSettings
from docs.generate_settings import render
from llm_api_client.config import HTTP_VARIABLE, KEY_VARIABLE, URL_VARIABLE
from tests.constraints import documented

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"


def codes(kind: type[ServiceError] = ServiceError) -> set[str]:
    return {kind.code} | {code for child in kind.__subclasses__() for code in codes(child)}


def test_settings_md_is_what_the_generator_prints() -> None:
    assert render() == (DOCS / "settings.md").read_text(), "run `make docs-settings`"


def test_every_setting_is_documented() -> None:
    text = (DOCS / "settings.md").read_text()
    missing = [f.alias for f in Settings.model_fields.values() if f"`{f.alias}`" not in text]
    assert not missing


def test_every_error_code_has_its_heading_and_no_other_has() -> None:
    text = (DOCS / "errors.md").read_text()
    headings = re.findall(r"^### (\w+)$", text, re.MULTILINE)
    assert len(headings) == len(set(headings))
    assert set(headings) == codes() | {str(code) for code in FailureCode}
    table = re.findall(r"^\| \[`(\w+)`\]\(#(\w+)\) \|", text, re.MULTILINE)
    assert all(name == anchor for name, anchor in table)
    assert {name for name, _ in table} == set(headings)


def test_the_statuses_in_the_table_are_the_codes_own() -> None:
    text = (DOCS / "errors.md").read_text()
    statuses = {}

    def collect(kind: type[ServiceError]) -> None:
        statuses[kind.code] = str(kind.status)
        for child in kind.__subclasses__():
            collect(child)

    collect(ServiceError)
    rows = re.findall(r"^\| \[`(\w+)`\]\(#\w+\) \| *(\d*) *\|", text, re.MULTILINE)
    assert {code: status for code, status in rows if status} == statuses


def test_the_table_of_constraints_has_those_of_the_engines_test() -> None:
    rows = re.findall(
        r"^\| `\{.*\| (?:enforced|refused: .*) \|$", (DOCS / "sampling.md").read_text(), re.M
    )
    assert rows == documented()


def test_settings_named_anywhere_exist() -> None:
    settings = (Settings, LogSettings, UiSettings)
    fields = [field for one in settings for field in one.model_fields.values()]
    known = {field.alias for field in fields} | {HTTP_VARIABLE, KEY_VARIABLE, URL_VARIABLE}
    renamed = [f.validation_alias for f in fields if isinstance(f.validation_alias, AliasChoices)]
    old_names = {name for alias in renamed for name in alias.choices}
    for document in [*DOCS.rglob("*.md"), ROOT / "README.md", *(ROOT / "app").rglob("*.py")]:
        is_list = document == DOCS / "settings.md" or document.parent.name == "settings"
        for name in re.findall(r"\b(?:LLM|TRITON)_[A-Z_]+[A-Z]\b", document.read_text()):
            is_prefix = any(alias and alias.startswith(f"{name}_") for alias in known)
            if name.startswith("LLM_") and not is_prefix:
                assert name in known or (is_list and name in old_names), (
                    f"{document.relative_to(ROOT)} names {name}"
                )


def test_relative_links_lead_somewhere() -> None:
    documents = [*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "models").rglob("*.md")]
    broken = []
    for document in documents:
        for target in re.findall(r"\]\((?!https?:|mailto:|#)([^)\s]+)\)", document.read_text()):
            path = target.split("#")[0]
            if not path.startswith("/") and not (document.parent / path).exists():
                broken.append(f"{document.relative_to(ROOT)}: {target}")
    assert not broken


def test_make_targets_named_in_the_readme_exist() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`make ([a-z][a-z-]*)", (ROOT / "README.md").read_text()))
    assert named <= targets


def test_files_that_documents_name_exist() -> None:
    named = re.compile(
        r"(?<![\w/.-])(?:(app|bench|db|tests|tools|triton)|(?:unit|integration|chaos|e2e))"
        r"/[\w/.-]+\.(?:py|sh|toml)\b"
    )
    missing = []
    for document in [*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        for match in named.finditer(document.read_text()):
            path = ROOT / match[0] if match[1] else ROOT / "tests" / match[0]
            if not path.exists():
                missing.append(f"{document.relative_to(ROOT)}: {match[0]}")
    assert not missing


def test_measured_figures_of_one_host_are_those_of_the_benchmarks() -> None:
    table = (DOCS / "scaling.md").read_text().partition("## One host")[2].partition("\n\n|")[2]
    rows = [line.split("|") for line in table.partition("\n\n")[0].splitlines()[2:]]
    figures = {number for row in rows for number in re.findall(r"\d+,\d{3}", row[2])}
    recorded = (DOCS / "benchmarks.md").read_text()
    assert len(figures) >= 8
    assert {one for one in figures if one not in recorded} == set()
