"""The check of a finished text against its JSON schema, within bounds of time and memory.

    check = compiled(schema)  # None: it cannot be checked within the bounds
    fault = check.fault_of(text)  # None: the text follows the schema, or its check would take too long

The validator is jsonschema-rs. It reads a relaxed copy of the schema (`relaxed`): keywords that engines read in other
ways than the validator are not in it, so that a text which follows its schema never fails.
"""

from app.inference.schema_check.check import Check, Fault, compiled, is_compiled

__all__ = ["Check", "Fault", "compiled", "is_compiled"]
