"""The engine in a simulated world: a seed chooses every order and every fault, and replays them exactly."""
