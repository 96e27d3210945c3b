"""Attention in plain torch. The reference backend takes linear maps, norms and experts from model/."""
