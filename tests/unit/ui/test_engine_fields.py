"""Fields of the engine's options: each option that a launch may set has one, and its value is of its type."""

from typing import Any

import pytest

from app.api.admin.launches_schemas import engine_options_to_wire
from app.inference.engine_options import check_engine_options, engine_options
from app.ui.engine_fields import sections_of
from app.ui.launch_form import FIELDS, NAMES, Field, from_spec, to_launch

PLACES = [
    {"name": "della", "engine_options": ["hf_overrides", "load_format"]},
    {"name": "laptop", "engine_options": ["load_format"]},
]
LISTING = engine_options_to_wire()


def fields_of(profiles: list[dict[str, Any]]) -> dict[str, Field]:
    parts = sections_of(LISTING, profiles)
    return {field.name: field for part in parts for field in part.fields}


def launched(**texts: str) -> dict[str, Any]:
    """The engine's options that a launch sends for the texts of its fields."""
    values = dict.fromkeys(NAMES, "") | {f"engine.{name}": text for name, text in texts.items()}
    engine: dict[str, Any] = to_launch(values, sections_of(LISTING, PLACES))["engine"]
    return engine


def test_every_option_that_a_launch_may_set_has_one_field() -> None:
    free = {f"engine.{one.name}" for one in engine_options().values() if one.access == "free"}
    own = {field.name for field in FIELDS if field.name.startswith("engine.")}
    assert set(fields_of([])) == free - own
    assert set(fields_of(PLACES)) == free - own | {"engine.hf_overrides"}
    for field in fields_of(PLACES).values():
        assert field.help.endswith(".")
        assert not field.help.endswith("..")


def test_values_without_a_permission_are_a_choice() -> None:
    assert fields_of([])["engine.load_format"].choices == ("auto", "safetensors", "dummy")
    open_field = fields_of(PLACES)["engine.load_format"]
    assert open_field.choices == ()
    assert "other values at della, laptop" in open_field.help
    assert "Such as auto, safetensors, dummy." in open_field.help
    assert "only at della" in fields_of(PLACES)["engine.hf_overrides"].help.lower()
    assert "Default: 20" in fields_of([])["engine.max_logprobs"].help.replace("; d", ". D")


@pytest.mark.parametrize("name", [name.removeprefix("engine.") for name in fields_of([])])
def test_each_choice_is_sent_with_its_type(name: str) -> None:
    option, field = engine_options()[name], fields_of([])[f"engine.{name}"]
    for choice in field.choices:
        engine = launched(**{name: choice})
        assert check_engine_options(engine, ()) == engine
        assert option.types == ("bool",) or engine[name] in option.choices


def test_texts_are_values_of_their_types() -> None:
    texts = {
        "max_num_seqs": "8", "cpu_offload_gb": "1.5", "enable_prefix_caching": "false",
        "cudagraph_capture_sizes": "1, 2,4", "lora_target_modules": "q_proj, v_proj",
        "limit_mm_per_prompt": '{"image": 2}', "optimization_level": "0", "log_level": "DEBUG",
        "hf_overrides": '{"a": [1]}', "load_format": "tensorizer",
    }  # fmt: skip
    engine = launched(**texts)
    assert engine == {
        "max_num_seqs": 8, "cpu_offload_gb": 1.5, "enable_prefix_caching": False,
        "cudagraph_capture_sizes": [1, 2, 4], "lora_target_modules": ["q_proj", "v_proj"],
        "limit_mm_per_prompt": {"image": 2}, "optimization_level": 0, "log_level": "DEBUG",
        "hf_overrides": {"a": [1]}, "load_format": "tensorizer",
    }  # fmt: skip
    spec = {name.partition(".")[0]: None for name in NAMES} | {"engine": engine}
    spec |= {name.removeprefix("resources."): None for name in NAMES}
    again = from_spec(spec)
    assert launched(**{name.removeprefix("engine."): again[name] for name in again}) == engine


@pytest.mark.parametrize(
    ("name", "text"),
    [("max_num_seqs", "many"), ("enable_dbo", "yes"), ("limit_mm_per_prompt", "{"),
     ("limit_mm_per_prompt", "[" * 100_000)],
)  # fmt: skip
def test_a_text_that_is_no_value_goes_to_the_api(name: str, text: str) -> None:
    assert launched(**{name: text}) == {name: text}
