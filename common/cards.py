"""Graphics cards by name and what memory they have, to plan for one that is not here."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30
# Of what a card is sold with; the least share that drivers report: 11,605 to 11,875 MiB on a B580 and 23,256 to
# 24,480 MiB on a B60, by the device properties in public issues of PyTorch, Triton and vLLM.
USABLE = 0.94
# Windows lends a GPU without memory of its own half of the machine's; Linux more.
SHARED = 0.5


@dataclass(frozen=True)
class Card:
    """A device to plan for."""

    name: str
    # As sold.
    gib: float
    # Where the number is from.
    source: str
    share: float = USABLE
    # The largest single allocation, where there is a limit below the whole.
    largest_gib: float | None = None
    note: str = ""

    @property
    def usable(self) -> int:
        """Bytes that programs get."""
        return int(self.gib * self.share * GIB)


_INTEL = "Intel's product specifications"
_ALCHEMIST = "single allocations of more than 4 GiB fail unless the driver is told to relax its limit"
CARDS = {
    "a770": Card("Arc A770", 16, _INTEL, largest_gib=4, note=_ALCHEMIST),
    "b570": Card("Arc B570", 10, _INTEL),
    "b580": Card("Arc B580", 12, _INTEL),
    "b50": Card("Arc Pro B50", 16, _INTEL),
    "b60": Card("Arc Pro B60", 24, _INTEL),
    "b65": Card("Arc Pro B65", 32, _INTEL),
    "b70": Card("Arc Pro B70", 32, _INTEL),
    "lunar-lake": Card("Arc 140V (Lunar Lake)", 32, _INTEL, SHARED, note="the machine's memory, 16 or 32 GiB, shared"),
    "max1100": Card("Data Center GPU Max 1100", 48, _INTEL),
    "max1550": Card("Data Center GPU Max 1550, one stack", 64, _INTEL, note="a stack is a device to PyTorch"),
    "max1550-card": Card("Data Center GPU Max 1550, both stacks", 128, _INTEL, note="as two devices, or as one"),
    "h200": Card("NVIDIA H200", 141, "NVIDIA's datasheet"),
}


def card(name: str) -> Card:
    """A card by its short name.

    Raises:
        ValueError: it is not known here.
    """
    found = CARDS.get(name.lower())
    if found is None:
        raise ValueError(
            f"no card is named {name!r}; there are: {', '.join(CARDS)}, and here for the one in this machine"
        )
    return found
