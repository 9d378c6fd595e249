"""Checks answers with llm-comply's schemas: JSON on stdin, findings as JSON on stdout.

Runs in the environment of the recipes. The input is a list of [specification, schema, answer]; an event of a response has the
schema `event`. A finding is [schema or type of the event, message].
"""

import json
import sys
from pathlib import Path

import llm_comply  # type: ignore[import-not-found] # in the other environment
from llm_comply.schema import SpecLoader  # type: ignore[import-not-found]

SPECIFICATIONS = Path(llm_comply.__file__).parent / "specs"


def main() -> None:
    given = json.load(sys.stdin)
    loaders = {
        name: SpecLoader(str(SPECIFICATIONS / f"{name}.json"))
        for name in {one for one, *_ in given}
    }
    findings = []
    for name, schema, answer in given:
        if schema == "event":
            schema = answer["type"]
            found = loaders[name].validate_sse_event(schema, answer)
        else:
            found = loaders[name].validate(answer, schema)
        findings += [[schema, message] for message in found]
    json.dump(findings, sys.stdout)


if __name__ == "__main__":
    main()
