"""Request tracing: recorded, exported, and written as a timeline."""
