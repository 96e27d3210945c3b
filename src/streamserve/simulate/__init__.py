"""The same Engine and Fleet on an event heap and a virtual clock, with costs in place of tensors."""
