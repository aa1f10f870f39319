"""Decoding: posteriors and priors for a Kaldi decoder, and word error rates without Kaldi."""
