"""NG-SGD: SGD whose gradient is preconditioned on both sides of every layer (section 3 of arXiv 1410.7455).

As Kaldi's nnet2 `AffineComponentPreconditionedOnline::Update` (src/nnet2/nnet-component.cc), the code behind arXiv
1507.01239. For a layer with input X (N x D, 1 appended for the bias) and output derivative Y (N x K):

    X^, gamma_in = precondition([X 1]),    Y^, gamma_out = precondition(Y)
    dW = gamma_in * gamma_out * kappa * Y^^T X^

with kappa from the max-change rule, at the learning rate times the layer's largest `learn_rate_coef`. What
`natural_gradient` keeps, the Fisher matrices, belongs to this worker.

A layer that gives P rows for each frame (`Layer.gemm`) has N P rows in X and Y. Its history is P times as long, so
that it counts frames, and kappa is in frames too. A layer without such rows has its plain gradient, limited likewise, by
the norms of the frames' gradients. In bf16, X and Y are preconditioned in place, the factors of X W^T and H W rounded to
bf16 and the sums in float32; with the option `exact` in float32, X^ and Y^ being rounded for the last product alone.
The Fisher matrices are updated in float32 in both cases, but in bf16 less often once a training has settled.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ddnn.nn.arithmetic import Float32
from ddnn.nn.layer import Gemm, Layer, LayerCall, Views
from ddnn.nn.network import Network, Workspace
from ddnn.optim.adam import Adam, AdamOptions
from ddnn.optim.muon import Muon, MuonOptions
from ddnn.optim.natural_gradient import NaturalGradient, NaturalGradientOptions, Side, gammas, max_change_factor
from ddnn.optim.sgd import Sgd, SgdOptions
from ddnn.optim.shampoo import Shampoo, ShampooOptions
from ddnn.util.system import usable_cores

HOST_THREADS = 8  # at most, for the eigendecompositions of a training on a GPU
FEW_FILTERS = 32  # up to so many the rank of their derivative is a quarter of their number, at most


@dataclass(frozen=True)
class NgSgdOptions(SgdOptions):
    """Options of NG-SGD; ranks, `alpha`, `num_samples_history` and `update_period` as in `NaturalGradientOptions`.

    `max_change_scope`: `global` limits the step by the frames of all workers, `local` by the worker's own (nnet2);
    `unscaled` limits the step at a learning rate of 1, without `learn_rate_coef`, so that the step at `lr` is limited to
    lr * max_change_per_sample (the code of arXiv 1507.01239)."""

    rank_in: int = 20  # of a layer's input
    rank_out: int = 80  # of its output derivative
    alpha: float = 4.0
    num_samples_history: float = 2000.0
    update_period: int = 4
    max_change_per_sample: float = (
        0.075  # a step that changes a layer by more than this per frame is shortened; 0: never
    )
    max_change_scope: Literal["global", "local", "unscaled"] = "global"
    exact: bool = False  # in bf16: round X^ and Y^ only for the last product; never `NaturalGradient.updates_rarely`

    def sides(self, gemm: Gemm) -> tuple[tuple[int, int], tuple[int, int]]:
        """Dimension and rank of a layer's two preconditioners, of the input with 1 appended and of the derivative. Of a
        convolution with few filters a rank near their number would take away most of the derivative."""
        few = gemm.rows > 1 and gemm.fan_out <= FEW_FILTERS
        rank_out = min(self.rank_out, max(1, gemm.fan_out // 4)) if few else self.rank_out
        return (gemm.fan_in + 1, self.rank_in), (gemm.fan_out, rank_out)

    def num_bytes(self, layers: Sequence[Layer], minibatch: int) -> int:
        """As `SgdOptions.num_bytes`: per side of a layer W and its update, in float64 as it begins; per minibatch the
        inputs once more, H, and the largest derivative."""
        gemms = [part.gemm for layer in layers for part in layer.parts.values() if part.gemm is not None]
        matrices = sum(4 * 4 * min(rank, dim - 1) * dim for gemm in gemms for dim, rank in self.sides(gemm))
        projections = sum(2 * rank * gemm.rows for gemm in gemms for _, rank in self.sides(gemm))
        rows = sum(gemm.rows * gemm.fan_in for gemm in gemms)
        return matrices + 4 * minibatch * (projections + rows + max((g.rows * g.fan_out for g in gemms), default=0))


class _Part(NamedTuple):
    """One of the `Layer.parts` of layer `number`."""

    number: int
    prefix: str
    layer: Layer

    def views(self, whole: Views) -> Views:
        """Its own parameters, of those of the layer, by its own names."""
        if not self.prefix:
            return whole
        return {k.removeprefix(self.prefix): view for k, view in whole.items() if k.startswith(self.prefix)}

    def call(self, workspace: Workspace) -> LayerCall:
        """After the backward pass."""
        call = workspace.call_of(self.number)
        return call.layer.part_calls(call)[self.prefix]

    @property
    def learn_rate_coef(self) -> float:
        """The largest of its parameters'."""
        return max((about.learn_rate_coef for about in self.layer.parameters.values()), default=1.0)


class NgSgd(Sgd):
    """SGD along the natural gradient.

    Attributes:
        parts: the trainable layers, split into their `Layer.parts`; numbers count the parts of the whole network, so that
            without networks side by side a part has its layer's number.
        preconditioners_of: of a part that has a `gemm`, those of its input (with 1 appended) and of its output derivative.
        limit_coefs: what the learning rate of a part is multiplied by where its step is limited.
    """

    output_side: type[Side] = Side
    fused = True  # nothing happens between the two calls of a projection of an output derivative

    def __init__(self, network: Network, options: NgSgdOptions | None = None) -> None:
        options = options or NgSgdOptions()
        super().__init__(network, options)
        self.options = options
        self.preconditioners_of: dict[int, list[NaturalGradient]] = {}
        every = (_Part(i, *part) for i, layer in enumerate(network.layers) for part in layer.parts.items())
        self.parts = {k: part for k, part in enumerate(every) if part.number in self.trainable}
        unscaled = options.max_change_scope == "unscaled"
        self.limit_coefs = {k: 1.0 if unscaled else part.learn_rate_coef for k, part in self.parts.items()}
        self.gemms = {k: part.layer.gemm for k, part in self.parts.items() if part.layer.gemm is not None}
        for k, gemm in self.gemms.items():
            rest = (options.alpha, options.num_samples_history * gemm.rows, options.update_period)
            sides = ((dim, NaturalGradientOptions(rank, *rest)) for dim, rank in options.sides(self.whole_gemm(k)))
            self.preconditioners_of[k] = self.new_preconditioners(k, *sides)
        self._parts_of = {i: [k for k, part in self.parts.items() if part.number == i] for i in self.trainable}
        self._rows: dict[int, tuple[Tensor, Tensor]] = {}  # of this minibatch: X^ and Y^ of parts with a `gemm`
        self._factors: dict[int, float] = {}  # of their gradients
        self._limited_lr = 1.0
        self._memory = _Memory(self, 0, Float32())
        self._beside = _BesideGpu(network.parameters.device) if network.parameters.is_cuda else None

    def whole_gemm(self, k: int) -> Gemm:
        """That of a part on all workers that share it."""
        return self.gemms[k]

    def new_preconditioners(self, k: int, *sides: tuple[int, NaturalGradientOptions]) -> list[NaturalGradient]:
        """Those of a part, from dimension and options of its input's and of its output derivative's."""
        parameters = self.network.parameters
        return [NaturalGradient(dim, options, parameters.device, parameters.dtype) for dim, options in sides]

    def set_lr_scale(self, lr_scale: float) -> None:
        super().set_lr_scale(1.0 if self.options.max_change_scope == "local" else lr_scale)

    def set_arithmetic(self, arithmetic: Float32) -> None:
        for preconditioner in self.preconditioners:
            preconditioner.updates_rarely = arithmetic.updates_rarely and not self.options.exact

    @property
    def sides(self) -> list[list[NaturalGradient]]:
        return [[sides[n] for sides in self.preconditioners_of.values() if sides[n].rank] for n in (0, 1)]

    def finish_updates(self) -> None:
        sides = [side for side in self.preconditioners if side.pending]
        if not self._beside:
            for side in sides:
                side.finish_update()
        elif sides:
            self._beside.finish(sides, self._take_w)
        self._take_w()  # also of a state that was loaded

    def phase(self, frames: int) -> Hashable | None:
        if any(side.initial_updates(rows) for side, rows in self._sides(frames)):
            return None
        return any(side.updates_at(side.t) for side in self.preconditioners)

    def replayed(self, frames: int) -> None:
        super().replayed(frames)
        for side, rows in self._sides(frames):
            side.replayed(rows)
        if self._beside:
            self._beside.mark()

    def _take_w(self) -> None:
        for side in itertools.chain(*self._memory.sides.values()):
            side.take_w()

    def _sides(self, frames: int) -> Iterator[tuple[NaturalGradient, int]]:
        """The `preconditioners`, and how many rows `frames` frames have there."""
        for k, sides in self.preconditioners_of.items():
            yield from ((side, frames * self.gemms[k].rows) for side in sides if side.rank)

    def prepare(self, workspace: Workspace, lr: float) -> None:
        """Preconditions all layers; overwrites the workspace's derivatives and, in bf16 or with compiled kernels,
        activations and input."""
        self._limited_lr = 1.0 if self.options.max_change_scope == "unscaled" else lr
        self.precondition(workspace)
        self.scale(workspace.arithmetic)

    def precondition(self, workspace: Workspace) -> None:
        """X^ and Y^ of all parts that have a `gemm`, without gamma and kappa."""
        self._fit_memory(workspace)
        for k, (inputs, grads) in self._memory.sides.items():
            x, grad = self._statistics(k, workspace)
            self._rows[k] = inputs.precondition(x), grads.precondition(grad)
        if self._beside:
            self._beside.mark()

    def _fit_memory(self, workspace: Workspace) -> None:
        a = workspace.arithmetic
        if self._memory.made_for != (len(workspace.x), a):
            self._rows.clear()
            self._memory = _Memory(self, 0, a)  # gives back the old memory before new is taken
            self._memory = _Memory(self, len(workspace.x), a)

    def _statistics(self, k: int, workspace: Workspace) -> tuple[Tensor, Tensor]:
        part = self.parts[k]
        return part.layer.statistics(part.call(workspace))

    def scale(self, arithmetic: Float32) -> None:
        """Brings gamma and kappa into Y^, but for the factors that are left to the update."""
        for numbers, scales in self._memory.scales(self._limited_lr, self.options.max_change_per_sample):
            factors = arithmetic.scale_([self._rows[k][1] for k in numbers], scales)
            self._factors |= zip(numbers, factors, strict=True)

    def fill_gradient(self, i: int, workspace: Workspace, out: Views) -> float:
        for k in self._parts_of[i]:
            part = self.parts[k]
            views, factor = part.views(out), self._factors.get(k, 1.0)
            if k in self._rows:
                bias_input = self._memory.sides[k][0].rows.bias_column
                part.layer.gradient_of_rows(workspace.arithmetic, *self._rows[k], views, bias_input)
            elif views:
                self._plain_gradient(part, workspace, self._limited_lr * self.limit_coefs[k], views)
            if not part.prefix:
                return factor
            for view in views.values():
                view.mul_(factor)
        return 1.0

    def _plain_gradient(self, part: _Part, workspace: Workspace, lr: float, out: Views) -> None:
        """Fills the plain gradient of a layer without `gemm`, so that it changes no more than `max_change_per_sample` per
        frame."""
        call = part.call(workspace)
        part.layer.gradient(call, out)
        if self.options.max_change_per_sample > 0.0:
            norms = self.gradient_norms(part.layer, call)
            one = norms.new_ones(())
            kappa = max_change_factor(norms, one, one, lr, self.options.max_change_per_sample)
            for view in out.values():
                view.mul_(kappa)

    def gradient_norms(self, layer: Layer, call: LayerCall) -> Tensor:
        """`Layer.gradient_norms`, on all workers that share the layer."""
        return layer.gradient_norms(call)


class _BesideGpu:
    """Finishes updates of the Fisher matrices while the GPU computes the next derivatives: by threads of the host and on a
    stream of its own."""

    def __init__(self, device: torch.device) -> None:
        each = torch.get_num_threads()  # of an eigendecomposition; a new thread would take all cores
        number = min(HOST_THREADS, usable_cores())
        self._threads = ThreadPoolExecutor(number, "eigh", initializer=torch.set_num_threads, initargs=(each,))
        self._device, self._stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._preconditioned = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def mark(self) -> None:
        """Of the current stream's work what was queued until now reads W and begins updates; nothing after it does before
        `finish`."""
        if not torch.cuda.is_current_stream_capturing():
            self._preconditioned.record(torch.cuda.current_stream(self._device))

    def finish(self, sides: Sequence[NaturalGradient], then: Callable[[], None]) -> None:
        """Finishes the updates of `sides`, and queues what is to be done with the new W, before the current stream goes on."""
        self._preconditioned.synchronize()
        list(self._threads.map(NaturalGradient.factor, sides))
        with torch.cuda.stream(self._stream):
            for side in sides:
                side.apply()
            then()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


class _Memory:
    """Memory for minibatches of `frames` frames in one arithmetic, made once. `sides`: by the numbers of `gemms` those of
    the input, in float32 [X 1] with rows that are aligned, and of the output derivative, whose float32 memory all share."""

    def __init__(self, optimizer: NgSgd, frames: int, arithmetic: Float32) -> None:
        gemms, exact = optimizer.gemms, optimizer.options.exact
        self.made_for = frames, arithmetic
        new = optimizer.network.parameters.new_zeros
        self.sides: dict[int, tuple[Side, Side]] = {}
        largest = max((gemm.rows * gemm.fan_out for gemm in gemms.values()), default=0)
        float32_grad = new(frames * largest) if arithmetic.casts else None
        # Parts with as many rows per frame have their norms in one piece: [0] inputs, [1] derivatives; (2, parts, N).
        # The last tensor has what the learning rate is multiplied by, (parts,).
        self._groups: list[tuple[int, list[int], Tensor, Tensor, Tensor]] = []
        for rows in dict.fromkeys(gemm.rows for gemm in gemms.values()):
            numbers, total = [k for k, gemm in gemms.items() if gemm.rows == rows], rows * frames
            before, after = new(2, 2, len(numbers), total).unbind()
            of_rates = new(len(numbers)).copy_(torch.tensor([optimizer.limit_coefs[k] for k in numbers]))
            self._groups.append((rows, numbers, before, after, of_rates))
            for n, k in enumerate(numbers):
                columns, fan_out = gemms[k].fan_in + 1, gemms[k].fan_out
                inputs = new(total, -(-columns // 16) * 16)[:, :columns]  # GEMMs want their rows aligned
                grads = None if float32_grad is None else float32_grad[: total * fan_out].view(total, fan_out)
                bias_column = new(total, dtype=arithmetic.bias_input_dtype)
                x_hat = arithmetic.projection(inputs, before[0, n], after[0, n], bias_column, exact=exact)
                y_hat = arithmetic.projection(grads, before[1, n], after[1, n], exact=exact, fused=optimizer.fused)
                of_x, of_y = optimizer.preconditioners_of[k]
                self.sides[k] = Side(of_x, x_hat), optimizer.output_side(of_y, y_hat)

    def scales(self, lr: float, max_change: float) -> Iterator[tuple[list[int], Tensor]]:
        """Parts and their gamma_in gamma_out kappa, from the norms before and after preconditioning."""
        for rows, numbers, before, after, of_rates in self._groups:
            scale = gammas(before, after).prod(dim=0)
            if max_change > 0.0:
                scale *= max_change_factor(after[0], after[1], scale, lr * of_rates, max_change / rows)
            yield numbers, scale


OPTIMIZERS: dict[str, tuple[type[SgdOptions], Callable[..., Sgd]]] = {
    "sgd": (SgdOptions, Sgd),
    "ng-sgd": (NgSgdOptions, NgSgd),
    "adam": (AdamOptions, Adam),
    "muon": (MuonOptions, Muon),
    "shampoo": (ShampooOptions, Shampoo),
}
"""By `optimizer.name`: the class of its options, whose fields are keys of the recipe, and its own."""


def make_optimizer(options: SgdOptions, network: Network) -> Sgd:
    (make,) = (make for kind, make in OPTIMIZERS.values() if kind is type(options))
    return make(network, options)
