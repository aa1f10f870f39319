"""Criteria over utterances as what a training minimizes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ddnn.data.batches import Batch
from ddnn.lattices.criteria import SequenceCriterion
from ddnn.lattices.store import LatticeStore
from ddnn.nn.figures import EXPECTED_ERROR, LOSS, RIGHT_FRAMES
from ddnn.nn.network import Workspace
from ddnn.nn.objective import Objective, Sums
from ddnn.util.arrays import Int32Array

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Utterances:
    """What a criterion knows of the utterances of a dataset besides their features: ids in the order of the dataset; by id
    the reference's transition-ids, int32 (frames,), and lattices."""

    names: Sequence[str]
    references: Mapping[str, Int32Array]
    lattices: LatticeStore


class SequenceObjective(Objective):
    """A criterion over each utterance of a minibatch. Of MMI the loss is minus its objective, of sMBR
    and MPFE the expected error is 1 less it; the second figure is `Value.reference`.

    Args:
        workspace: of the network.
        criterion: of one utterance.
        utterances: of the dataset whose minibatches come.
        log_priors: float32 (pdfs,), which outputs are divided by to give likelihoods.
    """

    def __init__(
        self, workspace: Workspace, *, criterion: SequenceCriterion, utterances: Utterances, log_priors: Tensor
    ) -> None:
        self.figures = LOSS if criterion.name == "mmi" else EXPECTED_ERROR, RIGHT_FRAMES
        self.criterion, self.utterances, self.log_priors = criterion, utterances, log_priors

    def __call__(self, outputs: Tensor, batch: Batch, derivative: Tensor) -> Sums:
        """An utterance whose derivative is not finite adds nothing to the figures, and alone makes no update."""
        loglikes = (outputs.float() - self.log_priors).cpu().numpy()
        losses, right, first, known, self.updates = 0.0, 0.0, 0, self.utterances, False
        for u in batch.utterances:
            name = known.names[u]
            rows = slice(first, first := first + len(known.references[name]))
            value = self.criterion(known.lattices[name], loglikes[rows], known.references[name])
            if np.isfinite(value.objective) and np.isfinite(value.derivative).all():
                derivative[rows].copy_(torch.from_numpy(value.derivative))
                losses += len(value.derivative) * (self.figures[0] is EXPECTED_ERROR) - value.objective
                right += value.reference
                self.updates = True
            else:
                log.warning("utterance %s: its derivative is not finite: ignored", name)
                derivative[rows].zero_()
        return torch.tensor(losses, dtype=torch.float64), torch.tensor(right, dtype=torch.float64)
