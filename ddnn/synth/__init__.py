"""A corpus in Kaldi's formats from nothing: speakers, senone HMMs, features, alignments, a decoding graph."""
