"""What README.md and other pages say about code holds, as far as it can be checked without
running it."""

import ast
import importlib.util
import re
import shlex
from dataclasses import fields
from typing import Any

import pytest
import typer
from sgl_jax.srt.server_args import ServerArgs

import patches
from enginepool.cli.main import app
from tests.support.pages import PAGES, ROOT, anchors, blocks, links, read

EACH = pytest.mark.parametrize("page", PAGES)
# tests/integrations/test_pages.py runs these.
ELSEWHERE = {"lm_eval", "tunix", "ray"}
COMMAND = typer.main.get_command(app)
UPSTREAM = {f"--{field.name.replace('_', '-')}" for field in fields(ServerArgs)}
TARGETS = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))


def test_every_patch_is_named() -> None:
    """docs/upstream.md names each existing patch once, and no others."""
    listed = read("docs/upstream.md").split("## Patches")[1].split("\n- **", 1)[1]
    names = re.findall(r"`([a-z0-9_]+)`", listed)
    assert sorted(names) == sorted(patch.name for patch in patches.ALL)


@EACH
def test_what_a_page_names_exists(page: str) -> None:
    """`package/file.py` is a file of the repository or of the package."""
    files = re.findall(r"`([a-z_0-9]+/[a-z_0-9/]*\.py)`", read(page))
    homes = [ROOT, ROOT / "enginepool"]
    assert not [name for name in files if not any((home / name).exists() for home in homes)]


@EACH
def test_links_lead_somewhere(page: str) -> None:
    """The file exists, and so does the heading if the link names one."""
    lost = []
    for target, anchor in links(page):
        path = (ROOT / page).parent.joinpath(target).resolve() if target else ROOT / page
        if not path.exists():
            lost.append(target)
        elif anchor and anchor not in anchors(str(path.relative_to(ROOT))):
            lost.append(f"{target}#{anchor}")
    assert not lost


def test_python_is_python_and_run_somewhere() -> None:
    """Each block compiles, and runs in tests/test_page_blocks.py or where its package is
    installed."""
    for page in PAGES:
        for block in blocks(page, "python"):
            ast.parse(block.code, page)
            assert block.needs in ELSEWHERE | {None}


@EACH
def test_commands_exist(page: str) -> None:
    """Targets of make, modules and scripts that Python runs, commands and their options."""
    wrong = []
    for words in commands(page):
        match words:
            case ["make", target, *_] if target not in TARGETS and not target.startswith("…"):
                wrong.append(target)
            case ["python", "-m", module, *_] if importlib.util.find_spec(module) is None:
                wrong.append(module)
            case ["python", script, *_] if script.endswith(".py") and not (ROOT / script).exists():
                wrong.append(script)
            case ["enginepool", *arguments]:
                wrong += unknown(COMMAND, arguments)
    assert not wrong


def commands(page: str) -> list[list[str]]:
    """The lines of blocks without a language, and the text in backticks."""
    lines = [
        line for block in blocks(page, "") for line in block.code.replace("\\\n", " ").splitlines()
    ]
    text = read(page)
    lines += re.findall(r"`((?:make|python|enginepool) [^`]+)`", text)
    found = []
    for line in lines:
        try:
            words = shlex.split(re.split(r"[|>]| &", line)[0], comments=True)
        except ValueError:  # a quotation that continues on the next line
            continue
        found.append([word for word in words if "=" not in word or word.startswith("--")])
    return found


def unknown(command: Any, arguments: list[str]) -> list[str]:
    """The commands and options among the arguments that do not exist."""
    while hasattr(command, "commands") and arguments and not arguments[0].startswith("-"):
        name, *arguments = arguments
        if name not in command.commands:
            return [name]
        command = command.commands[name]
    known = {"--help", "--install-completion", *options(command)}
    inner = getattr(command, "commands", {})  # after options of the outer one
    known.update(*(options(inner[word]) for word in arguments if word in inner))
    if command.name == "serve":
        known |= UPSTREAM
    given = [word.partition("=")[0].rstrip(",;:") for word in arguments if word.startswith("--")]
    return [f"{command.name} {option}" for option in given if option not in known]


def options(command: Any) -> set[str]:
    return {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
