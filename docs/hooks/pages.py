"""What the pages' Markdown lacks: formulas as MathML, links to arXiv, and signs that are not HTML.

All of it happens when the site is built, so that its pages fetch nothing when they are read.
"""

import re
from html import unescape
from typing import Any
from xml.etree.ElementTree import Element

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor
from mkdocs.config.defaults import MkDocsConfig

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the Markdown extension; docstrings are rendered with it too."""
    config.markdown_extensions.append(_Plain())
    return config


def on_page_content(html: str, **_: Any) -> str:
    """Turn the formulas that pymdownx.arithmatex has found into MathML, which browsers draw themselves."""
    return _FORMULA.sub(_mathml, html)


def _mathml(match: re.Match[str]) -> str:
    display = "block" if match[1] == "div" else "inline"
    formula = convert(unescape(match[2]).strip(), display=display)
    # A function's name is no operator, which would stand apart from its argument.
    return re.sub(r"<mo>([a-z]{2,})</mo>", r"<mi>\1</mi>", formula)


class _Plain(Extension):
    """No HTML, since `<G, A>` and `w <- w - u` are formulas here; and arXiv numbers as links."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.deregister("html_block")
        md.inlinePatterns.deregister("html")
        md.inlinePatterns.register(_ArXiv(r"arXiv:(\d{4}\.\d{5})", md), "arxiv", 75)


class _ArXiv(InlineProcessor):
    ANCESTOR_EXCLUDES = ("a",)

    def handleMatch(self, m: re.Match[str], data: str) -> tuple[Element, int, int]:
        link = Element("a", href=f"https://arxiv.org/abs/{m[1]}")
        link.text = m[0]
        return link, m.start(), m.end()
