"""The values that the Vast.ai commands take from the definition and from make, and refusals."""

import io
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from nvidia_triton.__main__ import is_confirmed, settings_line
from nvidia_triton.definition import Definition, InputError, identifier, read
from nvidia_triton.here import find_key, models_in
from nvidia_triton.instance import Remote, RemoteError
from nvidia_triton.vast import Instance, has_key

ROOT = Path(__file__).resolve().parents[3]
FILE = ROOT / "nvidia_triton" / "vastai_instance_definition.yaml"
KEYS = [field.name for field in fields(Definition)] + ["tag"]
# Texts that are for a shell, on the instance: they are passed on as they are.
SCRIPTS = {"onstart"}
SHOW = "import os; print(os.environ['TRITON_GRPC_SERVICE'], os.environ['LLM_MODEL_REPOSITORY'])"
BAD = [
    "a\nb: c",
    "x $(touch marker)",
    "`touch marker`",
    "$(shell touch marker)",
    "-oProxyCommand=touch marker",
    "../../etc/passwd",
    "a; touch marker",
    "a' b",
    "\x00",
    "a\x1b[31m",
    "e\u0301",
]


def with_value(tmp_path: Path, key: str, value: object) -> Path:
    content = yaml.safe_load(FILE.read_text())
    content[key] = value
    changed = tmp_path / "definition.yaml"
    changed.write_text(yaml.safe_dump(content))
    return changed


def test_every_key_of_the_original_is_there_and_every_field_is_in_the_file() -> None:
    content = yaml.safe_load(FILE.read_text())
    assert set(content) == set(KEYS)
    assert {
        "disk", "image", "tag", "label", "ssh", "jupyter", "direct", "jupyter_dir", "jupyter_lab",
        "lang_utf8", "python_utf8", "force", "retry",
    } <= set(content)  # fmt: skip
    makefile = (ROOT / "nvidia_triton" / "Makefile").read_text()
    keys = makefile.partition("keys := ")[2].partition("\n\n")[0].replace("\\", "").split()
    assert keys[: keys.index("METRICS_PORT") + 1][-1] == "METRICS_PORT"
    named = {key.lower() for key in keys[: len(KEYS)]}
    assert named == set(KEYS)


def test_the_image_is_the_one_of_docker_compose() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    assert read(FILE, {}).image == compose["services"]["triton-gpu"]["image"]


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("key", sorted(set(KEYS) - SCRIPTS - {"models"}))
def test_bad_values_are_refused_by_name(tmp_path: Path, key: str, value: str) -> None:
    for path, given in ((FILE, {key: value}), (with_value(tmp_path, key, value), {})):
        with pytest.raises(InputError, match=rf"^{key}: ") as caught:
            read(path, given)
        assert str(caught.value).isprintable()
        assert "marker" not in str(caught.value) or key != "env"


@pytest.mark.parametrize("value", [*BAD, "0", "-1", "1.5", " 1", "1" * 30, "\uff11"])
def test_bad_ids_are_refused(value: str) -> None:
    with pytest.raises(InputError, match=r"^CONTRACT_ID: .* is not a number: look$") as caught:
        identifier("CONTRACT_ID", value, "look")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"disk": "0"}, "disk: '0' is not a number from 1 to 100000."),
        ({"retry": "2.5"}, "retry: '2.5' is not a whole number from 1 to 100."),
        ({"ssh": "maybe"}, "ssh: 'maybe' is not true or false."),
        ({"tag": "24.07"}, None),
        ({"image": "a/b:1", "tag": "2"}, "tag: '2' is not the tag that image has, '1'."),
        ({"image": ""}, "image: is missing."),
        ({"search": "dph<9"}, "search: the price belongs in max_price."),
        ({"http_port": "8001"}, "http_port, grpc_port and metrics_port must be three ports"),
        ({"tunnels_address": "0.0.0.0"}, "tunnels_address: '0.0.0.0' is not a private"),  # noqa: S104
        ({"tunnels_address": "8.8.8.8"}, "tunnels_address: '8.8.8.8' is not a private"),
        ({"tunnels_address": "eth0"}, "tunnels_address: 'eth0' is not an IPv4 address"),
        ({"env": "-e A"}, "env: A is not set in your environment"),
        ({"env": "-e A=b c"}, "env: must be pairs"),
        ({"env": "--privileged true"}, "env: only -e, -p, -h and -v"),
        ({"onstart": "x" * 5000}, "onstart: at most 4048 characters."),
        ({"model_dir": "/"}, "model_dir: '/' is not an absolute path"),
        ({"model_dir": "/opt/../etc"}, "model_dir: '/opt/../etc' is not an absolute path"),
    ],
)
def test_each_refusal_names_a_remedy(given: dict[str, str], message: str | None) -> None:
    if message is None:
        assert read(FILE, given).image.endswith(":24.07")
        return
    with pytest.raises(InputError) as caught:
        read(FILE, given, {})
    assert str(caught.value).startswith(message)


def test_an_unquoted_tag_would_lose_its_zero(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^tag: must be in quotes\.$"):
        read(with_value(tmp_path, "tag", 26.10), {})


def test_what_is_no_definition_is_reported_in_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    for content in ("a: [1", "- 1", "1: 2", "\x00"):
        broken.write_text(content)
        with pytest.raises(InputError) as caught:
            read(broken, {})
        assert str(caught.value).isprintable()
    with pytest.raises(InputError, match="No such file"):
        read(tmp_path / "missing.yaml", {})
    with pytest.raises(InputError, match="'disc' is no key"):
        read(with_value(tmp_path, "disc", 40), {})


def test_a_variable_without_a_value_has_that_of_the_environment() -> None:
    given = {"env": "-e TZ=UTC  -e TOKEN -p 80:80/tcp -h box"}
    definition = read(FILE, given, {"TOKEN": "hf_1=$(x)"})
    assert definition.env == "-e TZ=UTC -e TOKEN=hf_1=$(x) -p 80:80/tcp -h box"
    with pytest.raises(InputError, match="the value of TOKEN must be ASCII") as caught:
        read(FILE, given, {"TOKEN": "secret text"})
    assert "secret" not in str(caught.value)


def test_folders_here_begin_at_the_definition(tmp_path: Path) -> None:
    assert read(FILE, {}).models == ROOT / "models"
    assert read(with_value(tmp_path, "models", "m"), {}).models == tmp_path / "m"


@pytest.mark.parametrize(
    "host", ["-oProxyCommand=touch marker", "a b", "a\nProxyCommand touch", "a%h", "", "é.example"]
)
def test_an_address_of_vast_is_not_believed(tmp_path: Path, host: str) -> None:
    instance = Instance(1, "running", "", "", "", 1, 0.1, "", host, 22)
    with pytest.raises(RemoteError, match="ssh address"):
        Remote(tmp_path / "1", instance, None)


@pytest.mark.parametrize("name", ['a"b', "a%d", "${HOME}", "a\nProxyCommand x"])
def test_a_key_that_ssh_would_expand_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(InputError, match=r"^PRIVATE_SSH_KEY: must be a path without"):
        find_key(tmp_path / name)
    with pytest.raises(InputError, match=r"^PRIVATE_SSH_KEY: there is no file"):
        find_key(tmp_path / "none")


def test_no_key_at_all_is_reported_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.setattr("nvidia_triton.here._own_keys", lambda: tmp_path)
    with pytest.raises(InputError, match="You have no ssh key: `ssh-keygen"):
        find_key(None)
    (tmp_path / "id_ed25519").touch()
    assert find_key(None) is None


def test_a_key_of_the_cli_is_found_where_the_cli_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("VAST_API_KEY", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    for place in (".config/vastai/vast_api_key", ".config/vastai/vast_tfa_key", ".vast_api_key"):
        home = tmp_path / f"of{place.replace('/', '_')}"
        monkeypatch.setenv("HOME", str(home))
        assert not has_key()
        (home / place).parent.mkdir(parents=True)
        (home / place).write_text("key")
        assert has_key()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert not has_key()
    (tmp_path / "config" / "vastai").mkdir(parents=True)
    (tmp_path / "config" / "vastai" / "vast_api_key").write_text("key")
    assert has_key()
    monkeypatch.setenv("VAST_API_KEY", "")  # the CLI sends this one
    assert not has_key()
    monkeypatch.setenv("VAST_API_KEY", "key")
    assert has_key()


def test_the_settings_are_for_a_shell_s_eval(tmp_path: Path) -> None:
    models = tmp_path / "a b's $(touch x)"
    line = settings_line(read(FILE, {"models": str(models), "grpc_port": "18001"}))
    printed = subprocess.run(
        ["sh", "-c", f'eval "export $SETTINGS"; {shlex.quote(sys.executable)} -c "{SHOW}"'],
        env={"SETTINGS": line}, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert printed == f"127.0.0.1:18001 {models}\n"


def test_only_a_yes_is_a_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    for answer, meant in {"y\n": True, "YES\n": True, "n\n": False, "\n": False, "": False}.items():
        monkeypatch.setattr("sys.stdin", io.StringIO(answer))
        assert is_confirmed("Really? ") is meant


def test_folders_that_are_no_models_are_reported_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(12):
        (tmp_path / f"folder{number:02}").mkdir()
    with pytest.raises(InputError, match="there is no model in"):
        models_in(tmp_path)
    assert capsys.readouterr().err == (
        "Left out, without a config.pbtxt: folder00, folder01, folder02, folder03, folder04 and 7 more\n"
    )
