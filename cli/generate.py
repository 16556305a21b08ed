"""`xpu-ports generate`: stream a continuation, with its speed and what ran it."""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xpu_ports.cli import _common

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


def generate(
    checkpoint: _common.CheckpointArgument,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text to continue; - reads it from stdin.")],
    device: _common.DeviceOption = "auto",
    dtype: _common.DtypeOption = _common.Dtype.AUTO,
    max_new_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Stop after so many tokens.")] = 128,
    temperature: Annotated[float, typer.Option(metavar="T", help="0 takes the likeliest token, else samples.")] = 0.0,
    top_p: Annotated[float, typer.Option(metavar="P", help="Sample from the likeliest tokens of this mass.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, metavar="S", help="Of the sampling.")] = 0,
    backend: _common.BackendOption = None,
    explain: Annotated[bool, typer.Option("--explain", help="Then tell which back end ran each op, and why.")] = False,
    as_json: _common.JsonOption = False,
    verbose: _common.VerboseOption = False,
) -> None:
    """Continue a prompt: text to stdout as it comes, then tokens per second to stderr.

    The prefill's time includes compiling kernels that are used for the first time. Under torchrun the layers are
    divided among its processes, of which the first prints.
    """
    arguments = {"max_new_tokens": max_new_tokens, **sampling_arguments(temperature, top_p)}
    setup = _common.Setup(device, dtype, backend, verbose)
    _common.check_checkpoint(checkpoint)
    prompt = _common.read_prompt(prompt)
    with _common.first_rank_speaks():
        with _common.stdout_kept_clean(as_json):
            result = run(checkpoint, prompt, setup, seed, arguments, _discard if as_json else _write)
        if as_json:
            _common.print_json(result)
            return
        print(speed(result), file=sys.stderr)
        if explain:
            rows = [[d["op"], d["backend"], d["device"], str(d["calls"]), d["reason"]] for d in result["explain"]]
            _common.print_table(["op", "back end", "device", "calls", "why"], rows, stderr=True)


def sampling_arguments(temperature: float, top_p: float) -> dict[str, Any]:
    """Arguments of transformers' generate() for what the command line asks.

    Raises:
        UserError: a number out of range, or a top-p that would have no effect.
    """
    if not (math.isfinite(temperature) and temperature >= 0):
        raise _common.UserError(f"--temperature is {temperature}, expected 0 or a positive number")
    if not 0 < top_p <= 1:
        raise _common.UserError(f"--top-p is {top_p}, expected more than 0 and at most 1")
    if temperature == 0:
        if top_p != 1:
            raise _common.UserError(
                f"--top-p {top_p} has no effect at --temperature 0, which takes the likeliest token"
            )
        return {"do_sample": False}
    # top_k=0: generate() would keep the 50 likeliest otherwise.
    return {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}


def run(
    checkpoint: str,
    prompt: str,
    setup: _common.Setup,
    seed: int,
    arguments: dict[str, Any],
    write: Callable[[str], None],
) -> dict[str, Any]:
    """Load, generate, and tell all of it: the object that --json prints.

    Args:
        checkpoint, prompt: as given.
        setup: where and how.
        seed: of the sampling.
        arguments: of transformers' generate().
        write: takes the text as it comes.
    """
    import torch

    from xpu_ports.common import dispatch

    # Loading says how layers are divided among processes.
    dispatch.reset_explain()
    with _common.loaded(checkpoint, setup) as (model, tokenizer):
        inputs = _common.encode(tokenizer, prompt, model.device)
        streamer = Streamer(tokenizer, write)
        torch.manual_seed(seed)
        model.generate(**inputs, streamer=streamer, **arguments)
    explanation = dispatch.explain(show=False)
    return {
        "text": tokenizer.decode(streamer.ids, skip_special_tokens=True),
        **streamer.figures(inputs["input_ids"].shape[1]),
        **_common.describe(checkpoint, model),
        "explain": [dataclasses.asdict(decision) for decision in explanation],
    }


class Streamer:
    """What generate() hands its tokens to: writes text once it is final and keeps the time of each token.

    A token's text can depend on its neighbours (a character in several tokens, a word's leading space), so a window
    of tokens is decoded and the text beyond its known part is written.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], None]) -> None:
        self.ids: list[int] = []
        self._tokenizer = tokenizer
        self._write = write
        self._window = 0
        self._written = 0
        self._started: float | None = None
        self._times: list[float] = []

    def put(self, ids: Tensor) -> None:
        """First the prompt, [1, T], then each new token, [1]; on the CPU, so the device is done with them."""
        if self._started is None:
            self._started = time.perf_counter()
            return
        self._times.append(time.perf_counter())
        self.ids.extend(ids.tolist())
        self._flush(last=False)

    def end(self) -> None:
        self._flush(last=True)
        self._write("\n")

    def _flush(self, last: bool) -> None:
        known = self._decode(self.ids[self._window : self._written])
        text = self._decode(self.ids[self._window :])
        # U+FFFD at the end: a character whose last bytes are still to come.
        if len(text) > len(known) and (last or not text.endswith("\ufffd")):
            self._write(text[len(known) :])
            self._window, self._written = self._written, len(self.ids)

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def figures(self, prompt_tokens: int) -> dict[str, Any]:
        """Token counts, seconds and tokens per second; the first new token comes out of the prefill."""
        assert self._started is not None
        prefill = self._times[0] - self._started
        decode = self._times[-1] - self._times[0]
        steps = len(self._times) - 1
        return {
            "prompt_tokens": prompt_tokens,
            "new_tokens": len(self._times),
            "prefill_seconds": prefill,
            "prefill_tokens_per_second": prompt_tokens / prefill,
            "decode_seconds": decode,
            "decode_tokens_per_second": steps / decode if steps else None,
        }


def speed(result: dict[str, Any]) -> str:
    """The line that follows the text."""
    line = (
        f"prefill: {result['prompt_tokens']} tokens in {result['prefill_seconds']:.3f} s, "
        f"{result['prefill_tokens_per_second']:.1f} tokens/s"
    )
    if result["decode_tokens_per_second"] is not None:
        line += (
            f"; decode: {result['new_tokens'] - 1} tokens in {result['decode_seconds']:.3f} s, "
            f"{result['decode_tokens_per_second']:.1f} tokens/s"
        )
    return f"{line} ({result['dtype']} on {result['device']})"


def _write(text: str) -> None:
    print(text, end="", flush=True)


def _discard(text: str) -> None:
    pass
