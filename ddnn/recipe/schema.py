"""The recipe: every key, its type, default, unit and meaning. `docs/reference/recipe` is generated from this file."""

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
    """File that lists the speakers whose utterances are held out, one per line."""
    utterances: Path | None = None
    """File that lists the utterances to hold out. Each line begins with an utterance ID: a plain list, `cv_utterances` of
    another run dir, or a Kaldi table such as `utt2spk` or `text`."""
    data: Paths | None = None
    """A separate Kaldi data dir for cross-validation, or a list of them. Nothing is then held out of the training data, and no
    utterance may occur in both."""
    alignments: Paths | None = None
    """Alignments of `data.cv.data`. If that is a list of data dirs, give one for each, in the same order."""
    transforms: Paths | None = None
    """Kaldi's transforms for `data.cv.data`, given in the same way as `data.transforms`. Default: `data.transforms`, which
    contains these speakers if both data dirs were aligned together."""
    fraction: Annotated[float, Field(gt=0.0, lt=1.0)] | None = Field(
        default_factory=lambda known: 0.1 if all(value is None for value in known.values()) else None
    )
    """Fraction of the training frames to hold out. Speakers or utterances are drawn with the recipe's `seed` so that their
    frames come close to it. Default: 0.1 if nothing else in this section is given."""
    by: Literal["speaker", "utterance"] | None = None
    """Whether `fraction` holds out whole speakers or utterances. If held-out utterances are of speakers who are also trained
    on, cross-validation results look better than they would be on new speakers. Default: speakers; but utterances, with a
    warning, if there is no `utt2spk` or there are too few speakers to come within a fifth of `fraction`."""


class DataConfig(Section):
    """Kaldi features and alignments."""

    train: Paths = Field(examples=["[data/train_a, data/train_b]"])
    """Kaldi data dir with `feats.scp`, `utt2spk` and, optionally, `cmvn.scp`; or a list: docs/how-to/several-corpora.md."""
    alignments: Paths = Field(examples=["[exp/ali_a, exp/ali_b]"])
    """Kaldi alignment dir (`ali.*.gz` with transition-ids, and `final.mdl`), or one archive of pdf-ids (`.ark`, `.txt`, `.gz`).
    If `data.train` is a list, give one for each data dir, in the same order; all must use the same tree."""
    num_pdfs: Count | None = None
    """Number of pdfs (senones), used only with an archive of pdf-ids; `final.mdl` has its own. Default: the largest pdf-id +
    1."""
    cv: CrossValidationConfig = CrossValidationConfig()
    """Cross-validation."""
    splice: Annotated[int, Field(ge=0, le=100)] = 5
    """Frames of context on each side: with 5, the network's input is 11 frames wide."""
    cmvn: Literal["none", "mean", "mean-variance"] = "none"
    """Cepstral mean (and variance) normalization per speaker, from `cmvn.scp` if the data dir has one, otherwise
    computed from its features."""
    deltas: Annotated[int, Field(ge=0, le=4)] = 0
    """Highest order of the deltas to append (Kaldi's add-deltas, window 2), after CMVN and before splicing."""
    transforms: Paths | None = None
    """Kaldi dir (`exp/tri4_ali`) whose transforms are applied to raw features after CMVN: docs/how-to/raw-features.md.
    `final.mat` (LDA+MLLT) is applied to frames spliced by its `splice_opts`; if there is no `final.mat`, deltas are appended by
    `delta_opts`. Then come the `trans.*` (fMLLR) of speakers or utterances, if there are any. If `data.train` is a list, give
    one dir with the transforms of all speakers, or one for each data dir, all of one system."""
    normalize: bool = True
    """Shift and scale each spliced dimension to zero mean and unit variance over the training set."""
    feature_dtype: Literal["float32", "float16"] = "float32"
    """Type of the features in memory. `float16` takes half the memory of `float32`."""
    feature_device: Literal["auto", "cpu"] = "auto"
    """On GPUs: where the features are kept. `auto`: in GPU memory if they fit there alongside training, otherwise in host
    memory. `cpu`: in host memory. From host memory, minibatches are prefetched. The log says where they are."""
    cache_dir: Path | None = None
    """Directory for cached features, created if it does not exist. The next run on the same data maps a file within seconds;
    docs/how-to/feature-cache.md lists what the file depends on. Default: no cache."""
    loader_processes: Count | None = None
    """Processes in which each worker reads the features, if these take gigabytes. Default: the usable cores, at most 8, divided
    among the workers on a host."""
    allow_pipes: bool = False
    """Run the shell commands in an scp file (`ssh host cat x.mat |`). Only for data that you wrote yourself. Accepted only on
    the command line or in the recipe file named there; rejected in included files, run dirs and corpora."""
    max_skipped_fraction: Fraction = 0.05
    """Largest fraction of the utterances in a data dir that may lack an alignment, or differ from it in length by 5 frames or
    more. If more do, training is refused."""


class ModelConfig(Section):
    """The network: hidden layers, then a softmax over the pdfs. If all hidden layers are alike, describe them by
    `hidden_layers`, `hidden_units` and `activation`; otherwise list them in `layers`."""

    hidden_layers: Annotated[int, Field(ge=0, le=100)] = 6
    """Number of hidden layers."""
    hidden_units: Count = 2048
    """Units in each hidden layer."""
    activation: Literal["sigmoid", "tanh", "relu"] = "sigmoid"
    """Activation of the hidden layers."""
    layers: Annotated[list[AnyLayer], AfterValidator(check_number)] | None = None
    """The layers below the output layer, first to last, instead of `hidden_layers`, `hidden_units` and `activation`. Each is a
    mapping of a kind of layer to its keys: docs/reference/recipe/layers.md."""
    bands: Size | None = None
    """Bands in a frame, along which the convolutions of `model.layers` move: 8 for images of 8 x 8 pixels, 40 for features of
    120 dims that include deltas. Default: the dims of the features, without `data.deltas`."""
    freeze: list[int] | None = Field(None, examples=["[0, 1]"])
    """Numbers of the layers that keep their initial parameters bit for bit, such as those of RBMs or of a trained network. 0 is
    the first hidden layer; the number of hidden layers is the output layer. With `model.layers`, count every layer (`repeat: 4`
    counts as four). At least one layer must stay trainable."""

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
    """Run dir of ddnn, or a model file in it (`best.safetensors` of a run that has not finished); or a directory with Kaldi's
    `final.nnet` and its feature transform."""
    output_layer: Literal["keep", "random"] = "keep"
    """`keep`: that of the trained network. `random`: a new one, for another tree or another number of pdfs."""

    def __str__(self) -> str:
        return f"from {self.model}"


class SequenceConfig(Section):
    """The mapping that `criterion` takes: a criterion over whole utterances and their lattices, for a network that was
    trained by cross-entropy (`init.model`): docs/how-to/sequence.md. `data.alignments` is then an alignment dir made with this
    network (`ddnn align`), and the defaults are those of Kaldi's `steps/nnet/train_mpe.sh` and `train_mmi.sh`."""

    name: Literal["smbr", "mpfe", "mmi"]
    """`smbr`: expected number of frames with the right pdf. `mpfe`: expected number of frames with the right phone. `mmi`:
    maximum mutual information."""
    lattices: Paths
    """Denominator lattices of all utterances, made with this network: a dir with `lat.scp` or `lat.*.gz` (as from
    `steps/nnet/make_denlats.sh`), or a list of such dirs."""
    silence_phones: Path
    """File with the IDs of the silence phones: `phones/silence.csl` of the lang dir."""
    class_counts: Path | None = None
    """Counts of the pdfs, whose logarithms are subtracted from the network's outputs: Kaldi's `ali_train_pdf.counts`. Default:
    the counts in the run dir of `init.model`."""
    acoustic_scale: Positive = 0.1
    """Scale of the acoustic log-likelihoods in a lattice."""
    lm_scale: NotNegative = 1.0
    """Scale of the graph costs in a lattice."""
    old_acoustic_scale: NotNegative = 0.0
    """Scale of the acoustic costs that a lattice already has, to which the new ones are added."""
    one_silence_class: bool = True
    """With `smbr` and `mpfe`: `true` counts any silence phone as right where the reference is silence, `false` none."""
    drop_frames: bool = True
    """With `mmi`: ignore frames where the reference is not in the lattice."""
    boost: NotNegative = 0.0
    """With `mmi`: boosting factor of paths with wrong phones (0.1 is usual). 0: no boosting."""
    max_frames: Count = 6000
    """Utterances with more frames than this are skipped."""
    utterances_per_update: Count = 1
    """Utterances of each worker whose gradients are summed in one update."""

    def __str__(self) -> str:
        return self.name


class GrowingMinibatchConfig(Section):
    """The mapping that `minibatch_size` takes: a minibatch that grows from epoch to epoch, by the same factor each time, in
    multiples of 8 frames."""

    start: Count
    """Frames in a minibatch of the first epoch."""
    end: Count
    """Frames in a minibatch of epoch number `epochs` and of all later ones; at least `start`."""
    epochs: Annotated[int, Field(ge=2)] = 5
    """Number of epochs over which the minibatch grows. Rejected epochs count."""

    def __str__(self) -> str:
        return f"{self.start} to {self.end} over {self.epochs} epochs"


class MomentumConfig(Section):
    """The keys that all optimizers have."""

    momentum: Fraction = 0.0
    """c <- momentum * c + gradient; each step is learning rate * c."""
    l2: NotNegative = 0.0
    """Each minibatch of N frames subtracts learning rate * l2 * N * W from the weights W; biases are exempt."""


class SgdConfig(MomentumConfig):
    """The optimizer. Gradients are sums over the minibatch, as in Kaldi, so the learning rate multiplies the sum."""

    name: Literal["sgd"] = "sgd"
    """`sgd`: plain stochastic gradient descent. `ng-sgd`: natural-gradient SGD. `adam`: Adam. `muon`: Muon. `shampoo`: Shampoo. What the
    learning rate is for each: docs/explanation/optimizers.md."""
    max_gradient_norm: NotNegative = 0.0
    """Gradient clipping: largest Euclidean norm, over all layers, of the gradient per frame (the sum over the minibatch divided
    by its frames). A larger gradient is scaled down to it before momentum is applied. 0: no clipping."""


class NgSgdConfig(MomentumConfig):
    """Natural-gradient SGD."""

    name: Literal["ng-sgd"] = "ng-sgd"
    rank_in: Count = 20
    """Rank of the Fisher matrix of each layer's input (the paper's code: 30)."""
    rank_out: Count = 80
    """Rank of the Fisher matrix of each layer's output derivative (the paper's code: 60). For a convolution of 32 or fewer
    filters it is at most a quarter of their number."""
    alpha: NotNegative = 4.0
    """How much the Fisher matrices are smoothed with the identity."""
    num_samples_history: Annotated[float, Field(gt=0.0, le=1e6)] = 2000.0
    """Time constant of the Fisher matrices, in frames."""
    update_period: Count = 4
    """Minibatches between two updates of the Fisher matrices, after the first 10 minibatches. With `precision: bf16` there are
    four times as many from minibatch 1000 on, unless `exact: true`."""
    max_change_per_sample: NotNegative = 0.075
    """Largest change of a layer per frame; a step that would exceed it is scaled down. The layer's `learn_rate_coef` counts,
    except with `max_change_scope: unscaled`. 0: no limit."""
    max_change_scope: Literal["global", "local", "unscaled"] = "global"
    """`global` counts the frames of all workers: if learning rates are multiplied by N workers, a step may be N times as long,
    as with one worker and N times the minibatch. `local` counts only the worker's own frames (as in nnet2), which slows down
    training with many workers. `unscaled` limits the step before it is multiplied by the learning rate, as in the code behind
    arXiv 1507.01239; learning rates of 0.32 and more work only with it."""
    exact: bool = False
    """With `precision: bf16`, precondition in float32 and round the result, and always update after `update_period`
    minibatches; this takes longer. In float32, precondition with PyTorch's matrix products even where compiled kernels would do
    it; this changes the last bits of the result."""


class MeansConfig(MomentumConfig):
    """The keys of Adam and of what comes from it."""

    momentum: Fraction = 0.9
    """beta1, the share of the running mean of gradients that each minibatch keeps. Averaging treats that mean as it does momentum
    (`parallel.local_momentum`)."""
    beta2: Fraction = 0.999
    """Share of the running mean of squared gradients that each minibatch keeps. Each worker has its own."""
    epsilon: Annotated[float, Field(ge=1e-20, le=1.0)] = 1e-8
    """Added to the root of the mean of squared gradients, each summed over the minibatch."""


class AdamConfig(MeansConfig):
    """Adam."""

    name: Literal["adam"] = "adam"


class MuonConfig(MeansConfig):
    """Muon."""

    name: Literal["muon"] = "muon"
    momentum: Fraction = 0.95


class ShampooConfig(MeansConfig):
    """Shampoo."""

    name: Literal["shampoo"] = "shampoo"
    update_period: Count = 20
    """Minibatches between two computations of the roots of the matrices, by eigendecompositions."""
    max_dimension: Count = 1024
    """A longer side of a weight matrix is not preconditioned; if both are longer, the step is Adam's."""


class CombinationConfig(Section):
    """The keys that all schedules have: what the final model is. `depends_on_length`: whether the learning rates of all
    epochs depend on their number, so that a training cannot be made longer."""

    depends_on_length: ClassVar[bool] = False

    keep: Literal["last", "best"] = "last"
    """Which epoch's model becomes the final one: the `last` accepted epoch's, or the `best`, with the lowest cross-validation
    loss. With Newbob these are the same, unless `criterion`, `min_epochs` or `keep_lr_epochs` is set."""
    average_last: Annotated[int, Field(ge=1, le=100)] = 1
    """At the end of training, the means of the parameters after the last 2, 3, ... accepted epochs are evaluated, up to this
    number. The best mean becomes the final model if its cross-validation loss is no higher than the last accepted epoch's. 1:
    no means."""
    moving_average_epochs: Positive | None = None
    """Time constant, in epochs, of an exponential moving average of the parameters, which is evaluated at the end like the
    means of `average_last`. It is updated every `parallel.averaging_period` minibatches, even with one worker."""


class NewbobConfig(CombinationConfig):
    """The learning-rate schedule, which also decides when training ends."""

    name: Literal["newbob"] = "newbob"
    """`newbob`: the learning rate is halved once cross-validation improves only a little, and epochs that make it worse are
    rejected. `exponential`: the rate falls from `initial_learning_rate` to `final_learning_rate`. `power`: it is
    `initial_learning_rate` * (1 + t / `decay_epochs`)^-`exponent` after t epochs. `constant`: it stays at
    `initial_learning_rate`. These three run for `epochs` epochs and reject none. `passes`: for sequence training."""
    initial_learning_rate: Positive = 0.008
    """Learning rate of the first epoch. It multiplies the sum of the gradient over a minibatch, not the mean: 0.008 with a
    minibatch of 256 frames is 2.048 on the mean."""
    max_epochs: Count = 20
    """Largest number of epochs."""
    criterion: Literal["loss", "frame-accuracy"] = "loss"
    """What is compared between epochs: the relative improvement of the cross-validation loss (as in Kaldi nnet1), or the
    absolute gain in frame accuracy (as in arXiv 1507.01239)."""
    start_halving_impr: Positive = Field(default_factory=lambda known: 0.01 if known["criterion"] == "loss" else 0.005)
    """Halving starts once an epoch improves by less than this. Default: 0.01 (relative) for `criterion: loss`, 0.005 (absolute)
    for `frame-accuracy`."""
    end_halving_impr: NotNegative = 0.001
    """Once halving has begun, training ends after an epoch that improves by less than this: relative for `criterion: loss`,
    absolute for `frame-accuracy`."""
    halving_factor: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """Factor by which the learning rate is multiplied when it is halved."""
    keep_lr_epochs: Annotated[int, Field(ge=0)] = 0
    """Number of epochs at the beginning that are always accepted and keep the initial learning rate (`keep_lr_iters`)."""
    min_epochs: Annotated[int, Field(ge=0)] = 0
    """Number of epochs at the beginning that are always accepted; training does not end before them (Kaldi's `min_iters`)."""


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
    """Largest number of passes; training ends earlier if cross-validation gets worse in two successive passes."""
    halving_factor: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Factor by which the learning rate is multiplied after each pass."""


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
    """RBM pretraining, used if `init` is `rbm`. Its learning rates multiply the mean gradient of a minibatch, not the sum, as
    in Kaldi."""

    dbn: Path | None = None
    """A pretrained DBN: a dir written by `ddnn pretrain`, or Kaldi's `N.dbn`. Without it, `ddnn train` pretrains one."""
    feature_transform: Path | None = None
    """The `final.feature_transform` that belongs to a Kaldi `.dbn` file."""
    below: Path | None = None
    """Run dir of a network that was trained with the same convolutions, if `model.layers` has any. RBMs are then trained for
    the affine layers at the end of `model.layers`, on the outputs of that network's layers below them. Afterwards all layers
    are fine-tuned together: docs/reference/layers.md."""
    epochs: Annotated[list[Count], Field(min_length=1)] | None = Field(None, examples=["[20, 10]"])
    """Epochs for each RBM, lowest first; the last number applies to all remaining RBMs."""
    hours: Positive = 100.0
    """Hours of speech on which each RBM is trained if `epochs` is not given, twice as many for the lowest. Each takes at least
    one epoch and at most `max_epochs`."""
    max_epochs: Count = 20
    """Limit of the number of epochs that follows from `hours`, which on an hour of speech would be 100, and 200 for the lowest
    RBM. Kaldi's recipes for small corpora use `--rbm-iter 20`, which is `epochs: [40, 20]`."""
    minibatch_size: Count = 100
    """Frames in a minibatch of pretraining."""
    gaussian_learning_rate: Positive = 0.01
    """Learning rate of the lowest RBM, whose visible units are Gaussian. An RBM on top of a convolution has binary visible
    units, and `learning_rate` applies."""
    learning_rate: Positive = 0.4
    """Learning rate of the other RBMs."""
    l2: NotNegative = 2e-4
    """Weight decay."""
    kaldi_momentum: bool = True
    """`true`: as in Kaldi, the momentum is 0.9 from the second minibatch on, while the learning rate is scaled as if the
    momentum rose from 0.5. `false`: the momentum does rise from 0.5."""


class WorkersConfig(Section):
    """The keys that all averaging strategies have."""

    workers: Count = 1
    """Number of workers. Each is one MPI rank with a device of its own."""
    columns: Count | Literal["auto"] = 1
    """Number of workers that share one network: each holds an equal part of the outputs or filters of every layer. They train
    on the same minibatches, and compute what one worker would, up to rounding. `workers` must be a multiple of `columns`;
    models are averaged among the `workers` / `columns` replicas: docs/how-to/model-parallel.md. `auto` (CPUs, networks of
    affine layers): the number that is predicted to be fastest, from products and messages timed at the start. The run dir's
    recipe.yaml records it."""
    stages: Count | Literal["auto"] = 1
    """Number of workers that share one network as a pipeline: each holds consecutive layers, and a minibatch goes through them
    in microbatches. They compute what one worker would, up to rounding. `workers` must be a multiple of `columns` x `stages`;
    the layers of a stage may be split over columns, too: docs/how-to/model-parallel.md. Only on CPUs and without dropout. `auto`:
    as for `columns`; it also chooses the number of microbatches if `microbatches` is not given."""
    microbatches: Count | None = None
    """Number of microbatches into which a pipeline divides a minibatch. Default: as many as possible with 64 frames each, but
    at most 4 for each stage."""
    pipeline: Literal["fill-drain", "1f1b"] = "fill-drain"
    """Order in which a stage takes microbatches. `fill-drain`: all forward, then all backward. `1f1b`: one forward and one
    backward in turn, which with SGD needs memory for at most `stages` of them."""
    averaging_period: Count = 10
    """Minibatches of each worker between two averaging steps."""
    averaging_frames: Count | Literal["epoch", "auto"] | None = None
    """Instead of `averaging_period`: frames of each worker between two averaging steps, rounded to whole minibatches. This
    suits utterances, whose lengths differ. `epoch`: parameters are averaged at the end of each epoch only. `auto`:
    as often as possible within a tenth of the training time, measured at the start, and at most after every minibatch. The run dir's
    recipe.yaml records the number; another run with `auto` may have another."""
    warmup: Literal["none", "single-worker", "all-reduce"] = "none"
    """Warm-up before the first epoch. `single-worker`: rank 0 alone trains on its shard, at the unscaled learning rate, and
    gives its model to all workers. `all-reduce`: parameters are averaged after every minibatch."""
    warmup_minibatches: Count = 100
    """Minibatches of each worker that takes part in the warm-up."""
    overlap: bool = False
    """Average the parameters of an interval while the next interval is trained, and correct the parameters afterwards."""
    comm_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which parameters are sent. `bfloat16` halves the bytes; sums are still computed in float32."""
    gpu_transport: Literal["auto", "host", "device", "nccl"] = "auto"
    """How GPUs exchange parameters. `host`: through pinned host memory. `device`: directly from device memory, if the MPI says
    that it supports this. `nccl`: by NCCL. `auto`: `device` if the MPI says that it supports it, otherwise `host`. If `columns`
    is over 1, `auto` takes `nccl` instead of `host`: the outputs of layers go from GPU to GPU."""
    oversubscribe_gpus: bool = False
    """Allow more workers than GPUs on a host."""
    pretrain_data: Literal["sharded", "replicated"] = "sharded"
    """How RBMs are trained if the run pretrains them itself. `sharded`: each worker trains on its shard, and they average by
    all-reduce every `averaging_period` minibatches. `replicated`: rank 0 trains on the whole corpus, which must fit into its
    memory; the result is bitwise identical to that of a single worker."""
    max_restarts: NotNegativeCount = 3
    """How often the job is restarted from its newest checkpoint after a worker was killed by a signal or hung. Each newer
    checkpoint resets the count. Errors that a worker reports are not retried. 0: no restarts."""
    hang_timeout: Positive = 300.0
    """Seconds without progress after which a worker is considered hung and killed."""
    cpu_threads: Count = 1
    """CPU threads of each worker. With minibatches of a few hundred frames one thread is fastest; in a measurement, two were
    ten times slower."""

    @property
    def split(self) -> tuple[int, int]:
        """Columns and stages; `auto` is 1 until the workers have chosen."""
        columns, stages = (1 if number == "auto" else number for number in (self.columns, self.stages))
        return columns, stages

    @property
    def period(self) -> str:
        """Between two averaging steps, in words."""
        frames = self.averaging_frames
        if frames is None:
            return f"{self.averaging_period} minibatches"
        return f"{frames} frames" if isinstance(frames, int) else {"epoch": "one epoch"}.get(frames, frames)

    def averaging_minibatches(self, frames: float) -> float:
        """Minibatches of so many frames between two averaging steps; infinite where there are none within an epoch. `auto`:
        as by default."""
        if isinstance(self.averaging_frames, int):
            return max(1.0, self.averaging_frames / frames)
        return math.inf if self.averaging_frames == "epoch" else self.averaging_period

    @property
    def replicas(self) -> int:
        """Among how many models the data is shared."""
        return max(1, self.workers // math.prod(self.split))


class AveragingConfig(WorkersConfig):
    """Workers and the averaging of their parameters: docs/how-to/parallel.md. With one worker only `workers` and
    `cpu_threads` are used."""

    strategy: Literal["all-reduce", "butterfly", "ring", "hopping-ring", "gradient-all-reduce", "1-bit"] = "all-reduce"
    """How parameters are averaged. `gradient-all-reduce` averages the gradients of every minibatch instead; `1-bit` sends
    their change in one bit each, with error feedback; `bmuf` applies momentum to the averaged change of a block; with
    `elastic` a center model attracts the workers' models; with `async` workers send their changes to a parameter server
    without waiting for each other."""
    scale_learning_rate: bool = True
    """Multiply the schedule's learning rates by the number of workers, as in arXiv 1507.01239."""
    local_momentum: Literal["keep", "average", "reset"] = "keep"
    """What an averaging step does to the momentum of the workers (`optimizer.momentum`): keep each worker's own, average it, or
    reset it to zero."""


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
    """Start each block from the model to which the block momentum leads (Nesterov momentum)."""


class ElasticConfig(WorkersConfig):
    """Elastic averaging."""

    strategy: Literal["elastic"] = "elastic"
    scale_learning_rate: bool = True
    local_momentum: Literal["keep", "average", "reset"] = "keep"
    elasticity: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9
    """How much of the workers' mean change the center model takes (beta of EASGD); n workers return 1/n as much of theirs."""


class AsyncConfig(WorkersConfig):
    """Asynchronous SGD with a parameter server."""

    strategy: Literal["async"] = "async"
    scale_learning_rate: bool = True
    local_momentum: Literal["keep", "average", "reset"] = "keep"
    update_scale: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Factor of the changes that the workers send, as the server adds them. Default: 1/n for n workers, so that together they
    count as in averaging. 1 with `scale_learning_rate: false`: Downpour SGD as published, which diverges with many workers."""


class CheckpointConfig(Section):
    """Checkpoints, written after each epoch and within it, for `--resume` and for restarts: docs/explanation/reliability.md."""

    interval_minutes: Positive = 2.0
    """Minutes between two checkpoints within an epoch. They are written at the next averaging step."""
    interval_minibatches: Count | None = None
    """Also write a checkpoint after this many minibatches of each worker, at the next averaging step."""
    keep_last: Count = 2
    """Number of checkpoints to keep: the newest, and earlier ones in case it is damaged."""


class LogConfig(Section):
    """What a run reports while it trains, apart from `train.log` and `metrics.jsonl`."""

    interval_minutes: Positive = 5.0
    """Minutes between two log lines within an epoch. Each has the progress, the loss so far, the speed and the time left."""
    tensorboard: bool = False
    """Also write losses, frame accuracies, learning rates, the workers' times and RBM reconstruction errors, by epoch, to
    `tensorboard` in the run dir. `tensorboard --logdir exp` shows them. Needs `pip install 'ddnn[tensorboard]'`."""


OptimizerConfig = SgdConfig | NgSgdConfig | AdamConfig | MuonConfig | ShampooConfig
ScheduleConfig = NewbobConfig | ExponentialConfig | ConstantConfig | PowerConfig | PassesConfig
ParallelConfig = AveragingConfig | BmufConfig | ElasticConfig | AsyncConfig

VARIANTS = {"optimizer": ("name", "sgd"), "schedule": ("name", "newbob"), "parallel": ("strategy", "all-reduce")}
"""Sections whose variants have different keys: the key that selects the variant, and its default."""


class Recipe(Section):
    """A whole recipe. Relative paths are looked up in the working directory, then in the folder of the recipe."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    """Seed of everything random: initial parameters, frame order, held-out speakers or utterances. On the same machine, the
    same seed gives bitwise identical results, unless `parallel.averaging_frames` is `auto`."""
    data: DataConfig
    """Features and alignments."""
    model: ModelConfig = ModelConfig()
    """The network."""
    init: Annotated[
        Annotated[Literal["random", "rbm"], VALUE] | Annotated[TrainedModelConfig, MAPPING], VALUE_OR_MAPPING
    ] = Field("random", examples=["{model: exp/dnn}"])
    """Initial parameters: `random` (as in Kaldi nnet1), pretrained RBMs (`rbm`), or a trained network (a mapping)."""
    pretrain: PretrainConfig = PretrainConfig()
    """RBM pretraining."""
    criterion: Annotated[Annotated[Literal["ce"], VALUE] | Annotated[SequenceConfig, MAPPING], VALUE_OR_MAPPING] = (
        Field("ce", examples=["{name: smbr, lattices: exp/denlats, silence_phones: data/lang/phones/silence.csl}"])
    )
    """What is trained: `ce`, frame-wise cross-entropy against the alignment, or a criterion over utterances (a mapping)."""
    optimizer: OptimizerConfig = Field(default=SgdConfig(), discriminator="name")
    """The optimizer."""
    minibatch_size: Annotated[
        Annotated[Count, VALUE] | Annotated[GrowingMinibatchConfig, MAPPING], VALUE_OR_MAPPING
    ] = Field(256, examples=["{start: 256, end: 2048}"])
    """Frames in a minibatch. The frames that remain at the end of an epoch are dropped, as in Kaldi. With a mapping, the
    minibatch grows from epoch to epoch: docs/how-to/learning-rate.md."""
    minibatch_scope: Literal["worker", "total"] = "worker"
    """`worker`: each worker has minibatches of `minibatch_size` frames. `total`: the workers share one minibatch, so each gets
    `minibatch_size` / `parallel.workers` frames (times `parallel.columns`): docs/how-to/parallel.md."""
    randomizer_size: Count | None = None
    """Size of the shuffle buffer in frames, as in Kaldi's nnet-train-frmshuff (which uses 32768); utterances then come in the
    same order in every epoch. See docs/explanation/differences-from-nnet1.md. Default: all frames of the
    corpus are shuffled."""
    precision: Literal["auto", "float32", "bf16"] = "auto"
    """Type of the factors of matrix products in training. With `bf16`, parameters, their updates, losses, the state of NG-SGD
    and pretraining remain float32; cross-validation is in bf16 too, except for the output layer. `auto`: bf16 if the network is
    not small and all workers have hardware on which it is faster (Intel's AMX, AMD's AVX512-BF16, or a GPU of compute
    capability 8.0). The run dir's recipe.yaml records the choice, and the log gives the reason."""
    allow_tf32: bool = False
    """On GPUs: multiply float32 as TF32 (10 bits of mantissa, not 23) in training, pretraining and cross-validation."""
    cuda_graphs: AutoOrOff = "auto"
    """On GPUs: `auto` captures the training step as a CUDA graph, if it agrees with the eager step. `off`: eager steps."""
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
