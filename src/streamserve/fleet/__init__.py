"""The fleet: admission, routing, what happens when a worker dies; and the runtime that carries it out."""
