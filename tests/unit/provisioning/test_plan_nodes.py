"""Models over several nodes: a stage of the layers on each, divided among the GPUs of the node."""

import pytest

from app.provisioning.sizing.architecture import read_facts
from app.provisioning.sizing.facts import PlanError
from app.provisioning.sizing.fit import Engine, cache_shape, plan, plan_on
from app.provisioning.sizing.gpus import GPUS
from app.provisioning.sizing.resources import resources_for
from tests.plan_configs import KNOWN

LLAMA_70B = read_facts(KNOWN["meta-llama/Llama-3.1-70B"].config)
A100 = GPUS["a100-80"]
TABLE = 2 * 128_256 * 8192  # bytes of the embeddings, and of the output head


def test_several_nodes_are_taken_only_where_one_is_not_enough() -> None:
    def taken(max_gpus: int, max_nodes: int) -> tuple[int, int, bool]:
        engine = Engine(max_gpus=max_gpus, max_nodes=max_nodes)
        (planned,) = plan(LLAMA_70B, [GPUS["a100-40"]], engine=engine)
        return planned.nodes, planned.gpus, planned.fits

    assert taken(8, 4) == (1, 8, True)
    assert taken(2, 1) == (1, 2, False)
    assert taken(2, 2) == (2, 2, False)
    assert taken(2, 3) == taken(2, 64) == (3, 2, True)
    assert taken(1, 64) == (5, 1, True)


def test_a_stage_has_its_layers_and_one_table_of_the_vocabulary() -> None:
    whole = plan_on(LLAMA_70B, A100, 1).weights
    # 80 layers: 40, 27 of the fullest, 20, and one.
    for nodes, layers in ((2, 40), (3, 27), (4, 20), (64, 2)):
        weights = plan_on(LLAMA_70B, A100, 1, nodes=nodes).weights
        assert weights == pytest.approx((whole - 2 * TABLE) * layers / 80 + TABLE, abs=2)
    halves = [plan_on(LLAMA_70B, A100, gpus, nodes=2).weights for gpus in (1, 2)]
    assert halves[1] == pytest.approx(halves[0] / 2, rel=0.001)


def test_a_table_that_serves_both_ends_is_on_both() -> None:
    gemma = read_facts(KNOWN["google/gemma-2-9b"].config)
    table = 2 * gemma.vocab_size * gemma.hidden_size
    whole, half = (plan_on(gemma, A100, 1, nodes=nodes).weights for nodes in (1, 2))
    assert half == pytest.approx((whole - table) / 2 + table, abs=2)


def test_a_stage_has_the_cache_of_its_layers() -> None:
    planned = {nodes: plan_on(LLAMA_70B, A100, 4, 8192, nodes=nodes) for nodes in (1, 2, 3)}
    assert [one.token_bytes for one in planned.values()] == [80 * 1024, 40 * 1024, 27 * 1024]
    for one in planned.values():
        assert one.tokens == one.cache // (16 * one.token_bytes) * 16


def test_each_stage_has_a_batch_in_progress() -> None:
    """Their tokens hold places behind a sliding window."""
    gemma = read_facts(KNOWN["google/gemma-2-9b"].config)
    shapes = [cache_shape(gemma, 1, "bfloat16", Engine(), nodes) for nodes in (1, 2, 4)]
    assert [shape.in_flight for shape in shapes] == [4096, 4096, 8192]


def test_resources_are_those_of_each_node() -> None:
    asked = plan_on(LLAMA_70B, A100, 4, serve_minutes=120, nodes=2).resources
    assert asked == resources_for(2 * 70_553_706_496, 4, 120, 2)
    assert (asked.nodes, asked.gpus, asked.gres, asked.cpu_cores) == (2, 4, "gpu:4", 12)
    # 8 + 4 x 4 + 141.1 / 2 GB, in steps of 8; the nodes read from one file system.
    assert (asked.memory_gb, asked.minutes) == (96, 130)


def test_gpus_that_share_nothing_but_the_network_need_its_buffers() -> None:
    alone, stage = (plan_on(LLAMA_70B, A100, 1, nodes=nodes).overhead for nodes in (1, 2))
    assert stage == alone + (1 << 30)


def test_nodes_do_not_help_a_gpu_that_cannot_run_the_model() -> None:
    engine = Engine(dtype="bfloat16", max_nodes=64)
    (planned,) = plan(LLAMA_70B, [GPUS["t4-16"]], engine=engine)
    assert planned.nodes == 1
    assert planned.verdict == "has no bfloat16: take --dtype float16"


@pytest.mark.parametrize("nodes", [0, 65])
def test_numbers_of_nodes_that_are_refused(nodes: int) -> None:
    with pytest.raises(PlanError, match="nodes: must be a whole number from 1 to 64"):
        plan_on(LLAMA_70B, A100, 1, nodes=nodes)
    with pytest.raises(PlanError, match="max_nodes: must be a whole number from 1 to 64"):
        plan(LLAMA_70B, [A100], engine=Engine(max_nodes=nodes))


def test_each_stage_needs_a_layer() -> None:
    opt = read_facts(KNOWN["facebook/opt-125m"].config)
    engine = Engine(max_nodes=64)
    (planned,) = plan(opt, [GPUS["t4-16"]], 2048, 20_000, engine)
    assert not planned.fits
    assert planned.nodes == opt.layers == 12
    with pytest.raises(PlanError, match="nodes: must be a whole number from 1 to 12"):
        plan_on(opt, A100, 1, nodes=13)
