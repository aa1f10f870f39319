"""Networks of the sizes of well-known corpora, and random frames to train them on, for measurements."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ddnn.data.batches import Batch, BatchLoader, ShuffledSampler, make_batch_loader
from ddnn.data.dataset import AcousticDataset, FrameSubset, splice_only
from ddnn.data.feature_reader import FeatureConfig
from ddnn.nn.acoustic_model import AcousticModel
from ddnn.nn.convolution import Convolution, MaxPooling
from ddnn.nn.elementwise import Activation, Scale, Shift
from ddnn.nn.layer import Layer
from ddnn.nn.layers import mlp_layers
from ddnn.nn.network import Network, Workspace, initialize
from ddnn.training.normalization import estimate_normalization

DIM, SPLICE = 40, 5


@dataclass(frozen=True)
class RandomTask:
    """A network to train, and random frames to train it on: the speed does not depend on their values."""

    model: AcousticModel
    train: FrameSubset
    minibatch: int

    def batches(self, workspace: Workspace) -> BatchLoader:
        """The minibatches of training, in `workspace.x`."""
        sampler = ShuffledSampler(self.train, self.minibatch, seed=1)
        kernel = workspace.arithmetic.gather_kernel
        return make_batch_loader(self.train, self.model.transform, sampler, out=workspace.x, gather_kernel=kernel)


class Shape(NamedTuple):
    """A network and minibatch to measure."""

    hidden_layers: int
    hidden_units: int
    pdfs: int
    minibatch: int
    convolutional: bool = False  # whether the hidden layers are on top of two convolutions

    @property
    def dim(self) -> int:
        """Of a frame: for convolutions filter banks with their deltas, of two orders."""
        return 3 * DIM if self.convolutional else DIM

    def layers(self) -> tuple[Layer, ...]:
        """With convolutions as in Kaldi's make_cnn_proto.py, but that the second runs along frequency."""
        dim = (1 + 2 * SPLICE) * self.dim
        if not self.convolutional:
            return mlp_layers(dim, self.hidden_layers, self.hidden_units, self.pdfs)
        return (
            *(
                Convolution.of_pieces(dim, 8, 1, DIM, 128),
                MaxPooling.of_patches(4224, 3, 3, 128),
                Scale(1408),
                Shift(1408),
                Activation(1408),
            ),
            *(Convolution.of_pieces(1408, 4 * 128, 128, 1408, 256), Scale(2048), Shift(2048), Activation(2048)),
            *mlp_layers(2048, self.hidden_layers, self.hidden_units, self.pdfs),
        )


NETWORKS = {
    "an4": Shape(4, 512, 616, 256),
    "swbd": Shape(6, 2048, 8806, 1024),
    "cnn": Shape(2, 512, 2000, 256, convolutional=True),
}


def endless(loader: BatchLoader) -> Iterator[Batch]:
    for epoch in itertools.count(1):
        yield from loader.epoch(epoch)


def random_task(shape: Shape, device: torch.device, frames: int = 60_000) -> RandomTask:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(frames, shape.dim, generator=generator)
    labels = torch.randint(0, shape.pdfs, (frames,), generator=generator, dtype=torch.int32)
    names, begins, lengths = ("random",), np.array([SPLICE]), np.array([frames - 2 * SPLICE])
    dataset = AcousticDataset(features, labels, names, names, begins, lengths, SPLICE)
    transform = estimate_normalization(splice_only(shape.dim, SPLICE), dataset, [0])
    network = Network(shape.layers())
    initialize(network, 1)
    model = AcousticModel(FeatureConfig(), transform, network).to(device)
    return RandomTask(model, dataset.to(device).subset([0]), shape.minibatch)
