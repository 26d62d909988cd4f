"""Lists the largest temporary arrays and the largest memory traffics of a compiled module, from XLA's text dumps."""

import math
import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple

INSTRUCTION = re.compile(
    r"^ *(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<shape>\(.*?\)|\S+) (?P<opcode>[\w\-]+)\((?P<rest>.*)$"
)
ARRAY = re.compile(r"(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
VALUE = re.compile(r"value: <\d+ (?P<name>[\w.\-]+)(?:\{[\d,]*\})? @\d+> \(size=(?P<size>\d+),offset=(?P<offset>\d+)\)")
# Instructions that move no bytes, and the ones whose bytes belong to the instructions that they call.
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all"}

NO_SCOPES = ("while", "body", "closed_call", "checkpoint", "rematted_computation", "shard_map", "cond")


class Item(NamedTuple):
    """An array or an instruction.

    Attributes:
        nbytes: bytes of the array, or bytes that the instruction reads and writes in an update.
        times: how often the instruction runs, or how many arrays of this shape and line there are.
        shape: dtype and sizes.
        run: "forward", "backward" or "recomputed" (for the backward pass).
        part: part of the model, such as `mtp_0/block/dense`.
        line: file and line of the code.
        is_bound: the instruction is in a loop whose number of turns depends on data, and one turn is counted.
    """

    nbytes: int
    times: int
    shape: str
    run: str
    part: str
    line: str
    is_bound: bool = False


class _Instruction(NamedTuple):
    name: str
    shape: str
    opcode: str
    operands: list[str]
    rest: str


class Module:
    """The computations of a compiled module's text."""

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, _Instruction]] = {}
        self.entry, current = "", {}
        for line in text.splitlines():
            if (start := re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$", line)) is not None:
                current = self.computations.setdefault(start[2], {})
                self.entry = start[2] if start[1] else self.entry
            elif (match := INSTRUCTION.match(line)) is not None:
                operands = re.findall(r"%([\w.\-]+)", match["rest"].split("), ")[0])
                instruction = _Instruction(match["name"], match["shape"], match["opcode"], operands, match["rest"])
                current[match["name"]] = instruction
        self.by_name = {name: each for part in self.computations.values() for name, each in part.items()}
        self.lines = _lines_of_frames(text)

    def describe(self, name: str) -> tuple[str, str, str, str]:
        """Returns shape, run, part and line of an instruction."""
        found = self.by_name[name]
        path = re.search(r'op_name="([^"]*)"', found.rest)
        frame = re.search(r"stack_frame_id=(\d+)", found.rest)
        run = part = ""
        if path is not None:
            scopes = [each for each in path[1].split("/")[1:-1] if re.fullmatch("[a-z_0-9]+", each)]
            part = "/".join(each for each in scopes if each not in NO_SCOPES)
            run = "recomputed" if "rematted" in path[1] else "backward" if "transpose(jvp" in path[1] else "forward"
        shapes = ["{}[{}]".format(*each) for each in ARRAY.findall(found.shape)]
        shape = max(shapes, key=_nbytes, default="")
        return shape, run, part, self.lines.get(int(frame[1]), "") if frame is not None else ""

    def largest_traffics(self, count: int) -> list[Item]:
        """Returns the instructions that read and write the most bytes in a run, all turns of loops together."""
        found: dict[tuple, list] = {}
        for name, nbytes, times, is_bound in self._traffics(self.entry, 1, is_bound=False):
            total = found.setdefault((*self.describe(name), is_bound), [0, 0])
            total[0] += nbytes * times
            total[1] += times
        items = [Item(nbytes, times, *key) for key, (nbytes, times) in found.items()]
        return sorted(items, key=lambda item: -item.nbytes)[:count]

    def _traffics(self, computation: str, times: int, *, is_bound: bool) -> Iterator[tuple[str, int, int, bool]]:
        for each in self.computations[computation].values():
            called = re.findall(r"(?:body|calls|to_apply|branch_computations)=\{?%?([\w.\-]+)", each.rest)
            if each.opcode in ("while", "call", "conditional"):
                turns = re.search(r'known_trip_count":\{"n":"(\d+)"', each.rest)
                inner = is_bound or (each.opcode == "while" and turns is None)
                for body in called:
                    yield from self._traffics(body, times * int(turns[1] if turns else 1), is_bound=inner)
            elif each.opcode not in FREE:
                yield each.name, self._bytes_moved(each, called), times, is_bound

    def _bytes_moved(self, instruction: _Instruction, called: list[str]) -> int:
        """Returns how many bytes an instruction reads and writes; slices count with the size of the slice."""
        body = self.computations[called[0]] if instruction.opcode == "fusion" and called else {}
        if instruction.opcode in ("dynamic-slice", "gather", "slice"):
            return 2 * _nbytes(instruction.shape)
        inner = list(body.values())
        updates = [each for each in inner if each.opcode == "dynamic-update-slice"]
        written = _nbytes(instruction.shape) - sum(_nbytes(each.shape) for each in updates)
        written += sum(2 * _nbytes(body[each.operands[1]].shape) for each in updates if each.operands[1] in body)
        parameters = {int(each.rest.split(")")[0]): each.name for each in inner if each.opcode == "parameter"}
        read = 0
        for index, operand in enumerate(instruction.operands):
            whole = _nbytes(self.by_name[operand].shape) if operand in self.by_name else 0
            users = [each for each in inner if parameters.get(index) in each.operands]
            # A fusion that slices an operand reads the slice; one that updates a slice leaves the rest as it is.
            parts = [_part_read(each, parameters.get(index, ""), whole) for each in users]
            read += min(whole, sum(parts)) if users else whole
        return max(written, 0) + read


def largest_temporaries(module: Module, dumped: pathlib.Path, count: int) -> list[Item]:
    """Returns the largest arrays in the temporary memory of a module that was compiled with `xla_dump_to`."""
    (file,) = dumped.glob("*train_step*buffer-assignment.txt")
    text = file.read_text()
    temporary = next(part for part in text.split("\nallocation ") if "preallocated-temp" in part.splitlines()[0])
    # Values at one place and of one size are one array, which instructions update in place.
    places: dict[tuple[str, str], str] = {}
    for value in VALUE.finditer(temporary):
        places.setdefault((value["offset"], value["size"]), value["name"])
    found: dict[tuple, list[int]] = {}
    for (_, size), name in places.items():
        if name in module.by_name:
            found.setdefault(module.describe(name), []).append(int(size))
    items = [Item(max(sizes), len(sizes), *key) for key, sizes in found.items()]
    return sorted(items, key=lambda item: -item.nbytes)[:count]


def _part_read(user: _Instruction, name: str, whole: int) -> int:
    if user.opcode in ("dynamic-slice", "slice", "gather"):
        return _nbytes(user.shape)
    return 0 if user.opcode == "dynamic-update-slice" and user.operands[0] == name else whole


def _nbytes(shape: str) -> int:
    total = 0
    for dtype, sizes in ARRAY.findall(shape):
        bits = 8 if dtype == "pred" or dtype.startswith("f8") else int(re.sub(r"\D", "", dtype))
        total += math.prod(int(size) for size in filter(None, sizes.split(","))) * bits // 8
    return total


def _lines_of_frames(text: str) -> dict[int, str]:
    """Returns file and line of each stack frame."""
    sections = dict(re.findall(r"^(FileNames|FileLocations|StackFrames)\n((?:\d+ .*\n)+)", text, re.M))
    rows = {name: dict(re.findall(r"^(\d+) (.*)$", section, re.M)) for name, section in sections.items()}
    lines = {}
    for frame, entry in rows.get("StackFrames", {}).items():
        place = rows["FileLocations"][_number("file_location_id", entry)]
        file = rows["FileNames"][_number("file_name_id", place)].strip('"')
        short = re.sub(r".*/(site-packages/|(?=(mtpjax|pallas_kernels)/))", "", file)
        lines[int(frame)] = f"{short}:{_number(' line', place)}"
    return lines


def _number(name: str, text: str) -> str:
    found = re.search(rf"{name}=(\d+)", text)
    return found[1] if found is not None else ""
