"""A launch's directory on its profile's host: created before the job, read meanwhile, removed after it.

The job writes `log`, `address` and `exit` (`job_script`): they are read with a bound, and their
format is checked.
"""

import re
from dataclasses import dataclass, replace
from uuid import UUID

import orjson

from app.inference.engine_options import engine_options
from app.inference.model_repository import NO_ENCODER, is_encoder_decoder
from app.provisioning import patterns
from app.provisioning.hosts import CommandOutput, HostError, Hosts
from app.provisioning.job_script import ModelPlace, directory_of, pack_directory, render_script
from app.provisioning.jobs import RefusedError
from app.provisioning.profiles import Profile
from app.provisioning.spec import LaunchSpec, is_below_a_root

LOG_BYTES = 32_768
_MAX_FILE_BYTES = 4096
_MAX_CONFIG_BYTES = 512 * 1024
_RANKS = tuple(int(one) for one in engine_options()["max_lora_rank"].choices)
_COMMIT = re.compile(r"[0-9a-f]{40,64}", re.ASCII)
# A job of an older version has three ports: HTTP's is between the two.
_ADDRESS = re.compile(r"(\S{1,253})((?: \d{1,5}){2,3})\n")
_EXIT = re.compile(r"(\d{1,3}) (\d{1,12})\n")


@dataclass(frozen=True, slots=True)
class PublishedAddress:
    """Address of the job's server: gRPC and metrics ports on a node; of an older job, HTTP's between."""

    node: str
    ports: tuple[int, ...]


class Directory:
    """One launch's directory. Every method may be repeated, by any worker."""

    def __init__(self, hosts: Hosts, profile: Profile, launch: UUID) -> None:
        self._hosts = hosts
        self.profile = profile
        self._launch = launch
        self.path = directory_of(profile, launch)

    async def make(self, spec: LaunchSpec, secret: str) -> None:
        """Write its first files. Raises HostError, and RefusedError if the model cannot be served."""
        place = await self._find_adapters(spec, await self._find_model(spec))
        script = render_script(self._launch, spec, self.profile, place)
        made = await self._run("mkdir", "-p", "-m", "700", "--", self.path)
        if made.status != 0:
            raise RefusedError(f"The directory could not be made: {made.error_line}")
        content = pack_directory(script, spec, place, secret)
        packed = await self._hosts.run(
            self.profile,
            ["tar", "--extract", "--file=-", "--no-same-owner", f"--directory={self.path}"],
            content=content,
        )
        if packed.status != 0:
            raise RefusedError(f"The directory could not be filled: {packed.error_line}")

    async def published(self) -> PublishedAddress | None:
        """The server's address, once the job has written it. Raises RefusedError for an invalid one."""
        text = await self._read("address")
        if text is None:
            return None
        found = _ADDRESS.fullmatch(text)
        ports = tuple(int(port) for port in found[2].split()) if found else ()
        if not found or not patterns.fits(patterns.HOST, found[1]) or max(ports) > 65_535:
            raise RefusedError("The job's file `address` has no valid address.")
        return PublishedAddress(found[1], ports)

    async def exit_status(self) -> tuple[int, int] | None:
        """The job's exit status and its run time in seconds, once it has ended by itself."""
        found = _EXIT.fullmatch(await self._read("exit") or "")
        return (int(found[1]), int(found[2])) if found else None

    async def log(self) -> str | None:
        answer = await self._run("tail", "-c", str(LOG_BYTES), "--", f"{self.path}/log")
        return answer.output if answer.status == 0 else None

    async def remove(self) -> None:
        """Remove it: a job that begins after this ends at once. Raises HostError."""
        answer = await self._run("rm", "-rf", "--", self.path)
        if answer.status != 0:
            raise HostError(f"The launch's directory cannot be removed: {answer.error_line}")

    async def _find_model(self, spec: LaunchSpec) -> ModelPlace:
        if not spec.model.startswith("/"):
            await self._refuse_encoder_decoder(spec, await self._cached(spec))
            return ModelPlace()
        path = await self._resolve("The model", spec.model)
        if (await self._run("test", "-f", f"{path}/config.pbtxt")).status == 0:
            if not self.profile.triton_entries:
                raise RefusedError(
                    "The model's path is an entry of a Triton model repository, which may run code "
                    f"of its own; the profile {self.profile.name!r} does not allow that "
                    "(triton_entries)."
                )
            if spec.adapters:
                raise RefusedError(
                    "The model's path is an entry of a Triton model repository: its multi_lora.json "
                    "names its adapters, and a launch cannot name others."
                )
            if options := sorted(spec.engine.model_extra or {}):
                raise RefusedError(
                    f"The model's path is an entry of a Triton model repository: its model.json has the "
                    f"engine's options, and a launch cannot set {', '.join(options)}."
                )
            return ModelPlace(path, is_entry=True)
        if (await self._run("test", "-f", f"{path}/config.json")).status != 0:
            raise RefusedError(
                f"{spec.model} has neither a config.json nor a config.pbtxt: it is not a model."
            )
        await self._refuse_encoder_decoder(spec, path)
        return ModelPlace(path)

    async def _resolve(self, subject: str, path: str) -> str:
        """A path without symbolic links. Raises RefusedError if it leads out of the model roots."""
        roots = self.profile.model_roots
        answer = await self._run("realpath", "-m", "--", path, *roots)
        path, *resolved = answer.output.splitlines() or [""]
        if answer.status != 0 or len(resolved) != len(roots):
            raise RefusedError(f"{subject}'s path cannot be resolved: {answer.error_line}")
        if not patterns.is_plain_path(path) or not is_below_a_root(path, tuple(resolved)):
            raise RefusedError(
                f"{subject}'s path leads out of the profile's model roots: its symbolic links must "
                "stay inside."
            )
        return path

    async def _find_adapters(self, spec: LaunchSpec, model: ModelPlace) -> ModelPlace:
        """The place with the adapters' directories; the engine itself finds Hugging Face ids."""
        found, ranks = {}, []
        for name, place in spec.adapters.items():
            if place.startswith("/"):
                found[name] = await self._resolve(f"The adapter {name}", place)
                ranks.append(await self._rank(name, found[name]))
        if not ranks:
            return model
        largest = max(ranks)
        rank = next((one for one in _RANKS if one >= largest), None)
        given = (spec.engine.model_extra or {}).get("max_lora_rank")
        if rank is None or (given is not None and given < largest):
            limit = _RANKS[-1] if given is None else given
            raise RefusedError(f"An adapter has the rank {largest}; the engine's limit is {limit}.")
        return replace(model, adapters=found, rank=rank)

    async def _rank(self, name: str, path: str) -> int:
        """The rank of an adapter in PEFT's format. Raises RefusedError for other directories."""
        file = f"{path}/adapter_config.json"
        answer = await self._run("head", "-c", str(_MAX_CONFIG_BYTES), "--", file)
        try:
            config = orjson.loads(answer.output) if answer.status == 0 else None
        except orjson.JSONDecodeError:
            config = None
        rank = config.get("r") if isinstance(config, dict) else None
        if not isinstance(rank, int) or rank < 1:
            raise RefusedError(f"{path} has no adapter_config.json of a LoRA adapter ({name}).")
        return rank

    async def _cached(self, spec: LaunchSpec) -> str | None:
        """Directory of a Hugging Face model's revision in the profile's cache, which may lack it."""
        if self.profile.cache is None:
            return None
        repository = f"{self.profile.cache}/hub/models--{spec.model.replace('/', '--')}"
        name = spec.revision or "main"
        answer = await self._run("head", "-c", "64", "--", f"{repository}/refs/{name}")
        commit = answer.output.strip() if answer.status == 0 else name
        return f"{repository}/snapshots/{commit}" if _COMMIT.fullmatch(commit) else None

    async def _refuse_encoder_decoder(self, spec: LaunchSpec, path: str | None) -> None:
        """Raise RefusedError for an encoder-decoder model, before a job waits for a GPU.

        The engine itself reports other faults of a config.json.
        """
        if path is None:
            return
        answer = await self._run("head", "-c", str(_MAX_CONFIG_BYTES), "--", f"{path}/config.json")
        try:
            config = orjson.loads(answer.output) if answer.status == 0 else None
        except orjson.JSONDecodeError:
            return
        if isinstance(config, dict) and is_encoder_decoder(config):
            raise RefusedError(f"{spec.model} is an encoder-decoder model: {NO_ENCODER}")

    async def _read(self, name: str) -> str | None:
        answer = await self._run("head", "-c", str(_MAX_FILE_BYTES), "--", f"{self.path}/{name}")
        return answer.output if answer.status == 0 else None

    async def _run(self, *words: str) -> CommandOutput:
        return await self._hosts.run(self.profile, words)
