"""`python -m app token`: help, arguments, JWTs. Keys need a database: see the integration tests."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from app.cli.main import main
from tests.unit.api.test_startup_checks import STRONG
from tests.unit.auth.test_jwt import (
    EC_KEY,
    ISSUED,
    OTHER_SECRET,
    PLACE,
    RSA_KEY,
    sign,
    to_jwk,
    write_keys,
)
from tests.unit.repository.test_layout import ROOT

OTHER_KEYS = {
    "RS256": rsa.generate_private_key(65537, 2048),
    "ES256": ec.generate_private_key(ec.SECP256R1()),
}
CLAIMS = '{"team_id": "tenstorrent", "token_id": "debug-test"}'


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("JWT_SECRET", STRONG)
    return monkeypatch


@pytest.mark.parametrize("path", [[], ["create"], ["list"], ["revoke"], ["jwt"], ["jwt", "encode"]])
def test_help_of_token_teaches(path: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["token", *path, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "python -m app token" in text
    if not path:
        assert "docs/authentication.md" in text
        assert all(f"token {name}" in text for name in ("create", "list", "revoke", "jwt"))


@pytest.mark.parametrize(
    "arguments",
    [
        [], ["fly"], ["create"], ["create", "--team", ""], ["create", "--team", "x" * 65],
        ["create", "--team", "a\nb"], ["create", "--team", "t", "--scopes", "admin"],
        ["create", "--team", "t", "--scopes", ""], ["create", "--team", "t", "--expires", "1"],
        ["create", "--team", "t", "--expires", "0d"], ["create", "--team", "t", "--expires", "-1d"],
        ["create", "--team", "t", "--expires", "99999999d"],
        ["create", "--team", "t", "--max-priority", "101"], ["revoke"], ["revoke", "x"],
        ["revoke", "llm_0123456789ab", "--token-id", "x"], ["jwt"], ["jwt", "encode"],
        ["jwt", "encode", "{"], ["jwt", "encode", "[]"], ["jwt", "decode"],
    ],
)  # fmt: skip
def test_wrong_arguments_of_token_end_with_two(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["token", *arguments])
    assert ended.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_a_jwt_id_needs_its_team(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["token", "revoke", "--token-id", "x"]) == 1
    assert "--team" in capsys.readouterr().err


def test_a_token_is_made_and_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["token", "jwt", "encode", CLAIMS]) == 0
    made = capsys.readouterr()
    assert made.err == ""
    assert main(["token", "jwt", "decode", made.out.strip()]) == 0
    read = capsys.readouterr()
    assert json.loads(read.out) == json.loads(CLAIMS)
    assert "verifies" in read.err
    assert STRONG not in made.out + read.out + read.err


def test_an_end_is_added(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["token", "jwt", "encode", "--expires", "1h", CLAIMS]) == 0
    assert main(["token", "jwt", "decode", capsys.readouterr().out.strip()]) == 0
    claims: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert claims["exp"] - claims["iat"] == 3600
    assert abs(claims["iat"] - time.time()) < 3600


@pytest.mark.parametrize(
    ("token", "said"),
    [
        (sign(json.loads(CLAIMS), OTHER_SECRET), "Signature verification failed"),
        (sign(json.loads(CLAIMS) | {"exp": 1}), "expired"), (sign({"team_id": "x"}), "token_id"),
    ],
)  # fmt: skip
def test_a_bad_token_is_shown_and_reported_as_bad(
    token: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["token", "jwt", "decode", token]) == 1
    shown = capsys.readouterr()
    assert "team_id" in shown.out
    assert said in shown.err
    assert main(["token", "jwt", "decode", "x.y"]) == 1


@pytest.mark.parametrize(
    "claims",
    ["{}", '{"team_id": "x"}', '{"team_id": 1, "token_id": "x"}',
     '{"team_id": "x", "token_id": "y", "iss": 1}'],
)  # fmt: skip
def test_no_token_is_made_that_would_be_refused(
    claims: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["token", "jwt", "encode", claims]) == 1
    assert capsys.readouterr().out == ""


def test_the_environments_secret_wins(
    environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["token", "jwt", "--secret", OTHER_SECRET, "encode", CLAIMS]) == 0
    assert main(["token", "jwt", "decode", capsys.readouterr().out.strip()]) == 0
    environment.delenv("JWT_SECRET")
    assert main(["token", "jwt", "decode", sign(json.loads(CLAIMS))]) == 2
    assert "JWT_SECRET" in capsys.readouterr().err
    assert main(["token", "jwt", "--secret", "test-secret-456", "encode", CLAIMS]) == 0
    assert "loopback" in capsys.readouterr().err


@pytest.mark.parametrize(("key", "algorithm"), [(RSA_KEY, "RS256"), (EC_KEY, "ES256")])
def test_an_issuers_token_is_read_by_its_keys(
    key: Any,
    algorithm: str,
    tmp_path: Path,
    environment: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    environment.delenv("JWT_SECRET")
    token = jwt.encode(ISSUED, key, algorithm=algorithm)
    decode = ["token", "jwt", "decode", token]
    assert main(decode) == 1  # no keys are configured
    assert json.loads(capsys.readouterr().out) == ISSUED
    for name, value in PLACE.items():
        environment.setenv(name, value)
    environment.setenv("LLM_JWKS", write_keys(tmp_path, to_jwk(key)))
    assert main(decode) == 0
    assert "verifies" in capsys.readouterr().err
    expired = jwt.encode(ISSUED | {"exp": 1}, key, algorithm=algorithm)
    assert main([*decode[:-1], expired]) == 1
    assert "expired" in capsys.readouterr().err
    # Keys of another issuer, and keys that are not there.
    environment.setenv("LLM_JWKS", write_keys(tmp_path, to_jwk(OTHER_KEYS[algorithm])))
    assert main(decode) == 1
    environment.setenv("LLM_JWKS", str(tmp_path / "none.json"))
    assert main(decode) == 1
    assert "LLM_JWKS" in capsys.readouterr().err


def test_the_command_line_itself_stays_small() -> None:
    """Only the command itself imports the code that it runs."""
    script = (
        "import sys; import app.cli.main; "
        "sys.exit(bool({'jwt', 'httpx', 'fastapi', 'asyncpg', 'cryptography'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False).returncode == 0
