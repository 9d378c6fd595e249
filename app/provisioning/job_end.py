"""The end of a job, by its exit file and its log."""

from itertools import islice, takewhile

from app.provisioning.jobs import End, Job, Phase
from app.provisioning.store import Launch

_TERMINATED = 128 + 15  # a shell's exit status of SIGTERM
_LAST_LINES, _LAST_CHARACTERS = 4, 600
_ERROR, _TRACE, _MAX_TRACE_LINES = "error: ", "At:", 100


def job_from_exit_file(launch: Launch, status: int, seconds: int) -> Job:
    limit = launch.spec.time_limit_minutes * 60
    if status == 0:
        end, words = End.COMPLETED, "the job ended with status 0"
    elif launch.provider == "slurm" and seconds >= limit - 1:
        end, words = End.TIMEOUT, "the job's time limit was reached"
    elif status == _TERMINATED:
        end, words = End.CANCELLED, "the job was ended by SIGTERM"
    else:
        end, words = End.FAILED, f"the job ended with status {status}"
    return Job(Phase.ENDED, launch.job_id, launch.node, words, end, status)


def last_words(log: str) -> str:
    """Triton's last error, without the trace that it ends with; else the last lines."""
    lines = [" ".join(line.split()) for line in log.splitlines() if line.strip()]
    errors = [number for number, line in enumerate(lines) if line.startswith(_ERROR)]
    if errors and len(lines) - errors[-1] <= _MAX_TRACE_LINES:
        message = takewhile(lambda line: line != _TRACE, lines[errors[-1] :])
        return " | ".join(islice(message, _LAST_LINES))[:_LAST_CHARACTERS]
    return " | ".join(lines[-_LAST_LINES:])[-_LAST_CHARACTERS:]
