"""Simulation: the real Engine and Fleet on an event heap and a virtual clock, with costs instead of
tensors."""
