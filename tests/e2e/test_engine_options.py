"""The engine's options in the repository are those of the vLLM beside it."""

import pytest

from app.inference import engine_options
from tests.conftest import ROOT
from tests.judges import judge

pytestmark = [
    pytest.mark.slow("its judge runs where the lock has changed"),
    pytest.mark.soak,
    pytest.mark.timeout(300),
]


def test_the_options_are_vllms() -> None:
    tool = ROOT / "tools" / "engine_options.py"
    assert judge(tool, arguments=lambda: ["/dev/stdout"]) == engine_options._FILE.read_text(), (
        f"{tool} writes other options now"
    )
