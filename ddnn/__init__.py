"""ddnn: trains hybrid DNN-HMM acoustic models on Kaldi features and alignments.

In Python: `ddnn.train`, `ddnn.load`, `ddnn.evaluate` and the others of `__all__`; docs/tutorials/python.md.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddnn.api import (
        Model,
        decode_prep,
        evaluate,
        load,
        read_alignments,
        read_cmvn_stats,
        read_features,
        read_metrics,
        score,
        train,
    )  # fmt: skip
    from ddnn.util.errors import DivergedError, UserError

__version__ = "0.2.0"
__all__ = [
    "DivergedError", "Model", "UserError", "decode_prep", "evaluate", "load", "read_alignments", "read_cmvn_stats",
    "read_features", "read_metrics", "score", "train",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """What `ddnn.api` has is imported when it is first used: `import ddnn` takes no time."""
    if name not in __all__:
        raise AttributeError(f"module 'ddnn' has no attribute {name!r}")
    from ddnn import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return [*__all__, "__doc__", "__version__"]
