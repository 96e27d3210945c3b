"""The fleet (admission, routing, and recovery from worker deaths), and the asyncio runtime that drives it."""
