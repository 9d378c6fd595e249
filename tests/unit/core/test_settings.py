"""Settings: required ones, bounds, addresses, and the committed environment files."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from app.core.settings import Settings
from app.core.settings.fields import split_address

ROOT = Path(__file__).resolve().parents[3]
REQUIRED = {
    "LLM_DATABASE_URL": "db",
    "LLM_DATABASE_ADMIN_USER": "u",
    "LLM_DATABASE_PASSWORD": "p",
    "LLM_DATABASE_DB": "d",
}
ALIASES = {field.alias or name for name, field in Settings.model_fields.items()}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """None of the service's settings but the required ones."""
    for name in (*ALIASES, *OLD_NAMES):
        monkeypatch.delenv(name, raising=False)
    for name, value in REQUIRED.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_the_originals_names_are_enough() -> None:
    settings = Settings()
    assert settings.database_addresses() == [("db", 5432)]
    assert settings.host == "127.0.0.1"
    assert settings.port == 8887


def test_several_database_servers(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("LLM_DATABASE_URL", "db1, db2:5433,[::1]:5434")
    assert Settings().database_addresses() == [("db1", 5432), ("db2", 5433), ("::1", 5434)]
    environment.setenv("LLM_DATABASE_URL", ",")
    with pytest.raises(ValidationError, match="LLM_DATABASE_URL"):
        Settings()


@pytest.mark.parametrize("name", REQUIRED)
def test_required_settings_have_no_default(environment: pytest.MonkeyPatch, name: str) -> None:
    environment.delenv(name)
    with pytest.raises(ValidationError, match=name):
        Settings()


def test_the_password_is_not_shown() -> None:
    assert "'p'" not in repr(Settings())
    assert "LLM_DATABASE_PASSWORD" not in str(Settings())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LLM_PORT", "-1"), ("LLM_PORT", "65536"), ("LLM_PORT", "x"), ("LLM_WORKER_SLOTS", "0"),
        ("LLM_LEASE_SECONDS", "0.5"), ("LLM_MAX_BODY_BYTES", "10"), ("LLM_MAX_ATTEMPTS", "0"),
        ("LLM_DEFAULT_DEADLINE_SECONDS", "0"), ("LLM_DATABASE_POOL_SIZE", "1"),
        ("LLM_FLUSH_SECONDS", "0"), ("LLM_POLL_SECONDS", "-1"), ("LLM_MAX_QUEUED", "0"),
        ("LLM_DATABASE_DB", ""), ("LLM_MAX_WAIT_SECONDS", "601"), ("LLM_SHUTDOWN_GRACE_SECONDS", "nan"),
    ],
)  # fmt: skip
def test_values_out_of_bounds_are_refused(
    environment: pytest.MonkeyPatch, name: str, value: str
) -> None:
    environment.setenv(name, value)
    with pytest.raises(ValidationError, match=name):
        Settings()


def test_every_alias_is_upper_case_and_ours_or_the_originals() -> None:
    assert all(name.isupper() for name in ALIASES)
    assert all(name.startswith(("LLM_", "TRITON_", "JWT_", "OTEL_", "HF_")) for name in ALIASES)


OLD_NAMES = {
    "LLM_GRACE_SECONDS": ("LLM_SHUTDOWN_GRACE_SECONDS", "shutdown_grace_seconds", "71"),
    "LLM_RETAIN_RESULTS_SECONDS": (
        "LLM_RESULTS_RETENTION_SECONDS", "results_retention_seconds", "72",
    ),
    "LLM_RETAIN_PROMPTS_SECONDS": (
        "LLM_PROMPTS_RETENTION_SECONDS", "prompts_retention_seconds", "73",
    ),
    "LLM_RETAIN_LOGS_DAYS": ("LLM_LOGS_RETENTION_DAYS", "logs_retention_days", "74"),
    "LLM_FAILED_ATTEMPTS_PER_MINUTE": (
        "LLM_AUTH_FAILURES_PER_MINUTE", "auth_failures_per_minute", "75",
    ),
    "INDEXES_FILE": ("LLM_INDEXES_FILE", "indexes_file", "76"),
}  # fmt: skip


@pytest.mark.parametrize("old", OLD_NAMES)
def test_old_names_are_still_accepted(environment: pytest.MonkeyPatch, old: str) -> None:
    new, field, value = OLD_NAMES[old]
    environment.setenv(old, value)
    assert str(getattr(Settings(), field)).removesuffix(".0") == value
    environment.setenv(new, "99")  # the new name wins
    assert str(getattr(Settings(), field)).removesuffix(".0") == "99"
    if old != "INDEXES_FILE":
        environment.delenv(new)
        environment.setenv(old, "x")
        with pytest.raises(ValidationError, match=f"{old}|{new}"):
            Settings()


def test_every_default_is_within_its_own_bounds() -> None:
    defaults = {
        name: field.default
        for name, field in Settings.model_fields.items()
        if not field.is_required()
    }
    Settings.model_validate(Settings().model_dump() | defaults)


def test_hosts_are_a_list_by_commas(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("LLM_ALLOWED_HOSTS", "a.example, b.example")
    assert Settings().allowed_hosts == ["a.example", "b.example"]
    environment.setenv("LLM_ALLOWED_HOSTS", "*")
    assert Settings().allowed_hosts == ["*"]


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("db", "db", 9), ("db:1", "db", 1), ("http://db:1/", "db", 1), ("http://db", "db", 9),
        ("[::1]:1", "::1", 1), ("[::1]", "::1", 9), ("10.0.0.1:80", "10.0.0.1", 80),
    ],
)  # fmt: skip
def test_addresses(address: str, host: str, port: int) -> None:
    assert split_address(address, 9) == (host, port)


def read_env_file(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text().splitlines()
    pairs = [line.split("=", 1) for line in lines if line and not line.startswith("#")]
    return {pair[0]: pair[1] for pair in pairs}


def test_the_api_environment_file_names_only_settings(environment: pytest.MonkeyPatch) -> None:
    values = read_env_file(".env.api.dev")
    assert values.keys() >= REQUIRED.keys()
    assert values.keys() <= ALIASES
    for name, value in values.items():
        environment.setenv(name, value)
    settings = Settings()
    assert (
        settings.allow_unauthenticated
    )  # it binds a container's address: a warning at every start
    database = read_env_file(".env.db.dev")
    assert database == {
        "POSTGRES_USER": values["LLM_DATABASE_ADMIN_USER"],
        "POSTGRES_PASSWORD": values["LLM_DATABASE_PASSWORD"],
        "POSTGRES_DB": values["LLM_DATABASE_DB"],
    }


def test_tritons_secret_is_one_for_all_servers_or_one_each(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("TRITON_GRPC_SERVICE", "a:1,b:1")
    environment.setenv("TRITON_HTTP_SERVICE", "")
    environment.setenv("TRITON_METRICS_SERVICE", "")
    for value, secrets in (
        ("", [None, None]),
        ("of-both-servers", ["of-both-servers"] * 2),
        ("of-the-first, of-the-second", ["of-the-first", "of-the-second"]),
    ):
        environment.setenv("LLM_TRITON_SECRET", value)
        settings = Settings()
        assert settings.triton_secrets() == secrets
        assert "of-" not in repr(settings)
    for value in ("short", "of-a-server,of-b-server,of-c-server", "with a blank", "x" * 257):
        environment.setenv("LLM_TRITON_SECRET", value)
        with pytest.raises(ValidationError, match="LLM_TRITON_SECRET") as error:
            Settings()
        assert value not in str(error.value)
