"""ddnn: trains hybrid DNN-HMM acoustic models on Kaldi features and alignments."""

__version__ = "0.2.0"
