"""CUDA tensors without a GPU: on the CPU tensors are real, on CUDA they have shapes alone, and integers their values.

integers    CUDA tensors carry their true values, as far as these are known, in host memory: their *shadow*
floats      shapes alone; read back on the host they are ones
large       floats and bytes on the CPU of a MiB or more, models on their way, are shapes too
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from rehearsal.fused import workspace_bytes
from rehearsal.memory import DEVICE, HOST, PINNED, Meter
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
LARGE_BYTES = 1 << 20  # floats on the CPU from here on are shapes
SHADOW_ELEMENTS = 1 << 22  # integers up to here are known
SCALARS = 64  # so many floats on the CPU may take part in an operation on integers
MAKERS = {"empty", "empty_strided", "zeros", "ones", "full", "arange", "scalar_tensor", "randn", "rand"}
PACKAGE, OWN = "/rlhfuse/", "/tools/rehearsal/"


class FakeCuda(TorchDispatchMode):
    """While it is open, tensors on CUDA are fake; `meter` counts them, `reads` the times that the host waits for one.

    `problems`: what NCCL would refuse and what would hold up other ranks, by place. Wrong devices, shapes and dtypes
    raise as they do on CUDA.
    """

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.meter = meter
        self.reads: Counter[str] = Counter()
        self.problems: Counter[str] = Counter()
        self.collectives: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()  # of Triton kernels
        self.variants: set[tuple[str, ...]] = set()  # of these, for what each is compiled
        self.doing = ""  # what the run says that it does
        self.operations = 0
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.operations += 1
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        fakes = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
        target = kwargs.get("device")
        to_cuda = target is not None and torch.device(target).type == "cuda"
        if not fakes and not to_cuda:
            return self._on_host(func, args, kwargs, tensors)
        if func.namespace == "c10d":
            return self._collective(func, args, tensors)
        if func.namespace == "aten" and _is_composite(func):  # under inference mode nothing has taken it apart
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        if special := _SPECIAL.get(func):
            return special(self, func, args, kwargs)
        body = _python_body(func)
        if body is not None:  # an operator of torch.library: what it does inside counts too
            with self:
                return body(*args, **kwargs)
        return self._run(func, args, kwargs, tensors)

    def note(self, doing: str) -> None:
        self.doing = doing

    def host_waits(self, values: Tensor) -> Tensor:
        """The values of a CUDA tensor on the host, ones where nobody knows them."""
        self.reads[place()] += 1
        return _values(values)

    def on_host(self, tensor: Tensor) -> Tensor:
        """A tensor like this one in host memory, of which the shape alone is there."""
        with self._fake:
            made = torch.empty(tensor.shape, dtype=tensor.dtype)
        self.meter.track(made, "weight", HOST)
        return made

    def _on_host(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        pinned = kwargs.get("pin_memory")
        kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
        if tensors or not _is_large(func, args, kwargs):
            return func(*args, **kwargs)
        with self._fake:
            made = func(*args, **kwargs | {"device": torch.device("cpu")})
        self.meter.track(made, _name(func), PINNED if pinned else HOST)
        return made

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        """On fakes; the same on shadows, where all that takes part is known."""
        refuse_bad_operands(func, args)
        known = self._on_shadows(func, args, kwargs, tensors)
        pinned = kwargs.get("pin_memory")
        try:
            with self._fake:
                out = func(*args, **kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            if known is None:
                raise
            self.reads[place()] += 1  # its shape depends on values: CUDA waits for them too
            out = tree_map(lambda value: self._like(value) if isinstance(value, Tensor) else value, known)
        outs, values = tree_leaves(out), tree_leaves(known) if known is not None else []
        values += [None] * (len(outs) - len(values))
        name = _name(func)
        for made, value in zip(outs, values):
            if not isinstance(made, FakeTensor):
                continue
            on_host = PINNED if pinned else HOST
            self.meter.track(made, name, DEVICE if made.fake_device.type == "cuda" else on_host)
            if isinstance(value, Tensor) and not value.dtype.is_floating_point and value.shape == made.shape:
                if shadow(made) is None:
                    made._shadow = value  # type: ignore[attr-defined]
            elif known is None and func._schema.is_mutable and shadow(made) is not None:
                made._shadow = None  # type: ignore[attr-defined]  # nobody knows what was written
        if passing := workspace_bytes(name, args):
            self.meter.pass_through(passing, f"workspace of {name}")
        return out

    def _on_shadows(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        """What the operation gives on the known values; None where some are not known, or it makes floats."""
        if tensors:
            if not all(map(_is_known, tensors)):
                return None
        else:
            dtype, maker = kwargs.get("dtype"), _name(func).split(".")[0]
            if maker not in MAKERS or dtype is None and maker != "arange" or dtype and dtype.is_floating_point:
                return None
            if maker.startswith("empty"):  # unset on CUDA; here the same in every rehearsal
                size = args[0]
                return torch.zeros(size, dtype=dtype) if _elements(size) <= SHADOW_ELEMENTS else None
        given = tree_map(lambda value: shadow(value) if isinstance(value, Tensor) else value, (args, kwargs))
        plain = {key: value for key, value in given[1].items() if key != "pin_memory"}
        if plain.get("device") is not None:
            plain["device"] = torch.device("cpu")
        try:
            return func(*given[0], **plain)
        except (RuntimeError, IndexError, NotImplementedError):  # the fakes say what is wrong, if anything is
            return None

    def _like(self, value: Tensor) -> Tensor:
        with self._fake:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=CUDA)

    def _collective(self, func: Any, args: Any, tensors: list[Tensor]) -> Any:
        name = func._schema.name.removeprefix("c10d::")
        self.collectives[name] += 1
        if complaint := refuse_bad_collective(name, tensors):
            self.problems[f"refused by NCCL: {complaint} at {place()}"] += 1
        work = FakeWork().boxed()
        return work if len(func._schema.returns) == 1 else (args[0], work)

    # operators that are about devices -------------------------------------------------------------------------

    def _scalar(self, func: Any, args: Any, kwargs: Any) -> Any:
        return self.host_waits(args[0]).item() if args[0].fake_device.type == "cuda" else 1

    def _pin(self, func: Any, args: Any, kwargs: Any) -> Any:
        return args[0] if func is aten._pin_memory.default else True

    def _to(self, func: Any, args: Any, kwargs: Any) -> Any:
        source, target = args[0], kwargs.get("device")
        leaves = isinstance(source, FakeTensor) and source.fake_device.type == "cuda"
        if not leaves or target is None or torch.device(target).type != "cpu":
            return self._run(func, args, kwargs, [source])
        if source.dtype.is_floating_point and source.nbytes >= LARGE_BYTES:
            self.reads[place()] += 1
            return self._run(func, args, kwargs, [source])
        return self.host_waits(source).to(kwargs.get("dtype") or source.dtype).clone()

    def _copy(self, func: Any, args: Any, kwargs: Any) -> Any:
        target, source = args[0], args[1]
        torch.broadcast_shapes(target.shape, source.shape)
        if source.numel() > target.numel():
            raise RuntimeError(f"copy_ of {list(source.shape)} into {list(target.shape)}")
        waits = not (len(args) > 2 and args[2] or kwargs.get("non_blocking"))
        if not isinstance(target, FakeTensor):
            return func(target, self.host_waits(source) if waits else _values(source))
        if target.fake_device.type == "cpu" and isinstance(source, FakeTensor) and source.fake_device.type == "cuda":
            self.reads[place()] += waits
        before, values = shadow(target), shadow(source)
        if values is not None and values.dtype.is_floating_point and isinstance(source, FakeTensor):
            values = None
        if before is not None and values is not None:
            before.copy_(values)
        elif values is not None and not target.dtype.is_floating_point and target.numel() <= SHADOW_ELEMENTS:
            if target.shape == values.shape:
                target._shadow = values.to(target.dtype).clone()  # type: ignore[attr-defined]
        elif before is not None:
            before.fill_(1)
        return target


def shadow(tensor: Tensor) -> Tensor | None:
    """The values of a tensor, None where they are not known."""
    return getattr(tensor, "_shadow", None) if isinstance(tensor, FakeTensor) else tensor


def _values(tensor: Tensor) -> Tensor:
    """Those of a tensor, ones where they are not known."""
    known = shadow(tensor)
    return torch.ones(tensor.shape, dtype=tensor.dtype) if known is None else known


def place() -> str:
    """Where in the project this is, with what of Megatron stands between."""
    frame, within = sys._getframe(1), ""
    while frame is not None:
        file = frame.f_code.co_filename
        if PACKAGE in file and OWN not in file:
            return f"{file.rpartition(PACKAGE)[2]}:{frame.f_lineno} {frame.f_code.co_name}{within}"
        if "/megatron/" in file and not within:
            within = f" <- megatron/{file.rpartition('/megatron/')[2]}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return f"backward{within}"


def _is_known(tensor: Tensor) -> bool:
    values = shadow(tensor)
    if values is None or tensor.numel() > SHADOW_ELEMENTS:
        return False
    floats = values.dtype.is_floating_point
    return not floats or not isinstance(tensor, FakeTensor) and tensor.numel() < SCALARS


def _is_large(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether this makes a tensor on the CPU, of floats or of bytes for them, that is as large as a weight."""
    if not args or not isinstance(args[0], list | tuple) or _name(func).split(".")[0] not in MAKERS:
        return False
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    of_weights = dtype.is_floating_point or dtype == torch.uint8
    return of_weights and _elements(args[0]) * dtype.itemsize >= LARGE_BYTES


def _elements(size: Any) -> int:
    return functools.reduce(lambda a, b: a * int(b), size, 1)


def _name(func: Any) -> str:
    return func._schema.name.removeprefix("aten::")


@functools.cache
def _is_composite(func: Any) -> bool:
    if func._schema.name in ("aten::reshape", "aten::contiguous"):
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


@functools.cache
def _python_body(func: Any) -> Any:
    """The function of an operator made by torch.library.custom_op, None of any other."""
    made = OPDEFS.get(f"{func.namespace}::{func._schema.name.partition('::')[2]}")
    return made and (made._backend_fns.get("cuda") or made._backend_fns.get(None))


_SPECIAL = {
    aten._local_scalar_dense.default: FakeCuda._scalar,
    aten._pin_memory.default: FakeCuda._pin,
    aten.is_pinned.default: FakeCuda._pin,
    aten._to_copy.default: FakeCuda._to,
    aten.copy_.default: FakeCuda._copy,
}


ONE_DTYPE = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "mv", "dot"}
INT64_INDEX = dict.fromkeys(
    ("index_copy", "index_copy_", "index_add", "index_add_", "gather", "scatter", "scatter_", "scatter_add_"), 2
)
INDICES = (torch.int64, torch.int32, torch.bool, torch.uint8)


def refuse_bad_operands(func: Any, args: Any) -> None:
    """Raise RuntimeError for dtypes, and for tensors on two devices, that a CUDA kernel refuses."""
    name = func._schema.name.removeprefix("aten::")
    if name in ONE_DTYPE:
        ends_in = [value for value in args if isinstance(value, torch.dtype)]  # of 16-bit factors, a sum in float32
        summed = ends_in and args[0].dtype == ends_in[0]
        kinds = {value.dtype for value in args[1 if summed else 0 :] if isinstance(value, Tensor)}
        if len(kinds) > 1:
            raise RuntimeError(f"{name} of {' and '.join(sorted(map(str, kinds)))}")
    elif name in INT64_INDEX:
        if (dtype := args[INT64_INDEX[name]].dtype) != torch.int64:
            raise RuntimeError(f"{name}: the index is {dtype}, not torch.int64")
    elif name in ("index", "index_put_", "index_put"):
        for index in args[1]:
            if index is not None and index.dtype not in INDICES:
                raise RuntimeError(f"{name}: an index is {index.dtype}")


def refuse_bad_collective(name: str, tensors: Iterable[Tensor]) -> str | None:
    """Why NCCL would not take these tensors, one of them at least as large as a weight or on CUDA; None if it does."""
    for tensor in tensors:
        if tensor.device.type != "cuda":
            return f"{name} of a tensor on the CPU: {list(tensor.shape)}"
        if not tensor.is_contiguous():
            return f"{name} of a tensor that is not contiguous: {list(tensor.shape)}, strides {list(tensor.stride())}"
    return None
