"""The processor that vLLM runs on: the driver's answers, and the choice by make."""

import ctypes
import re
from collections.abc import Callable
from typing import Any

import pytest

from app.cli.up import gpu
from app.cli.up.gpu import CUDA, Gpu, GpuError, NoGpuError, choose, describe
from tests.conftest import ROOT

H100 = Gpu("NVIDIA H100 80GB HBM3", 80 << 30, (9, 0))
T4 = Gpu("Tesla T4", 16 << 30, (7, 5))
P100 = Gpu("Tesla P100", 16 << 30, (6, 0))


class Driver:
    """The functions of libcuda.so.1 that are called, for the devices of a test."""

    def __init__(self, *gpus: Gpu, version: int = 13_000, status: int = 0) -> None:
        self.gpus, self.version, self.status = gpus, version, status

    def __getattr__(self, function: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            getattr(self, f"_{function}")(*arguments)
            return self.status

        return call

    def _cuInit(self, flags: int) -> None:  # noqa: N802 - the driver's name
        assert flags == 0

    def _cuDriverGetVersion(self, version: Any) -> None:  # noqa: N802
        version._obj.value = self.version

    def _cuDeviceGetCount(self, count: Any) -> None:  # noqa: N802
        count._obj.value = len(self.gpus)

    def _cuDeviceGet(self, device: Any, ordinal: int) -> None:  # noqa: N802
        device._obj.value = ordinal

    def _cuDeviceGetName(self, name: Any, size: int, device: ctypes.c_int) -> None:  # noqa: N802
        name.value = self.gpus[device.value].name.encode()[:size]

    def _cuDeviceTotalMem_v2(self, memory: Any, device: ctypes.c_int) -> None:  # noqa: N802
        memory._obj.value = self.gpus[device.value].memory

    def _cuDeviceGetAttribute(  # noqa: N802
        self, value: Any, attribute: int, device: ctypes.c_int
    ) -> None:
        value._obj.value = self.gpus[device.value].capability[{75: 0, 76: 1}[attribute]]


def test_devices_are_described_in_the_order_of_cuda() -> None:
    assert describe(Driver(H100, P100)) == [H100, P100]
    assert describe(Driver(T4, version=13_050)) == [T4]


@pytest.mark.parametrize(
    ("driver", "words"),
    [
        (Driver(H100, version=12_080), r"for CUDA 12\.8, .* needs CUDA 13\.0: install driver 580"),
        (Driver(P100, H100), r"Tesla P100 has compute capability 6\.0, .* needs 7\.5"),
        (Driver(H100, status=803), r"cuInit: CUDA error 803"),
    ],
)
def test_a_driver_that_cannot_be_used_gives_the_reason(driver: Driver, words: str) -> None:
    with pytest.raises(GpuError, match=words) as caught:
        describe(driver)
    assert "GPU=0" in str(caught.value)
    assert not isinstance(caught.value, NoGpuError)


@pytest.mark.parametrize("driver", [Driver(), Driver(H100, status=100)])
def test_a_driver_without_devices_is_a_machine_without_a_gpu(driver: Driver) -> None:
    with pytest.raises(NoGpuError, match=r"shows no GPU.*CUDA_VISIBLE_DEVICES"):
        describe(driver)


def finds(monkeypatch: pytest.MonkeyPatch, answer: list[Gpu] | GpuError) -> None:
    def find(_library: str) -> list[Gpu]:
        if isinstance(answer, GpuError):
            raise answer
        return answer

    monkeypatch.setattr(gpu, "find", find)


def test_a_gpu_is_used_unless_configured_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    finds(monkeypatch, [H100])
    assert choose("") == ("gpu", "")
    assert choose("1") == ("gpu", "")
    assert choose("0") == ("cpu", "")


def test_a_machine_without_a_gpu_runs_on_the_cpu_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    finds(monkeypatch, NoGpuError("none"))
    assert choose("") == ("cpu", "")
    with pytest.raises(NoGpuError):
        choose("1")


def test_a_gpu_that_cannot_be_used_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    finds(monkeypatch, GpuError("the NVIDIA driver is too old."))
    assert choose("") == ("cpu", "Running on the CPU: the NVIDIA driver is too old.")
    with pytest.raises(GpuError, match="too old"):
        choose("1")


def test_a_wrong_value_is_refused() -> None:
    with pytest.raises(GpuError, match="GPU=yes is neither 0 nor 1"):
        choose("yes")


def test_the_lock_is_for_the_cuda_that_the_driver_is_checked_for() -> None:
    lock = (ROOT / "triton" / "requirements-gpu.txt").read_text()
    assert f"\nnvidia-cuda-runtime=={CUDA[0]}.{CUDA[1]}." in lock


def test_both_locks_hold_the_same_vllm_and_server() -> None:
    """The backend is written against one version of vLLM."""
    locks = [(ROOT / "triton" / f"requirements-{name}.txt").read_text() for name in ("gpu", "cpu")]
    versions = [re.findall(r"^vllm(?:-cpu)?==(\S+)", lock, re.MULTILINE) for lock in locks]
    assert versions[0] == versions[1] != []
    for package in ("nvidia-pytriton", "numpy"):
        pinned = [re.findall(rf"^{package}==(\S+)", lock, re.MULTILINE) for lock in locks]
        assert pinned[0] == pinned[1] != []


def test_torch_is_pinned_so_that_no_cpu_build_passes_for_it() -> None:
    """`==2.13.0` also matches 2.13.0+cpu, where pip is configured with a source of that."""
    lock = (ROOT / "triton" / "requirements-gpu.txt").read_text()
    assert re.search(r"^torch===\d", lock, re.MULTILINE)
