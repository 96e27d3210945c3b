"""Contracts between the packages of one process: the step plan with the protocols of executors and drafters,
token trees, costs, limits of an engine, KV transports. Messages between processes are in `protocol`."""
