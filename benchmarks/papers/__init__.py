"""The five papers: stream pairs, latency targets, SpecuStream, prompt streams, one draft for many targets."""
