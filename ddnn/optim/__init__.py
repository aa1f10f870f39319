"""How the parameters move: plain SGD, online natural gradient, and the schedules of the learning rate."""
