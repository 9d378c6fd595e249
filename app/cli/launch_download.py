"""`python -m app launch download` and `launch token`: models of Hugging Face for the profiles' hosts."""

import argparse
import asyncio
import getpass
import signal
import sys
import time

from app.api.startup_checks import secret_weakness
from app.cli.arguments import Subcommands, add_command, add_subcommands
from app.cli.progress_line import ProgressLine
from app.core.settings.processes import DownloadSettings, LaunchSettings
from app.provisioning.hosts import HostError, Hosts
from app.provisioning.hub_token import HubToken, HubTokenError
from app.provisioning.model_download import (
    Downloaded,
    ModelDownloadError,
    ModelUnavailableError,
    download_model,
)
from app.provisioning.profiles import Profile, ProfileError, find_profile, read_profiles

_TEXT = "Download a model into the cache of a profile's host; the same command again continues it."
_EPILOG = """Weights are fetched as safetensors only. The model is listed by `launch models` once it is complete.

example:
  python -m app launch download Qwen/Qwen2.5-7B-Instruct --profile della"""
_STDIN_EPILOG = """The token is needed for gated and private models. It is never an argument: other users of the machine
see those. LLM_HUGGING_FACE_TOKEN_FILE and LLM_SEAL_SECRET have to be set.

example:
  python -m app launch token set < token.txt"""
_INTERRUPTED = 130
_MAX_TOKEN = 4096


class _Settings(LaunchSettings, DownloadSettings):
    """Those of a download; it needs no database."""


def configure(actions: Subcommands) -> None:
    download = add_command(actions, "download", _TEXT, _download, _EPILOG)
    add = download.add_argument
    add("model", help="Hugging Face id")
    add("--profile", help="the place (default: the default profile, or the first)")
    add("--revision", default="main", help="branch, tag or commit (main)")
    text = "Store the token for downloads from Hugging Face, or remove it."
    token = add_subcommands(add_command(actions, "token", text, epilog=_STDIN_EPILOG))
    add_command(token, "set", "Seal and store a token that is read from standard input.", _set)
    add_command(token, "remove", "Remove the stored token.", _remove)


def _download(options: argparse.Namespace) -> int:
    settings = _Settings()
    # Ctrl-C also if a shell started this process with SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        profile = _profile(settings, options.profile)
        found = asyncio.run(_fetch(settings, profile, options.model, options.revision))
    except ModelUnavailableError as error:
        return _fail(f"{error}. The same command continues.")
    except (HostError, HubTokenError, ModelDownloadError, ProfileError) as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return _fail("Interrupted: the same command continues it.", _INTERRUPTED)
    sys.stdout.write(
        f"{options.model} is complete: {found.files} files, {found.total / 1e9:.2f} GB "
        f"({found.received / 1e9:.2f} GB received now)\n{found.snapshot}\n"
    )
    return 0


def _profile(settings: _Settings, name: str | None) -> Profile:
    """The place of the download. Raises ProfileError."""
    profiles = read_profiles(settings.profiles_file)
    if not profiles:
        raise ProfileError("There are no profiles: set LLM_PROFILES_FILE (docs/launches.md).")
    found = find_profile(profiles, name, None)
    if found is None:
        raise ProfileError(f"There is no profile {name!r}. There are: {', '.join(profiles)}.")
    return found


async def _fetch(settings: _Settings, profile: Profile, model: str, revision: str) -> Downloaded:
    token = HubToken(settings).read()
    sys.stderr.write(f"Downloading to {profile.name} ({profile.host or 'this machine'})\n")
    with ProgressLine() as line:
        begun = (time.monotonic(), 0)

        def report(done: int, total: int) -> None:
            nonlocal begun
            if not total:
                line.report("listing the files", 0, "")
                return
            if not begun[1]:
                begun = (time.monotonic(), done)  # the rate is this download's own
            rate = (done - begun[1]) / max(0.001, time.monotonic() - begun[0])
            detail = f"{done / 1e9:.2f} of {total / 1e9:.2f} GB, {rate / 1e6:.1f} MB/s"
            line.report("download", done / max(1, total), detail)

        async with Hosts() as hosts:
            return await download_model(
                hosts, profile, model, revision,
                endpoint=settings.hub_endpoint, token=token, report=report,
            )  # fmt: skip


def _set(_: argparse.Namespace) -> int:
    settings = _Settings()
    weakness = settings.seal_secret and secret_weakness(settings.seal_secret.get_secret_value())
    if weakness:
        return _fail(f"LLM_SEAL_SECRET {weakness}: make one with `openssl rand -base64 32`.")
    is_terminal = sys.stdin.isatty()
    token = getpass.getpass("Token: ") if is_terminal else sys.stdin.read(_MAX_TOKEN)
    try:
        file = HubToken(settings).store(token.strip())
    except HubTokenError as error:
        return _fail(str(error))
    sys.stdout.write(f"The token is sealed in {file}.\n")
    return 0


def _remove(_: argparse.Namespace) -> int:
    try:
        is_removed = HubToken(_Settings()).remove()
    except HubTokenError as error:
        return _fail(str(error))
    sys.stdout.write("The token is removed.\n" if is_removed else "There is no token.\n")
    return 0


def _fail(text: str, status: int = 1) -> int:
    sys.stderr.write(f"{text}\n")
    return status
