"""`python -m app plan`: the table, JSON, and what is wrong in one line."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from app.cli.main import main
from app.provisioning.sizing.config_file import read_config
from app.provisioning.sizing.facts import GIB
from app.provisioning.sizing.fit import plan_on
from app.provisioning.sizing.gpus import GPUS
from tests.conftest import ROOT
from tests.plan_configs import KNOWN

Output = pytest.CaptureFixture[str]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = KNOWN["meta-llama/Meta-Llama-3-8B"].config
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def run(capsys: Output, *arguments: object) -> str:
    assert main(["plan", *(str(one) for one in arguments)]) == 0
    out, error = capsys.readouterr()
    assert error == ""
    return out


def test_the_table(model: Path, capsys: Output) -> None:
    out = run(
        capsys, model, "--gpu", "a100-80", "--gpu", "t4", "--context", 8192, "--concurrency", 16,
        "--max-gpus", 2,
    )  # fmt: skip
    assert out.splitlines() == [
        "model     llama, 8.03 billion parameters, 32 layers, bfloat16",
        "cache     128.0 KiB for a token",
        "request   8,192 tokens, 16 at the same time",
        "",
        "GPU      GPUs  weights  overhead  cache   tokens  requests  verdict",
        "a100-80     1     15.0       1.4   54.8  449,152        54  fits",
        "t4-16       2      7.5       2.4    3.3   53,520         6  no",
        "",
        "Weights, overhead and cache: GiB on each GPU. Tokens and requests: in the cache at a time.",
        "",
        "Resources to request from Slurm, or the reason why it does not fit:",
        "a100-80  --gres=gpu:1 -c 6 --mem=32G -t 01:10:00",
        "t4-16    holds 6 of 16 requests of 8192 tokens",
    ]


def test_the_documents_example_is_what_is_printed(model: Path, capsys: Output) -> None:
    """Examples of docs/plan.md: its first command, and its worked example."""
    document = (ROOT / "docs" / "plan.md").read_text()
    command = re.search(r"python -m app plan path/to/model (.*)\n", document)
    assert command
    out = run(capsys, model, *command[1].split())
    assert f"```\n{out}```\n" in document
    facts = read_config(model)
    planned = plan_on(facts, GPUS["a100-80"], 1, 8192, 16)
    for figure in (
        f"= {facts.parameters:,}\n",
        f"=  {planned.overhead / 1e9:.2f} GB  =  {planned.overhead / GIB:.2f} GiB",
        f"= {planned.cache / GIB:.2f} GiB\n",
        f"= {planned.token_bytes:,} bytes\n",
        f"= {int(planned.requests)}, and {planned.tokens:,} tokens\n",
    ):
        assert figure in document


def test_the_documents_example_over_nodes_is_what_is_printed(
    tmp_path: Path, capsys: Output
) -> None:
    document = (ROOT / "docs" / "plan.md").read_text()
    config = KNOWN["meta-llama/Llama-3.1-70B"].config
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = re.search(r"python -m app plan path/to/llama-70b (.*)\n", document)
    assert command
    out = run(capsys, tmp_path, *command[1].split())
    assert f"```\n{out}```\n" in document
    first = json.loads(run(capsys, tmp_path, *command[1].split(), "--json"))["plans"][0]
    assert (first["nodes"], first["resources"]["nodes"], first["gpus"]) == (3, 3, 2)


def test_what_a_reader_should_know_is_in_the_table(tmp_path: Path, capsys: Output) -> None:
    config = KNOWN["deepseek-ai/DeepSeek-V3"].config | {"model_type": "novel"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    out = run(capsys, tmp_path / "config.json", "--gpu", "t4", "--gpu", "h200", "--max-gpus", 8)
    assert "novel, 671.03 billion parameters (37.55 billion for a token), 61 layers" in out
    assert "bfloat16, fp8" in out
    assert "68.6 KiB for a token; each GPU holds all of it (MLA)" in out
    assert "note      The architecture 'novel' is not known here" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["t4-16", "8", "79.2", "2.4", "-", "-", "-", "no"] in rows
    assert "\nt4-16     lacks 68.5 GiB per GPU for weights and overhead\n" in out
    assert "\nh200-141  --gres=gpu:8 " in out


def test_windows_and_small_models_are_reported(tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "config.json").write_text(json.dumps(KNOWN["google/gemma-3-1b-pt"].config))
    out = run(capsys, tmp_path, "--gpu", "t4")
    assert "999.9 million parameters" in out
    assert "22 of 26 layers keep 512 tokens only" in out
    assert "fits, in float16" in out


def test_json(model: Path, capsys: Output) -> None:
    document = json.loads(run(capsys, model, "--gpu", "a100-80", "--gpu", "v100-16", "--json"))
    assert document["model"]["parameters"] == 8_030_261_248
    assert document["model"]["max_context"] == 8192
    first, second = document["plans"]
    assert first["gpu"] == "a100-80"
    assert first["fits"] is True
    assert first["weights_bytes"] == 16_060_522_496
    assert first["cache_bytes_per_token"] == 131_072
    assert first["resources"] == {
        "nodes": 1, "gpus": 1, "gres": "gpu:1", "cpu_cores": 6, "memory_gb": 32, "minutes": 70,
    }  # fmt: skip
    assert second["gpus"] == 2
    assert second["dtype"] == "float16"


def test_all_gpus_without_a_choice(model: Path, capsys: Output) -> None:
    document = json.loads(run(capsys, model, "--json"))
    assert len(document["plans"]) >= 16


def test_a_quantization_leaves_its_trace(model: Path, capsys: Output) -> None:
    out = run(capsys, model, "--quantization", "fp8", "--gpu", "a100-80")
    assert "32 layers, bfloat16, fp8\n" in out
    assert "note      fp8: vLLM reads all 16,060,522,496 bytes, and compresses them" in out
    assert "--mem=32G" in out
    asked = json.loads(run(capsys, model, "--quantization", "awq", "--json"))["model"]
    assert asked["quantization"] == "awq"
    assert "vLLM needs a checkpoint that is compressed so" in asked["notes"][-1]


def test_a_gpu_has_one_row_however_often_it_is_named(model: Path, capsys: Output) -> None:
    arguments = ("--gpu", "t4", "--gpu", "T4-16", "--gpu", "a100", "--gpu", "a100-80")
    plans = json.loads(run(capsys, model, *arguments, "--json"))["plans"]
    assert [one["gpu"] for one in plans] == ["t4-16", "a100-40", "a100-80"]


def test_the_table_fits_100_columns(model: Path, capsys: Output) -> None:
    config = model / "config.json"
    for known in KNOWN.values():
        config.write_text(json.dumps(known.config))
        for line in run(capsys, config).split("\n\n")[1].splitlines():
            assert len(line) <= 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "8k"], "--context: must be a whole number from 1 to 2147483648, not '8k'"),
        (["--context", "-1"], "--context: must be a whole number from 1 to 2147483648, not '-1'"),
        (
            ["--concurrency", "0"],
            "--concurrency: must be a whole number from 1 to 1000000, not '0'",
        ),
        (["--max-gpus", "0"], "--max-gpus: must be a whole number from 1 to 1024, not '0'"),
        (["--max-nodes", "65"], "--max-nodes: must be a whole number from 1 to 64, not '65'"),
        (["--minutes", "0"], "--minutes: must be a whole number from 1 to 525600, not '0'"),
        (
            ["--gpu-memory-utilization", "90"],
            "--gpu-memory-utilization: must be above 0, and at most 1 (for example 0.9), not '90'",
        ),
        (["--gpu-memory-utilization", "nan"], "--gpu-memory-utilization: must be above 0, and"),
        (["--gpu-memory-utilization", "90%"], "--gpu-memory-utilization: must be above 0, and"),
        (["--quantization", "int4"], "--quantization: invalid choice: 'int4' (choose from "),
        (["--gpu"], "--gpu: expected one argument"),
    ],
)
def test_wrong_options_are_reported_in_one_line(
    model: Path, arguments: list[str], message: str, capsys: Output
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(model), *arguments])
    assert ended.value.code == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith(message)
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "tpu"], "'tpu' is not a known GPU: there are t4-16, "),
        (["--context", "100000"], "context: 100000 tokens are more than the model's 8192"),
    ],
)
def test_wrong_arguments_are_reported_in_one_line(
    model: Path, arguments: list[str], message: str, capsys: Output
) -> None:
    assert main(["plan", str(model), *arguments]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith(message)
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "change", [{"num_hidden_layers": 10**9}, {"hidden_size": None}, {"quantization_config": 1}]
)
def test_a_wrong_config_is_reported_in_one_line(
    model: Path, change: dict[str, Any], capsys: Output
) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert main(["plan", str(model)]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith(f"{file}: {next(iter(change))}: ")
    assert error.count("\n") == 1


def test_names_with_line_ends_stay_on_one_line(capsys: Output) -> None:
    assert main(["plan", "a\nb"]) == 2
    assert capsys.readouterr().err == "a b: there is no such file\n"


def test_names_in_a_file_do_nothing_to_a_terminal(model: Path, capsys: Output) -> None:
    file = model / "config.json"
    config = json.loads(file.read_text())
    kinds = ["full_attention"] * 31 + ["\x1b[31mmamba\n"]
    file.write_text(json.dumps(config | {"model_type": "\x1b]0;x\x07", "layer_types": kinds}))
    out = run(capsys, model, "--gpu", "t4")
    assert "?[31mmamba?" in out
    assert all(line.isprintable() for line in out.splitlines())


def test_the_help_teaches(capsys: Output) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for word in ("examples:", "--gpu a100-80", "h200-141", "docs/plan.md", "Exit status 2"):
        assert word in text
