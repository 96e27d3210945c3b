"""Benchmarks of servers over HTTP: workloads, arrivals, the load client, statistics and reports.

Works with any server that has OpenAI's API.
"""
