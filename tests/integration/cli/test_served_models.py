"""The entries that `up` serves, on a CPU and on a GPU."""

import io
from collections.abc import Sequence
from pathlib import Path

import orjson
import pytest

from app.cli.up import gpu, preflight
from app.cli.up.gpu import Gpu, GpuError
from app.cli.up.processes import StartError
from app.cli.up.progress import Progress
from app.cli.up.served_models import ModelOptions, prepare
from app.cli.up.up import GPU_VENV, UpOptions, local_profile
from app.inference.prompts import read_format
from app.provisioning.profiles import read_profiles
from tests.conftest import ROOT

H100 = [Gpu("NVIDIA H100", 80 << 30, (9, 0))]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    directory = tmp_path / "tiny"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").touch()
    return directory


async def entry(tmp_path: Path, options: ModelOptions, gpus: Sequence[Gpu]) -> Path:
    """The one entry that is served."""
    progress = Progress(io.StringIO())
    found = await prepare(options, tmp_path / "data", progress, light=False, gpus=gpus)
    (path,) = found.values()
    return path


def arguments(path: Path) -> dict[str, object]:
    engine: dict[str, object] = orjson.loads((path / "1" / "model.json").read_bytes())
    return engine


@pytest.mark.parametrize("gpus", [[], H100], ids=["cpu", "gpu"])
async def test_an_entry_leaves_number_format_and_graphs_to_the_engine(
    gpus: list[Gpu], weights: Path, tmp_path: Path
) -> None:
    options = ModelOptions(str(weights), "awq", 77)
    assert arguments(await entry(tmp_path, options, gpus)) == {
        "model": "models/tiny/1/weights",
        "max_model_len": 77,
        "gpu_memory_utilization": 0.9,
        "quantization": "awq",
    }


async def test_the_demo_model_is_as_it_is_on_a_cpu(tmp_path: Path) -> None:
    assert await entry(tmp_path, ModelOptions(), []) == ROOT / "models" / "demo"


async def test_the_demo_model_drops_the_cpus_arguments_on_a_gpu(tmp_path: Path) -> None:
    path = await entry(tmp_path, ModelOptions(), H100)
    engine = arguments(path)
    committed = arguments(ROOT / "models" / "demo")
    assert engine == {
        "model": "models/demo/1/weights",
        "max_model_len": committed["max_model_len"],
        "gpu_memory_utilization": committed["gpu_memory_utilization"],
    }
    served, original = (
        read_format(repository, "demo") for repository in (path.parent, ROOT / "models")
    )
    assert served is not None
    assert original is not None
    assert served.tokenizer is not None
    assert original.tokenizer is not None
    assert served.tokenizer.to_str() == original.tokenizer.to_str()


@pytest.mark.parametrize(
    ("quantization", "gpus", "words"),
    [
        ("fp8", [], "QUANTIZATION=fp8 is not a method of vLLM on a CPU: choose one of .*awq"),
        ("bitsandbytes", H100, "QUANTIZATION=bitsandbytes is not a method of vLLM here"),
    ],
)
async def test_a_quantization_is_refused_before_the_download(
    quantization: str, gpus: list[Gpu], words: str, tmp_path: Path
) -> None:
    with pytest.raises(StartError, match=words):
        await entry(tmp_path, ModelOptions("owner/never-fetched", quantization), gpus)
    assert not (tmp_path / "data").exists()


async def test_a_gpu_takes_what_a_cpu_does_not(weights: Path, tmp_path: Path) -> None:
    path = await entry(tmp_path, ModelOptions(str(weights), "fp8"), H100)
    assert arguments(path)["quantization"] == "fp8"


def test_a_gpu_that_vanished_is_a_start_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def find() -> list[Gpu]:
        raise GpuError("the NVIDIA driver shows no GPU.")

    monkeypatch.setattr(gpu, "find", find)
    with pytest.raises(StartError, match="shows no GPU"):
        preflight.find_gpus(tmp_path)


@pytest.mark.parametrize("gpu", [True, False])
def test_servers_are_launched_on_the_same_processor(gpu: bool, tmp_path: Path) -> None:
    options = UpOptions(port=1, data=tmp_path, gpu=gpu)
    file = local_profile(options)["LLM_PROFILES_FILE"]
    (profile,) = read_profiles(Path(file)).values()
    assert (profile.venv == str(GPU_VENV)) == gpu
    assert [tier.gpus for tier in profile.tiers] == [int(gpu)]
