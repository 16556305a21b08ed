"""The ops' benchmark rows: shapes of the released models, and the peers that compute the same."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from xpu_ports.common.bench.case import Args, Case, Draw, sample_rows
from xpu_ports.common.kernels.gated_rms_norm import gated_rms_norm
from xpu_ports.common.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_backward

_PEERS = "xpu_ports.common.bench.peers"


def _peers(function: str, *modules: str) -> dict[str, str]:
    return {module: f"{_PEERS}.{module}:{function}" for module in modules}


def _weight(size: Mapping[str, int], draw: Draw) -> Tensor:
    return 1.0 + 0.1 * draw(size["N"])


def _norm(size: Mapping[str, int], draw: Draw) -> Args:
    return draw(size["T"], size["N"]), _weight(size, draw), 1e-6


def _add_norm(size: Mapping[str, int], draw: Draw) -> Args:
    return draw(size["T"], size["N"]), draw(size["T"], size["N"]), _weight(size, draw), 1e-6


def _mixer_norm(size: Mapping[str, int], draw: Draw) -> Args:
    # Mamba-2's: the gate is a slice of the input projection's rows, Z wide (contiguous where there is no Z).
    T, N = size["T"], size["N"]
    z = draw(T, size.get("Z", N))[:, :N]
    return draw(T, N), z, _weight(size, draw), 1e-5, N // size["G"], False, "silu"


def _head_norm(size: Mapping[str, int], draw: Draw) -> Args:
    # KDA's: one norm a head.
    shape = size["T"], size["H"], size["N"]
    return draw(*shape), draw(*shape), _weight(size, draw), 1e-5, None, True, "sigmoid"


def _whole(args: Args, outputs: list[Tensor]) -> tuple[Args, list[Any]]:
    return args, outputs


CASES = {
    case.name: case
    for case in (
        Case(
            "rms_norm",
            rms_norm,
            ("T1-N4096", "T256-N4096", "T8192-N4096", "T65536-N4096"),
            _norm,
            _peers("rms_norm", "pytorch", "liger", "transformers"),
            sample_rows,
        ),
        Case(
            "add_rms_norm",
            add_rms_norm,
            ("T1-N4096", "T256-N4096", "T8192-N4096", "T65536-N4096"),
            _add_norm,
            _peers("add_rms_norm", "pytorch", "liger", "transformers"),
            sample_rows,
        ),
        Case(
            "rms_norm_backward",
            rms_norm_backward,
            ("T1-N4096", "T256-N4096", "T8192-N4096"),
            _add_norm,
            _peers("rms_norm_backward", "pytorch", "liger"),
            # The weight's gradient is a sum over all rows, so that no part of them can stand for it.
            _whole,
        ),
        Case(
            "gated_rms_norm",
            gated_rms_norm,
            (*(f"T{T}-N4096-G{G}" for T in (1, 256, 8192, 65536) for G in (1, 2)), "T8192-N4096-G1-Z8512"),
            _mixer_norm,
            _peers("gated_rms_norm", "vllm", "mamba_ssm", "transformers"),
            sample_rows,
        ),
        Case(
            "gated_rms_norm.sigmoid",
            gated_rms_norm,
            tuple(f"T{T}-H32-N128" for T in (1, 256, 8192, 65536)),
            _head_norm,
            _peers("gated_rms_norm", "fla", "transformers"),
            sample_rows,
        ),
    )
}


def find(names: Iterable[str]) -> list[Case]:
    """The rows of these names; an op's name stands for all of its rows; all rows for none.

    Raises:
        ValueError: a name is neither a row's nor an op's.
    """
    found: dict[str, Case] = {}
    for name in names:
        rows = [case for case in CASES.values() if name in (case.name, case.op.name)]
        if not rows:
            near = difflib.get_close_matches(name, CASES, n=1)
            hint = f" did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"no benchmark is named {name!r};{hint} there are {', '.join(CASES)}")
        found |= {case.name: case for case in rows}
    return list(found.values()) or list(CASES.values())
