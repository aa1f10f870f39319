"""The tables of Su, Chen and Xu, "Experiments on Parallel Training of Deep Neural Network using Model Averaging" (arXiv
1507.01239): settings, workers, the paper's numbers, and the contrasts that it draws. The same for every corpus.

A setting is a recipe of the corpus with this name (`SETTING.yaml`). `base` is the paper's choice: RBMs, NG-SGD, an
exponential rate, all-reduce every ten minibatches. The others differ from it in what they are named after.
"""

from __future__ import annotations

from collections.abc import Mapping

from ddnn.errors import UserError
from ddnn.reproduce.table import BASE, Contrast, Setting, Table

PAPER_SOURCE = "arXiv 1507.01239: Switchboard 300 h, 440-6x2048-8806, WER in percent on Hub5'00 (SWB, CH) and Hub5'01"
PAPER_SPEED_UPS: Mapping[str, Mapping[int, float]] = {
    "base": {1: 1.0, 2: 1.39, 4: 2.65, 8: 4.99, 16: 9.32, 32: 16.70},
    "butterfly": {1: 1.0, 2: 1.45, 4: 2.83, 8: 5.44, 16: 10.10, 32: 18.02},
}
"""Setting -> GPUs -> speed-up: the raw times behind figure 2, from the authors' repository."""


def _swb(swb: float, ch: float) -> dict[str, float]:
    return {"SWB": swb, "CH": ch}


_BASE_WER: dict[tuple[str, int], dict[str, float]] = {
    ("base", 1): {"SWB": 14.7, "CH": 26.8, "SWB01": 16.1, "SWB2P3": 21.0, "SWBCELL": 27.4},
    ("base", 8): {"SWB": 15.1, "CH": 27.4, "SWB01": 16.4, "SWB2P3": 21.8, "SWBCELL": 27.3},
    ("base", 16): {"SWB": 15.1, "CH": 27.0, "SWB01": 16.2, "SWB2P3": 21.7, "SWBCELL": 27.4},
    ("base", 32): {"SWB": 15.2, "CH": 27.1, "SWB01": 16.4, "SWB2P3": 21.7, "SWBCELL": 27.8},
}

_TABLES = (
    Table(
        "table1",
        "How many workers",
        (
            BASE,
            Setting("each-worker", "the same, steps limited by the worker's own frames", beyond=True, columns="many"),
            Setting("warm-start", "the same, after 100 minibatches on one worker", beyond=True, columns="many"),
            Setting("every-1", "the same, averaged after every minibatch", beyond=True, columns="many"),
            Setting("closing", "the setting meant to close the loss", beyond=True, columns="one and many"),
        ),
        "every size",
        (
            Contrast("one worker is better than many: averaging costs accuracy", ("base", "one"), ("base", "many")),
            Contrast(
                "limiting a step by the frames of all workers is better than by the worker's own, on many",
                ("base", "many"),
                ("each-worker", "many"),
                published=False,
            ),
            Contrast(
                "averaging after every minibatch, on many workers, is better than the paper's setting on one",
                ("every-1", "many"),
                ("base", "one"),
                published=False,
            ),
            Contrast(
                "the setting meant to close the loss, on many workers, is better than the paper's on one",
                ("closing", "many"),
                ("base", "one"),
                published=False,
            ),
            Contrast(
                "the setting meant to close the loss is better than the paper's, on many workers",
                ("closing", "many"),
                ("base", "many"),
                published=False,
            ),
        ),
        _BASE_WER,
    ),
    Table(
        "table2",
        "Random initial parameters or RBMs",
        (Setting("random", "random"), Setting("base", "RBM")),
        "one and many",
        (
            Contrast("RBMs are better than random, on one worker", ("base", "one"), ("random", "one")),
            Contrast("RBMs are better than random, on many", ("base", "many"), ("random", "many")),
        ),
        {
            ("random", 1): _swb(15.6, 27.4),
            ("random", 32): _swb(16.4, 28.8),
            **{key: _BASE_WER[key] for key in (("base", 1), ("base", 32))},
        },
    ),
    Table(
        "table3",
        "Minibatches between two averagings",
        (
            Setting("every-1", "every 1", beyond=True),
            Setting("every-5", "every 5", beyond=True),
            Setting("base", "every 10"),
            Setting("every-20", "every 20"),
            Setting("every-50", "every 50", beyond=True),
        ),
        "many",
        (Contrast("every 10 is better than every 20", ("base", "many"), ("every-20", "many")),),
        {("base", 16): _BASE_WER["base", 16], ("every-20", 16): _swb(15.8, 28.0)},
    ),
    Table(
        "table4",
        "Frames in a minibatch",
        (Setting("minibatch-256", "256"), Setting("minibatch-1024", "1024")),
        "one and many",
        (
            Contrast("1024 is better than 256, on one worker", ("minibatch-1024", "one"), ("minibatch-256", "one")),
            Contrast("1024 is better than 256, on many", ("minibatch-1024", "many"), ("minibatch-256", "many")),
        ),
        {
            ("minibatch-256", 1): _swb(15.3, 26.8),
            ("minibatch-256", 16): _swb(15.6, 27.3),
            ("minibatch-1024", 1): _BASE_WER["base", 1],
            ("minibatch-1024", 16): _BASE_WER["base", 16],
        },
    ),
    Table(
        "table5",
        "Newbob or exponential rate",
        (Setting("newbob", "Newbob"), Setting("base", "exponential")),
        "one and many",
        (
            Contrast("exponential is better than Newbob, on one worker", ("base", "one"), ("newbob", "one")),
            Contrast("exponential is better than Newbob, on many", ("base", "many"), ("newbob", "many")),
        ),
        {
            ("newbob", 1): _swb(14.9, 26.6),
            ("newbob", 16): _swb(15.4, 27.2),
            **{key: _BASE_WER[key] for key in (("base", 1), ("base", 16))},
        },
    ),
    Table(
        "table6",
        "SGD or natural-gradient SGD",
        (
            Setting("sgd", "SGD"),
            Setting("sgd-half", "SGD at half the rate", beyond=True),
            Setting("base", "NG-SGD"),
        ),
        "one and many",
        (
            Contrast("NG-SGD is better than SGD, on one worker", ("base", "one"), ("sgd", "one")),
            Contrast("NG-SGD is better than SGD, on many", ("base", "many"), ("sgd", "many")),
            Contrast(
                "NG-SGD is better than SGD at half the rate, on many",
                ("base", "many"),
                ("sgd-half", "many"),
                published=False,
            ),
        ),
        {
            ("sgd", 1): _swb(14.9, 26.9),
            ("sgd", 16): _swb(16.3, 28.3),
            **{key: _BASE_WER[key] for key in (("base", 1), ("base", 16))},
        },
    ),
    Table(
        "figure2",
        "How much faster",
        (Setting("base", "all-reduce"), Setting("butterfly", "butterfly")),
        "every size",
        (),
        kind="speed",
        note="Speed-ups of the paper are of GPUs in machines of their own.",
    ),
    Table(
        "reduce",
        "Strategies of averaging",
        (
            Setting("base", "all-reduce"),
            Setting("butterfly", "butterfly"),
            Setting("ring", "ring"),
            Setting("hopping-ring", "hopping ring"),
            Setting("gradient", "gradients, every minibatch"),
            Setting("bmuf", "BMUF", beyond=True),
            Setting("overlap", "all-reduce, overlap", beyond=True, columns="many"),
            Setting("wire-16", "all-reduce, 16 bits on the wire", beyond=True, columns="many"),
        ),
        "every size",
        (
            Contrast(
                "all-reduce is better than butterfly, on many (drafts of the authors say so)",
                ("base", "many"),
                ("butterfly", "many"),
                published=False,
            ),
            Contrast("all-reduce is better than ring, on many", ("base", "many"), ("ring", "many"), published=False),
            Contrast("BMUF is better than all-reduce, on many", ("bmuf", "many"), ("base", "many"), published=False),
        ),
        note="The accuracies of these strategies were announced and never published.",
    ),
)
TABLES: Mapping[str, Table] = {table.name: table for table in _TABLES}
"""Name -> table, in the paper's order."""


def chosen(names: tuple[str, ...]) -> tuple[Table, ...]:
    """The tables of these names, each once; "all" is all of them.

    Raises:
        UserError: no table has one of these names.
    """
    for name in names:
        if name != "all" and name not in TABLES:
            raise UserError(f"there is no table {name!r}", mend=f"name one or more of: {', '.join(TABLES)}, all")
    return tuple(TABLES.values()) if "all" in names else tuple(TABLES[name] for name in dict.fromkeys(names))
