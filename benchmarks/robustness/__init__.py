"""Effect of hostile clients, processor quotas and faults of machines."""
