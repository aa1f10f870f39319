"""Keeping the eigenvectors of natural gradient orthonormal, as Kaldi's `OnlineNaturalGradient::ReorthogonalizeRt1`."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ORTHONORMAL = 1e-3  # largest |R R^T - I| left alone
_INVERSE_FACTOR = 100.0  # largest element of the inverse Cholesky factor that is trusted


def orthonormalise(w: Tensor, e: NDArray[np.float64]) -> None:
    """Makes the rows of R = E^-.5 W orthonormal again, in place, if they are off by over 1e-3. Waits for the device."""
    sqrt_e = torch.from_numpy(np.sqrt(e))
    scale = torch.outer(sqrt_e, sqrt_e)
    eye = torch.eye(len(e), dtype=torch.float64)
    if (
        float((torch.mm(w, w.T).cpu() / scale - eye).abs().max()) <= _ORTHONORMAL
    ):  # float32 does to see that nothing is to be done
        return
    wide = w.double()  # an inverse factor of 100 would raise the roundoff of float32 to 1e-3
    o = torch.mm(wide, wide.T).cpu() / scale
    factor, failed = torch.linalg.cholesky_ex(o)
    if not int(failed):
        inverse = torch.linalg.solve_triangular(factor, eye, upper=False)
        if float(inverse.max()) < _INVERSE_FACTOR:
            inverse *= sqrt_e.unsqueeze(1) / sqrt_e
            w.copy_(torch.mm(inverse.to(w.device), wide))
            return
    r = wide.cpu()
    _gram_schmidt(r)
    w.copy_(r * sqrt_e.unsqueeze(1))


def _gram_schmidt(r: Tensor) -> None:
    """Makes the rows of r (float64, host, no more rows than columns) orthonormal in place: Kaldi's `OrthogonalizeRows`.

    A row of which less than a tenth is left is projected once more; one that vanishes is replaced by a random one,
    from a generator of its own, so that the same input gives the same bits."""
    generator = torch.Generator().manual_seed(0)
    for i, row in enumerate(r):
        while True:
            before = float(row @ row)
            if math.isfinite(before) and before > 0.0:
                row -= (r[:i] @ row) @ r[:i]
                after = float(row @ row)
                if after > 0.01 * before:
                    row /= math.sqrt(after)
                    break
                if after > 0.0:
                    continue
            row.normal_(generator=generator)
