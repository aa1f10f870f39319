"""What of a training depends on its criterion: minibatches, objective and validation; of cross-entropy frame by frame, and of
a criterion over utterances and their lattices."""

from __future__ import annotations

import logging
from collections import Counter
from functools import partial
from pathlib import Path

import torch

from ddnn.data.batches import Sampler, ShuffledSampler, UtteranceSampler, shuffled, utterances_of
from ddnn.data.dataset import AcousticDataset, FrameSubset
from ddnn.data.index import UtteranceIndex
from ddnn.distributed.groups import Groups
from ddnn.kaldi.alignments import check_same_tree, kaldi_counts, read_transition_ids, transition_digest
from ddnn.kaldi.transition_model import read_transition_model
from ddnn.lattices.objective import SequenceObjective, Utterances
from ddnn.lattices.store import open_lattices
from ddnn.nn.arithmetic import Float32
from ddnn.nn.objective import CrossEntropy, MakeObjective
from ddnn.nn.scorer import log_priors, read_counts
from ddnn.optim.schedule import MinibatchSizes
from ddnn.recipe.schema import Recipe, SequenceConfig, TrainedModelConfig
from ddnn.recipe.section import as_list
from ddnn.runs.run_dir import RunDir
from ddnn.runs.run_status import MODEL_DIGEST, PDF_COUNTS, model_digest, read_digest, run_dir_of
from ddnn.training import options
from ddnn.training.data import load_data
from ddnn.training.evaluation import CrossValidation, EvalResult, Validation, baseline_result
from ddnn.util.arrays import Int32Array
from ddnn.util.errors import DataError, RecipeError
from ddnn.util.progress import progress_bar
from ddnn.util.text import plural

log = logging.getLogger(__name__)


class Criterion:
    """Cross-entropy. Collective.

    Attributes:
        data: what this worker trains on.
        sizes: of this worker's minibatches.
        precision: that the recipe asks for.
        counts: float64 (pdfs,), from which the priors of decoding are made.
        make_objective: of the training.
        graphs: whether a step may be captured as a CUDA graph: the objective leaves the host nothing to do.
    """

    make_objective: MakeObjective = CrossEntropy
    graphs = True

    def __init__(self, recipe: Recipe, device: torch.device, groups: Groups) -> None:
        self.recipe, self.groups = recipe, groups
        self.data = data = load_data(recipe, device, groups)
        self.sizes, self.precision = options.minibatch_sizes(recipe), recipe.precision
        self.counts = kaldi_counts(data.index.pdf_counts)
        options.require_minibatch(data.index, "minibatch_size", self.sizes.end, data.train_shards)

    def sampler(self) -> Sampler:
        """This worker's minibatches of the training set."""
        recipe, prefetch = self.recipe, self.data.device.type == "cuda"
        seeds = recipe.seed, self.groups.data.rank
        return ShuffledSampler(self.data.train, self.sizes.start, *seeds, recipe.randomizer_size, prefetch=prefetch)

    def validation(self, arithmetic: Float32) -> Validation:
        """By which epochs are accepted. Collective."""
        data, comm = self.data, self.groups.data
        baseline = baseline_result(data.train, data.cv, data.index.num_pdfs, comm)
        return CrossValidation(data.cv, comm, arithmetic, baseline=baseline)


class HeldOut(CrossValidation):
    """Of a sequence training: no pass is rejected, and none has to be better than the initial network."""

    def is_better(self, result: EvalResult, initial: EvalResult) -> bool:
        return True


class UtteranceCriterion(Criterion):
    """sMBR, MPFE or MMI, utterance by utterance; its log-priors are those of `counts`, a file."""

    graphs = False

    def __init__(
        self,
        recipe: Recipe,
        config: SequenceConfig,
        device: torch.device,
        groups: Groups,
        run: RunDir,
        counts: Path,
        *,
        resumed: bool,
    ) -> None:
        self.recipe, self.groups, self.config, self.precision = recipe, groups, config, "float32"
        self.lattices = open_lattices(as_list(config.lattices), run.path / "lattices", groups.world, keep=resumed)
        self.data = data = load_data(recipe, device, groups, skips=self._skips)
        self.counts = read_counts(counts, data.index.num_pdfs)
        references = dict[str, Int32Array]()
        for source, dataset in ((data.source, data.dataset), (data.cv_source, data.cv.dataset)):
            for part in source.parts if source is not None else ():
                references |= read_transition_ids(part.corpus.alignments, {*dataset.utterances})
        model = read_transition_model(data.source.parts[0].corpus.alignments / "final.mdl")
        self.references, self.num_tids = references, model.num_transition_ids
        self.criterion = options.sequence_criterion(config, model)
        rank, per_update = groups.data.rank, config.utterances_per_update
        train = self._usable(data.train, data.index.subset(data.train_utterances), "training", by_each=True)
        self._sampler = UtteranceSampler(data.dataset, shuffled(train, recipe.seed, rank), per_update)
        self._cv_sampler = UtteranceSampler(data.cv.dataset, self._usable(data.cv, data.cv_index(), "cross-validation"))
        self.sizes = MinibatchSizes(self._sampler.batch_size, self._sampler.batch_size)
        self.make_objective = self._objective_for(data.dataset)
        longest, period = groups.world.all_gather_object(self.sizes.end), recipe.parallel.averaging_frames
        if isinstance(period, int) and period < max(longest):
            message = f"{period} found, expected at least {max(longest)}: the longest minibatch has as many frames"
            raise RecipeError(message, location="parallel.averaging_frames")

    def sampler(self) -> Sampler:
        return self._sampler

    def validation(self, arithmetic: Float32) -> Validation:
        data, objective = self.data, self._objective_for(self.data.cv.dataset)
        return HeldOut(data.cv, self.groups.data, arithmetic, objective, self._cv_sampler)

    def _objective_for(self, dataset: AcousticDataset) -> MakeObjective:
        utterances = Utterances(dataset.utterances, self.references, self.lattices)
        priors = torch.from_numpy(log_priors(self.counts)).float().to(self.data.device)
        return partial(SequenceObjective, criterion=self.criterion, utterances=utterances, log_priors=priors)

    def _usable(self, frames: FrameSubset, index: UtteranceIndex, kind: str, *, by_each: bool = False) -> list[int]:
        """Indices of this worker's utterances with a lattice of their length. Logs how many others there are, `index` being of all
        workers. Collective. DataError: there are none, or where `by_each` is true, none of one worker; a lattice has
        transition-ids of another model."""
        dataset, own = frames.dataset, progress_bar(f"lattices for {kind}")(utterances_of(frames))
        usable = [u for u in own if self._fits(dataset.utterances[u], int(dataset.num_frames[u]))]
        usable_by = self.groups.data.all_gather_object(len(usable))
        reasons = map(self._skips, index.utterances, index.num_frames.tolist())
        skipped = Counter(reason for reason in reasons if reason)
        skipped["whose lattice has another length"] = len(index.entries) - sum(usable_by) - skipped.total()
        skipped = +skipped
        if self.groups.world.rank == 0:
            text = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
            log.log(
                logging.WARNING if skipped else logging.INFO,
                "%s: %s with lattices; skipped: %s",
                kind,
                plural(sum(usable_by), "utterance"),
                text or "none",
            )
        if not any(usable_by) or (by_each and not all(usable_by)):
            message = (
                f"no utterance of {'a worker' if any(usable_by) else 'all'} can be used for {kind}: {dict(skipped)}"
            )
            hint = "make lattices of these utterances" + (", or take fewer workers" if any(usable_by) else "")
            raise DataError(message, location="criterion.lattices", hint=hint)
        return usable

    def _skips(self, name: str, frames: int) -> str | None:
        """Why an utterance is skipped, as far as is known without its lattice, in the order of Kaldi's checks."""
        if name not in self.lattices:
            return "without a lattice"
        return f"of more than {self.config.max_frames} frames" if frames > self.config.max_frames else None

    def _fits(self, name: str, frames: int) -> bool:
        """Whether the lattice of an utterance has its length."""
        lattice = self.lattices[name]
        if len(lattice.tids) and lattice.tids.max() > self.num_tids:
            message = f"utterance {name}: its lattice has transition-id {lattice.tids.max()}, expected at most {self.num_tids}"
            hint = "make lattices and alignments with one final.mdl"
            raise DataError(message, location=self.lattices.entries[name].location, hint=hint)
        return lattice.num_frames == frames


def _check_origin(made: list[Path], network: Path, *, warns: bool) -> None:
    """`made`: alignment dirs and lattice dirs, with a final.mdl, those of Kaldi's lattices without. DataError where it is of
    another tree than that of the first; `warns` of dirs in which ddnn has left that another network has made them."""
    for path in made:
        if (model := path / "final.mdl").exists():
            check_same_tree(transition_digest(path), transition_digest(made[0]), model, str(made[0]))
        digest, _ = read_digest(path / MODEL_DIGEST)
        if warns and digest and model_digest(network) not in (digest, None):
            log.warning("%s was made with another network than %s: make it again with this one", path, network)


def make_criterion(
    recipe: Recipe, device: torch.device, groups: Groups, run: RunDir, *, resumed: bool = False
) -> Criterion:
    """What `criterion` of the recipe says, with its data, for a worker that computes on `device`. `resumed`: class counts and
    copied lattices are those of the run dir. Collective. DataError, RecipeError: as `load_data`; the data or lattices do not
    fit it."""
    criterion, init = recipe.criterion, recipe.init
    if not (isinstance(criterion, SequenceConfig) and isinstance(init, TrainedModelConfig)):
        return Criterion(recipe, device, groups)
    path = run.path if resumed else run_dir_of(init.model)
    if criterion.class_counts is not None and not resumed:
        path = criterion.class_counts
    counts = path / PDF_COUNTS if path.is_dir() else path
    made = [*as_list(recipe.data.alignments), *as_list(criterion.lattices)]
    _check_origin(made, init.model, warns=groups.world.rank == 0)
    return UtteranceCriterion(recipe, criterion, device, groups, run, counts, resumed=resumed)
