"""`python -m app launch models`: the models that profiles' hosts have, also as a catalogue."""

import argparse
import asyncio
import sys

from app.cli.table import write_table
from app.core.settings.processes import LaunchSettings
from app.provisioning.catalogue import CatalogueEntry, read_catalogue
from app.provisioning.hosts import HostError, Hosts
from app.provisioning.model_scan import FoundModel, catalogue_entries, find_models
from app.provisioning.profiles import Profile, ProfileError, read_profiles

TEXT = "List the models below the model roots and in the caches of the profiles' hosts."
EPILOG = """A model of a cache has its Hugging Face id as its name, any other one its path.

example:
  python -m app launch models --profile della --catalogue > catalogue.toml   # for LLM_CATALOGUE_FILE"""
_COMMIT = 12  # characters that are shown


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--profile", help="of this profile only (default: of all)")
    parser.add_argument(
        "--catalogue", action="store_true",
        help="print those that can be launched as a file for LLM_CATALOGUE_FILE",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    settings = LaunchSettings()
    try:
        profiles = _profiles(settings, options.profile)
        offered = read_catalogue(settings.catalogue_file)
        found = asyncio.run(_find(profiles))
    except (HostError, ProfileError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if options.catalogue:
        entries: dict[str, CatalogueEntry] = {}
        for profile, models in found:
            entries = catalogue_entries(models, profile) | entries
        sys.stdout.write("\n".join(map(_to_toml, entries.values())))
        return 0
    rows = [["MODEL", "REVISION", "GB", "PROFILE", "OFFERED", "FAULT"]]
    for profile, models in found:
        rows += [_row(one, profile, offered) for one in models]
    write_table(rows)
    return 0


def _profiles(settings: LaunchSettings, name: str | None) -> list[Profile]:
    """The profiles to search. Raises ProfileError."""
    profiles = read_profiles(settings.profiles_file)
    if not profiles:
        raise ProfileError("There are no profiles: set LLM_PROFILES_FILE (docs/launches.md).")
    if name is None:
        return [one for one in profiles.values() if one.model_roots or one.cache]
    if name not in profiles:
        raise ProfileError(f"There is no profile {name!r}. There are: {', '.join(profiles)}.")
    return [profiles[name]]


async def _find(profiles: list[Profile]) -> list[tuple[Profile, list[FoundModel]]]:
    found = []
    async with Hosts() as hosts:
        for profile in profiles:
            sys.stderr.write(f"Reading {profile.name} ({profile.host or 'this machine'})\n")
            found.append((profile, await find_models(hosts, profile)))
    return found


def _row(one: FoundModel, profile: Profile, offered: dict[str, CatalogueEntry]) -> list[str]:
    revision = one.revision[:_COMMIT] if one.revision else "-"
    size = f"{one.size_gb:.1f}" if one.weights else "-"
    is_offered = "yes" if one.name in offered else "-"
    return [one.name, revision, size, profile.name, is_offered, one.fault or "-"]


def _to_toml(entry: CatalogueEntry) -> str:
    """A table of the catalogue; its texts match patterns without quotes."""
    lines = [f'[models."{entry.name}"]']
    if entry.revision is not None:
        lines.append(f'revision = "{entry.revision}"')
    if entry.size_gb is not None:
        lines.append(f"size_gb = {entry.size_gb}")
    lines.append(f'profile = "{entry.profile}"')
    return "\n".join(lines) + "\n"
