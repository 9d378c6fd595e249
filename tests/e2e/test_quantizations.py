"""The quantizations that the service lists are those of the vLLM beside it."""

from pathlib import Path

import pytest

from app.inference.model_repository import NOT_ON_CPU, QUANTIZATIONS
from tests.judges import judge

pytestmark = [
    pytest.mark.slow("its judge runs where the lock has changed"),
    pytest.mark.soak,
    pytest.mark.timeout(300),
]
# Compresses any model while it loads, on any processor: shows that the others fail for a reason.
ON_LOAD = "int8_per_channel_weight_only"


def test_the_lists_are_vllms(request: pytest.FixtureRequest) -> None:
    names = [*NOT_ON_CPU, ON_LOAD]
    tried = judge(
        Path(__file__).with_name("try_quantizations.py"),
        " ".join(names),
        arguments=lambda: [request.getfixturevalue("entries")["tools"] / "1" / "weights", *names],
        depends=[Path(__file__).with_name("make_tiny_models.py")],
        environment={
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "LC_ALL": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CONFIGURE_LOGGING": "0",
            "VLLM_NO_USAGE_STATS": "1",
        },
    )
    words = [line.split() for line in tried.splitlines()]
    known = next(line[1:] for line in words if line[:1] == ["known"])
    assert sorted(known) == list(QUANTIZATIONS)
    answers = {line[0]: line[1] for line in words if line[1:] in (["yes"], ["no"])}
    assert answers == {**dict.fromkeys(NOT_ON_CPU, "no"), ON_LOAD: "yes"}
