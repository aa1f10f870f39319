"""Which averager a training has, and which its warm-up before the first epoch (`parallel.warmup`)."""

from __future__ import annotations

from ddnn.averaging.averager import (
    Averager,
    BlockingAverager,
    EpochAverager,
    GradientAverager,
    OverlappedAverager,
    ReplicaAverager,
    Request,
    SeveralWorkersAverager,
)
from ddnn.averaging.parameter_server import AsyncAverager
from ddnn.averaging.strategies import STRATEGIES
from ddnn.averaging.strategy import AveragingOptions, weighted_mean
from ddnn.distributed.groups import Groups
from ddnn.nn.network import Network
from ddnn.nn.rbm import Rbm
from ddnn.optim.sgd import Sgd


def make_averager(config: AveragingOptions, groups: Groups, network: Network | Rbm, optimizer: Sgd | Rbm) -> Averager:
    """The averager of a training. Collective."""
    if groups.world.world_size == 1:
        return Averager(groups, network, optimizer)
    if groups.data.world_size == 1:
        return ReplicaAverager(config, groups, network, optimizer)
    blocking = OverlappedAverager if config.overlap else BlockingAverager
    blocking = EpochAverager if config.averaging_frames == "epoch" else blocking
    averagers = {"parameters": blocking, "gradients": GradientAverager, "changes": AsyncAverager}
    return averagers[STRATEGIES[config.strategy].unit](config, groups, network, optimizer)


class _WarmUpAverager(SeveralWorkersAverager):
    """Averages the models after each minibatch of a warm-up, by their exact mean whatever the strategy is."""

    def begin_epoch(self, num_minibatches: int, num_frames: int) -> int:
        return Averager.begin_epoch(self, num_minibatches, num_frames)

    def after_minibatch(self, frames: int) -> bool:
        self._count_minibatch(frames)
        finite = self._is_finite(self.parameters)
        with self._staged_parameters() as vector:
            weighted_mean(self.groups.data, vector, float(finite))
        if not finite:
            self._reset_excluded()
        self.sync_requests()
        return True


class _SingleWorkerAverager(_WarmUpAverager):
    """Averages nothing: rank 0 trains alone. All workers exchange their requests after each averaging period."""

    excludes = False

    def _prepare(self) -> None:
        self.lr_scale = 1.0

    def after_minibatch(self, frames: int) -> bool:
        self._count_minibatch(frames)
        self.requested = Request.NONE
        if self.counters.minibatches % self.config.averaging_period:
            return False
        self.sync_requests()
        return True


def make_warmup_averager(averager: Averager, *, single: bool) -> Averager:
    """The averager of the warm-up before the training of `averager`, which asks the same worker for requests; `single`:
    rank 0 trains alone. With one worker `averager` itself."""
    if not isinstance(averager, SeveralWorkersAverager):
        return averager
    several = GradientAverager if isinstance(averager, GradientAverager) else _WarmUpAverager
    kind = _SingleWorkerAverager if single else several
    warmup = kind(averager.config, averager.groups, averager.network, averager.optimizer)
    warmup.local_request = averager.local_request
    return warmup
