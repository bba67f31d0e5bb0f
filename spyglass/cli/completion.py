"""`spyglass completion bash|zsh|fish`: a script for the shell, made from the parsers of all verbs."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator

from spyglass.config.shipped import shipped_models

HELP = "Print what makes a shell complete verbs, options and models."
_USE = {
    "bash": "source <(spyglass completion bash)",
    "zsh": "source <(spyglass completion zsh)",
    "fish": "spyglass completion fish | source",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("shell", choices=tuple(_USE), help="for good, put this into its start-up file: " + _USE["bash"])


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    print(_fish() if args.shell == "fish" else _bash(zsh=args.shell == "zsh"))
    return 0


def _parsers() -> Iterator[tuple[str, str, list[argparse.Action]]]:
    """Name, help and actions of every verb."""
    from spyglass.cli.main import VERBS, build_parser, load_verb

    for name, text in VERBS.items():
        yield name, text, build_parser(name, load_verb(name))._actions


def _words(actions: list[argparse.Action]) -> list[str]:
    """What may stand where no option's value is expected: choices of arguments, shipped models."""
    placed = [action for action in actions if not action.option_strings]
    takes_model = any("MODEL" in str(action.metavar) for action in placed)
    return [*(str(c) for action in placed for c in action.choices or ()), *(shipped_models() if takes_model else ())]


def _values(action: argparse.Action) -> list[str] | None:
    """What an option may be followed by: its choices, shipped models; None for one without a value."""
    if action.nargs == 0:
        return None
    if action.choices:
        return [str(choice) for choice in action.choices]
    return list(shipped_models()) if action.metavar == "MODEL" else []


def _bash(*, zsh: bool) -> str:
    verbs, options, words, values = [], [], [], []
    for name, _, actions in _parsers():
        verbs.append(name)
        options.append(f"    {name}) options={shlex.quote(' '.join(o for a in actions for o in a.option_strings))} ;;")
        words.append(f"    {name}) words={shlex.quote(' '.join(_words(actions)))} ;;")
        for action in actions:
            if action.option_strings and (known := _values(action)) is not None:
                asked = "|".join(f"'{name} {option}'" for option in action.option_strings)
                values.append(f"    {asked}) words={shlex.quote(' '.join(known))}; options='' ;;")
    head = ["autoload -Uz compinit bashcompinit && compinit && bashcompinit"] if zsh else []
    body = f"""_spyglass() {{
  local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}" verb="${{COMP_WORDS[1]}}"
  local options='' words=''
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W '{" ".join(verbs)} --help --version' -- "$cur"))
    return
  fi
  case "$verb" in
{chr(10).join(options)}
  esac
  case "$verb" in
{chr(10).join(words)}
  esac
  case "$verb $prev" in
{chr(10).join(values)}
  esac
  case "$cur" in
    -*) COMPREPLY=($(compgen -W "$options" -- "$cur")) ;;
    *) COMPREPLY=($(compgen -W "$words" -- "$cur") $(compgen -f -- "$cur")) ;;
  esac
}}
complete -o filenames -F _spyglass spyglass"""
    return "\n".join([*head, body])


def _fish() -> str:
    lines = []
    for name, text, actions in _parsers():
        lines.append(f"complete -c spyglass -f -n __fish_use_subcommand -a {name} -d {shlex.quote(text)}")
        here = f"complete -c spyglass -n '__fish_seen_subcommand_from {name}'"
        if known := _words(actions):
            lines.append(f"{here} -a {shlex.quote(' '.join(known))}")
        for action in actions:
            names = [f"-l {o[2:]}" if o.startswith("--") else f"-{'s' if len(o) == 2 else 'o'} {o[1:]}"
                     for o in action.option_strings]  # fmt: skip
            if not names:
                continue
            values = _values(action)
            takes = "" if values is None else f" -x -a {shlex.quote(' '.join(values))}" if values else " -r"
            told = (action.help or "").replace("%%", "%").split(";")[0]
            lines.append(f"{here} {' '.join(names)}{takes} -d {shlex.quote(told)}")
    return "\n".join(lines)
