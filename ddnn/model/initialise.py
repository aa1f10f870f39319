"""Random initial parameters, as Kaldi nnet1's utils/nnet/make_nnet_proto.py draws them."""

from __future__ import annotations

import math

import torch

from ddnn.model.network import Network


def initialise_randomly(network: Network, seed: int) -> None:
    """W ~ N(0, s^2), s = 3.5 sqrt(2 / (inputs + outputs)), the first layer's times sqrt(1/12); hidden biases uniform
    in (-4, 0), output bias 0.

    Drawn on the CPU, so that a seed gives the same network on every device. A network without hidden layers has its
    one layer as output layer. tanh and ReLU layers have their biases around 0: (-4, 0) is where sigmoids start.
    """
    generator = torch.Generator().manual_seed(seed)
    last = len(network.layers) - 1
    for i, (layer, weight, bias) in enumerate(zip(network.layers, network.weights, network.biases, strict=True)):
        deviation = 3.5 * math.sqrt(2.0 / (layer.inputs + layer.outputs))
        if i == 0:
            deviation *= math.sqrt(1.0 / 12.0)
        if layer.activation == "relu":
            deviation = math.sqrt(2.0 / layer.inputs)  # He et al. 2015: 3.5 would explode without a squashing function
        weight.copy_(torch.randn(weight.shape, generator=generator) * deviation)
        if i == last or layer.activation != "sigmoid":
            bias.zero_()
        else:
            bias.copy_(torch.rand(bias.shape, generator=generator) * 4.0 - 4.0)
