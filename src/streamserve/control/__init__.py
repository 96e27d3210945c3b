"""The fleet: admission, routing, what happens when a worker dies; and the shell that carries it out."""
