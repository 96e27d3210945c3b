"""Attention in plain torch. Linear maps, norms and experts of the reference are those of model/."""
