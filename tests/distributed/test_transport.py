"""The choice of a transport, staging buffers, and what only a GPU can show."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from distributed.mpi_worlds import launch

from ddnn.averaging import averager
from ddnn.averaging.choice import make_averager
from ddnn.averaging.strategy import AveragingOptions
from ddnn.distributed.communicator import Communicator, SingleProcess, StagingBuffer, TensorBackend
from ddnn.distributed.groups import Groups
from ddnn.distributed.mpi import require_thread_level
from ddnn.distributed.transport import choose_transport, cuda_aware, select_transport
from ddnn.nn.layers import Affine
from ddnn.nn.network import Network
from ddnn.optim.sgd import Sgd, SgdOptions
from ddnn.util.errors import UserError

GPUS = ["GPU-1", "GPU-2"]


@pytest.mark.parametrize(
    ("name", "devices", "aware", "chosen"),
    [
        ("auto", ["cpu", "cpu"], False, "host"),
        ("host", ["cpu", "cpu"], False, "host"),
        ("auto", GPUS, False, "host"),
        ("auto", GPUS, True, "device"),
        ("auto", ["GPU-1", "cpu"], True, "host"),
        ("host", GPUS, True, "host"),
        ("device", GPUS, True, "device"),
        ("device", ["GPU-1", "GPU-1"], True, "device"),
        ("nccl", GPUS, False, "nccl"),
    ],
)
def test_auto_takes_device_only_where_the_mpi_says_so(name: str, devices: list[str], aware: bool, chosen: str) -> None:
    assert select_transport(name, devices, aware, "asked") == chosen


@pytest.mark.parametrize(
    ("name", "devices", "said"),
    [
        ("device", ["cpu", "cpu"], "worker 0 computes on the CPU"),
        ("nccl", ["GPU-1", "cpu"], "worker 1 computes on the CPU"),
        ("nccl", ["GPU-1", "GPU-1"], "one worker for each GPU"),
        ("device", GPUS, r"does not say that it takes GPU memory \(MPIX_Query_cuda_support\(\) is 0\)"),
    ],
)
def test_what_cannot_be_had_is_refused(name: str, devices: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        select_transport(name, devices, False, "MPIX_Query_cuda_support() is 0")
    assert caught.value.location == f"parallel.gpu_transport: {name}"


@pytest.mark.parametrize(
    ("name", "devices", "aware", "chosen"),
    [
        ("auto", ["cpu", "cpu"], False, "host"),
        ("host", ["cpu", "cpu"], True, "host"),
        ("auto", GPUS, False, "nccl"),
        ("auto", GPUS, True, "device"),
        ("nccl", GPUS, True, "nccl"),
        ("device", ["GPU-1", "GPU-1"], True, "device"),
    ],
)
def test_what_columns_exchange_stays_on_the_gpus(name: str, devices: list[str], aware: bool, chosen: str) -> None:
    assert select_transport(name, devices, aware, "asked", columns=2) == chosen


@pytest.mark.parametrize(
    ("name", "devices", "said"),
    [
        ("host", GPUS, "parallel.columns is 2, and outputs of layers go from GPU to GPU"),
        ("auto", ["GPU-1", "cpu"], "worker 1 computes on the CPU"),
        ("auto", ["GPU-1", "GPU-1"], "one worker for each GPU"),
    ],
)
def test_gpus_that_cannot_exchange_share_no_model(name: str, devices: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        select_transport(name, devices, False, "asked", columns=2)


def test_a_single_worker_exchanges_nothing() -> None:
    assert choose_transport("nccl", torch.device("cpu"), SingleProcess()) == "host"


def fake_mpi4py(monkeypatch: pytest.MonkeyPatch, **attributes: Any) -> None:
    """Instead of the real one, which would start an MPI in this process, and change the environment of what it starts
    later."""
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=SimpleNamespace(**attributes)))  # type: ignore


class FakeMpi:
    """An MPI library and its communicator, as far as `cuda_aware` asks them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, version: str, kinds: str | None, **functions: Any) -> None:
        fake_mpi4py(monkeypatch, Get_library_version=lambda: version, __file__="MPI.so")
        monkeypatch.setattr("ctypes.CDLL", lambda path: SimpleNamespace(**functions))
        self.kinds = kinds

    def Get_info(self) -> FakeMpi:
        return self

    def get(self, key: str) -> str | None:
        return self.kinds if key == "mpi_memory_alloc_kinds" else None

    def Free(self) -> None:
        pass


@pytest.mark.parametrize(
    ("version", "kinds", "functions", "environment", "aware"),
    [
        ("Open MPI v5", None, {"MPIX_Query_cuda_support": lambda: 1}, {}, True),
        ("Open MPI v5", None, {"MPIX_Query_cuda_support": lambda: 0}, {}, False),
        ("MPICH 5", "mpi,system,cuda:device", {}, {}, True),
        ("MPICH 5", "mpi,system", {}, {}, False),
        ("Old", None, {}, {}, False),
        ("CRAY MPICH 8", None, {"MPIX_Query_cuda_support": lambda: 1}, {}, False),
        ("CRAY MPICH 8", None, {"MPIX_Query_cuda_support": lambda: 1}, {"MPICH_GPU_SUPPORT_ENABLED": "1"}, True),
    ],
)
def test_the_mpi_is_asked(
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    kinds: str | None,
    functions: dict[str, Any],
    environment: dict[str, str],
    aware: bool,
) -> None:
    found, asked = cuda_aware(FakeMpi(monkeypatch, version, kinds, **functions), environment)
    assert found is aware
    assert asked.startswith(version)


def test_two_workers_on_the_cpu(tmp_path: Path) -> None:
    """What this MPI itself says, and that both workers refuse alike."""
    process = launch(2, "mpi_transport.py", tmp_path)
    _, errors = process.communicate(timeout=600)
    assert (process.returncode, errors) == (0, "")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["chosen"] == ["host", "host"]
    assert [answer for answer, _ in found["aware"]] in ([True, True], [False, False])
    assert all("Open MPI" not in asked or "MPIX_Query_cuda_support" in asked for _, asked in found["aware"])
    for name in ("device", "nccl"):
        assert found[name] == [f"parameters cannot travel by {name}: worker 0 computes on the CPU"] * 2


def test_overlap_is_refused_where_the_mpi_has_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = dict(THREAD_SINGLE=0, THREAD_FUNNELED=1, THREAD_SERIALIZED=2, THREAD_MULTIPLE=3)
    for given in range(4):
        fake_mpi4py(monkeypatch, Query_thread=lambda given=given: given, Get_library_version=lambda: "Old 1", **levels)
        require_thread_level(SingleProcess(), "overlap", "overlap sends")
        if given < 2:
            with pytest.raises(UserError, match=["only MPI_THREAD_SINGLE", "only MPI_THREAD_FUNNELED"][given]):
                require_thread_level(Communicator(0, 2, "n", {}), "overlap", "overlap sends")
        else:
            require_thread_level(Communicator(0, 2, "n", {}), "overlap", "overlap sends")


def test_without_a_buffer_tensors_go_as_they_are() -> None:
    parameters, gradient = torch.arange(3.0), torch.ones(3)
    staging = StagingBuffer(parameters, "host")
    assert staging.buffer is None
    assert staging.copy_in(parameters) is parameters
    assert staging.copy_in(gradient) is gradient
    staging.copy_out(parameters)
    assert parameters.tolist() == [0.0, 1.0, 2.0]


def test_an_own_buffer_leaves_the_parameters_alone() -> None:
    parameters = torch.arange(3.0, requires_grad=True)
    staging = StagingBuffer(parameters, "host", own_buffer=True)
    buffer = staging.copy_in(parameters)
    with staging.side_stream():
        buffer.add_(1.0)
    assert parameters.tolist() == [0.0, 1.0, 2.0]
    staging.copy_out(parameters)
    assert parameters.tolist() == [1.0, 2.0, 3.0]
    assert staging.copy_in(parameters) is buffer
    assert not buffer.requires_grad


@pytest.mark.parametrize(
    ("keys", "buffers"),
    [
        ({}, 1),
        ({"local_momentum": "reset"}, 1),
        ({"local_momentum": "average"}, 2),
        ({"strategy": "bmuf"}, 1),
        ({"strategy": "gradient-all-reduce"}, 2),
    ],
)
def test_a_buffer_of_momentum_or_gradients_is_made_where_they_are_sent(
    keys: dict[str, Any], buffers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    class Counted(StagingBuffer):
        def __init__(self, *of: Any, **options: Any) -> None:
            made.append(self)
            super().__init__(*of, **options)

    monkeypatch.setattr(averager, "StagingBuffer", Counted)
    network = Network((Affine(3, 2, "softmax"),))
    comm = Communicator(0, 2, "n", {"cpu": TensorBackend()})
    make_averager(AveragingOptions(**keys), Groups.data_parallel(comm), network, Sgd(network, SgdOptions(momentum=0.5)))
    assert len(made) == buffers


def test_a_tensor_on_a_device_without_a_backend_is_refused() -> None:
    with pytest.raises(TypeError, match=r"on cpu is needed, not .* on meta"):
        Communicator(0, 2, "n", {"cpu": TensorBackend()}).all_reduce(torch.ones(3, device="meta"))


@pytest.mark.gpu
@pytest.mark.parametrize("own_buffer", [False, True])
@pytest.mark.parametrize("transport", ["host", "device"])
def test_staging_of_a_gpu(transport: Any, own_buffer: bool) -> None:
    parameters = torch.arange(1000.0, device="cuda")
    staging = StagingBuffer(parameters, transport, own_buffer)
    work = staging.copy_in(parameters)
    assert work.is_pinned() if transport == "host" else work.is_cuda
    assert (work is parameters) is (transport == "device" and not own_buffer)
    assert torch.equal(work.cpu(), torch.arange(1000.0))
    with staging.side_stream():
        work.mul_(2.0)
    staging.copy_out(parameters)
    assert torch.equal(parameters.cpu(), 2 * torch.arange(1000.0))


@pytest.mark.gpu
def test_workers_on_gpus(tmp_path: Path) -> None:
    """Every averaging on GPUs, by each transport that can be had, against the host's."""
    process = launch(2, "mpi_transport.py", tmp_path, "cuda")
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    found = json.loads((tmp_path / "found.json").read_text())
    assert "host" in found["averaged"]
    for name, averaged in found["averaged"].items():
        for way, theta in averaged.items():
            torch.testing.assert_close(torch.tensor(theta), torch.tensor(found["cpu"][way]), msg=f"{name} {way}")
