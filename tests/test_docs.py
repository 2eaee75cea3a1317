"""The documentation's pages hold every public name and command; `make docs` checks the rest, strictly."""

import inspect
import re
from collections import Counter
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest

from experiments import commands

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = {page.relative_to(DOCS).as_posix(): page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md")}


def documented(page: str) -> list[str]:
    """The objects that mkdocstrings is told to put on a page."""
    return re.findall(r"^::: (\S+)$", PAGES[page], flags=re.MULTILINE)


def public(module: str) -> set[str]:
    """The functions and classes that a module itself has for others."""
    found = vars(import_module(module)).items()
    return {
        f"{module}.{name}"
        for name, value in found
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == module
    }


@pytest.mark.parametrize(
    ("package", "flax"),
    [
        ("spectral", ["spectral.linen", "spectral.nnx"]),
        ("manifold_muon", []),
        ("sel_jax", ["sel_jax.linen", "sel_jax.nnx"]),
    ],
)
def test_every_public_name_is_on_the_api_page_once(package: str, flax: list[str]) -> None:
    # A function that its module is called after is named whole: from outside Python, the module hides it.
    named = [re.sub(r"\.(\w+)\.\1$", r".\1", name) for name in documented(f"api/{package}.md")]
    expected = {f"{package}.{name}" for name in import_module(package).__all__}
    assert Counter(named) == Counter(expected.union(*map(public, flax)))


def test_every_command_is_on_its_page_once() -> None:
    modules = [module.name for module in iter_modules(commands.__path__, f"{commands.__name__}.")]
    expected = set().union(*map(public, modules))
    assert Counter(documented("command_line.md")) == Counter(expected)


def test_the_menu_has_every_page_and_no_other() -> None:
    menu = re.findall(r"^ +- .+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(menu) == sorted(PAGES)


def test_included_sections_are_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    included = re.findall(r'^--8<-- "README.md:(\w+)"$', "\n".join(PAGES.values()), re.MULTILINE)
    assert included
    for name in included:
        start, end = (f"<!-- --8<-- [{side}:{name}] -->" for side in ("start", "end"))
        assert 0 <= readme.find(start) < readme.find(end)
