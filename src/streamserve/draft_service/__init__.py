"""One draft model for many targets, without sockets, threads or tensors: both sides of the protocol."""
