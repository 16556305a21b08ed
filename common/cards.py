"""Graphics cards by name: their memory and their roofs, to plan and to predict for one that is not here."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30
# Of what a card is sold with; the least share that drivers report: 11,605 to 11,875 MiB on a B580 and 23,256 to
# 24,480 MiB on a B60, by the device properties in public issues of PyTorch, Triton and vLLM.
USABLE = 0.94
# Windows lends a GPU without memory of its own half of the machine's; Linux more.
SHARED = 0.5


@dataclass(frozen=True)
class Roofs:
    """What a device does at most in a second."""

    # Bytes from and to its memory.
    memory: float
    # FLOP of dense products of bf16 matrices, summed in fp32, on the matrix units.
    matrix: float
    # FLOP of fp32 arithmetic outside of them.
    vector: float

    def bounds(self, moved: int, products: int, elementwise: int = 0) -> dict[str, float]:
        """Seconds that each roof leaves at least for this many bytes, FLOP in products, and other FLOP."""
        return {
            "memory": moved / self.memory,
            "matrix": products / self.matrix,
            "vector": elementwise / self.vector,
        }

    def floor(self, moved: int, products: int, elementwise: int = 0) -> float:
        """Seconds that no version of this much work beats."""
        return max(self.bounds(moved, products, elementwise).values())


@dataclass(frozen=True)
class Link:
    """How a device reaches the others of its machine."""

    name: str
    # Bytes in a second, in one direction, all lanes or links together.
    rate: float
    source: str


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
    # As published, or by published units and clocks; None for one that is known by its driver's answer alone.
    roofs: Roofs | None = None
    roofs_source: str = ""
    # None for one that there is but one of in a machine, or that is known by its driver's answer alone.
    link: Link | None = None
    # In xpu_ports.common.device.ARCHITECTURES.
    architecture: str = ""
    # Part of the name that its driver reports, in lower case.
    driver_name: str = ""

    @property
    def usable(self) -> int:
        """Bytes that programs get."""
        return int(self.gib * self.share * GIB)


def _roofs(gigabytes: float, matrix: float, vector: float) -> Roofs:
    """From GB/s and TFLOP/s."""
    return Roofs(gigabytes * 1e9, matrix * 1e12, vector * 1e12)


def _pcie(generation: int, lanes: int) -> Link:
    """128 of 130 bits are data; 16 and 32 GT/s a lane."""
    rate = {4: 16e9, 5: 32e9}[generation] / 8 * 128 / 130 * lanes
    return Link(f"PCIe {generation}.0 x{lanes}", rate, f"{_INTEL}; PCI-SIG's rate a lane, without what packets cost")


def _xe_link(links: int) -> Link:
    return Link(
        f"{links} Xe Links", links * 26.5e9, "26.5 GB/s a link, 8 a stack: glennklockwood.com/garden/processors/pvc"
    )


_INTEL = "Intel's product specifications"
_ALCHEMIST = "single allocations of more than 4 GiB fail unless the driver is told to relax its limit"
# Operations a clock and Xe core by Intel's oneAPI GPU optimization guide, "Intel Xe GPU Architecture": on the matrix
# units 2048 in bf16 on Xe2 and Xe-HPG (twice that in int8) and 4096 on Xe-HPC; on the vector units 256 in fp32.
_XE2 = f"bandwidth and int8 TOPS: {_INTEL}; bf16 is half of int8; fp32 by Xe cores and clock"
_XE_HPG = f"bandwidth, 32 Xe cores, 2.1 GHz: {_INTEL}; 2048 bf16 and 256 fp32 operations a core and clock"
_XE_HPC = f"bandwidth, Xe cores, clock: {_INTEL}; 4096 bf16 and 256 fp32 operations a core and clock"
CARDS = {
    "a770": Card(
        "Arc A770", 16, _INTEL, largest_gib=4, note=_ALCHEMIST,
        roofs=_roofs(560, 137.6, 17.2), roofs_source=_XE_HPG, architecture="arc-a", driver_name="a770",
        link=_pcie(4, 16),
    ),
    "b570": Card(
        "Arc B570", 10, _INTEL,
        roofs=_roofs(380, 101.5, 11.5), roofs_source=_XE2, architecture="xe2", driver_name="b570",
        link=_pcie(4, 8),
    ),
    "b580": Card(
        "Arc B580", 12, _INTEL,
        roofs=_roofs(456, 116.5, 13.7), roofs_source=_XE2, architecture="xe2", driver_name="b580",
        link=_pcie(4, 8),
    ),
    "b50": Card(
        "Arc Pro B50", 16, _INTEL,
        roofs=_roofs(224, 85.0, 10.7), roofs_source=_XE2, architecture="xe2", driver_name="pro b50",
        link=_pcie(5, 8),
    ),
    "b60": Card(
        "Arc Pro B60", 24, _INTEL,
        roofs=_roofs(456, 98.5, 12.3), roofs_source=_XE2, architecture="xe2", driver_name="pro b60",
        link=_pcie(5, 8),
    ),
    "b65": Card(
        "Arc Pro B65", 32, _INTEL,
        roofs=_roofs(608, 98.5, 12.3), roofs_source=_XE2, architecture="xe2", driver_name="pro b65",
        link=_pcie(5, 16),
    ),
    "b70": Card(
        "Arc Pro B70", 32, _INTEL,
        roofs=_roofs(608, 183.5, 22.9), roofs_source=_XE2, architecture="xe2", driver_name="pro b70",
        link=_pcie(5, 16),
    ),
    "lunar-lake": Card(
        "Arc 140V (Lunar Lake)", 32, _INTEL, SHARED, note="the machine's memory, 16 or 32 GiB, shared",
        roofs=_roofs(136.5, 33.5, 4.2), roofs_source=f"LPDDR5X-8533 on 128 bits; {_XE2}", architecture="xe2",
        driver_name="140v",
    ),
    "max1100": Card(
        "Data Center GPU Max 1100", 48, _INTEL,
        roofs=_roofs(1228.8, 355.5, 22.2), roofs_source=_XE_HPC, architecture="max", driver_name="max 1100",
        link=_pcie(5, 16),
    ),
    "max1550": Card(
        "Data Center GPU Max 1550, one stack", 64, _INTEL, note="a stack is a device to PyTorch",
        roofs=_roofs(1638.4, 419.4, 26.2), roofs_source=f"half of the card's; {_XE_HPC}", architecture="max",
        driver_name="max 1550",
        link=_xe_link(8),
    ),
    "max1550-card": Card(
        "Data Center GPU Max 1550, both stacks", 128, _INTEL, note="as two devices, or as one",
        roofs=_roofs(3276.8, 838.9, 52.4), roofs_source=_XE_HPC, architecture="max",
        link=_xe_link(16),
    ),
    "h200": Card(
        "NVIDIA H200", 141, "NVIDIA's datasheet",
        roofs=_roofs(4800, 989, 67), roofs_source="NVIDIA's datasheet, without sparsity", architecture="nvidia",
        driver_name="h200",
        link=Link("NVLink 4", 450e9, "NVIDIA's datasheet: 900 GB/s in both directions"),
    ),
}  # fmt: skip


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


def card_of_driver(name: str) -> Card | None:
    """The card with the name that a driver reports, such as "Intel(R) Arc(TM) B580 Graphics"; None if unknown."""
    lowered = name.lower().replace("(tm)", "").replace("(r)", "")
    return next((c for c in CARDS.values() if c.driver_name and c.driver_name in lowered), None)
