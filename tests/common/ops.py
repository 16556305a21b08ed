"""How every op is tested: on one back end, forced, on one device, against the fp64 oracle.

`Runner` is what the fixture `run` gives. A call of it checks what holds for all ops: the forced back end is the one
that ran, the result is within the error budget, inputs are left alone bit for bit, outputs share no memory with
inputs, and nothing reads memory that it did not write or writes beyond what it was given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from xpu_ports.common import accuracy, dispatch
from xpu_ports.common.dispatch import BackendError, Op, use_backend

# Bytes before and after each block of memory; a multiple of every alignment that a kernel may assume.
GUARD = 1024
# Every byte set is NaN in all floating dtypes and -1 in the integer ones.
UNWRITTEN = 0xFF


@dataclass(frozen=True)
class Target:
    """Where an op test runs: a back end and the device of the tensors."""

    backend: str
    device: str


def targets(op: Op, emulator: str | None, accelerator: str | None) -> dict[str, Target]:
    """Test ids and targets of an op.

    Args:
        op: the op.
        emulator: id for back ends that are emulated on CPU tensors in this process, None where none is.
        accelerator: device type to run on as well, None for the CPU alone.
    """
    found = {"reference": Target("reference", "cpu")}
    names = {i.backend for i in op.implementations}
    if emulator is not None and "triton" in names:
        found[emulator] = Target("triton", "cpu")
    for i in op.implementations:
        if "cpu" in i.devices:
            found[f"cpu-{i.backend}"] = Target(i.backend, "cpu")
    if accelerator is not None:
        found[f"{accelerator}-reference"] = Target("reference", accelerator)
        for i in op.implementations:
            if accelerator in i.devices:
                name = accelerator if i.backend == "triton" else f"{accelerator}-{i.backend}"
                found[name] = Target(i.backend, accelerator)
    return found


class Runner:
    """Runs one op on one target. Results come back on the CPU."""

    def __init__(self, op: Op, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
        self.op = op
        self.target = target
        self._monkeypatch = monkeypatch
        # Whether results are rounded at the end alone. A test turns it off where the op's contract rounds in between.
        self.rounds_once = True
        # Whether matrix units take the op's sums in fp32. NVIDIA's cut sums off instead of rounding them (Fasi et al.,
        # "Numerical behavior of NVIDIA tensor cores", 2021): a row of some thousand terms is off by twice as much.
        self.sums_on_matrix_units = False
        # What an op's kernels, by its contract, round the operands of products to: wider results are measured as this.
        self.operands: torch.dtype | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the op and check it against its reference in fp64.

        Returns:
            A tensor, or a tuple of them where there are more: the outputs, then the arguments that the op writes.
        """
        given = self._bind(args, kwargs)
        expected, oracle = (_reference(self.op, given, double) for double in (False, True))
        if self.rounds_once and self.target == Target("reference", "cpu"):
            # The reference beside itself would prove nothing: it has to be the oracle, rounded.
            expected = {name: t.to(expected[name].dtype) for name, t in oracle.items()}
        placed = Placed(given, self.target.device)
        with torch.no_grad():
            outputs = self._watched(lambda: self._call(placed.values))
        results = _named(outputs, placed.values, self.op.mutates)
        memory = {t.untyped_storage().data_ptr() for t in placed.tensors() if t.numel()}
        for name, t in results.items():
            if name.startswith("output"):
                assert t.untyped_storage().data_ptr() not in memory, f"{name} shares memory with an argument"
        results = {name: t.detach().cpu().clone() for name, t in results.items()}
        placed.assert_untouched(self.op.mutates)
        assert results.keys() == oracle.keys(), f"got {list(results)}, expected {list(oracle)}"
        for name, t in results.items():
            rounds = self.operands is not None and self.target.backend != "reference"
            if rounds:
                t, expected[name] = (x.to(min(x.dtype, self.operands, key=_bits)) for x in (t, expected[name]))
            rounds = rounds and t.dtype == self.operands != torch.float32
            if self.sums_on_matrix_units and self.target == Target("triton", "cuda"):
                rounds |= t.dtype == torch.float32
            accuracy.assert_close(t, expected[name], oracle[name], name, rounds)
        return next(iter(results.values())) if len(results) == 1 else tuple(results.values())

    def gradients(self, *args: Any, grads: Sequence[Tensor], **kwargs: Any) -> None:
        """Check the gradients of the arguments that require one against autograd through the fp64 reference.

        Args:
            grads: gradients of the outputs, in the outputs' dtypes.
        """
        given = self._bind(args, kwargs)
        leaves = [name for name, v in given.items() if isinstance(v, Tensor) and v.requires_grad]

        def reference(arguments: dict[str, Any]) -> Any:
            return self.op.reference(*arguments.values())

        expected = _gradients(reference, _copy(given, False), leaves, grads)
        oracle = _gradients(reference, _copy(given, True), leaves, [g.double() for g in grads])
        placed, upstream = Placed(given, self.target.device), Placed(dict(enumerate(grads)), self.target.device)
        got = self._watched(lambda: _gradients(self._call, placed.values, leaves, upstream.tensors()))
        placed.assert_untouched(())
        upstream.assert_untouched(())
        for name in leaves:
            accuracy.assert_close(got[name].cpu(), expected[name], oracle[name], f"gradient of {name}")

    def _bind(self, args: tuple, kwargs: dict) -> dict[str, Any]:
        bound = self.op.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    def _call(self, arguments: dict[str, Any]) -> Any:
        return self.op(*arguments.values())

    def _watched(self, function: Callable[[], Any]) -> Any:
        """Call a function with the back end forced, and check that all ops ran on it and this op once."""
        before = _calls()
        with use_backend(self.target.backend), unwritten_is_nan(self._monkeypatch):
            result = function()
        ran = {key: calls - before.get(key, 0) for key, calls in _calls().items() if calls != before.get(key, 0)}
        assert {backend for _, backend in ran} == {self.target.backend}, f"not all on the forced back end: {ran}"
        assert ran[self.op.name, self.target.backend] == 1, f"one call, counted as {ran}"
        return result


class Placed:
    """Arguments on a device, in copies of their whole memory: strides, offsets and sharing stay as they are.

    Each block of memory lies between guards, so that access beyond it shows.
    """

    def __init__(self, values: dict[Any, Any], device: str) -> None:
        self._blocks: dict[int, tuple[Tensor, Tensor]] = {}
        self._originals = values
        self.values = {k: each_tensor(v, lambda t: self._place(t, device)) for k, v in values.items()}

    def tensors(self) -> list[Tensor]:
        found: list[Tensor] = []
        for value in self.values.values():
            each_tensor(value, found.append)
        return found

    def _place(self, t: Tensor, device: str) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in self._blocks:
            content = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),))
            guard = torch.full((GUARD,), UNWRITTEN, dtype=torch.uint8)
            block = torch.cat([guard, content, guard])
            self._blocks[storage.data_ptr()] = (block.to(device, copy=True), block)
        moved = self._blocks[storage.data_ptr()][0].untyped_storage()
        offset = GUARD // t.itemsize + t.storage_offset()
        return torch.empty(0, dtype=t.dtype, device=device).set_(moved, offset, t.shape, t.stride())

    def assert_untouched(self, mutates: Sequence[str]) -> None:
        """Everything but the arguments named in `mutates` is as it was, the memory around them included."""
        for name in mutates:
            self.values[name].copy_(self._originals[name])
        for now, before in self._blocks.values():
            changed = (now.cpu() != before).nonzero().flatten().tolist()
            inside = [byte for byte in changed if GUARD <= byte < len(before) - GUARD]
            assert not inside, f"an input was modified: {len(inside)} bytes from byte {inside[0] - GUARD}"
            assert not changed, f"memory around an input was written: {len(changed)} bytes"


@contextlib.contextmanager
def unwritten_is_nan(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make torch.empty and its kin give memory full of NaN, between guards that are checked at the end."""
    blocks: list[Tensor] = []

    def guarded(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def empty(*args: Any, **kwargs: Any) -> Tensor:
            t = allocate(*args, **kwargs)
            size = t.untyped_storage().nbytes() + 2 * GUARD
            blocks.append(torch.full((size,), UNWRITTEN, dtype=torch.uint8, device=t.device))
            return t.set_(blocks[-1].untyped_storage(), GUARD // t.itemsize, t.shape, t.stride())

        return empty

    with monkeypatch.context() as patch:
        for owner, name in (
            (torch, "empty"),
            (torch, "empty_like"),
            (torch, "empty_strided"),
            (Tensor, "new_empty"),
            (Tensor, "new_empty_strided"),
        ):
            patch.setattr(owner, name, guarded(getattr(owner, name)))
        yield
    for block in blocks:
        around = torch.cat([block[:GUARD], block[-GUARD:]])
        assert (around == UNWRITTEN).all(), "memory around an allocation was written"


def round_to_nearest_bfloat16() -> None:
    """Make Triton's interpreter round fp32 to bf16 as devices do: to nearest, ties to even. It truncates."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast = InterpreterBuilder.cast_impl

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if src.dtype.scalar != tl.float32 or dst_type.scalar != tl.bfloat16:
            return cast(self, src, dst_type)
        rounded = torch.tensor(src.data).bfloat16().view(torch.uint16).numpy()
        return TensorHandle(rounded, dst_type.scalar)

    InterpreterBuilder.cast_impl = cast_impl


def patch_language_once() -> None:
    """Make Triton's interpreter patch its language for a launch, not again for each function that the kernel calls.

    It is what it spends most of its time with.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    languages: dict[Callable, list[Any]] = {}

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn not in languages:
            languages[self.fn] = [value for value in self.fn.__globals__.values() if value is tl or value is tl.core]
        if any(tl.core.is_builtin(language.load) for language in languages[self.fn]):
            interpreter._patch_lang(self.fn)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as e:
            raise interpreter.InterpreterError(repr(e)) from e

    interpreter.InterpretedFunction.__call__ = call


def assert_rounded_once(op: Op, *args: Any, **kwargs: Any) -> None:
    """The reference in bf16 is the oracle, rounded: it rounds nothing in between.

    fp32 decides otherwise than fp64 only next to a tie, which few elements are; a second rounding changes every fourth.
    """
    oracle = accuracy.oracle(op.reference, *args, **kwargs)
    out = op.reference(*args, **kwargs)
    out, oracle = (t if isinstance(t, Tensor) else t[0] for t in (out, oracle))
    assert out.dtype == torch.bfloat16
    differs = (out != oracle.bfloat16()).double().mean().item()
    assert differs < accuracy.TOLERANCE[torch.bfloat16], f"{differs:.2%} of the elements differ"


LAYOUTS = ("contiguous", "slice", "gap", "transposed", "expanded")


def normal(*shape: int, dtype: torch.dtype, layout: str = "contiguous", scale: float = 1.0) -> Tensor:
    """Normal random numbers in a tensor of at least two dimensions, laid out as models hand them over.

    Args:
        shape: its sizes.
        dtype: its dtype.
        layout: "slice": columns of a wider projection, off by two elements; "gap": rows between others, so that batch
            and time do not merge; "transposed": the first two dimensions swapped; "expanded": one row for all.
        scale: the standard deviation.
    """
    first, second, last = shape[0], shape[1], shape[-1]
    if layout == "slice":
        base = torch.randn(*shape[:-1], 2 * last + 5)[..., 2 : 2 + last]
    elif layout == "gap":
        base = torch.randn(first, 2 * second + 3, *shape[2:])[:, 1 : 2 * second + 1 : 2]
    elif layout == "transposed":
        base = torch.randn(second, first, *shape[2:]).transpose(0, 1)
    elif layout == "expanded":
        base = torch.randn(1, *shape[1:])
    else:
        base = torch.randn(shape)
    whole = torch.empty(0).set_(base.untyped_storage()).mul_(scale).to(dtype)
    view = torch.empty(0, dtype=dtype).set_(whole.untyped_storage(), base.storage_offset(), base.shape, base.stride())
    return view.expand(shape) if layout == "expanded" else view


def refusal(op: Op, *args: Any, **kwargs: Any) -> str:
    """Why the Triton back end does not take a call with such arguments on an XPU.

    Checks both ways a refusal shows: unforced what comes next runs, for that reason; forced a `BackendError` gives it.
    No XPU is needed: the arguments are replaced by fakes of the same shape, strides and dtype.
    """
    with FakeTensorMode():
        fakes = [fake(a) for a in args]
        keywords = {k: fake(v) for k, v in kwargs.items()}
        backend, reason = op.choose(*fakes, **keywords)
        if backend == "triton":
            return ""
        with use_backend("triton"), pytest.raises(BackendError) as error:
            op.choose(*fakes, **keywords)
    # What the back ends behind it say comes after, where there are any.
    reason = reason.split("; ")[0]
    assert reason in str(error.value)
    return reason


def each_tensor(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """The value with the function applied to it, or to the tensors in a list of them; anything else as it is."""
    if isinstance(value, list):
        return [each_tensor(v, function) for v in value]
    return function(value) if isinstance(value, Tensor) else value


def fake(value: Any) -> Any:
    """A tensor without data on an accelerator in place of each tensor, else the value. Inside a FakeTensorMode."""
    return each_tensor(value, _fake_tensor)


def _fake_tensor(value: Tensor) -> Tensor:
    # A CUDA build asks its own device even for a fake; a CPU build lets an XPU be faked.
    device = "cuda" if torch.cuda.is_available() else "xpu"
    return torch.empty_strided(
        value.shape, value.stride(), dtype=value.dtype, device=device, requires_grad=value.requires_grad
    )


def _bits(dtype: torch.dtype) -> int:
    return torch.finfo(dtype).bits


def _reference(op: Op, given: dict[str, Any], double: bool) -> dict[str, Tensor]:
    arguments = _copy(given, double)
    with torch.no_grad():
        return _named(op.reference(*arguments.values()), arguments, op.mutates)


def _copy(given: dict[str, Any], double: bool) -> dict[str, Any]:
    values = {k: accuracy.to_double(v) if double else v for k, v in given.items()}
    return {k: each_tensor(v, lambda t: t.detach().clone()) for k, v in values.items()}


def _named(outputs: Any, arguments: dict[str, Any], mutates: Sequence[str]) -> dict[str, Tensor]:
    listed = [outputs] if isinstance(outputs, Tensor) else list(outputs or ())
    return {f"output {i}": t for i, t in enumerate(listed)} | {name: arguments[name] for name in mutates}


def _gradients(
    function: Callable[..., Any], arguments: dict[str, Any], leaves: Sequence[str], grads: Sequence[Tensor]
) -> dict[str, Tensor]:
    for name in leaves:
        arguments[name].requires_grad_()
    outputs = function(arguments)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    found = torch.autograd.grad(outputs, [arguments[name] for name in leaves], list(grads))
    return dict(zip(leaves, found, strict=True))


def _calls() -> dict[tuple[str, str], int]:
    """Calls so far by (op, back end)."""
    calls: dict[tuple[str, str], int] = {}
    for d in dispatch.explain(show=False):
        calls[d.op, d.backend] = calls.get((d.op, d.backend), 0) + d.calls
    return calls
