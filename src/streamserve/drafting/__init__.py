"""One draft model for many targets, without sockets, threads or tensors: the service's side and the
targets'."""
