"""The resource calculator against the CPU engine's report of its cache."""

import pytest

from app.cli.up.triton import EmbeddedTriton
from app.provisioning.sizing.cache import CacheShape
from app.provisioning.sizing.config_file import read_config
from app.provisioning.sizing.facts import GIB
from app.provisioning.sizing.fit import Engine, cache_shape
from tests.conftest import ROOT
from tests.e2e.cache_reports import BLOCK_TOKENS, last_report

pytestmark = pytest.mark.timeout(300)


async def test_the_demo_models_cache_is_what_the_engine_reports(
    vllm_triton: EmbeddedTriton,
) -> None:
    facts = read_config(ROOT / "models" / "demo" / "1")
    report = last_report(vllm_triton.log_file)
    # The demo's model.json: float32.
    token_bytes = cache_shape(facts, 1, "float32", Engine()).token_bytes
    assert report.context == facts.max_context == 1024
    assert report.tokens * token_bytes / GIB == pytest.approx(report.gib, abs=0.005)
    shape = CacheShape(facts, 1, 4, in_flight=4096, block_tokens=BLOCK_TOKENS)
    # As our backend gives it to a CPU engine (engine_host.py).
    memory = 32 * shape.request_bytes(report.context) + token_bytes * BLOCK_TOKENS
    assert report.gib == round(memory / GIB, 2)
    assert shape.tokens(memory, report.context) == report.tokens
    assert round(shape.requests(memory, report.context), 2) == report.requests
