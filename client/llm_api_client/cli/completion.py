"""Scripts that complete commands in shells."""

from collections.abc import Sequence

SHELLS = ("bash", "zsh", "fish")

_BASH = """\
_llm_api() {{
    local word=${{COMP_WORDS[COMP_CWORD]}}
    if ((COMP_CWORD == 1)); then
        mapfile -t COMPREPLY < <(compgen -W "{names}" -- "$word")
    else
        mapfile -t COMPREPLY < <(compgen -W "{options}" -- "$word")
    fi
}}
complete -o default -F _llm_api llm-api"""
_ZSH = """\
#compdef llm-api
_llm_api() {{
    if ((CURRENT == 2)); then
        compadd -- {names}
    else
        compadd -- {options}
        _files
    fi
}}
compdef _llm_api llm-api"""
_FISH = """\
complete -c llm-api -n __fish_use_subcommand -f -a "{names}"
{lines}"""
_OPTIONS = (
    "--json", "--url", "--no-color", "--help", "--model", "--follow", "--max-tokens", "--temperature",
    "--prompt-template", "--key", "--out", "--name", "--system",
)  # fmt: skip


def script(shell: str, names: Sequence[str]) -> str:
    """The script of a shell: `source <(llm-api completion bash)`."""
    lines = "\n".join(f"complete -c llm-api -l {option[2:]}" for option in _OPTIONS)
    form = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}[shell]
    return form.format(names=" ".join(names), options=" ".join(_OPTIONS), lines=lines)
