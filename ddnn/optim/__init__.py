"""How the parameters move: plain SGD, online natural gradient, Adam, Muon, and the schedules of the learning rate."""
