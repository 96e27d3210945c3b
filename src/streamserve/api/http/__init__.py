"""The HTTP server below the routes: connections, limits, memory, authentication, errors."""
