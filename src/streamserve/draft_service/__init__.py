"""One draft model for many targets: both sides of the protocol, without sockets, threads or tensors."""
