"""Options of the engine in requests to launch, and in the files of a job."""

import io
import tarfile
from pathlib import Path
from typing import Any

import orjson
import pytest

from app.core.errors import InvalidRequestError
from app.provisioning.job_script import ModelPlace, engine_settings, pack_directory
from app.provisioning.profiles import Profile
from app.provisioning.spec import LaunchSpec
from tests.unit.provisioning.test_launch_requests import PROFILE, profiles, profiles_of, spec_of

__all__ = ["profiles"]


def packed_json(spec: LaunchSpec, name: str, place: ModelPlace | None = None) -> Any:
    """A file of version 1 of the model's entry in a job's directory."""
    content = pack_directory("", spec, place or ModelPlace(), "")
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        member = archive.extractfile(f"repository/{spec.served_name}/1/{name}")
        assert member is not None
        return orjson.loads(member.read())


def test_options_of_the_engine_reach_its_arguments(profiles: dict[str, Profile]) -> None:
    given = {
        "max_model_len": 4096, "enable_prefix_caching": True, "kv_cache_dtype": "fp8",
        "cudagraph_capture_sizes": [1, 2], "limit_mm_per_prompt": {"image": 1}, "max_num_seqs": None,
    }  # fmt: skip
    spec = spec_of(profiles, engine=given)
    expected = {name: value for name, value in given.items() if value is not None}
    stored = LaunchSpec.model_validate_json(spec.model_dump_json())
    for place in (ModelPlace(), ModelPlace("/scratch/models/a")):
        settings = engine_settings(stored, place)
        assert settings == {"model": place.path or "org/model"} | expected
    assert packed_json(stored, "model.json") == {"model": "org/model"} | expected


def test_a_pipeline_divides_the_gpus(profiles: dict[str, Profile]) -> None:
    for gpus, stages, tensor in ((4, 2, 2), (4, 4, None), (4, 1, 4), (1, 1, None), (0, 1, None)):
        engine = {"pipeline_parallel_size": stages}
        spec = spec_of(profiles, resources={"gpus": gpus}, engine=engine)
        assert engine_settings(spec, ModelPlace()).get("tensor_parallel_size") == tensor
    for gpus, stages in ((4, 3), (1, 2), (0, 2), (4, 0), (4, -2)):
        engine = {"pipeline_parallel_size": stages}
        with pytest.raises(InvalidRequestError, match="must divide the launch's GPUs"):
            spec_of(profiles, resources={"gpus": gpus}, engine=engine)


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ({"max_num_sqes": 1}, "engine.max_num_sqes: is not an option"),
        ({"max_num_seqs": "1"}, "engine.max_num_seqs: must be a whole number"),
        ({"dtype": "int8"}, "engine.dtype: must be one of auto"),
        ({"quantization": "bitsandbytes"}, "engine.quantization: must be one of auto_awq"),
        ({"hf_overrides": {}}, "engine.hf_overrides: needs a profile"),
        ({"tensor_parallel_size": 2}, "engine.tensor_parallel_size: cannot be set"),
    ],
)
def test_options_of_the_engine_that_are_refused(
    profiles: dict[str, Profile], engine: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        spec_of(profiles, engine=engine)
    assert words in refused.value.detail


def test_a_profile_permits_options_by_name(tmp_path: Path) -> None:
    text = PROFILE + 'engine_options = ["hf_overrides", "load_format"]'
    profiles = profiles_of(tmp_path, text)
    engine = {"hf_overrides": {"rope_theta": 1}, "load_format": "tensorizer"}
    spec = spec_of(profiles, profile="laptop", engine=engine)
    assert engine_settings(spec, ModelPlace()) == {
        "model": "org/model", "enforce_eager": True, **engine,
    }  # fmt: skip
    with pytest.raises(InvalidRequestError, match="needs a profile"):
        spec_of(profiles, profile="della", engine=engine)
