"""How the parameters move: plain SGD, online natural gradient, Adam, Muon, Shampoo, and the schedules of the learning rate."""
