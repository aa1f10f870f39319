"""Compiled parts of the bf16 training step on a CPU, and of NG-SGD in float32: `kernels.c`, which pip compiles where there
is a C compiler. Every function has a plain counterpart in PyTorch, named in its docstring, which runs wherever these
cannot: where nothing was compiled, on a GPU, on a processor without AVX-512, which all of them need, or without
AVX512-BF16, which those for bf16 need. The tests hold the two together."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import platform
import threading
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

log = logging.getLogger(__name__)

SOURCE, LIBRARY = Path(__file__).with_name("kernels.c"), Path(__file__).with_name("kernels.so")

_POINTER, _COUNT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_ARGUMENTS = {
    "ddnn_gather_spliced": [_POINTER, *[_COUNT] * 3, _POINTER, *[_COUNT] * 2, *[_POINTER] * 3],
    "ddnn_sigmoid": [_POINTER, _COUNT, _COUNT, _POINTER],
    "ddnn_sigmoid_backward": [_POINTER, _POINTER, _COUNT],
    "ddnn_column_sums": [_POINTER, _COUNT, _COUNT, _POINTER, _POINTER],
    "ddnn_bf16_to_float32_rows": [_POINTER, *[_COUNT] * 2, _POINTER, _COUNT, ctypes.c_int, _POINTER],
    "ddnn_float32_to_bf16_rows": [_POINTER, *[_COUNT] * 3, *[_POINTER] * 3],
    "ddnn_precondition": [_POINTER, *[_COUNT] * 2, _POINTER, *[_COUNT] * 2, *[_POINTER] * 6],
    "ddnn_precondition_memory": [_COUNT] * 3,
    "ddnn_precondition_float32": [_POINTER, *[_COUNT] * 2, _POINTER, *[_COUNT] * 2, *[_POINTER] * 6],
    "ddnn_precondition_float32_memory": [_COUNT] * 3,
    "ddnn_cross_entropy": [_POINTER, _POINTER, _COUNT, _COUNT, _POINTER, ctypes.POINTER(ctypes.c_double), _POINTER],
    "ddnn_sgd_update": [_POINTER, _POINTER, _POINTER, _COUNT, _FLOAT, _FLOAT],
}


class _Scratch(threading.local):
    """Memory for a kernel to work in. Each thread has its own, as ctypes lets other threads run during a call."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)


class Kernels:
    """The functions of a compiled `kernels.c`. All tensors are in host memory, contiguous. OSError, AttributeError: the
    library cannot be loaded, or is none of ours.

    Attributes:
        source: SHA-256 of the `kernels.c` that was compiled.
        supported: for which precisions this processor has the instructions; in float32 only `remove_projection_` is compiled.
    """

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.ddnn_kernels_source.restype = ctypes.c_char_p
        self.source = bytes(self._library.ddnn_kernels_source() or b"").decode("ascii", "replace")
        self.supported = ("float32", "bf16")[: self._library.ddnn_kernels_supported()]
        if not self.supported:
            return
        for name, arguments in _ARGUMENTS.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = arguments, None
        for name in ("ddnn_cross_entropy", "ddnn_gather_spliced"):
            getattr(self._library, name).restype = _COUNT
        self._precondition = {}
        for dtype, name in ((torch.bfloat16, "ddnn_precondition"), (torch.float32, "ddnn_precondition_float32")):
            memory = getattr(self._library, f"{name}_memory")
            memory.restype = _COUNT
            self._precondition[dtype] = getattr(self._library, name), memory
        self._scratch = _Scratch()

    def gather_spliced(
        self, store: Tensor, rows: Tensor, first: int, shift: Tensor | None, scale: Tensor | None, out: Tensor
    ) -> None:
        """out (n, columns) bf16 <- the spliced frames at `rows` (n,) int64 of the store (frames, dim) float32, shifted
        and scaled by (columns,) float32 or None. `first`: the first frame of a splice, relative to its row. IndexError
        where a splice reaches beyond the store. Plain: `ddnn.data.dataset.gather`."""
        (_, dim), (n, columns) = store.shape, out.shape
        _check(torch.float32, store.shape, store)
        _check(torch.float32, (columns,), shift, scale)
        _check(torch.int64, (n,), rows)
        _check(torch.bfloat16, out.shape, out)
        if dim == 0 or columns % dim:
            raise ValueError(f"splices of {columns} from a store of shape {tuple(store.shape)}")
        windows = len(store) - columns // dim + 1
        given = (store.data_ptr(), windows, dim, columns, rows.data_ptr(), n, first, _pointer(shift), _pointer(scale))
        if self._library.ddnn_gather_spliced(*given, out.data_ptr()) != 0:
            raise IndexError(f"splices of {columns} from {first} on reach beyond {tuple(store.shape)}")

    def sigmoid_(self, y: Tensor, bias: Tensor) -> None:
        """y (rows, columns) bf16 <- 1 / (1 + e^-(y + bias)), bias (columns,) float32. Plain:
        `y.add_(bias).sigmoid_()`."""
        rows, columns = y.shape
        _check(torch.bfloat16, y.shape, y)
        _check(torch.float32, (columns,), bias)
        self._library.ddnn_sigmoid(y.data_ptr(), rows, columns, bias.data_ptr())

    def sigmoid_backward_(self, d: Tensor, y: Tensor) -> None:
        """d <- d y (1 - y), bf16, of one shape. Plain: `torch.ops.aten.sigmoid_backward(d, y)`."""
        _check(torch.bfloat16, d.shape, d, y)
        self._library.ddnn_sigmoid_backward(d.data_ptr(), y.data_ptr(), y.numel())

    def column_sums(self, d: Tensor, out: Tensor, weights: Tensor | None = None) -> None:
        """out (columns,) bf16 <- the sum of the rows of d (rows, columns) bf16, each times its weight, (rows,) float32,
        where they are given; summed in float32. Plain: `d.sum(0)` or `d.t() @ weights`."""
        rows, columns = d.shape
        _check(torch.bfloat16, d.shape, d)
        _check(torch.bfloat16, (columns,), out)
        _check(torch.float32, (rows,), weights)
        self._library.ddnn_column_sums(d.data_ptr(), rows, columns, _pointer(weights), out.data_ptr())

    def bf16_to_float32_rows(self, x: Tensor, out: Tensor, norms: Tensor) -> None:
        """out <- x (rows, columns) bf16, and a last column of ones where it has one column more; norms (rows,) float32
        <- those of its rows. Rows of out, float32, are contiguous in themselves. Plain: `Float32.load_rows`."""
        rows, columns = x.shape
        one = out.shape[-1] == columns + 1
        stride = _check_rows((rows, columns + one), out)
        _check(torch.bfloat16, x.shape, x)
        _check(torch.float32, (rows,), norms)
        pointers = x.data_ptr(), rows, columns, out.data_ptr(), stride, one, norms.data_ptr()
        self._library.ddnn_bf16_to_float32_rows(*pointers)

    def float32_to_bf16_rows(self, x: Tensor, out: Tensor, norms: Tensor, last: Tensor | None = None) -> None:
        """out (rows, columns) bf16 <- x, rounded, but for its further column where `last` is given: it goes there;
        norms <- those of the rows of x, float32, contiguous in themselves. norms, last: (rows,) float32. Plain:
        `BFloat16.store_rows`."""
        rows, columns = out.shape
        stride = _check_rows((rows, columns + (last is not None)), x)
        _check(torch.bfloat16, out.shape, out)
        _check(torch.float32, (rows,), norms, last)
        pointers = x.data_ptr(), rows, columns, stride, out.data_ptr(), _pointer(last), norms.data_ptr()
        self._library.ddnn_float32_to_bf16_rows(*pointers)

    def remove_projection_(
        self,
        x: Tensor,
        w: Tensor,
        *,
        before: Tensor | None = None,
        after: Tensor | None = None,
        last: Tensor | None = None,
        j: Tensor | None = None,
        h: Tensor | None = None,
    ) -> None:
        """X <- X - H W, H = X W^T, for x in bf16 of W and H rounded to bf16, summed in float32 and rounded. X is x (rows,
        columns) bf16 or float32 and, where w (rank, columns of X) float32 has one more column, a column of ones, of which
        `last` (rows,) float32 gets what becomes of it. before, after (rows,) float32 <- the norms of the rows of X,
        unrounded; j (rank, columns of X) float32 <- H^T X, where it is given. In two calls: without `after` only h (rows,
        rank) float32 <- H; without `before` H is read from h. Plain: `RoundedProjection`, `Projection` of
        `ddnn.nn.arithmetic`."""
        (rows, columns), rank = x.shape, w.shape[0]
        one = w.shape[1] == columns + 1 if after is None else last is not None
        _check(torch.float32 if x.dtype is torch.float32 else torch.bfloat16, x.shape, x)
        _check(torch.float32, (rank, columns + one), w, j)
        _check(torch.float32, (rows,), before, after, last)
        _check(torch.float32, (rows, rank), h)
        if h is None and (before is None or after is None):
            raise ValueError("no memory for the projection of rows from which it is not removed in the same call")
        precondition, memory_of = self._precondition[x.dtype]
        scratch, needed = self._scratch, memory_of(columns, one, rank)
        if scratch.memory.numel() < needed:
            scratch.memory = torch.empty(needed, dtype=torch.uint8)
        tensors = map(_pointer, (h, before, after, last, j))
        precondition(
            x.data_ptr(), rows, columns, w.data_ptr(), rank, columns + one, *tensors, scratch.memory.data_ptr()
        )

    def cross_entropy(self, activations: Tensor, labels: Tensor, derivative: Tensor, row: Tensor) -> tuple[float, int]:
        """Softmax and its derivative. Plain: `ddnn.nn.loss.SoftmaxCrossEntropyBFloat16`.

        Args:
            activations, derivative: (frames, pdfs) bf16, before softmax; filled with softmax - target.
            labels: (frames,) int64 pdf-ids; IndexError where one is not one of the pdfs.
            row: (pdfs,) float32 memory to work in.

        Returns:
            The loss summed over the frames, and how many have their label as the first of the largest activations.
        """
        frames, pdfs = activations.shape
        _check(torch.bfloat16, activations.shape, activations, derivative)
        _check(torch.float32, (pdfs,), row)
        _check(torch.int64, (frames,), labels)
        loss = ctypes.c_double()
        given = (activations.data_ptr(), labels.data_ptr(), frames, pdfs, derivative.data_ptr())
        right = self._library.ddnn_cross_entropy(*given, ctypes.byref(loss), row.data_ptr())
        if right < 0:
            raise IndexError(f"labels are {int(labels.min())} to {int(labels.max())}, of {pdfs} pdfs")
        return loss.value, int(right)

    def sgd_update(self, parameters: Tensor, low: Tensor, gradient: Tensor, rate: float, keep: float = 1.0) -> None:
        """parameters, float32 of any shape, <- keep * parameters - rate * gradient; low <- parameters, rounded; low and
        gradient bf16. Plain: `parameters.mul_(keep).add_(gradient, alpha=-rate)`, `low.copy_(parameters)`."""
        _check(torch.float32, parameters.shape, parameters)
        _check(torch.bfloat16, parameters.shape, low, gradient)
        pointers = parameters.data_ptr(), low.data_ptr(), gradient.data_ptr()
        self._library.ddnn_sgd_update(*pointers, parameters.numel(), rate, keep)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _check(dtype: torch.dtype, shape: tuple[int, ...], *tensors: Tensor | None) -> None:
    """Checks the tensors that are given: in host memory, contiguous, of this type and shape."""
    for one in tensors:
        if one is None:
            continue
        if one.dtype is not dtype or not one.is_cpu or not one.is_contiguous():
            raise TypeError(f"{one.dtype} on {one.device} with strides {one.stride()}, contiguous {dtype} expected")
        if one.shape != shape:
            raise ValueError(f"shape {tuple(one.shape)}, {tuple(shape)} expected")


def _check_rows(shape: tuple[int, int], matrix: Tensor) -> int:
    """As `_check`, of a matrix whose rows alone are contiguous. Returns the floats between the starts of two rows."""
    if matrix.dtype is not torch.float32 or matrix.dim() != 2 or not matrix.is_cpu or matrix.stride(1) != 1:
        raise TypeError(f"{matrix.dtype} on {matrix.device} with strides {matrix.stride()}, float32 rows expected")
    if matrix.shape != shape:
        raise ValueError(f"shape {tuple(matrix.shape)}, {shape} expected")
    return matrix.stride(0)


@cache
def load_library() -> Kernels | None:
    """The compiled kernels, or None where they cannot be used; the log says why."""
    if platform.machine() != "x86_64":
        log.info("compiled kernels are for x86-64: bf16 and NG-SGD run in PyTorch alone")
        return None
    hint = "pip install compiles it, where there is a C compiler"
    if not LIBRARY.is_file():
        log.info("no compiled kernels: bf16 and NG-SGD run in PyTorch alone, which is slower; %s", hint)
        return None
    try:
        kernels, source = Kernels(LIBRARY), hashlib.sha256(SOURCE.read_bytes()).hexdigest()
    except (OSError, AttributeError) as error:
        log.warning("compiled kernels cannot be loaded, bf16 and NG-SGD run in PyTorch alone: %s; %s", error, hint)
        return None
    if kernels.source != source:
        log.warning("%s was compiled from another %s and is not used; %s", LIBRARY, SOURCE.name, hint)
        return None
    if not kernels.supported:
        log.info("compiled kernels: not used, this processor has no AVX-512: bf16 and NG-SGD run in PyTorch alone")
        return None
    users = "bf16 and NG-SGD" if "bf16" in kernels.supported else "NG-SGD in float32; bf16 would need AVX512-BF16"
    log.info("compiled kernels: available (used by %s)", users)
    return kernels
