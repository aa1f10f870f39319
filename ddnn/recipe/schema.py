"""The recipe: every key, its type, default, unit and meaning. `docs/recipe.md` is written from this file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0.0, lt=1.0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A mapping of a recipe: immutable once read, no keys but its own."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class CrossValidation(Section):
    """What is held out to judge an epoch: by default whole speakers of the training data."""

    fraction: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Share of the training frames to hold out, as whole speakers drawn with the recipe's `seed`. 0.1 where nothing
    in this section is given."""
    speakers_file: Path | None = None
    """File with one speaker per line: their utterances are held out."""
    data: Path | None = None
    """A Kaldi data dir of its own for cross-validation; then nothing is held out of the training data."""
    alignments: Path | None = None
    """The alignments that belong to `data.cv.data`."""


class Data(Section):
    """Features and alignments, as Kaldi leaves them."""

    train: Path
    """Kaldi data dir: `feats.scp`, `utt2spk`, and `cmvn.scp` where wanted."""
    alignments: Path
    """Kaldi alignment dir (`ali.*.gz` of transition-ids and `final.mdl`), or one archive of pdf-ids (`.ark`, `.txt`,
    `.gz`)."""
    pdfs: Count | None = None
    """Number of pdfs (senones). Read from `final.mdl`; needed only with an archive of pdf-ids, where it defaults to
    the largest pdf-id + 1."""
    cv: CrossValidation = CrossValidation()
    """Cross-validation."""
    splice: Annotated[int, Field(ge=0, le=100)] = 5
    """Frames of context on each side: 5 makes the network's input 11 frames wide."""
    cmvn: Literal["none", "mean", "mean-variance"] = "none"
    """Cepstral mean (and variance) normalisation per speaker, from `cmvn.scp` where the data dir has one, else
    computed from its features."""
    deltas: Annotated[int, Field(ge=0, le=4)] = 0
    """Order of delta features to append (Kaldi's add-deltas, window 2), after CMVN and before splicing."""
    normalise: bool = True
    """Shift and scale each spliced dimension to zero mean and unit variance over the training set."""
    store: Literal["float32", "float16"] = "float32"
    """How the frames lie in memory. float16 halves the memory."""
    place: Literal["auto", "host"] = "auto"
    """GPUs: where the frames lie. `auto`: on the GPU where they fit beside the training; else, and with `host`, in host
    memory, from where minibatches are read ahead. The log says where."""
    cache: Path | None = None
    """Directory, made where it is missing, for files that hold what loading makes of the features: the next training
    on the same data maps one in seconds. docs/input.md says what it depends on. Not given: none."""
    loaders: Count | None = None
    """Processes of each worker that read the features, where there are gigabytes of them. Default: the usable cores,
    up to 8, shared out over the workers of a host."""
    allow_pipes: bool = False
    """Run shell commands that stand in an scp (`gunzip -c x.gz |`). Only for data that you wrote yourself."""
    max_missing: Fraction = 0.05
    """Largest share of utterances that may lack an alignment, or differ from it by more than 5 frames, before
    training is refused."""


class Model(Section):
    """The network: equal hidden layers, then softmax over the pdfs."""

    hidden_layers: Annotated[int, Field(ge=0, le=100)] = 6
    """Number of hidden layers."""
    hidden_units: Count = 2048
    """Units in each hidden layer."""
    activation: Literal["sigmoid", "tanh", "relu"] = "sigmoid"
    """Activation of the hidden layers."""


class Optimizer(Section):
    """How a gradient becomes a step. Gradients are sums over the minibatch, as in Kaldi: a rate multiplies the sum."""

    name: Literal["sgd", "ng-sgd"] = "sgd"
    """`sgd`: plain stochastic gradient descent. `ng-sgd`: natural-gradient SGD."""
    momentum: Fraction = 0.0
    """c <- momentum * c + gradient; the step is rate * c."""
    l2: NotNegative = 0.0
    """Each minibatch of N frames takes rate * l2 * N * W from the weights W; biases have none."""
    rank_in: Count = 20
    """NG-SGD: rank of the Fisher matrix of each layer's input (the paper's code: 30)."""
    rank_out: Count = 80
    """NG-SGD: rank of the Fisher matrix of each layer's output derivative (the paper's code: 60)."""
    alpha: NotNegative = 4.0
    """NG-SGD: smoothing of the Fisher matrices with the identity."""
    num_samples_history: Annotated[float, Field(gt=0.0, le=1e6)] = 2000.0
    """NG-SGD: time constant of the Fisher matrices, in frames."""
    update_period: Count = 4
    """NG-SGD: minibatches between two updates of the Fisher matrices, once the first 10 have been made."""
    max_change_per_sample: NotNegative = 0.075
    """NG-SGD: a step that would change a layer by more than this per frame is shortened. 0: never."""
    max_change_mode: Literal["exact", "each-worker", "before-rate"] = "exact"
    """NG-SGD: `exact` limits the step by the frames of all workers: where rates are multiplied by the workers, each of
    them may go as many times as far, as one with as many times the minibatch may. `each-worker` limits it by the
    worker's own frames (nnet2), which slows down many. `before-rate` limits it before it is multiplied by the rate, as
    the code behind arXiv 1507.01239 did: there rates of 0.32 and more work only so."""


class Schedule(Section):
    """How the learning rate moves, and when training ends."""

    name: Literal["newbob", "exponential"] = "newbob"
    """`newbob`: halve once the cross-validation gain is small, reject epochs that made it worse. `exponential`: from
    `initial` to `final`, no rejection."""
    initial: Positive = 0.008
    """Learning rate of the first epoch; multiplies the SUM of the gradient over a minibatch (0.008 at minibatch 256
    is 2.048 on the mean)."""
    final: Positive | None = None
    """Exponential: rate of the last epoch. Default: 0.01 * `initial`."""
    epochs: Count | None = None
    """Newbob: most epochs (default 20). Exponential: all epochs (default 15)."""
    criterion: Literal["loss", "frame-accuracy"] = "loss"
    """Newbob: judge by relative improvement of the cross-validation loss (Kaldi nnet1), or by absolute gain in frame
    accuracy (the paper)."""
    start_halving: Positive | None = None
    """Newbob: halving starts below this improvement. Default 0.01 relative for loss, 0.005 absolute for frame
    accuracy."""
    end_halving: NotNegative | None = None
    """Newbob: training ends below this improvement once halving has begun. Default 0.001, relative for loss or
    absolute for frame accuracy."""
    halving_factor: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """Newbob: what the rate is multiplied by."""
    keep_epochs: Annotated[int, Field(ge=0)] = 0
    """Newbob: so many first epochs are accepted, and keep the initial rate, whatever happens (`keep_lr_iters`)."""
    min_epochs: Annotated[int, Field(ge=0)] = 0
    """Newbob: so many first epochs are accepted, and training does not end before (`min_iters`)."""


class Pretrain(Section):
    """RBM pretraining, read where `init` is `rbm`. Rates multiply the MEAN gradient over a minibatch, as in Kaldi."""

    from_: Annotated[Path | None, Field(alias="from")] = None
    """A finished stack: a dir of `ddnn pretrain`, or Kaldi's `N.dbn`. Where it is not given, `ddnn train` makes one."""
    feature_transform: Path | None = None
    """With a `.dbn` file: Kaldi's `final.feature_transform` that belongs to it."""
    passes: Annotated[list[Count], Field(min_length=1)] | None = None
    """Passes over the data for each RBM, lowest first; the last number serves all further ones."""
    hours: Positive = 100.0
    """Hours of speech that each RBM sees where `passes` is not given, the lowest twice as many; one pass at least."""
    minibatch: Count = 100
    """Frames in a minibatch of pretraining."""
    gauss_rate: Positive = 0.01
    """Learning rate of the lowest RBM, of which the visible units are Gaussian."""
    rate: Positive = 0.4
    """Learning rate of the other RBMs."""
    l2: NotNegative = 2e-4
    """Weight decay."""
    momentum_as_kaldi: bool = True
    """As Kaldi: momentum 0.9 from the second minibatch on, while the rate is scaled as if it rose from 0.5. false: it
    does rise."""


class Parallel(Section):
    """Workers and the averaging of their parameters: docs/parallel.md. With one worker nothing but `workers` and
    `threads` is read."""

    workers: Count = 1
    """Number of workers: one MPI rank with its device each."""
    reduce: Literal["all-reduce", "butterfly", "ring", "hopping-ring", "gradient", "bmuf"] = "all-reduce"
    """Strategy of an averaging. `gradient` averages the gradients of every minibatch instead, `bmuf` gives the
    averaged change of a block a momentum."""
    every: Count = 10
    """Minibatches of each worker between two averagings."""
    start: Literal["none", "one-worker", "all-reduce"] = "none"
    """Warm start, before the first epoch: `one-worker` trains on the first worker's shard alone at the unscaled rate
    and hands its model to all; `all-reduce` averages after every minibatch."""
    start_minibatches: Count = 100
    """Minibatches of each worker that takes part in the warm start."""
    scale_learning_rate: bool | None = None
    """Multiply the schedule's rates by the number of workers, as arXiv 1507.01239 did. Default: true, but false for
    bmuf."""
    momentum_rule: Literal["keep", "average", "reset"] | None = None
    """What an averaging does with the workers' momentum (`optimizer.momentum`). Default: keep, but reset for bmuf."""
    block_momentum: Fraction | None = None
    """bmuf: share of the last block's change that is added to the next. Default: 1 - 1 / `workers`."""
    block_rate: Positive = 1.0
    """bmuf: what the averaged change of a block is multiplied by."""
    nesterov: bool = False
    """bmuf: start each block where the block momentum will lead (Nesterov)."""
    overlap: bool = False
    """Exchange the parameters of a block while the next one trains, and correct when they arrive."""
    wire: Literal["float32", "bfloat16"] = "float32"
    """How parameters travel. bfloat16 halves the bytes; sums are made in float32."""
    transport: Literal["auto", "host", "device", "nccl"] = "auto"
    """GPUs: through pinned host memory, straight from device memory where the MPI says it can, or by NCCL. auto:
    device where the MPI says it can, else host."""
    share_devices: bool = False
    """Allow more workers than GPUs on a host."""
    pretrain: Literal["sharded", "replicated"] = "sharded"
    """RBMs that a training makes itself: `sharded` over the workers, averaged by all-reduce at `every`; or
    `replicated`, on the whole corpus as one worker would, to the same bits: it must fit into one worker's memory."""
    on_failure: Literal["stop", "continue"] = "stop"
    """What follows where a worker dies: `stop`, all end, to be resumed; `continue`, the others share its shard out and
    go on. `continue` needs Open MPI's ULFM and mpirun (docs/reliability.md)."""
    timeout: Positive = 300.0
    """Seconds without progress after which a worker counts as hung and is killed."""
    threads: Count = 1
    """CPU threads of each worker. On minibatches of a few hundred frames one is fastest: two were measured ten times
    slower."""


class Checkpoint(Section):
    """What a training leaves to be resumed from with --resume, after each epoch and within it: docs/reliability.md."""

    every_minutes: Positive = 10.0
    """Minutes between two checkpoints within an epoch; taken at the next averaging."""
    every_minibatches: Count | None = None
    """Minibatches of each worker between two checkpoints, besides; taken at the next averaging."""
    keep: Count = 2
    """How many to keep: the newest, and those before it to fall back to should it be damaged."""


class Recipe(Section):
    """A whole recipe. All data paths are tried against the working directory, then against the folder of the recipe."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    """Seed of everything random: initial parameters, frame order, held-out speakers. Same seed, same machine: the
    same bits."""
    data: Data
    """Features and alignments."""
    model: Model = Model()
    """The network."""
    init: Literal["random", "rbm"] = "random"
    """Initial parameters: random (as Kaldi nnet1), or a stack of RBMs."""
    pretrain: Pretrain = Pretrain()
    """RBM pretraining."""
    optimizer: Optimizer = Optimizer()
    """The optimizer."""
    minibatch: Count = 256
    """Frames in a minibatch. The tail of an epoch that is shorter is dropped, as in Kaldi."""
    precision: Literal["auto", "float32", "bf16"] = "auto"
    """What the matrix products of training multiply. `bf16`: parameters, their updates, losses and the state of NG-SGD
    stay float32, and so do pretraining and cross-validation. `auto`: bf16 where a measurement at the start finds it
    faster; the log says which."""
    tf32: bool = False
    """GPUs: multiply float32 in TF32, with 10 bits of mantissa in place of 23. In training, pretraining and
    cross-validation."""
    graphs: Literal["auto", "never"] = "auto"
    """GPUs: capture the training step as a CUDA graph, where it is found to do what the plain step does. `never`: the
    plain step."""
    schedule: Schedule = Schedule()
    """The learning-rate schedule."""
    parallel: Parallel = Parallel()
    """Workers."""
    checkpoint: Checkpoint = Checkpoint()
    """Checkpoints."""
