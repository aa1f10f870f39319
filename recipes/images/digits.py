"""scikit-learn's bundled digits as IDX files, then as Kaldi data dirs: python recipes/images/digits.py images/digits.

1,797 images of 8 x 8 pixels. The last 360 in the file's order, for the most part by writers of none of the others, are
the test set.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from idx import ConvertOptions, convert_idx, write_idx
from sklearn.datasets import load_digits

from ddnn.util.files import ensure_directory

TEST = 360
SPEAKERS = {"train": 20, "test": 5}


def main(out: Path) -> None:
    """Writes `train` and `test` below `out`, and beside them the IDX files that they were made from."""
    digits = load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    labels = digits.target.astype(np.uint8)
    ensure_directory(out)
    for split, part in (("train", slice(None, -TEST)), ("test", slice(-TEST, None))):
        files = out / f"{split}-images.idx", out / f"{split}-labels.idx"
        write_idx(files[0], images[part])
        write_idx(files[1], labels[part])
        summary = convert_idx(*files, out / split, ConvertOptions(name=split, speakers=SPEAKERS[split]))
        print(f"{out / split}: {summary}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
