"""bf16 against float32 and float64, and the choice between them. On processors without bf16 units these are slow."""

from __future__ import annotations

import inspect
import logging
import math
import re
import subprocess
import sys
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from twins import FUNCTIONS, batch_of, cross_entropy_step, random_minibatch

from ddnn.bench import step
from ddnn.bench.task import RandomTask, Shape, random_task
from ddnn.data.batches import ShuffledSampler
from ddnn.distributed.communicator import Communicator
from ddnn.nn import precision as module
from ddnn.nn import products
from ddnn.nn.acoustic_model import save_model
from ddnn.nn.arithmetic import Float32, Precision, make_arithmetic
from ddnn.nn.layer import Layer
from ddnn.nn.layers import Affine, mlp_layers
from ddnn.nn.network import Network, Workspace, initialize
from ddnn.nn.precision import allow_tf32, bf16_error, bf16_is_fast, choose_arithmetic
from ddnn.nn.products import (
    ONEDNN_FLOP,
    Processor,
    affine_out,
    matmul_out,
    onednn_from,
    processor,
    supports_float32_output,
)
from ddnn.optim.ng_sgd import NgSgdOptions, make_optimizer
from ddnn.optim.sgd import Sgd, SgdOptions
from ddnn.training.step import EagerStep
from ddnn.util import system
from ddnn.util.errors import UserError

CPU = torch.device("cpu")
AN4 = mlp_layers(440, 4, 512, 616, "sigmoid")
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def network(layers: tuple[Layer, ...], seed: int = 1) -> Network:
    made = Network(layers)
    initialize(made, seed)
    return made


UNIT = 1.1 * 2**-8
"""Rounding to bf16, and a tenth for float32's own."""
SLOPES = {
    "sigmoid": lambda y: y * (1 - y),
    "tanh": lambda y: 1 - y * y,
    "relu": lambda y: (y > 0).double(),
    "linear": torch.ones_like,
}


@settings(max_examples=25, deadline=None)
@given(
    dims=st.lists(st.integers(1, 40), min_size=2, max_size=5),
    kind=st.sampled_from(["sigmoid", "tanh", "relu", "linear"]),
    frames=st.integers(1, 30),
    seed=st.integers(0, 1000),
    compiled=st.booleans(),
)
def test_every_product_is_float64s_but_for_rounding(
    dims: list[int], kind: str, frames: int, seed: int, compiled: bool
) -> None:
    """Each layer's output, derivative and gradient in float64 from what it read in bf16, rounded once or twice."""
    kinds = [kind] * (len(dims) - 2) + ["softmax"]
    made = network(tuple(Affine(a, b, k) for a, b, k in zip(dims[:-1], dims[1:], kinds, strict=True)), seed)
    arithmetic = make_arithmetic("bf16", CPU, use_kernels=compiled)
    workspace = Workspace(made, 32, arithmetic).of(frames)
    labels = random_minibatch(workspace, dims[-1], torch.Generator().manual_seed(seed))
    workspace.forward()
    cross_entropy_step(workspace, labels)
    workspace.backward()
    flat = workspace.gradient(torch.full_like(made.parameters, float("nan")))
    assert flat.dtype == torch.float32
    rounded, gradients = made.split(made.parameters.bfloat16().double()), made.split(flat.double())
    assert torch.equal(workspace.inputs[0], workspace.x.bfloat16())
    for i, layer in enumerate(made.layers):
        assert isinstance(layer, Affine)
        x, y, d = (t.double() for t in (workspace.inputs[i], workspace.activations[i], workspace.grad_outputs[i]))
        weight, bias = rounded[i]["weight"], rounded[i]["bias"]
        exact = FUNCTIONS[layer.activation](x @ weight.t() + bias)
        sizes = x.abs() @ weight.abs().t() + bias.abs()
        assert within(y, exact, UNIT * (sizes + exact.abs()))
        assert within(gradients[i]["weight"], d.t() @ x, UNIT * (d.abs().t() @ x.abs()))
        assert within(gradients[i]["bias"], d.sum(0), UNIT * d.abs().sum(0))
        if i:
            below, slope = workspace.grad_outputs[i - 1].double(), SLOPES[kind](x)
            assert within(below, slope * (d @ weight), 2 * UNIT * slope * (d.abs() @ weight.abs()))


def within(found: torch.Tensor, exact: torch.Tensor, error: torch.Tensor) -> bool:
    return bool(((found - exact).abs() <= error + 1e-6).all())


@pytest.mark.parametrize("compiled", [False, True])
def test_parameters_that_have_changed_are_cast_at_the_next_forward_pass(compiled: bool) -> None:
    made = network((Affine(4, 3, "softmax"),))
    workspace = Workspace(made, 2, make_arithmetic("bf16", CPU, use_kernels=compiled))
    workspace.x.fill_(1.0)
    before = workspace.forward().clone()
    made.load_parameters(2.0 * made.parameters)  # as an averaging or a rejected epoch does, from outside
    assert torch.equal(workspace.forward(), 2 * before)
    assert made.parameters.dtype == torch.float32


@pytest.mark.parametrize("device", DEVICES)
def test_products_in_bf16_are_summed_in_float32(device: str) -> None:
    ones = torch.ones(600, 3, dtype=torch.bfloat16, device=device)
    out = torch.empty(
        3, 3, dtype=torch.float32 if supports_float32_output(torch.device(device)) else torch.bfloat16, device=device
    )
    matmul_out(ones.t(), ones, out=out)
    assert torch.equal(out.float().cpu(), torch.full((3, 3), 600.0)), "bf16 sums end at 256"
    matmul_out(ones.t(), ones[:, 0].contiguous(), out=out[0])
    assert out[0].tolist() == [600.0] * 3


def learnable(device: torch.device, optimizer: str) -> tuple[RandomTask, Sgd]:
    """A training on frames that do tell their label: the largest of the first 5 dims."""
    task = random_task(Shape(2, 24, 5, 32), device, frames=1500)
    dataset = task.train.dataset
    dataset = replace(dataset, labels=dataset.features[:, :5].argmax(dim=1).int())
    options = SgdOptions() if optimizer == "sgd" else NgSgdOptions(rank_in=5, rank_out=3)
    task = replace(task, train=replace(task.train, dataset=dataset))
    return task, make_optimizer(options, task.model.network)


def losses(
    task: RandomTask, optimizer: Sgd, precision: Precision, minibatches: int = 200, compiled: bool = True
) -> torch.Tensor:
    """Losses per frame, averaged over 20 minibatches at a time."""
    arithmetic = make_arithmetic(precision, task.model.network.parameters.device, use_kernels=compiled)
    workspace = Workspace(task.model.network, task.minibatch, arithmetic)
    step = EagerStep(workspace, optimizer)
    rows = cycle(ShuffledSampler(task.train, task.minibatch, seed=1).epoch(1))
    batches = (batch_of(workspace, task.train.dataset, task.model.transform, one) for one in rows)
    found = [step(batch, 0.02)[0] for batch in islice(batches, minibatches)]
    return torch.stack(found).view(-1, 20).mean(dim=1).cpu() / task.minibatch


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("optimizer", ["sgd", "ng-sgd"])
@pytest.mark.parametrize("compiled", [False, True])
def test_200_minibatches_have_the_same_losses_in_either_precision(compiled: bool, optimizer: str, device: str) -> None:
    plain = losses(*learnable(torch.device(device), optimizer), "float32")
    low = losses(*learnable(torch.device(device), optimizer), "bf16", compiled=compiled)
    assert plain[-1] < 0.85 * plain[0], "it has to learn, or nothing is compared"
    torch.testing.assert_close(low, plain, rtol=0.01, atol=0.002)
    assert not torch.equal(low, plain), "bf16 was not in bf16"


@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_trained_in_bf16_is_saved_in_float32(compiled: bool, tmp_path: Path) -> None:
    task, optimizer = learnable(CPU, "ng-sgd")
    losses(task, optimizer, "bf16", minibatches=20, compiled=compiled)
    parameters = task.model.network.parameters
    assert parameters.dtype == optimizer.gradient.dtype == torch.float32
    # Not rounded to bf16 either: an update smaller than 2^-8 of a parameter must not be lost.
    assert not torch.equal(parameters, parameters.bfloat16().float())
    save_model(tmp_path / "model.safetensors", task.model)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as stored:
        assert {stored.get_tensor(name).dtype for name in stored.keys()} == {torch.float32}  # noqa: SIM118


def cpuinfo(vendor: str, family: int, model: int, flags: str) -> str:
    """Two processors, of which the second is another."""
    names = f"vendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: {model}\nmodel name\t: A {model} B\n"
    one = f"processor\t: 0\n{names}flags\t\t: fpu avx2 {flags}\n"
    return f"{one}bogomips\t: 5000.0\n\n{one.replace(': 0', ': 1').replace(vendor, 'Other')}"


BF16 = "avx512f avx512_bf16"
AMX = f"{BF16} amx_bf16 avx512_fp16 amx_tile amx_int8"
ARM = "processor\t: 0\nFeatures\t: fp asimd bf16 i8mm\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n"
CPUS = {
    "Zen 4": (
        cpuinfo("AuthenticAMD", 25, 17, BF16), "bf16", "oneDNN", "this processor (AuthenticAMD 25/17) has AVX512-BF16"),
    "Zen 5": (
        cpuinfo("AuthenticAMD", 26, 2, BF16), "bf16", "oneDNN", "this processor (AuthenticAMD 26/2) has AVX512-BF16"),
    "Zen 3": (
        cpuinfo("AuthenticAMD", 25, 1, ""), "float32", "MKL",
        "this processor (AuthenticAMD 25/1) has neither AMX nor AVX512-BF16"),
    "Zen 4, AVX512-BF16 masked": (
        cpuinfo("AuthenticAMD", 25, 17, "avx512f"), "float32", "oneDNN",
        "this processor (AuthenticAMD 25/17) has neither AMX nor AVX512-BF16"),
    "Sapphire Rapids": (
        cpuinfo("GenuineIntel", 6, 143, AMX), "bf16", "MKL", "this processor (GenuineIntel 6/143) has AMX"),
    "Sapphire Rapids, AMX masked": (
        cpuinfo("GenuineIntel", 6, 143, BF16), "float32", "MKL",
        "this processor (GenuineIntel 6/143) has AVX512-BF16 but no AMX, and then float32 is faster"),
    "Cooper Lake": (
        cpuinfo("GenuineIntel", 6, 85, BF16), "float32", "MKL",
        "this processor (GenuineIntel 6/85) has AVX512-BF16 but no AMX, and then float32 is faster"),
    "Skylake-SP": (
        cpuinfo("GenuineIntel", 6, 85, "avx512f"), "float32", "MKL",
        "this processor (GenuineIntel 6/85) has neither AMX nor AVX512-BF16"),
    "AMX without bf16": (
        cpuinfo("GenuineIntel", 6, 99, "avx512f amx_tile amx_int8"), "float32", "MKL",
        "this processor (GenuineIntel 6/99) has neither AMX nor AVX512-BF16"),
    "another maker": (
        cpuinfo("New", 77, 1, AMX), "float32", "MKL",
        "this processor (New 77/1) is neither AMD's nor Intel's: bf16 has not been measured on it"),
    "ARM": (ARM, "float32", "MKL", "this processor has neither AMX nor AVX512-BF16"),
    "no file": (None, "float32", "MKL", "this processor has neither AMX nor AVX512-BF16"),
}  # fmt: skip
"""/proc/cpuinfo, what `precision: auto` selects by it, the library of products in float32 (MKL stands for torch.mm, whatever
it calls), and the reason for the precision."""


def by_cpuinfo(text: str | None, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this machine one of these processors, on which PyTorch can do what they can."""
    if text is not None:
        (root / "proc").mkdir()
        (root / "proc/cpuinfo").write_text(text)
    found = processor(root)
    monkeypatch.setattr(module, "processor", lambda: found)
    monkeypatch.setattr(products, "processor", lambda: found)
    monkeypatch.setattr(module, "pytorch_has_amx", lambda: True)


@pytest.mark.parametrize("cpu", CPUS)
def test_auto_is_decided_by_what_the_processor_is(
    cpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    text, chosen, library, reason = CPUS[cpu]
    by_cpuinfo(text, tmp_path, monkeypatch)
    caplog.set_level(logging.INFO, logger="ddnn.nn.precision")
    assert choose_arithmetic("auto", network(AN4), 256).precision == chosen
    assert [(record.levelno, record.message) for record in caplog.records] == [
        (logging.INFO, f"precision {chosen}: {reason}")
    ]
    least = ONEDNN_FLOP if library == "oneDNN" and onednn_product_exists() else math.inf
    assert onednn_from.__wrapped__(torch.float32, CPU) == least
    caplog.clear()
    assert choose_arithmetic("bf16", network(AN4), 256).precision == "bf16"
    (record,) = caplog.records
    assert record.levelno == (logging.INFO if chosen == "bf16" else logging.WARNING)
    assert ("float32 may be faster" in record.message) == (chosen == "float32")


def test_amx_that_pytorch_cannot_use_is_not_counted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = Processor("GenuineIntel", 6, 143, frozenset(AMX.split()))
    monkeypatch.setattr(module, "pytorch_has_amx", lambda: False)
    assert bf16_is_fast(CPU, cpu) == (False, "this processor (GenuineIntel 6/143) has AMX, but PyTorch cannot use it")
    monkeypatch.setattr(module, "pytorch_has_amx", lambda: True)
    assert bf16_is_fast(CPU, cpu)[0]
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    limited = "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 limits which instructions PyTorch uses"
    assert bf16_is_fast(CPU, cpu) == (False, limited)


@pytest.mark.parametrize(
    ("capability", "fast"), [((7, 0), False), ((7, 5), False), ((8, 0), True), ((8, 9), True), ((9, 0), True)]
)
def test_auto_is_decided_by_the_compute_capability_of_a_gpu(
    capability: tuple[int, int], fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    has = f"this GPU (compute capability {capability[0]}.{capability[1]}) has {'' if fast else 'no '}bf16 tensor cores"
    assert bf16_is_fast(torch.device("cuda", 0), Processor("GenuineIntel", 6, 143, frozenset())) == (fast, has)


def test_float32_asked_for_and_small_networks_need_no_facts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "bf16_is_fast", lambda device: pytest.fail("asked"))
    caplog.set_level(logging.INFO, logger="ddnn")
    make_arithmetic("float32", CPU)
    caplog.clear()  # of what is said of the kernels
    assert choose_arithmetic("float32", Network(AN4), 256).precision == "float32"
    assert choose_arithmetic("auto", Network((Affine(4, 3, "softmax"),)), 256).precision == "float32"
    said = ["precision float32, as the recipe says", "precision float32: the network is too small for bf16 to matter"]
    assert caplog.messages == said


def test_float32_asked_for_and_small_networks_have_compiled_kernels() -> None:
    kernels = type(make_arithmetic("float32", CPU))
    if kernels is Float32:
        pytest.skip("no compiled kernels that this processor can run")
    assert type(choose_arithmetic("float32", Network(AN4), 256)) is kernels
    assert type(choose_arithmetic("auto", Network((Affine(4, 3, "softmax"),)), 256)) is kernels


def test_30_starts_on_a_busy_machine_give_one_choice() -> None:
    """All at once, each in a process of its own, beside as many busy ones as there are cores, until the last decides."""
    script = """
import os, signal
import torch
torch.set_num_threads(1)
from ddnn.nn import precision
from ddnn.nn.layers import mlp_layers
from ddnn.nn.network import Network, initialize
from ddnn.nn.products import Processor
network = Network(mlp_layers(440, 4, 512, 616, "sigmoid"))
initialize(network, 1)

def child(work):
    pid = os.fork()
    if not pid:
        try:
            work()
        finally:
            os._exit(1)
    return pid

def starts():
    def choose():
        os._exit(10 + (precision.choose_arithmetic("auto", network, 256).precision == "bf16"))
    started = [child(choose) for _ in range(30)]
    return {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in started}

def work():
    os.nice(19)
    [None for _ in range(10**9) if False]

busy = [child(work) for _ in range(os.cpu_count())]
try:
    here = precision.bf16_is_fast(torch.device("cpu"))[0]
    assert starts() == {10 + here}, "this machine"
    precision.processor, precision.pytorch_has_amx = lambda: Processor("GenuineIntel", 6, 143, {"amx_bf16", "amx_tile"}), lambda: True
    assert starts() == {11}, "a machine with AMX"
finally:
    for pid in busy:
        os.kill(pid, signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr


def test_the_choice_reads_no_clock() -> None:
    clock = re.compile(r"^\s*(?:import|from) (?:time|datetime)|\btime\.\w|perf_counter|cuda\.Event", re.M)
    assert [found for one in (module, system) for found in clock.findall(inspect.getsource(one))] == []
    assert clock.search(inspect.getsource(step))  # where bf16 is timed for a person


def test_bf16_that_disagrees_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    made = network((Affine(30, 20, "sigmoid"), Affine(20, 10, "softmax")))
    assert bf16_error(made, 16) is None

    backward = Workspace.backward

    def wrong(self: Workspace) -> None:
        backward(self)
        if self.arithmetic.precision == "bf16":
            self.grad_outputs[0].neg_()

    monkeypatch.setattr(Workspace, "backward", wrong)
    assert choose_arithmetic("bf16", made, 16).precision == "float32"
    assert "bf16 is numerically unsafe on this device: relative gradient error" in caplog.text

    def missing(self: Workspace) -> None:
        if self.arithmetic.precision == "bf16":
            raise NotImplementedError('"sigmoid_backward" not implemented for bf16\nand so on')

    monkeypatch.setattr(Workspace, "backward", missing)
    assert choose_arithmetic("bf16", made, 16).precision == "float32"
    assert "NotImplementedError: " in caplog.text
    assert "and so on" not in caplog.text


def test_a_training_resumed_in_bf16_is_not_continued_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume promises the same bits."""
    made = network((Affine(30, 20, "sigmoid"), Affine(20, 10, "softmax")))
    assert choose_arithmetic("bf16", made, 16, resumed=True).precision == "bf16"
    monkeypatch.setattr(module, "bf16_error", lambda network, minibatch: "it cannot")
    with pytest.raises(UserError, match="the training to resume was in bf16, but bf16 is numerically unsafe"):
        choose_arithmetic("bf16", made, 16, resumed=True)
    assert choose_arithmetic("float32", made, 16, resumed=True).precision == "float32"


class OtherWorkers(Communicator):
    """Worker `rank` of several with these facts and complaints."""

    def __init__(self, rank: int, facts: list[tuple[bool, str]], complaints: list[str | None]) -> None:
        super().__init__(rank, len(facts), f"n{rank}", {})
        self.complaints = complaints
        self.gathered: list[list[Any]] = [complaints, [[*fact, f"n{other}"] for other, fact in enumerate(facts)]]

    def all_reduce_min(self, value: int) -> int:
        return min(value, *(one is None for one in self.complaints))

    def all_gather_object(self, value: Any) -> list[Any]:
        found = self.gathered.pop()
        assert value == found[self.rank]
        return found


FAST, SLOW = (True, "this processor has AMX"), (False, "this processor (AuthenticAMD 25/1) has neither")


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("slow", [(), (0,), (1,), (1, 2), (0, 1, 2)])
def test_bf16_is_for_all_workers_or_for_none(
    slow: tuple[int, ...], rank: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    facts = [SLOW if other in slow else FAST for other in range(3)]
    monkeypatch.setattr(module, "bf16_error", lambda network, minibatch: None)
    monkeypatch.setattr(module, "bf16_is_fast", lambda device: facts[rank])
    caplog.set_level(logging.INFO, logger="ddnn.nn.precision")
    comm = OtherWorkers(rank, facts, [None] * 3)
    assert choose_arithmetic("auto", Network(AN4), 256, comm).precision == ("float32" if slow else "bf16")
    why = f"float32: worker {slow[0]} on n{slow[0]}: {SLOW[1]}" if slow else f"bf16: {FAST[1]}"
    assert caplog.messages == [f"precision {why}"]
    mixed = 0 < len(slow) < 3
    assert caplog.records[0].levelno == (logging.WARNING if mixed and rank == 0 else logging.INFO)


def test_all_workers_check_bf16(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "bf16_is_fast", lambda device: FAST)
    monkeypatch.setattr(module, "bf16_error", lambda network, minibatch: None)
    comm = OtherWorkers(0, [FAST, FAST], [None, "it cannot"])
    assert choose_arithmetic("auto", Network(AN4), 256, comm).precision == "float32"
    assert "bf16 is numerically unsafe on this device: it cannot. Training in float32" in caplog.text
    caplog.clear()
    comm = OtherWorkers(1, [FAST, FAST], ["it cannot", None])
    assert choose_arithmetic("bf16", Network(AN4), 256, comm).precision == "float32"
    assert all(record.levelno < logging.WARNING for record in caplog.records), "the first worker says it, once"


def test_tf32_is_off_unless_asked() -> None:
    """Of products, and of cuDNN, where it is on by default."""
    backends = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [backend.allow_tf32 for backend in backends]
    try:
        for asked in (True, False):
            allow_tf32(asked, torch.device("cuda"))
            assert [backend.allow_tf32 for backend in backends] == [asked] * 2
    finally:
        for backend, allowed in zip(backends, before, strict=True):
            backend.allow_tf32 = allowed


def onednn_product_exists() -> bool:
    try:
        products.onednn_product(torch.ones(2, 3), torch.ones(4, 3))
    except (AttributeError, RuntimeError):
        return False
    return True


@pytest.mark.skipif(not onednn_product_exists(), reason="this PyTorch has no oneDNN")
def test_products_by_onednn_are_the_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, as far as it goes: of factors as the layers have them, transposed, and with gaps."""
    made = torch.Generator().manual_seed(1)
    x, d = torch.randn(50, 34, generator=made)[:, :30], torch.randn(50, 20, generator=made)
    weight, bias = torch.randn(20, 30, generator=made), torch.randn(20, generator=made)
    results, by_onednn, product = list[list[torch.Tensor]](), list[None](), products.onednn_product
    counted = lambda *factors: by_onednn.append(None) or product(*factors)  # noqa: E731
    monkeypatch.setattr(products, "onednn_product", counted)
    for least in (math.inf, 0.0):
        monkeypatch.setattr(products, "onednn_from", lambda dtype, device, least=least: least)
        wide = torch.full((50, 40), 7.0)
        outs = [wide[:, :20], torch.empty(50, 30), torch.empty(20, 30), torch.empty(50, 20)]
        matmul_out(x, weight.t(), outs[0])
        matmul_out(d, weight, outs[1])
        matmul_out(d.t(), x, outs[2])
        affine_out(x, weight, bias, outs[3])
        assert bool((wide[:, 20:] == 7.0).all())
        results.append(outs)
    expected = [x.double() @ weight.double().t(), d.double() @ weight.double(), d.double().t() @ x.double()]
    expected.append(expected[0] + bias.double())
    assert len(by_onednn) == 4
    for found in results:
        for one, right in zip(found, expected, strict=True):
            torch.testing.assert_close(one.double(), right, rtol=1e-5, atol=2e-5)


def test_onednn_multiplies_with_matrices_without_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copied where they have gaps, in the order that they have; with them it takes 2 s for 1 ms."""
    wide, given = torch.randn(6, 5, generator=torch.Generator().manual_seed(1)), list[torch.Tensor]()
    monkeypatch.setattr(products, "onednn_from", lambda dtype, device: 0.0)
    fake = SimpleNamespace(_linear_pointwise=lambda x, w, *rest: given.append(w) or x @ w.t())
    monkeypatch.setattr(torch.ops, "mkldnn", fake)
    factors = (wide, wide.t(), wide[:, :4], wide[:, :4].t(), wide[::2], wide[:, ::2])
    for b in factors:
        out = torch.empty(3, b.shape[1])
        matmul_out(torch.ones(3, b.shape[0]), b, out)
        torch.testing.assert_close(out, torch.ones(3, b.shape[0]) @ b)
    assert len(given) == 6 and all(w.is_contiguous() or w.t().is_contiguous() for w in given)
    assert [w.data_ptr() == wide.data_ptr() for w in given] == [True, True, False, False, False, False]


@pytest.mark.skipif(not onednn_product_exists(), reason="this PyTorch has no oneDNN")
def test_onednn_is_for_large_float32_products_where_it_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    choose, known = onednn_from.__wrapped__, Processor("AuthenticAMD", 25, 17, frozenset(["avx512f"]))
    assert choose(torch.float32, CPU, known) == ONEDNN_FLOP
    for dtype, device in (
        (torch.bfloat16, "cpu"),
        (torch.float64, "cpu"),
        (torch.float32, "cuda"),
        (torch.float32, "meta"),
    ):
        assert choose(dtype, torch.device(device), known) == math.inf
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "AVX2")
    assert choose(torch.float32, CPU, known) == math.inf
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "default")
    assert choose(torch.float32, CPU, known) == ONEDNN_FLOP
    product = products.onednn_product
    rounded = lambda x, w, b: product(x, w, b).bfloat16().float()  # noqa: E731
    for wrong in (rounded, lambda x, w, b: product(x, w), lambda x, w, b: torch.ops.mkldnn.there_is_none(x)):
        monkeypatch.setattr(products, "onednn_product", wrong)
        assert choose(torch.float32, CPU, known) == math.inf


def test_small_products_are_torchs_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 m n k operations count."""
    monkeypatch.setattr(products, "onednn_from", lambda dtype, device: 2.0 * 5 * 6 * 7)
    by_onednn = []
    monkeypatch.setattr(products, "onednn_product", lambda x, w, b=None: by_onednn.append(x.shape) or x @ w.t())
    for frames in (4, 5):
        x, w = torch.ones(frames, 6), torch.ones(7, 6)
        matmul_out(x, w.t(), torch.empty(frames, 7))
        affine_out(x, w, torch.ones(7), torch.empty(frames, 7))
    assert by_onednn == [(5, 6), (5, 6)]
