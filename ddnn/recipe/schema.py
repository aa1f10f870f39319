"""The recipe: every key, its type, default, unit and meaning. `docs/reference/recipe.md` is generated from this file."""

from __future__ import annotations

import math
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from ddnn.recipe.layers import AnyLayer, check_number
from ddnn.recipe.section import (
    MAPPING,
    VALUE,
    VALUE_OR_MAPPING,
    AutoOrOff,
    Count,
    Fraction,
    NotNegative,
    NotNegativeCount,
    Paths,
    Positive,
    Section,
    Size,
)


class CrossValidationConfig(Section):
    """The cross-validation set, by default whole speakers held out of the training data."""

    speakers: Path | None = None
    """File with one speaker per line, whose utterances are held out."""
    utterances: Path | None = None
    """File with the utterances to hold out, an id at the beginning of each line: a plain list, `cv_utterances` of another
    run dir, or a Kaldi table such as `utt2spk` or `text`."""
    data: Paths | None = None
    """A separate Kaldi data dir for cross-validation, or a list of them. Nothing is then held out of the training data,
    and no utterance may be in both."""
    alignments: Paths | None = None
    """The alignments of `data.cv.data`. For a list, one for each data dir, in the same order."""
    transforms: Paths | None = None
    """Kaldi's transforms of `data.cv.data`, a path or a list as there. Default: `data.transforms`, which contains these
    speakers if both data dirs were aligned together."""
    fraction: Annotated[float, Field(gt=0.0, lt=1.0)] | None = Field(
        default_factory=lambda known: 0.1 if all(value is None for value in known.values()) else None
    )
    """Fraction of the training frames to hold out, drawn with the recipe's `seed` to come close to it.
    Default: 0.1 if nothing else in this section is given."""
    by: Literal["speaker", "utterance"] | None = None
    """Whether `fraction` holds out whole speakers or utterances. Default: speakers; but utterances, with a warning, if
    there is no `utt2spk` or there are too few speakers to come within a fifth of `fraction`. Held-out utterances of
    speakers who are also trained on make the cross-validation look better than other speakers would."""


class DataConfig(Section):
    """Kaldi features and alignments."""

    train: Paths
    """Kaldi data dir: `feats.scp`, `utt2spk` and, optionally, `cmvn.scp`. Or a list of data dirs, which are trained on
    together: docs/how-to/several-corpora.md."""
    alignments: Paths
    """Kaldi alignment dir (`ali.*.gz` of transition-ids and `final.mdl`), or one archive of pdf-ids (`.ark`, `.txt`,
    `.gz`). If `data.train` is a list, give one for each data dir, in the same order; all must use the same tree."""
    num_pdfs: Count | None = None
    """Number of pdfs (senones). It is read from `final.mdl` and only used with an archive of pdf-ids, where the default
    is the largest pdf-id + 1."""
    cv: CrossValidationConfig = CrossValidationConfig()
    """Cross-validation."""
    splice: Annotated[int, Field(ge=0, le=100)] = 5
    """Frames of context on each side: with 5, the network's input is 11 frames wide."""
    cmvn: Literal["none", "mean", "mean-variance"] = "none"
    """Cepstral mean (and variance) normalization per speaker, from `cmvn.scp` if the data dir has one, otherwise
    computed from its features."""
    deltas: Annotated[int, Field(ge=0, le=4)] = 0
    """Order of delta features to append (Kaldi's add-deltas, window 2), after CMVN and before splicing."""
    transforms: Paths | None = None
    """A Kaldi dir (`exp/tri4_ali`) whose transforms are applied to raw features after CMVN: `final.mat` (LDA+MLLT) to
    frames spliced by its `splice_opts`, or deltas by its `delta_opts` if there is no `final.mat`; then `trans.*`
    (fMLLR) of speakers or utterances, if there are any. See docs/how-to/raw-features.md. If `data.train` is a list, give one dir with
    the transforms of all speakers, or one for each data dir, all of one system."""
    normalize: bool = True
    """Shift and scale each spliced dimension to zero mean and unit variance over the training set."""
    feature_dtype: Literal["float32", "float16"] = "float32"
    """Type of the features in memory. float16 halves the memory."""
    feature_device: Literal["auto", "cpu"] = "auto"
    """GPUs: where the features are kept. `auto`: in GPU memory if they fit alongside training. Otherwise, and
    with `cpu`, they are kept in host memory, and minibatches are prefetched. The log reports where they are."""
    cache_dir: Path | None = None
    """Directory of cached features, created if it does not exist: the next run on the same data maps a file in
    seconds. docs/how-to/feature-cache.md lists what the file depends on. Default: no cache."""
    loader_processes: Count | None = None
    """Processes of each worker that read the features, if these take gigabytes. Default: the usable cores, up to 8,
    divided among the workers of a host."""
    allow_pipes: bool = False
    """Run shell commands in an scp (`ssh host cat x.mat |`). Only for data that you wrote yourself. Accepted only
    on the command line or in the recipe file named there; rejected in included files, run dirs and corpora."""
    max_skipped_fraction: Fraction = 0.05
    """Largest fraction of the utterances of a data dir that may have no alignment, or differ from it by 5 frames or more.
    With more, training is refused."""


class ModelConfig(Section):
    """The network: hidden layers, then softmax over the pdfs. Equal hidden layers are `hidden_layers`, `hidden_units` and
    `activation`; any others are `layers`."""

    hidden_layers: Annotated[int, Field(ge=0, le=100)] = 6
    """Number of hidden layers."""
    hidden_units: Count = 2048
    """Units in each hidden layer."""
    activation: Literal["sigmoid", "tanh", "relu"] = "sigmoid"
    """Activation of the hidden layers."""
    layers: Annotated[list[AnyLayer], AfterValidator(check_number)] | None = None
    """Instead of the three keys above, the layers below the output layer, first to last, each a mapping of its kind to its
    keys: [Layers](#layers)."""
    bands: Size | None = None
    """Bands of a frame along which the convolutions of `model.layers` move: 8 for images of 8 x 8 pixels, 40 if features
    of 120 dims have their deltas in the file. Default: the dims of the features, without `data.deltas`."""
    freeze: list[int] | None = None
    """Numbers of layers that keep their initial parameters bit for bit, such as those of RBMs or of a trained network: 0
    is the first hidden layer, the number of hidden layers the output layer. With `model.layers`, count every entry
    (`repeat: 4` counts as four). At least one layer must stay trainable."""

    def summary(self) -> str:
        """The hidden layers in a few words: "6 x 2048 sigmoid"."""
        if self.layers is not None:
            return ", ".join(layer.describe() for layer in self.layers) or "no hidden layers"
        return f"{self.hidden_layers} x {self.hidden_units} {self.activation}"

    def rbm_units(self) -> list[int]:
        """Hidden units of RBMs, lowest first: of all hidden layers, or of the affine ones at the end of `layers`."""
        if self.layers is None:
            return [self.hidden_units] * self.hidden_layers
        units = [layer.rbm_units or 0 for layer in self.layers for _ in range(layer.repeat)]
        return list(takewhile(bool, reversed(units)))[::-1]

    def layers_below_rbms(self) -> int:
        """How many layers, as `freeze` counts them, are below those of `rbm_units`."""
        return sum(self.layer_counts()) - len(self.rbm_units())

    def layer_counts(self) -> list[int]:
        """Of each of `layers`, or of each hidden layer, how often it is repeated."""
        return [1] * self.hidden_layers if self.layers is None else [layer.repeat for layer in self.layers]


class TrainedModelConfig(Section):
    """The mapping that `init` takes: a trained network to start from."""

    model: Path
    """A run dir of ddnn or a model file in it (`best.safetensors` of a run that has not finished), or a directory of
    Kaldi's `final.nnet` and its feature transform."""
    output_layer: Literal["keep", "random"] = "keep"
    """`random` makes a new output layer, for another tree or another number of pdfs."""

    def __str__(self) -> str:
        return f"from {self.model}"


class SequenceConfig(Section):
    """The mapping that `criterion` takes: a criterion over whole utterances and their lattices, for a network that was
    trained by cross-entropy (`init.model`): docs/how-to/sequence.md. `data.alignments` is then an alignment dir made with this
    network (`ddnn align`), and the defaults are those of Kaldi's `steps/nnet/train_mpe.sh` and `train_mmi.sh`."""

    name: Literal["smbr", "mpfe", "mmi"]
    """`smbr`: the expected number of frames with the right pdf; `mpfe`: with the right phone; `mmi`: maximum mutual
    information."""
    lattices: Paths
    """Denominator lattices of all utterances, made with this network: a dir with `lat.scp` or `lat.*.gz`
    (`steps/nnet/make_denlats.sh`), or a list of such dirs."""
    silence_phones: Path
    """File with the ids of the silence phones: `phones/silence.csl` of the lang dir."""
    class_counts: Path | None = None
    """Counts of the pdfs whose logarithms are subtracted from the network's outputs, which Kaldi has in
    `ali_train_pdf.counts`. Default: those of the run dir of `init.model`."""
    acoustic_scale: Positive = 0.1
    """Factor of log-likelihoods in a lattice."""
    lm_scale: NotNegative = 1.0
    """Factor of graph costs in a lattice."""
    old_acoustic_scale: NotNegative = 0.0
    """Factor of the acoustic costs that the lattices have, to which the new ones are added."""
    one_silence_class: bool = True
    """sMBR and MPFE: silence for silence is right, whichever silence phone it is. `false`: silence is never right."""
    drop_frames: bool = True
    """MMI: frames on which the reference is not in the lattice do not count."""
    boost: NotNegative = 0.0
    """MMI: boosting of paths with wrong phones (0.1 is usual)."""
    max_frames: Count = 6000
    """Longer utterances are skipped."""
    utterances_per_update: Count = 1
    """Utterances of each worker whose gradients are summed in one update."""

    def __str__(self) -> str:
        return self.name


class GrowingMinibatchConfig(Section):
    """The mapping that `minibatch_size` takes: a minibatch that grows from epoch to epoch, by the same factor each time,
    in multiples of 8 frames."""

    start: Count
    """Frames in a minibatch of the first epoch."""
    end: Count
    """Frames in a minibatch of epoch number `epochs` and of all that follow; `start` or more."""
    epochs: Annotated[int, Field(ge=2)] = 5
    """Number of epochs over which the minibatch grows. Rejected epochs count."""

    def __str__(self) -> str:
        return f"{self.start} to {self.end} over {self.epochs} epochs"


class MomentumConfig(Section):
    """The keys that all optimizers have."""

    momentum: Fraction = 0.0
    """c <- momentum * c + gradient; the step is learning rate * c."""
    l2: NotNegative = 0.0
    """Each minibatch of N frames subtracts learning rate * l2 * N * W from the weights W, but nothing from biases."""


class SgdConfig(MomentumConfig):
    """The optimizer. Gradients are sums over the minibatch, as in Kaldi: the learning rate multiplies the sum."""

    name: Literal["sgd"] = "sgd"
    """`sgd`: plain stochastic gradient descent. `ng-sgd`: natural-gradient SGD."""
    max_gradient_norm: NotNegative = 0.0
    """Gradient clipping: the largest Euclidean norm, over all layers, of the gradient per frame (the sum over the
    minibatch divided by its frames). A longer gradient is scaled down to it, before momentum. 0: never."""


class NgSgdConfig(MomentumConfig):
    """Natural-gradient SGD."""

    name: Literal["ng-sgd"] = "ng-sgd"
    rank_in: Count = 20
    """Rank of the Fisher matrix of each layer's input (the paper's code: 30)."""
    rank_out: Count = 80
    """Rank of the Fisher matrix of each layer's output derivative (the paper's code: 60); of a convolution of 32 or
    fewer filters at most a quarter of their number."""
    alpha: NotNegative = 4.0
    """Smoothing of the Fisher matrices with the identity."""
    num_samples_history: Annotated[float, Field(gt=0.0, le=1e6)] = 2000.0
    """Time constant of the Fisher matrices, in frames."""
    update_period: Count = 4
    """Minibatches between two updates of the Fisher matrices, after the first 10 minibatches. In bf16 it is four times as
    many from minibatch 1000 on, unless `exact: true`."""
    max_change_per_sample: NotNegative = 0.075
    """A step that would change a layer by more than this per frame, its `learn_rate_coef` included (but not with `unscaled`),
    is scaled down. 0: never."""
    max_change_scope: Literal["global", "local", "unscaled"] = "global"
    """`global` counts the frames of all workers: if learning rates are multiplied by N workers, a step may be N times
    as long, as with one worker and N times the minibatch. `local` counts the worker's own frames (nnet2), which
    slows down training with many workers. `unscaled` limits the step before it is multiplied by the learning rate, as
    in the code behind arXiv 1507.01239: learning rates of 0.32 and more work only with it."""
    exact: bool = False
    """With `precision: bf16`, precondition in float32 and round the result, and always update after
    `update_period` minibatches, which takes longer. In float32, precondition by PyTorch's products even if compiled
    kernels would do it, which changes the last bits."""


class CombinationConfig(Section):
    """The keys that all schedules have: what the final model is. `depends_on_length`: whether the learning rates of all
    epochs depend on their number, so that a training cannot be made longer."""

    depends_on_length: ClassVar[bool] = False

    keep: Literal["last", "best"] = "last"
    """Which epoch's model becomes the final one: that of the `last` accepted epoch, or the `best`, with the lowest
    cross-validation loss. Newbob's last accepted epoch is its best one, unless `criterion`, `min_epochs` or `keep_lr_epochs` is set."""
    average_last: Annotated[int, Field(ge=1, le=100)] = 1
    """At the end the means of the parameters after the last 2, 3, ... accepted epochs are evaluated, up to this number. The
    best becomes the final model if its cross-validation loss is no higher than the last accepted epoch's. 1: no means."""
    moving_average_epochs: Positive | None = None
    """Likewise an exponential moving average of the parameters with this time constant, in epochs: it is updated every
    `parallel.averaging_period` minibatches, with one worker too. Default: none."""


class NewbobConfig(CombinationConfig):
    """The learning-rate schedule, which also decides when training ends."""

    name: Literal["newbob"] = "newbob"
    """`newbob`: the learning rate is halved once the cross-validation improves only a little; epochs that make it worse
    are rejected. `exponential`: from `initial_learning_rate` to `final_learning_rate`; `power`: lr(t) =
    `initial_learning_rate` * (1 + t / `decay_epochs`)^-`exponent` after t epochs; `constant`: `initial_learning_rate`;
    these three without rejection, for `epochs` epochs; `passes`: of a sequence training."""
    initial_learning_rate: Positive = 0.008
    """Learning rate of the first epoch. It multiplies the SUM of the gradient over a minibatch (0.008 at minibatch size
    256 is 2.048 on the mean)."""
    max_epochs: Count = 20
    """Largest number of epochs."""
    criterion: Literal["loss", "frame-accuracy"] = "loss"
    """What is compared: the relative improvement of the cross-validation loss (Kaldi nnet1), or the absolute gain in
    frame accuracy (the paper)."""
    start_halving_impr: Positive = Field(default_factory=lambda known: 0.01 if known["criterion"] == "loss" else 0.005)
    """Halving starts below this improvement. Default: 0.01 (relative) for loss, 0.005 (absolute) for frame
    accuracy."""
    end_halving_impr: NotNegative = 0.001
    """Training ends below this improvement once halving has begun; relative for loss, absolute for frame accuracy."""
    halving_factor: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """Factor of the learning rate when it is halved."""
    keep_lr_epochs: Annotated[int, Field(ge=0)] = 0
    """Number of first epochs that are always accepted and keep the initial learning rate (`keep_lr_iters`)."""
    min_epochs: Annotated[int, Field(ge=0)] = 0
    """Number of first epochs that are always accepted; training does not end before them (`min_iters`)."""


class ExponentialConfig(CombinationConfig):
    """An exponentially falling learning rate."""

    depends_on_length: ClassVar[bool] = True

    name: Literal["exponential"] = "exponential"
    initial_learning_rate: Positive = 0.008
    final_learning_rate: Positive = Field(default_factory=lambda known: 0.01 * float(known["initial_learning_rate"]))
    """Learning rate of the last epoch. Default: 0.01 * `initial_learning_rate`."""
    epochs: Count = 15
    """Number of epochs."""


class ConstantConfig(CombinationConfig):
    """The same learning rate in all epochs."""

    name: Literal["constant"] = "constant"
    initial_learning_rate: Positive = 0.008
    epochs: Count = 15


class PassesConfig(CombinationConfig):
    """The passes of a sequence training."""

    name: Literal["passes"] = "passes"
    initial_learning_rate: Positive = 1e-5
    epochs: Count = 4
    """Largest number of passes; training ends earlier where cross-validation gets worse in two passes, one after the
    other."""
    halving_factor: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Factor of the learning rate after each pass."""


class PowerConfig(CombinationConfig):
    """A learning rate that falls by a power of the epochs passed."""

    name: Literal["power"] = "power"
    initial_learning_rate: Positive = 0.008
    decay_epochs: Annotated[float, Field(ge=1e-3, le=1e6)] = 1.0
    """Epochs after which the learning rate is `initial_learning_rate` * 2^-`exponent`: r of power scheduling."""
    exponent: Annotated[float, Field(gt=0.0, le=10.0)] = 1.0
    """How fast the learning rate falls: c of power scheduling."""
    epochs: Count = 15


class PretrainConfig(Section):
    """RBM pretraining, if `init` is `rbm`. Its learning rates multiply the MEAN gradient over a minibatch, as in
    Kaldi."""

    dbn: Path | None = None
    """A pretrained DBN: a dir of `ddnn pretrain`, or Kaldi's `N.dbn`. By default `ddnn train` pretrains one."""
    feature_transform: Path | None = None
    """The `final.feature_transform` of a Kaldi `.dbn` file."""
    below: Path | None = None
    """If `model.layers` has convolutions: run dir of a network that was trained with the same ones. RBMs are trained for
    the affine layers at the end of `model.layers`, on the outputs of that network's layers below them, which are then
    fine-tuned together with them: docs/reference/layers.md."""
    epochs: Annotated[list[Count], Field(min_length=1)] | None = None
    """Epochs for each RBM, lowest first; the last number applies to all remaining RBMs."""
    hours: Positive = 100.0
    """Hours of speech on which each RBM is trained if `epochs` is not given, twice as many for the lowest; at least one
    epoch and at most `max_epochs`."""
    max_epochs: Count = 20
    """Limit of the number of epochs that follows from `hours`, which on an hour of speech would be 100 and 200.
    Kaldi's recipes for small corpora use `--rbm-iter 20`, which is `epochs: [40, 20]`."""
    minibatch_size: Count = 100
    """Frames in a minibatch of pretraining."""
    gaussian_learning_rate: Positive = 0.01
    """Learning rate of the lowest RBM, whose visible units are Gaussian. An RBM on top of a convolution has binary visible
    units and uses `pretrain.learning_rate`."""
    learning_rate: Positive = 0.4
    """Learning rate of the other RBMs."""
    l2: NotNegative = 2e-4
    """Weight decay."""
    kaldi_momentum: bool = True
    """`true`: as in Kaldi, momentum 0.9 from the second minibatch on, while the learning rate is scaled as if the
    momentum rose from 0.5. `false`: the momentum does rise from 0.5."""


class WorkersConfig(Section):
    """The keys that all averaging strategies have."""

    workers: Count = 1
    """Number of workers. Each is one MPI rank with its device."""
    columns: Count | Literal["auto"] = 1
    """Number of workers that share one network: each holds an equal part of the outputs or filters of every layer. They train
    on the same minibatches, and compute what one worker would, up to rounding. `workers` must be a multiple of it; models are
    averaged among `workers` / `columns` of these replicas: docs/how-to/model-parallel.md. `auto` (CPUs, networks of affine layers): the
    number predicted to be fastest, from products and messages timed at the start. recipe.yaml in the run dir records it."""
    stages: Count | Literal["auto"] = 1
    """Number of workers that share one network as a pipeline: each holds consecutive layers, and a minibatch goes through
    them in microbatches. They compute what one worker would, up to rounding. `workers` must be a multiple of `columns` x
    `stages`; the layers of a stage may be split over columns, too: docs/how-to/model-parallel.md. Only on CPUs and without dropout.
    `auto`: as for `columns`; it also chooses the number of microbatches if that is not given."""
    microbatches: Count | None = None
    """Microbatches of a minibatch in a pipeline. Default: as many as possible with 64 frames each, but at most 4 for each
    stage."""
    pipeline: Literal["fill-drain", "1f1b"] = "fill-drain"
    """In which order a stage takes microbatches: `fill-drain` all forward, then all backward; `1f1b` one forward and one
    backward in turn, which with SGD needs memory for at most `stages` of them."""
    averaging_period: Count = 10
    """Minibatches of each worker between two averaging steps."""
    averaging_frames: Count | None = None
    """Alternative to `averaging_period`: frames of each worker between two averaging steps, rounded to whole minibatches.
    This suits utterances, whose lengths differ."""
    warmup: Literal["none", "single-worker", "all-reduce"] = "none"
    """Warm-up before the first epoch: `single-worker` trains rank 0 alone on its shard, at the unscaled learning rate,
    and gives its model to all workers; `all-reduce` averages after every minibatch."""
    warmup_minibatches: Count = 100
    """Minibatches of each worker that takes part in the warm-up."""
    overlap: bool = False
    """Average the parameters of an interval while the next interval is trained, and correct them afterwards."""
    comm_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which parameters are sent. bfloat16 halves the bytes; sums are computed in float32."""
    gpu_transport: Literal["auto", "host", "device", "nccl"] = "auto"
    """GPUs: `host` sends parameters through pinned host memory, `device` directly from device memory if the MPI says
    that it supports this, `nccl` by NCCL. `auto`: `device` if the MPI says that it supports it, otherwise `host`, or `nccl`
    if `columns` is over 1: outputs of layers go from GPU to GPU, not by `host`."""
    oversubscribe_gpus: bool = False
    """Allow more workers than GPUs on a host."""
    pretrain_data: Literal["sharded", "replicated"] = "sharded"
    """How RBMs that the run pretrains itself are trained. `sharded`: each worker trains on its shard, and they average by all-reduce
    every `averaging_period` minibatches. `replicated`: rank 0 trains on the whole corpus, which must fit into its
    memory; the result is bitwise identical to that of a single worker."""
    max_restarts: NotNegativeCount = 3
    """How often the job is restarted from its newest checkpoint after a worker was killed by a signal or hung. Each
    newer checkpoint resets the count. 0: never. Errors that a worker reports are not retried."""
    hang_timeout: Positive = 300.0
    """Seconds without progress after which a worker is considered hung and killed."""
    cpu_threads: Count = 1
    """CPU threads of each worker. With minibatches of a few hundred frames one is fastest: two were ten times slower in
    a measurement."""

    @property
    def split(self) -> tuple[int, int]:
        """Columns and stages; `auto` is 1 until the workers have chosen."""
        columns, stages = (1 if number == "auto" else number for number in (self.columns, self.stages))
        return columns, stages

    @property
    def period(self) -> str:
        """Between two averaging steps, in words."""
        frames = self.averaging_frames
        return f"{self.averaging_period} minibatches" if frames is None else f"{frames} frames"

    @property
    def replicas(self) -> int:
        """Among how many models the data is shared."""
        return max(1, self.workers // math.prod(self.split))


class AveragingConfig(WorkersConfig):
    """Workers and the averaging of their parameters: docs/how-to/parallel.md. With one worker only `workers` and
    `cpu_threads` are used."""

    strategy: Literal["all-reduce", "butterfly", "ring", "hopping-ring", "gradient-all-reduce"] = "all-reduce"
    """How parameters are averaged. `gradient-all-reduce` averages the gradients of every minibatch instead; `bmuf`
    applies momentum to the averaged change of a block."""
    scale_learning_rate: bool = True
    """Multiply the schedule's learning rates by the number of workers, as in arXiv 1507.01239. Default: true, but false
    for bmuf."""
    local_momentum: Literal["keep", "average", "reset"] = "keep"
    """What an averaging step does to the workers' momentum (`optimizer.momentum`). Default: keep, but reset for bmuf."""


class BmufConfig(WorkersConfig):
    """Blockwise model-update filtering."""

    strategy: Literal["bmuf"] = "bmuf"
    scale_learning_rate: bool = False
    local_momentum: Literal["keep", "average", "reset"] = "reset"
    block_momentum: Fraction | None = None
    """Fraction of the last block's change that is added to the next. Default: 1 - 1/n for n workers."""
    block_learning_rate: Positive = 1.0
    """Factor of the averaged change of a block."""
    nesterov: bool = False
    """Start each block from the model that the block momentum leads to (Nesterov)."""


class CheckpointConfig(Section):
    """Checkpoints, written after each epoch and within it, for --resume and restarts: docs/explanation/reliability.md."""

    interval_minutes: Positive = 2.0
    """Minutes between two checkpoints within an epoch, which are written at the next averaging step."""
    interval_minibatches: Count | None = None
    """Also write a checkpoint after this number of minibatches of each worker, at the next averaging step."""
    keep_last: Count = 2
    """How many checkpoints to keep: the newest, and earlier ones in case it is damaged."""


class LogConfig(Section):
    """What a run reports while it trains, besides `train.log` and `metrics.jsonl`."""

    interval_minutes: Positive = 5.0
    """Minutes within an epoch after which the log gets a line on how far the epoch is, with the loss so far, the speed
    and the time left."""
    tensorboard: bool = False
    """Also write losses, frame accuracies, learning rates, the time of the workers and RBM reconstruction errors, by
    epoch, into `tensorboard` in the run dir: `tensorboard --logdir exp` shows them. Needs `pip install
    'ddnn[tensorboard]'`."""


OptimizerConfig = SgdConfig | NgSgdConfig
ScheduleConfig = NewbobConfig | ExponentialConfig | ConstantConfig | PowerConfig | PassesConfig
ParallelConfig = AveragingConfig | BmufConfig

VARIANTS = {"optimizer": ("name", "sgd"), "schedule": ("name", "newbob"), "parallel": ("strategy", "all-reduce")}
"""Sections whose variants have different keys: the key that selects the variant, and its default."""


class Recipe(Section):
    """A whole recipe. Relative paths are looked up in the working directory, then in the folder of the recipe."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    """Seed of everything random: initial parameters, frame order, held-out speakers or utterances. On the same
    machine the same seed gives bitwise identical results."""
    data: DataConfig
    """Features and alignments."""
    model: ModelConfig = ModelConfig()
    """The network."""
    init: Annotated[
        Annotated[Literal["random", "rbm"], VALUE] | Annotated[TrainedModelConfig, MAPPING], VALUE_OR_MAPPING
    ] = "random"
    """Initial parameters: random (as in Kaldi nnet1), pretrained RBMs, or those of a trained network."""
    pretrain: PretrainConfig = PretrainConfig()
    """RBM pretraining."""
    criterion: Annotated[Annotated[Literal["ce"], VALUE] | Annotated[SequenceConfig, MAPPING], VALUE_OR_MAPPING] = "ce"
    """What is trained: cross-entropy against the alignment, frame by frame, or a criterion over utterances."""
    optimizer: OptimizerConfig = Field(default=SgdConfig(), discriminator="name")
    """The optimizer."""
    minibatch_size: Annotated[
        Annotated[Count, VALUE] | Annotated[GrowingMinibatchConfig, MAPPING], VALUE_OR_MAPPING
    ] = 256
    """Frames in a minibatch. The frames that remain at the end of an epoch are dropped, as in Kaldi. A mapping makes it
    grow from epoch to epoch: docs/how-to/learning-rate.md."""
    minibatch_scope: Literal["worker", "total"] = "worker"
    """`worker`: each worker uses minibatches of `minibatch_size` frames. `total`: the workers share one minibatch, so each
    gets `minibatch_size` / `parallel.workers` frames (times `parallel.columns`): docs/how-to/parallel.md."""
    randomizer_size: Count | None = None
    """Size of the shuffle buffer in frames, as in nnet-train-frmshuff (which uses 32768); utterances come in the same order
    in every epoch. Default: shuffle all frames of the corpus. See docs/explanation/differences-from-nnet1.md."""
    precision: Literal["auto", "float32", "bf16"] = "auto"
    """Type of the factors of matrix products in training. With `bf16`, parameters, their updates, losses, the state of
    NG-SGD and pretraining remain float32; cross-validation is in bf16 too, except for the output layer. `auto`: bf16
    if all workers have hardware on which it is faster (Intel's AMX, AMD's AVX512-BF16, or a GPU of compute capability 8.0)
    and the network is not small. The choice is recorded in recipe.yaml of the run dir, and its reason in the log."""
    allow_tf32: bool = False
    """GPUs: multiply float32 numbers as TF32, with 10 bits of mantissa instead of 23, in training, pretraining and
    cross-validation."""
    cuda_graphs: AutoOrOff = "auto"
    """GPUs: `auto` captures the training step as a CUDA graph, if its results agree with those of the eager step.
    `off`: eager steps."""
    schedule: ScheduleConfig = Field(default=NewbobConfig(), discriminator="name")
    """The learning-rate schedule."""
    parallel: ParallelConfig = Field(default=AveragingConfig(), discriminator="strategy")
    """Workers."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    log: LogConfig = LogConfig()
    """Reporting."""

    @property
    def minibatch(self) -> str:
        """The minibatch in a few words: "256 of all workers"."""
        return f"{self.minibatch_size}" + (" of all workers" if self.minibatch_workers > 1 else "")

    @property
    def minibatch_workers(self) -> int:
        """How many workers share `minibatch_size`."""
        return self.parallel.replicas if self.minibatch_scope == "total" else 1

    @model_validator(mode="before")
    @classmethod
    def _choose_variants(cls, tree: Any) -> Any:
        """Sets the default variant of a section that does not select one."""
        if not isinstance(tree, dict):
            return tree
        named = dict(tree)
        for section, (key, default) in VARIANTS.items():
            if isinstance(named.get(section), dict):
                named[section] = {key: default, **named[section]}
        return named
