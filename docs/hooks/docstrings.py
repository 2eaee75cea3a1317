"""Docstrings as the API pages want them: one entry for each parameter, and names that are links."""

import re
from typing import Any

from griffe import ExprSubscript, Extension, Function, Module, Object

_SHARED = re.compile(r"^( +)(\**\w+(?:, \**\w+)+): (.*\n(?:\1 +.*\n)*)", re.MULTILINE)
_NAME = re.compile(r"(?<![\[`])`(\w+)`(?!`)")


class Docstrings(Extension):
    """Rewrites docstrings before they are parsed."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Split `a, b: text` into an entry for each, and link `name` where it is a public one."""
        if obj.docstring:
            text = _SHARED.sub(_one_by_one, obj.docstring.value + "\n").rstrip()
            obj.docstring.value = _NAME.sub(lambda match: _link(match, obj), text)

    def on_function(self, *, func: Function, **_: Any) -> None:
        """Leave out what `Annotated[...]` tells tyro about a command's argument."""
        for parameter in func.parameters:
            annotation = parameter.annotation
            if isinstance(annotation, ExprSubscript) and annotation.canonical_name == "Annotated":
                parameter.annotation = annotation.slice.elements[0]


def _one_by_one(match: re.Match[str]) -> str:
    indent, names, text = match.groups()
    return "".join(f"{indent}{name}: {text}" for name in names.split(", "))


def _link(match: re.Match[str], obj: Object) -> str:
    package: Module = obj.package
    name = match[1]
    if name not in map(str, package.exports or ()) or name == obj.name:
        return match[0]
    if obj.parent.is_class and name in obj.parent.members:  # the class's own
        return match[0]
    # A module of a function's name hides it here, though not when Python runs.
    hidden = package.members[name].is_module
    return f"[`{name}`][{package.name}.{name}{f'.{name}' if hidden else ''}]"
