"""By which a training recognizes its data when it is resumed: digests of utterances and labels, statistics of features."""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Iterable

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from ddnn.data.dataset import STATISTICS_UTTERANCES, AcousticDataset
from ddnn.data.index import UtteranceIndex
from ddnn.data.pipeline import TrainingData
from ddnn.distributed.communicator import Communicator
from ddnn.distributed.groups import Groups
from ddnn.util.errors import DataError

FEATURE_TOLERANCE = 1e-4
"""By how much of its standard deviation a feature may differ on average where data is the same: another order of sums,
another machine."""


class DataIdentity(BaseModel):
    """The same for any number of workers, and wherever the data is stored. By the recipe's keys, of several corpora with a
    number: `data.train[0]`."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    contents: dict[str, str]  # utterances and their lengths, pdf-ids, what is held out: as text, with a digest
    features: dict[str, list[list[float]]]  # `feature_statistics`

    def of(self, key: str) -> DataIdentity:
        """The part that belongs to this key."""
        contents = {name: text for name, text in self.contents.items() if name.partition("[")[0] == key}
        features = {name: rows for name, rows in self.features.items() if name.partition("[")[0] == key}
        return DataIdentity(contents=contents, features=features)

    def differences(self, before: DataIdentity) -> dict[str, str]:
        """What has changed: key -> the values found and expected."""
        keys = sorted({*self.contents, *before.contents})
        return {key: text for key in keys if (text := self._difference(before, key)) is not None}

    def _difference(self, before: DataIdentity, key: str) -> str | None:
        now, then = self.contents.get(key, "nothing"), before.contents.get(key, "nothing")
        if now != then:
            return f"{now} found, {then} expected"
        if key not in self.features:
            return None
        rows = self.features[key], before.features.get(key, [[]])
        if [len(row) for row in rows[0]] != [len(row) for row in rows[1]]:
            return "features of {} dimensions found, of {} expected".format(*(len((x or [[]])[0]) for x in rows))
        now_values, then_values = (torch.tensor(x, dtype=torch.float64) for x in rows)
        scale = then_values[1] + 0.01 * then_values[0].abs()  # that of rounding, where the standard deviation is 0
        change = ((now_values - then_values).abs() / scale.clamp_(min=1e-30)).nan_to_num(nan=math.inf).amax(dim=0)
        if bool((change <= FEATURE_TOLERANCE).all()):
            return None
        worst = int(change.argmax())
        figures = (
            "mean {:.6g}, standard deviation {:.6g}, weighted sum {:.6g}".format(*x[:, worst])
            for x in (now_values, then_values)
        )
        return "other features: dimension {}: {} found, {} expected".format(worst, *figures)


def data_identity(data: TrainingData, comm: Communicator) -> DataIdentity:
    """By which a resume recognizes this data. Collective."""
    train = hashlib.sha256(f"{data.train_utterances}".encode()).hexdigest()[:32]
    total = len(data.index.entries)
    contents = {"data.cv": f"{len(data.train_utterances)} of {total} utterances to train on, digest {train}"}
    features = {}
    corpora = [(part, data.dataset) for part in data.source.parts]
    if data.cv_source is not None:
        corpora += [(part, data.cv.dataset) for part in data.cv_source.parts]
    for part, dataset in corpora:
        (data_key, alignments_key), index = part.corpus.keys, part.index
        found = f"{len(index.entries)} utterances, {index.num_frames.sum()} frames, digest"
        contents[data_key] = f"{found} {_digest(index, 32)}"
        contents[alignments_key] = f"pdf-ids of digest {label_digest(dataset, index.utterances, comm)}"
        chosen = index.utterances[:: -(-len(index.entries) // STATISTICS_UTTERANCES)]  # evenly over the corpus
        features[data_key] = feature_statistics(dataset, _positions(dataset, chosen), comm).tolist()
    return DataIdentity(contents=contents, features=features)


def check_shared_data(identity: DataIdentity, groups: Groups) -> None:
    """DataError where workers of a replica, which train on the same minibatches, have read other data, of files that are not
    the same on all hosts. Collective."""
    everyone = groups.replica.all_gather_object([groups.world.rank, groups.world.host, identity.model_dump()])
    first, host, found = everyone[0]
    if changed := identity.differences(DataIdentity.model_validate(found)):
        key, text = next(iter(changed.items()))
        who = f"workers {first} on {host} and {groups.world.rank} on {groups.world.host} share a model"
        raise DataError(f"{who}, but their data differs: {key}: {text}", hint="give every host the same files")


def split_digests(data: TrainingData) -> tuple[str, str]:
    """Short digests of the utterances to train on and of those for cross-validation, with their lengths."""
    return _digest(data.index.subset(data.train_utterances)), _digest(data.cv_index())


def _digest(index: UtteranceIndex, digits: int = 16) -> str:
    return utterance_digest(zip(index.utterances, index.num_frames.tolist(), strict=True), digits)


def utterance_digest(utterances: Iterable[tuple[str, int]], digits: int = 16) -> str:
    """A digest of ids and numbers of frames."""
    return hashlib.sha256("".join(f"{name} {frames}\n" for name, frames in utterances).encode()).hexdigest()[:digits]


def _positions(dataset: AcousticDataset, utterances: Iterable[str]) -> list[int]:
    """Positions in the dataset of those of the utterances that it has."""
    names = set(utterances)
    return [n for n, utterance in enumerate(dataset.utterances) if utterance in names]


def label_digest(dataset: AcousticDataset, utterances: Iterable[str], comm: Communicator) -> str:
    """Of the pdf-ids of those utterances that the workers have. Digests of the utterances are summed, which no order
    changes: the same for any number of workers. Collective."""
    labels, total = dataset.labels.cpu().numpy().astype("<i4", copy=False), np.zeros(4, np.int64)
    for n in _positions(dataset, utterances):
        name, row, frames = dataset.utterances[n], dataset.offsets[n], dataset.num_frames[n]
        digest = hashlib.blake2b(f"{name}\n".encode(), digest_size=16)
        digest.update(labels[row : row + frames].tobytes())
        total += np.frombuffer(digest.digest(), "<u4")
    sums = torch.from_numpy(total)
    comm.all_reduce(sums)
    return "".join(f"{word % 2**32:08x}" for word in sums.tolist())


def feature_statistics(dataset: AcousticDataset, utterances: list[int], comm: Communicator) -> Tensor:
    """(3, dim) float64: mean and standard deviation of each feature dimension over these utterances of all workers, and
    a sum over their frames times cosines that depend on utterance and frame, divided by the square root of the number
    of frames. Independent of the number of workers but for rounding. The sum changes with any frame, also where CMVN
    makes mean and standard deviation the same. Collective."""
    dim = dataset.dim
    totals = torch.zeros(3 * dim + 1, dtype=torch.float64)
    sums = totals[:-1].view(3, dim)
    for u in utterances:
        row, frames = int(dataset.offsets[u]), int(dataset.num_frames[u])
        values = dataset.features[row : row + frames].cpu().double()
        place = zlib.crc32(dataset.utterances[u].encode()) % 65536 + np.arange(frames, dtype=np.float64)
        weights = torch.from_numpy(np.cos(place * place))
        sums += torch.stack([values.sum(dim=0), values.square().sum(dim=0), weights @ values])
        totals[-1] += frames
    comm.all_reduce(totals)
    totals[-1].clamp_(min=1.0)  # no worker need have any
    mean, square = sums[:2] / totals[-1]
    return torch.stack([mean, (square - mean.square()).clamp_(min=0).sqrt(), sums[2] / totals[-1].sqrt()])
