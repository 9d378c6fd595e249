"""Options of the engine: each has an owner, a type, and a clear refusal."""

from typing import Any

import orjson
import pytest

from app.core.errors import InvalidRequestError
from app.inference import engine_options as module
from app.inference.engine_options import (
    MAX_OPTIONS,
    EngineOption,
    check_engine_options,
    engine_options,
    parse_option,
)
from app.inference.engine_policy import FREE, GUARDED, NARROWED, OWNED

# One value of each type, which only the types that it has may take.
VALUES: dict[str, list[Any]] = {
    "bool": [True],
    "int": [3],
    "float": [0.5],
    "str": ["q_proj"],
    "object": [{"a": 1}],
}


def refusal(name: str, value: object, *permitted: str) -> str:
    with pytest.raises(InvalidRequestError) as refused:
        check_engine_options({name: value}, permitted)
    (error,) = refused.value.errors
    assert error.field == f"engine.{name[:64]}"
    return error.message


def free() -> list[EngineOption]:
    return [one for one in engine_options().values() if one.access == "free"]


def test_every_option_of_the_engine_has_one_owner() -> None:
    """An option of a new vLLM is in no table, and refused until a maintainer assigns it."""
    decided = [
        name for table in (FREE, GUARDED, OWNED) for names in table.values() for name in names
    ]
    known = orjson.loads(module._FILE.read_bytes())["options"]
    assert sorted(decided) == sorted(known)
    assert set(NARROWED) <= {one.name for one in free()}
    assert all(one.reason for one in engine_options().values() if one.access != "free")


def test_no_free_option_takes_a_path_or_an_address() -> None:
    for option in free():
        for text in ("/etc/passwd", "../x", "http://x", "a/b", "module:Class", "-x", "a b", ""):
            for value in (text, [text], ["q_proj", text]):
                if value == option.default:
                    continue
                assert not option.takes(value, is_permitted=False), (option.name, value)


@pytest.mark.parametrize("name", [one.name for one in free()])
def test_a_free_option_takes_its_types_and_no_others(name: str) -> None:
    option = engine_options()[name]
    for kind, values in VALUES.items():
        for value in [*option.choices, *values]:
            fits = type(value).__name__.replace("dict", "object") in option.types or (
                "float" in option.types and type(value) is int
            )
            fits = fits and (not option.choices or value in option.choices)
            assert option.takes(value, is_permitted=False) is fits, (kind, value)
            if not fits:
                assert refusal(name, value).startswith("must be ")
    assert not option.takes(None, is_permitted=False)
    for value in option.choices:
        listed = any(one.startswith("list") for one in option.types)
        assert check_engine_options({name: [value] if listed else value}, ())


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("max_num_sqes", 1, "near it: max_num_seqs"),
        ("x" * 5000, 1, "is not an option of vLLM"),
        ("max_num_seqs", "64", "must be a whole number"),
        ("max_num_seqs", True, "must be a whole number"),
        ("max_num_seqs", 2**60, "must be a whole number"),
        ("enable_prefix_caching", 1, "must be true or false"),
        ("cpu_offload_gb", float("inf"), "must be a number"),
        ("cudagraph_capture_sizes", [1, "2"], "must be a list of whole numbers"),
        ("cudagraph_capture_sizes", [1] * 257, "must be a list of whole numbers"),
        ("limit_mm_per_prompt", {"image": "x" * 20_000}, "must be a JSON object"),
        ("max_lora_rank", 17, "must be one of 1, 8, 16"),
        ("scheduling_policy", "random", "must be one of fcfs, priority"),
        ("lora_target_modules", ["../x"], "must be plain names"),
        ("trust_remote_code", True, "cannot be set: a launch has `trust_remote_code` for it"),
        ("model", "/etc", "cannot be set"),
        ("hf_token", "x", "cannot be set"),
        ("tensor_parallel_size", 2, "it follows from `resources.gpus`"),
        ("worker_cls", "a.B", "engine_options = ['worker_cls']: it can load Python code"),
        ("load_format", "pt", "others need a profile with engine_options = ['load_format']"),
        ("generation_config", "/etc", "others need a profile"),
        ("distributed_executor_backend", "evil.Executor", "must be one of mp, uni"),
    ],
)
def test_a_refusal_names_what_is_expected(name: str, value: object, words: str) -> None:
    assert words in refusal(name, value)


def test_a_permission_opens_one_option_with_its_types() -> None:
    for name, value in (("hf_overrides", {"a": 1}), ("load_format", "pt"), ("tokenizer", "/a b")):
        assert check_engine_options({name: value}, [name]) == {name: value}
        assert refusal(name, value, "download_dir")
    assert refusal("hf_overrides", "x", "hf_overrides") == "must be a JSON object"
    assert refusal("load_format", "a\nb", "load_format") == "must be a text"
    assert refusal("tokenizer", "a\x00", "tokenizer") == "must be a text"


def test_nulls_are_left_out_and_errors_are_bounded() -> None:
    assert check_engine_options({"max_num_seqs": None, "unknown": None}, ()) == {}
    with pytest.raises(InvalidRequestError) as many:
        check_engine_options({f"a{number}": 1 for number in range(MAX_OPTIONS)}, ())
    assert len(many.value.errors) == 20
    with pytest.raises(InvalidRequestError, match=f"at most {MAX_OPTIONS} options"):
        check_engine_options({f"a{number}": 1 for number in range(MAX_OPTIONS + 1)}, ())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max_num_seqs=64", ("max_num_seqs", 64)),
        ("--max-num-seqs= 64", ("max_num_seqs", 64)),
        ("enable_prefix_caching=False", ("enable_prefix_caching", False)),
        ("cpu_offload_gb=1.5", ("cpu_offload_gb", 1.5)),
        ("cudagraph_capture_sizes=1, 2,4", ("cudagraph_capture_sizes", [1, 2, 4])),
        ("cudagraph_capture_sizes=[1,2]", ("cudagraph_capture_sizes", [1, 2])),
        ("lora_target_modules=q_proj,v_proj", ("lora_target_modules", ["q_proj", "v_proj"])),
        ('limit_mm_per_prompt={"image": 2}', ("limit_mm_per_prompt", {"image": 2})),
        ("kv_cache_dtype=fp8", ("kv_cache_dtype", "fp8")),
        ("max_num_seqs=many", ("max_num_seqs", "many")),
        ("unknown=a=b", ("unknown", "a=b")),
    ],
)
def test_options_of_the_command_line(text: str, expected: tuple[str, object]) -> None:
    name, value = parse_option(text)
    assert (name, value) == expected
    assert type(value) is type(expected[1])


@pytest.mark.parametrize("text", ["max_num_seqs", "=1", "", "--=1"])
def test_options_without_a_name_or_a_value(text: str) -> None:
    with pytest.raises(ValueError, match="NAME=VALUE"):
        parse_option(text)
