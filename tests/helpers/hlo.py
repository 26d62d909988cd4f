"""Reads optimised HLO: which instructions run in loops, and which write large arrays in place."""

import dataclasses
import re

# Opcodes that write nothing.
NO_RESULT = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "call", "conditional", "constant"}
UPDATES = {"dynamic-update-slice", "scatter"}


@dataclasses.dataclass
class Instruction:
    name: str
    shapes: list[tuple[int, ...]]  # of each part of the result
    opcode: str
    line: str


def parse(text: str) -> dict[str, list[Instruction]]:
    """The computations of a compiled module; the last instruction of each is its root."""
    computations, current = {}, None
    for line in text.splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line):
            current = computations.setdefault(header[1], [])
        elif found := re.match(r"\s+(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\(", line):
            shapes = re.findall(r"\w+\[([\d,]*)\]", found[2])
            shapes = [tuple(int(size) for size in shape.split(",") if size) for shape in shapes]
            current.append(Instruction(found[1], shapes, found[3], line.strip()))
    return computations


def called(line: str, *attributes: str) -> list[str]:
    return re.findall(rf"\b(?:{'|'.join(attributes)})=%?([\w.-]+)", line)


def loop_instructions(computations) -> list[Instruction]:
    """All that runs within loops, fusions as one."""
    waiting = [name for body in computations.values() for one in body for name in called(one.line, "body")]
    seen, found = set(), []
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            found += computations[name]
            for one in computations[name]:
                if one.opcode != "fusion":
                    waiting += called(one.line, "body", "condition", "to_apply")
    return found


def updates_in(computations, one: Instruction, is_large) -> int | None:
    """How many large arrays an instruction updates in place; None where it makes one anew."""
    parts = [shape for shape in one.shapes if is_large(shape)]
    if one.opcode in UPDATES:
        return len(parts)
    # A kernel whose results are its operands writes in place.
    if one.opcode == "custom-call":
        aliased = re.search(r"output_to_operand_aliasing=\{(.*?)\}, ", one.line)
        places = re.findall(r"\{(\d*)\}: \(", aliased[1] + "}") if aliased else []
        return len(parts) if len(parts) == sum(is_large(one.shapes[int(place or 0)]) for place in places) else None
    if one.opcode == "fusion":
        inside = computations[called(one.line, "calls")[0]]
        made = [other for other in inside if other.opcode in UPDATES and any(map(is_large, other.shapes))]
        return len(made) if len(made) == len(parts) else None
    return None
