"""Networks: flat parameters, forward, backward; initialisation; storage; exchange with Kaldi."""
