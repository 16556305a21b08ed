"""Tables and pictures of numbers stand beside the command that made them.

Beside means: in the text between the table or heading before it and the one behind it. What is a number in running text
is left to the reader: no rule would tell a measurement from a size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.docs.pages import ROOT, blocks, named_commands, pages

# Cells that begin with a number, from which on a table is one of numbers.
FEW = 3
_NUMBER = re.compile(r"^[*(<~]*\d[\d.,]*(e-?\d+)?([ %)*,x/]|$)")
_HEADING = re.compile(r"^#+ ")
# Tables of numbers that nothing measured: (page, the first cell of the second row) -> what they are.
NOT_MEASURED = {
    ("models/deepseek_v4/README.md", "`DeepseekV4Attention`"): "sections of a report",
    ("models/deepseek_v4/README.md", "a row of attention, 512 columns"): "bytes of a format",
}


class Shown(NamedTuple):
    """A table or a picture, the heading that it stands under, and the text beside it."""

    heading: str
    content: str
    beside: str


def shown(text: str) -> Iterator[Shown]:
    """The tables and pictures of a page. Lines in fences count as text."""
    lines, fenced = [], False
    for line in text.splitlines():
        fenced ^= line.startswith("```")
        kind = "text" if fenced or line.startswith("```") else _kind(line)
        lines.append((kind, line))
    groups: list[tuple[str, list[str]]] = []
    for kind, line in lines:
        if groups and groups[-1][0] == kind != "heading":
            groups[-1][1].append(line)
        else:
            groups.append((kind, [line]))
    heading = ""
    for i, (kind, content) in enumerate(groups):
        if kind == "heading":
            heading = content[0]
        elif kind in ("table", "picture"):
            before, behind = groups[:i], groups[i + 1 :]
            texts = [*_until(before[::-1], kind)[::-1], *_until(behind, kind)]
            yield Shown(heading, "\n".join(content), "\n".join(texts))


def _kind(line: str) -> str:
    if _HEADING.match(line):
        return "heading"
    if line.startswith("|"):
        return "table"
    return "picture" if line.startswith("![") else "text"


def _until(groups: list[tuple[str, list[str]]], kind: str) -> list[str]:
    """Text up to the next heading or table; of a picture up to the next heading, since it shows what a table says."""
    found = []
    for other, content in groups:
        if other == "heading" or (other == "table" and kind == "table"):
            break
        found += ["\n".join(content)] if other == "text" else []
    return found


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in row.strip().strip("|").split("|")] for row in table.splitlines()]


def of_numbers(table: str) -> bool:
    return sum(bool(_NUMBER.match(cell)) for row in cells(table)[2:] for cell in row) >= FEW


def names_a_command(text: str) -> bool:
    return any(named_commands(text)) or any(block.commands for block in blocks("", text))


def without_command(page: str, text: str) -> list[str]:
    """Headings under which numbers stand without a command."""
    found = []
    for heading, content, beside in shown(text):
        numbers = not content.startswith("|") or of_numbers(content)
        listed = content.startswith("|") and (page, cells(content)[2][0]) in NOT_MEASURED
        if numbers and not listed and not names_a_command(beside):
            found.append(f"{page}: {heading}: {content.splitlines()[0]}")
    return found


@pytest.mark.parametrize("page", pages())
def test_numbers_stand_beside_their_command(page: str) -> None:
    assert without_command(page, (ROOT / page).read_text(encoding="utf-8")) == []


def test_what_is_listed_is_there() -> None:
    tables = {
        (page, cells(s.content)[2][0])
        for page in pages()
        for s in shown((ROOT / page).read_text(encoding="utf-8"))
        if s.content.startswith("|") and of_numbers(s.content)
    }
    assert NOT_MEASURED.keys() <= tables
    assert len(tables) > 10


TABLE = "| op | us |\n|---|---|\n| a | 1.5 (1.4-1.6) |\n| b | **20%**, 3 TFLOP/s |\n| c | 1,024 |\n"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (f"# A\n\n{TABLE}", 1),
        (f"# A\n\nBy `xpu-ports bench ops`:\n\n{TABLE}", 0),
        (f"# A\n\n{TABLE}\n```\nxpu-ports bench ops\n```\n", 0),
        (f"# A\n\nBy `xpu-ports bench ops`.\n\n# B\n\n{TABLE}", 1),
        (f"# A\n\nBy `xpu-ports bench ops`:\n\n{TABLE}\nand `notes`\n\n{TABLE}", 1),
        ("# A\n\n| op | runs on |\n|---|---|\n| a | `xe2` |\n| b | 2 cards |\n", 0),
        ("# A\n\n![roof](a.png)\n", 1),
        (f"# A\n\nBy `xpu-ports bench ops`:\n\n{TABLE}\n![roof](a.png)\n", 0),
    ],
)
def test_numbers_without_a_command_are_seen(text: str, count: int) -> None:
    assert len(without_command("page.md", text)) == count
