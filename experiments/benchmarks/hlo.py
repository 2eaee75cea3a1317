"""Compiled programs read from their HLO text: computations, who calls whom, and the collectives in them.

The text is what `jax.jit(f).lower(...).compile().as_text()` gives, on CPU, GPU and TPU.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

COLLECTIVES = frozenset(
    {
        "all-gather",
        "all-reduce",
        "all-to-all",
        "collective-broadcast",
        "collective-permute",
        "ragged-all-to-all",
        "recv",
        "reduce-scatter",
        "send",
    }
)
"""Opcodes of communication between devices, without the `-start` and `-done` of the asynchronous ones."""

_BITS = {"pred": 8, "token": 0, "opaque": 0}
_SHAPE = re.compile(r"\b([a-z]\w*)\[([^\]]*)\]")
_HEADER = re.compile(r"(ENTRY\s+)?%?([^\s(%]+)\s.*\{$")
_ASSIGNED = re.compile(r"\s*(?:ROOT\s+)?%?([^\s=]+)\s*=\s*")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_OP_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_CALLED = re.compile(
    r"\b(?:to_apply|calls|body|condition|true_computation|false_computation|branch_computations"
    r"|called_computations)=(?:\{([^}]*)\}|([^\s,]+))"
)


class Shape(NamedTuple):
    """Of an array on one device."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size without padding."""
        bits = _BITS.get(self.dtype)
        if bits is None:
            # f32, bf16, s4, f8e4m3fn: the first number is the width.
            bits = int(re.search(r"\d+", self.dtype).group())
        return math.ceil(math.prod(self.dims) * bits / 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    """The result's arrays: one, or a tuple's leaves."""
    operands: tuple[str, ...]
    called: tuple[str, ...]
    """Computations: a loop's body and condition, a fusion's, a reduction's, a conditional's branches."""
    attributes: str
    """What follows the operands."""

    @property
    def op_name(self) -> str:
        """Named scopes, transformations and primitive that JAX traced it from; empty where XLA made it."""
        found = _OP_NAME.search(self.attributes)
        return found.group(1) if found else ""

    @property
    def base_opcode(self) -> str:
        """The opcode without the `-start` of an asynchronous instruction."""
        return self.opcode.removesuffix("-start")


class Module(NamedTuple):
    """A program."""

    entry: str
    computations: dict[str, tuple[Instruction, ...]]
    devices: int


class Collective(NamedTuple):
    """A communication between devices and the place where it stands."""

    instruction: Instruction
    computation: str
    loops: tuple[Instruction, ...]
    """The `while` instructions around it, outermost first."""
    shapes: tuple[Shape, ...]
    """Its result, on one device."""
    bytes: int
    """The larger of its operands and its result, on one device, for one execution."""
    group: int
    """Devices that take part in each of its groups."""
    op_name: str
    """Its own, or where XLA gave it none, that of the nearest instruction that calls its computation."""


def parse(text: str) -> Module:
    """The program of an HLO text.

    Raises:
      ValueError: the text has no entry computation, or a line that is no instruction.
    """
    computations: dict[str, tuple[Instruction, ...]] = {}
    entry, name, lines = "", "", []
    for line in text.splitlines():
        if name and line.startswith("}"):
            computations[name] = tuple(map(_instruction, lines))
            name, lines = "", []
        elif name:
            lines.append(line)
        elif not line.startswith("HloModule") and (header := _HEADER.match(line)):
            name = header.group(2)
            entry = name if header.group(1) else entry
    if entry not in computations:
        raise ValueError("not the text of an HLO module: no ENTRY computation in it")
    counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", text.split("\n", 1)[0])
    return Module(entry, computations, math.prod(map(int, counts)))


def _instruction(line: str) -> Instruction:
    assigned = _ASSIGNED.match(line)
    if assigned is None:
        raise ValueError(f"not an HLO instruction: {line[:100]!r}")
    start = assigned.end()
    # The result's type ends at the first space outside of brackets, or with its own closing parenthesis.
    type_end = _closing(line, start) if line[start] == "(" else line.index(" ", start)
    open_operands = line.index("(", type_end)
    close_operands = _closing(line, open_operands)
    attributes = line[close_operands:]
    called = [a or b for a, b in _CALLED.findall(_QUOTED.sub('""', attributes))]
    return Instruction(
        name=assigned.group(1),
        opcode=line[type_end:open_operands].strip(),
        shapes=_shapes(line[start:type_end]),
        operands=tuple(_names(line[open_operands + 1 : close_operands - 1])),
        called=tuple(name for names in called for name in _names(names)),
        attributes=attributes,
    )


def _closing(text: str, start: int) -> int:
    """The position after the parenthesis that closes the one at `start`; quoted ones do not count."""
    depth, position = 0, start
    while position < len(text):
        if text[position] == '"' and (quoted := _QUOTED.match(text, position)):
            position = quoted.end()
            continue
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        position += 1
        if depth == 0:
            return position
    raise ValueError(f"a parenthesis is never closed: {text[start : start + 100]!r}")


def _shapes(text: str) -> tuple[Shape, ...]:
    def size(dim: str) -> int:
        return int(dim.strip().removeprefix("<="))

    # Layouts, such as {1,0:T(8,128)(2,1)S(1)}, hold no square brackets.
    return tuple(
        Shape(dtype, tuple(size(dim) for dim in dims.split(",") if dim.strip()))
        for dtype, dims in _SHAPE.findall(text)
    )


def _names(text: str) -> Iterator[str]:
    """Names in a list, where each may stand after its type: `f32[2,3]{1,0} %x, %y`."""
    plain = re.sub(r"/\*.*?\*/|\[[^\]]*\]|\{[^}]*\}", "", text)
    for item in plain.split(","):
        if words := item.replace("(", " ").replace(")", " ").split():
            yield words[-1].removeprefix("%")


def collectives(module: Module) -> list[Collective]:
    """Every collective that the program can reach, in the order of the text.

    Computations are followed through calls, fusions, conditionals, asynchronous wrappers and loops, so one
    that stands deep in a loop's body has that loop in `loops`. Of an asynchronous pair the start counts. A
    collective that a TPU's compiler has cut into a chain of pieces, to be moved along by other fusions while
    they compute, counts once; it is in a loop where all of its pieces are, not where it only passes through.
    """
    found: dict[str | int, Collective] = {}
    for collective in _reach(module, module.entry, ()):
        chain = re.search(r"channel_id=\d+|$", collective.instruction.attributes).group()
        key = chain if "chain_id=" in collective.instruction.attributes else len(found)
        first = found.setdefault(key, collective)
        shared = tuple(loop for loop in first.loops if loop in collective.loops)
        found[key] = first._replace(loops=shared)
    return list(found.values())


def _reach(module: Module, computation: str, callers: tuple[Instruction, ...]) -> Iterator[Collective]:
    for instruction in module.computations[computation]:
        if instruction.base_opcode in COLLECTIVES:
            yield _collective(module, computation, instruction, callers)
            continue
        for called in instruction.called:
            yield from _reach(module, called, (*callers, instruction))


def _collective(
    module: Module, computation: str, instruction: Instruction, callers: tuple[Instruction, ...]
) -> Collective:
    shapes, siblings = instruction.shapes, module.computations[computation]
    if instruction.opcode.endswith("-start"):
        # A start's tuple holds operands and context too; its end, where it stands here, the result alone.
        shapes = next((i.shapes for i in siblings if instruction.name in i.operands), shapes)
    operands = [shape for i in siblings if i.name in instruction.operands for shape in i.shapes]
    return Collective(
        instruction=instruction,
        computation=computation,
        loops=tuple(i for i in callers if i.opcode == "while"),
        shapes=shapes,
        bytes=max(sum(s.bytes for s in operands), sum(s.bytes for s in shapes)),
        group=_group(instruction.attributes, module.devices),
        op_name=next((i.op_name for i in (instruction, *reversed(callers)) if i.op_name), ""),
    )


def _group(attributes: str, devices: int) -> int:
    """Devices in each group, from any of the three notations of `replica_groups`."""
    found = re.search(r"\breplica_groups=", attributes)
    if found is None:
        # A permutation lists pairs instead.
        return 2 if "source_target_pairs=" in attributes else devices
    text = attributes[found.end() :]
    if listed := re.match(r"\{\{([^}]*)\}", text):
        return len(listed.group(1).split(","))
    if iota := re.match(r"\[(\d+),(\d+)\]<=", text):
        return int(iota.group(2))
    if mesh := re.match(r"@?mesh\[([^\]]*)\]\s*(?:,[^{]*)?\{([^}]*)\}", text):
        sizes = dict(re.findall(r"'([^']*)'=(\d+)", mesh.group(1)))
        # 'x' is a whole axis; 'x':(2)4 is a part of one, 4 wide.
        axes = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", mesh.group(2))
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    return devices


def loop_scope(module: Module, loop: Instruction) -> str:
    """The `op_name` of a loop, or where XLA gave it none, of an instruction inside that has one."""
    # Those of a reduction's own additions are a bare word.
    inside = (name for name in _op_names(module, loop) if "/" in name)
    return loop.op_name or next(inside, "")


def _op_names(module: Module, caller: Instruction) -> Iterator[str]:
    for computation in caller.called:
        for instruction in module.computations[computation]:
            yield instruction.op_name
            yield from _op_names(module, instruction)
