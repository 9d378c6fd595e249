"""LoRA adapters in requests to launch, and in the files of a job."""

from typing import Any

import pytest

from app.core.errors import InvalidRequestError
from app.provisioning.job_script import ModelPlace, engine_settings, render_script
from app.provisioning.profiles import Profile
from app.provisioning.spec import MAX_ADAPTERS, LaunchSpec
from tests.unit.provisioning.test_launch_engine import packed_json
from tests.unit.provisioning.test_launch_requests import EVIL, LAUNCH, profiles, spec_of

__all__ = ["profiles"]

SHEEP = "/scratch/models/adapters/sheep"
GIVEN = {"sheep": SHEEP, "goat": "org/goat"}


def test_adapters_reach_the_entry_of_the_server(profiles: dict[str, Profile]) -> None:
    spec = spec_of(profiles, adapters=GIVEN)
    stored = LaunchSpec.model_validate_json(spec.model_dump_json())
    place = ModelPlace(adapters={"sheep": "/real/sheep"}, rank=32)
    expected = {"model": "org/model", "enable_lora": True, "max_lora_rank": 32}
    assert engine_settings(stored, place) == expected
    assert packed_json(stored, "model.json") == {"model": "org/model", "enable_lora": True}
    assert packed_json(stored, "multi_lora.json") == GIVEN
    assert packed_json(stored, "multi_lora.json", place) == GIVEN | {"sheep": "/real/sheep"}
    script = render_script(LAUNCH, stored, profiles["della"], place)
    assert "--bind /real/sheep:/real/sheep:ro" in script
    larger = spec_of(profiles, adapters=GIVEN, engine={"max_lora_rank": 64})
    assert engine_settings(larger, place)["max_lora_rank"] == 64


def test_a_launch_without_adapters_has_none_of_their_files(profiles: dict[str, Profile]) -> None:
    spec = spec_of(profiles)
    assert "enable_lora" not in engine_settings(spec, ModelPlace())
    with pytest.raises(KeyError):
        packed_json(spec, "multi_lora.json")
    older = spec.model_dump()
    del older["adapters"]  # stored before launches had adapters
    assert LaunchSpec.model_validate(older) == spec


@pytest.mark.parametrize(
    "adapters",
    [*({"sheep": evil} for evil in EVIL), *({evil: SHEEP} for evil in EVIL), ["sheep"],
     {"a:b": SHEEP}, {"sheep": "/etc/sheep"}, {"sheep": "/scratch/models"}, {"sheep": 1},
     {f"a{number}": "org/a" for number in range(MAX_ADAPTERS + 1)}],
)  # fmt: skip
def test_adapters_that_are_refused(profiles: dict[str, Profile], adapters: Any) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        spec_of(profiles, adapters=adapters)
    assert all(error.field.startswith("adapters") for error in refused.value.errors)
