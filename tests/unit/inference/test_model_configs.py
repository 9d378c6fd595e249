"""Every config.pbtxt that is shipped, or written for vLLM, lets a dead engine and a full one be seen."""

import io
import json
import tarfile
from pathlib import Path

import pytest

from app.inference.model_repository import write_entry
from app.provisioning.job_script import ModelPlace, pack_directory
from tests.conftest import ROOT
from tests.unit.provisioning.test_launch_requests import PROFILE, profiles_of, spec_of

# NVIDIA's vllm_backend reads these parameters in src/model.py.
PARAMETERS = ("ENABLE_VLLM_HEALTH_CHECK", "REPORT_CUSTOM_METRICS")


def written(folder: Path) -> str:
    """The configuration that `make run MODEL=` writes."""
    weights = folder / "weights"
    weights.mkdir()
    (weights / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    (weights / "model.safetensors").touch()
    write_entry(folder / "entry", weights)
    return (folder / "entry" / "config.pbtxt").read_text()


def launched(folder: Path) -> str:
    """The configuration that a launch brings to its node."""
    spec = spec_of(profiles_of(folder, PROFILE))
    packed = pack_directory("", spec, ModelPlace(), "secret-1")
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        member = archive.extractfile(f"repository/{spec.served_name}/config.pbtxt")
        assert member is not None
        return member.read().decode()


def shipped() -> list[Path]:
    """Those of the repository, but for the scripted model, which is no vLLM's."""
    folders = ("models", "triton", "kubernetes", "nvidia_triton", "bench")
    found = [path for folder in folders for path in (ROOT / folder).rglob("config.pbtxt")]
    return [path for path in found if path.parent.name != "scripted" and ".venv" not in path.parts]


@pytest.mark.parametrize("parameter", PARAMETERS)
def test_every_model_configuration_reports_its_engine_s_health(
    tmp_path: Path, parameter: str
) -> None:
    texts = [path.read_text() for path in shipped()]
    assert texts
    line = f'parameters: {{ key: "{parameter}" value: {{ string_value: "true" }} }}'
    for text in (*texts, written(tmp_path), launched(tmp_path)):
        assert 'backend: "vllm"' in text
        assert line in text.splitlines()


def test_a_launch_brings_the_whole_health_check(tmp_path: Path) -> None:
    packed = pack_directory("", spec_of(profiles_of(tmp_path, PROFILE)), ModelPlace(), "secret-1")
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        names = {name for name in archive.getnames() if name.startswith("health/")}
    files = {f"health/{path.name}" for path in (ROOT / "triton" / "health").glob("*.py")}
    assert names == files
    assert "health/__main__.py" in names
    # The service's image has it, too.
    assert "COPY triton/health triton/health\n" in (ROOT / "Dockerfile").read_text()
    assert "!triton/health/\n" in (ROOT / ".dockerignore").read_text()
