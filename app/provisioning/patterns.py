"""Valid values in launches and profiles: one pattern for each kind of value.

Every value of a job's script or of a command matches one of them, so that no value can be an option, a
second word, a path upwards, or shell code. Each is also quoted.
"""

import re
from pathlib import PurePosixPath

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
# Hugging Face: no repository has "--" or ".." in its name.
# https://huggingface.co/docs/huggingface_hub/package_reference/utilities (validate_repo_id)
HUGGING_FACE_ID = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}$"
ADAPTER = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
REVISION = r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$"
PATH = r"^/[A-Za-z0-9._+@/-]{1,1023}$"
# Only in profiles, which an operator writes.
HOST = r"^[A-Za-z0-9][A-Za-z0-9.-]{0,252}$"
USER = r"^[a-z_][a-z0-9_-]{0,31}$"
MODULE = r"^[A-Za-z0-9][A-Za-z0-9._+-]{0,62}(/[A-Za-z0-9][A-Za-z0-9._+-]{0,62}){0,3}$"
GRES = r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,62}$"
ADDRESS = r"^[A-Za-z0-9][A-Za-z0-9.:-]{0,252}$"


def fits(pattern: str, text: str) -> bool:
    return re.fullmatch(pattern, text) is not None


def is_plain_path(text: str) -> bool:
    return fits(PATH, text) and str(PurePosixPath(text)) == text and ".." not in text.split("/")


def is_model_id(text: str) -> bool:
    return fits(HUGGING_FACE_ID, text) and "--" not in text and ".." not in text


def is_revision(text: str) -> bool:
    return fits(REVISION, text) and ".." not in text and "//" not in text
