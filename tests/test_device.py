"""Devices: chosen by local rank, compared by identity, refused in plain words."""

from __future__ import annotations

import pytest
import torch

from ddnn.util.errors import UserError
from ddnn.util.system import check_devices, choose_device, device_identity

ONE, TWO = "GPU-1111", "GPU-2222"


@pytest.mark.parametrize(
    ("places", "share"),
    [
        ([(0, "a", ONE), (1, "a", TWO)], False),
        ([(0, "a", "cpu"), (1, "a", "cpu"), (2, "b", "cpu")], False),
        ([(0, "a", ONE), (1, "a", ONE)], True),
        ([(0, "a", ONE), (1, "a", "cpu"), (2, "a", "cpu")], False),
        ([], False),
    ],
)
def test_devices_of_their_own_or_shared_by_choice_pass(places: list[tuple[int, str, str]], share: bool) -> None:
    check_devices(places, share)


def test_a_shared_gpu_is_named_with_its_host_and_workers() -> None:
    places = [(0, "a", ONE), (1, "a", TWO), (2, "a", ONE), (3, "b", "GPU-3333"), (4, "a", ONE)]
    with pytest.raises(UserError) as caught:
        check_devices(places, share=False)
    assert caught.value.message == f"5 workers have 3 GPUs between them: workers 0, 2, 4 share GPU {ONE} of a"
    assert "oversubscribe_gpus" in str(caught.value.hint)
    with pytest.raises(UserError, match="2 workers have 1 GPU between"):
        check_devices([[0, "a", ONE], [1, "a", ONE]], share=False)


def test_the_cpu_is_everybodys() -> None:
    assert device_identity(choose_device("cpu")) == "cpu"


class Gpus:
    """A machine with two GPUs, as far as choosing goes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, says: str | None = None) -> None:
        self.says, self.used, self.current = says, "", ""
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(self, "current", str(device)))
        monkeypatch.setattr(torch, "zeros", self.zeros)

    def zeros(self, size: int, device: torch.device) -> None:
        self.used = str(device)
        if self.says:
            raise RuntimeError(self.says)


@pytest.mark.parametrize(("local_rank", "used"), [(0, "cuda:0"), (1, "cuda:1"), (2, "cuda:0")])
def test_the_gpu_is_that_of_the_local_rank(monkeypatch: pytest.MonkeyPatch, local_rank: int, used: str) -> None:
    gpus = Gpus(monkeypatch)
    assert (str(choose_device("auto", local_rank)), gpus.used, gpus.current) == (used, used, used)


def test_a_gpu_in_exclusive_mode_that_is_taken_is_said_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpus(monkeypatch, "CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCUDA kernel errors might ...")
    with pytest.raises(UserError, match="GPU 1 is taken") as caught:
        choose_device("cuda", 1)
    assert "CUDA_VISIBLE_DEVICES" in str(caught.value.hint)
    Gpus(monkeypatch, "CUDA error: out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        choose_device("cuda", 1)


def test_no_gpu_is_said_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto").type == "cpu"
    with pytest.raises(UserError, match="torch finds no CUDA device"):
        choose_device("cuda")


@pytest.mark.gpu
def test_identities_of_real_gpus_differ() -> None:
    found = [device_identity(torch.device("cuda", number)) for number in range(torch.cuda.device_count())]
    assert len(set(found)) == len(found)
    assert "cpu" not in found
