"""`xpu-ports explain`: which back end runs each op of a model, in prefill and in decode, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xpu_ports.cli import _common

if TYPE_CHECKING:
    from torch import Tensor

    from xpu_ports.common.dispatch import Decision, Explanation

PROMPT = "In the beginning God created the heaven and the earth."


def explain(
    checkpoint: _common.CheckpointArgument,
    prompt: Annotated[str, typer.Option("--prompt", metavar="TEXT", help="Text to run; - reads stdin.")] = PROMPT,
    device: _common.DeviceOption = "auto",
    dtype: _common.DtypeOption = _common.Dtype.AUTO,
    backend: _common.BackendOption = None,
    as_json: _common.JsonOption = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also the back ends that each op has, and warnings of libraries.")
    ] = False,
) -> None:
    """Run one prefill and one decode step, then tell which back end ran each op, and why."""
    _common.check_checkpoint(checkpoint)
    prompt = _common.read_prompt(prompt)
    with _common.stdout_kept_clean(as_json):
        result = run(checkpoint, prompt, _common.Setup(device, dtype, backend, verbose))
    if as_json:
        _common.print_json(result)
        return
    print(headline(result))
    rows = [
        [row["op"], row["backend"], row["device"], str(row["prefill_calls"]), str(row["decode_calls"]), row["reason"]]
        for row in result["explain"]
    ]
    _common.print_table(["op", "back end", "device", "prefill calls", "decode calls", "why"], rows)
    if verbose:
        print()
        _common.print_table(
            ["op", "back ends, in order of preference"],
            [[op, ", ".join([*backends, "reference"])] for op, backends in result["registered"].items()],
        )


def run(checkpoint: str, prompt: str, setup: _common.Setup) -> dict[str, Any]:
    """The object that --json prints."""
    from xpu_ports.common import dispatch

    with _common.loaded(checkpoint, setup) as (model, tokenizer):
        inputs = _common.encode(tokenizer, prompt, model.device)
        phases = Phases()
        dispatch.reset_explain()
        # Two new tokens: the first comes out of the prefill, the second out of one step on the cache.
        model.generate(**inputs, streamer=phases, min_new_tokens=2, max_new_tokens=2, do_sample=False)
    rows = merge(phases.prefill, dispatch.explain(show=False))
    return {
        **_common.describe(checkpoint, model),
        "prompt_tokens": inputs["input_ids"].shape[1],
        "explain": rows,
        "registered": {
            name: [f"{i.backend} ({', '.join(i.devices)})" for i in op.implementations]
            for name, op in sorted(dispatch.OPS.items())
            if any(row["op"] == name for row in rows)
        },
    }


class Phases:
    """A streamer that takes the ledger when the first new token comes, which ends the prefill."""

    def __init__(self) -> None:
        self.prefill: Explanation | None = None
        self._prompt_seen = False

    def put(self, ids: Tensor) -> None:
        from xpu_ports.common import dispatch

        if self._prompt_seen and self.prefill is None:
            self.prefill = dispatch.explain(show=False)
            dispatch.reset_explain()
        self._prompt_seen = True

    def end(self) -> None:
        pass


def merge(prefill: Explanation | None, decode: Explanation) -> list[dict[str, Any]]:
    """The two phases' ledgers in one table: a row for each op, back end, device and reason."""
    rows: dict[tuple[str, str, str, str], dict[str, Any]] = {}
    phases: dict[str, Sequence[Decision]] = {"prefill_calls": prefill or [], "decode_calls": decode}
    for phase, decisions in phases.items():
        for d in decisions:
            empty = {"prefill_calls": 0, "decode_calls": 0}
            row = {"op": d.op, "backend": d.backend, "device": d.device, **empty, "reason": d.reason}
            rows.setdefault((d.op, d.backend, d.device, d.reason), row)[phase] = d.calls
    return sorted(rows.values(), key=lambda row: (row["op"], row["backend"]))


def headline(result: dict[str, Any]) -> str:
    """One line: what was run, on what."""
    versions = result["versions"]
    return (
        f"{result['model_class'].rpartition('.')[2]}, {result['parameters']:,} parameters, {result['dtype']} on "
        f"{result['device']} ({result['device_name']}), prompt of {result['prompt_tokens']} tokens, "
        f"torch {versions['torch']}, Triton {versions['triton'] or 'not installed'}"
    )
