"""Speculation compared with plain decoding, its profiles and its recorded acceptance."""
