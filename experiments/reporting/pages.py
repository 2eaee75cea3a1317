"""What reports share: tables, figures inside a page, and the page around them."""

import base64
import html
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from matplotlib.figure import Figure

from experiments.files import write_json, write_whole
from experiments.reporting.panels import png

_WIDEST = 18


@dataclass(frozen=True)
class Table:
    """A table's columns: their headings, and what each shows of a row."""

    columns: Mapping[str, Callable[[Any], str]]
    left: Collection[str]
    """The columns that hold words, aligned on the left."""

    def plain(self, rows: Sequence[Any], heads: Mapping[str, str]) -> str:
        """Aligned plain text; `heads` chooses the columns, and all but its last are cut to 18 characters."""
        columns = []
        for name, head in heads.items():
            cells = [head, *map(self.columns[name], rows)]
            if name != list(heads)[-1]:
                cells = [cell if len(cell) <= _WIDEST else cell[: _WIDEST - 1] + "…" for cell in cells]
            width = max(map(len, cells))
            columns.append([cell.ljust(width) if name in self.left else cell.rjust(width) for cell in cells])
        return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))

    def markdown(self, rows: Sequence[Any]) -> str:
        """The whole table in Markdown, without a last line break."""
        cells = [[render(row).replace("|", "\\|") for render in self.columns.values()] for row in rows]
        rule = [":--" if name in self.left else "--:" for name in self.columns]
        return "\n".join(f"| {' | '.join(line)} |" for line in [list(self.columns), rule, *cells])

    def html(
        self, rows: Sequence[Any], color: Callable[[Any], str], bold: Callable[[Any], bool] = lambda _: False
    ) -> str:
        """The whole table in HTML, each row marked with its line's colour in the figures."""
        body = [f"<tr>{self._line('th', self.columns)}</tr>"]
        for row in rows:
            swatch = f'<span class="swatch" style="background:{color(row)}"></span>'
            cells = (html.escape(cell(row)) for cell in self.columns.values())
            body.append(f"<tr{' class=best' * bold(row)}>{self._line('td', cells, swatch)}</tr>")
        return "<table>\n" + "\n".join(body) + "\n</table>"

    def _line(self, tag: str, cells: Iterable[str], swatch: str = "") -> str:
        first = next(iter(self.columns))
        return "".join(
            f"<{tag}{' class=text' * (name in self.left)}>{swatch * (name == first)}{cell}</{tag}>"
            for name, cell in zip(self.columns, cells, strict=True)
        )


def text(value: float | str | None, spec: str = ".4f") -> str:
    """A number in a table, or the word in its place; a dash if there is neither."""
    if value is None:
        return "–"
    return value if isinstance(value, str) else format(value, spec)


def from_to(pair: tuple[float | None, float | None]) -> str:
    """A number at the start and at the end, in a table."""
    return " → ".join(text(value, ".3g") for value in pair)


def setting(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What a report says of its runs' common setting, from the facts of one of them (see `RunRecord`)."""
    config, corpus = facts["config"], facts["corpus"]
    optimizer = config["optimizer"]
    return {
        **{name: config["model"][name] for name in ("layers", "heads", "width", "context")},
        "steps": config["steps"],
        "batch": config["data"]["batch_size"],
        "seed": config["seed"],
        "solver": optimizer["solver"],
        "retraction": optimizer["dgram_retraction"],
        "corpus": corpus["description"],
        "fingerprint": corpus["fingerprint"],
        "versions": ", ".join(f"{name} {version}" for name, version in facts["versions"].items()),
    }


def write_page(
    page: Path,
    *,
    title: str,
    template: Path,
    words: Mapping[str, Any],
    panels: Mapping[str, Mapping[str, Figure]],
    tables: Mapping[str, str],
    notes: Sequence[str],
    images_dir: Path | None = None,
) -> Path:
    """Writes a page that refers to nothing outside itself.

    Args:
      page: the HTML file, in a folder that exists.
      title: in the browser's tab.
      template: the page's body, with a `$name` for every word and table, a `$name_panels` for all panels of a
        name, and `$notes`.
      words: plain values, which are escaped.
      panels: name in the template -> file's name -> figure.
      tables: HTML.
      notes: what a reader must know first.
      images_dir: where the figures go as PNG too.

    Returns:
      The page's path.
    """
    images = {
        f"{place}_panels": " ".join(_image(figure, name, images_dir) for name, figure in group.items())
        for place, group in panels.items()
    }
    items = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    notes_list = f'<ul class="notes">{items}</ul>' if items else ""
    escaped = {name: html.escape(str(value)) for name, value in words.items()}
    body = _template(template).substitute(escaped, **images, **tables, notes=notes_list)
    whole = _template(Path(__file__).with_name("page_template.html")).substitute(
        title=html.escape(title), body=body
    )
    write_whole(page, whole)
    return page


def write_report(
    study_dir: Path,
    *,
    results: Mapping[str, Any],
    markdown: Sequence[str],
    notes: Sequence[str],
    **page: Any,
) -> Path:
    """Writes report.html, results.json, results.md and the figures as PNG into a study's directory.

    Args:
      study_dir: where they go.
      results: what results.json holds besides the notes.
      markdown: the paragraphs of results.md.
      notes: what a reader must know first.
      **page: the rest of the page, as `write_page` takes it.

    Returns:
      The path of report.html.
    """
    write_json(study_dir / "results.json", {"notes": list(notes), **results})
    write_whole(study_dir / "results.md", "\n\n".join(markdown) + "\n")
    return write_page(study_dir / "report.html", notes=notes, images_dir=study_dir, **page)


def _image(figure: Figure, name: str, images_dir: Path | None) -> str:
    """The `<img>` that holds a panel whole; it is written as NAME.png too if there is a folder for it."""
    image = png(figure)
    if images_dir is not None:
        write_whole(images_dir / f"{name}.png", image)
    source = f"data:image/png;base64,{base64.b64encode(image).decode()}"
    title = figure.get_suptitle() or figure.axes[0].get_title(loc="left")
    return f'<img alt="{html.escape(title)}" src="{source}">'


def _template(path: Path) -> Template:
    return Template(path.read_text(encoding="utf-8"))
