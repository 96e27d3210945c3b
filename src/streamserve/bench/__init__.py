"""Measuring servers from outside: workloads, arrivals, the load client, statistics and reports.

Talks HTTP to any server with OpenAI's API, and knows nothing of what is behind it."""
